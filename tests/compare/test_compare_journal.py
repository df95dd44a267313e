"""Runs are never lost and never repeated."""

import json

import numpy as np
import pytest

import bilevax as bx
from bilevax._compare import bench
from bilevax._compare.rows import Journal, read_rows

from ..comparisons import BUDGET, KINK, Refuser, Walk, of, outcome, run_all


def counted(monkeypatch, stop_after=np.inf):
    """How many runs start, warm-ups aside; the one after `stop_after` is killed."""
    calls, solve = [], bench.solve

    def watched(*arguments, **named):
        if named["num_steps"] == BUDGET.steps:
            if len(calls) >= stop_after:
                raise KeyboardInterrupt
            calls.append(arguments)
        return solve(*arguments, **named)

    monkeypatch.setattr(bench, "solve", watched)
    return calls


WALKS = {"walk": Walk(), "refuser": Refuser(), "other walk": Walk(also=3)}
# Two trials and two seeds of the two that run.
SOLVES = 8


@pytest.mark.parametrize("stop_after", [0, 3, 5, 7])
def test_a_killed_comparison_goes_on_where_it_stopped(
    finished, tmp_path, monkeypatch, stop_after
):
    with monkeypatch.context() as patch:
        before = counted(patch, stop_after)
        with pytest.raises(KeyboardInterrupt):
            run_all(tmp_path, WALKS)
    assert len(before) == stop_after
    path = tmp_path / "rows.jsonl"
    kept = path.read_bytes() if path.exists() else b""
    after = counted(monkeypatch)
    again = run_all(tmp_path, WALKS)
    assert len(after) == SOLVES - stop_after
    assert path.read_bytes().startswith(kept)
    rows = read_rows(path)
    assert len(rows) == len({row["id"] for row in rows}) == SOLVES + 2
    for name in WALKS:
        for seed in (0, 1):
            expected = outcome(of(finished, name, seed))
            assert outcome(of(again, name, seed)) == expected


@pytest.mark.parametrize("cut", [1, 2, 40, "line", "all but the newline"])
def test_a_torn_last_line_is_run_again_and_nothing_else(tmp_path, monkeypatch, cut):
    run_all(tmp_path, WALKS)
    path = tmp_path / "rows.jsonl"
    whole = path.read_bytes()
    lines = whole.splitlines(keepends=True)
    first = b"".join(lines[:-1])
    if cut == "line":
        torn, missing = first, 1
    elif cut == "all but the newline":
        torn, missing = whole[:-1], 0
    else:
        torn, missing = first + lines[-1][:cut], 1
    path.write_bytes(torn)
    calls = counted(monkeypatch)
    run_all(tmp_path, WALKS)
    assert len(calls) == missing
    assert path.read_bytes().startswith(first)
    assert len(read_rows(path)) == len(lines)
    if not missing:
        assert path.read_bytes() == whole


def test_a_finished_comparison_runs_nothing(finished, monkeypatch):
    calls = counted(monkeypatch)
    content = (finished.folder / "rows.jsonl").read_bytes()
    again = run_all(finished.folder)
    assert again.rows == finished.rows
    assert again.trials == finished.trials
    assert calls == []
    assert (finished.folder / "rows.jsonl").read_bytes() == content


def test_another_setting_is_another_run(tmp_path, monkeypatch):
    """Method, seed, budget, start and problem are parts of the identity of a run."""
    budget = bx.Budget(20, look_every=10)
    compare = lambda case, method, seeds, budget: bx.compare(
        [case], {"walk": method}, seeds, budget, folder=tmp_path
    )
    case = bx.Case("kink", KINK, np.array([2.0]))
    calls = counted(monkeypatch)
    for i, other in enumerate(
        (
            (case, Walk(), 1, budget),
            (case, Walk(0.2), 1, budget),
            (case, Walk(also=3), 1, budget),
            (case, Walk(), [4], budget),
            (case, Walk(), 1, bx.Budget(20, lower_solves=15, look_every=10)),
            (bx.Case("kink", KINK, np.array([2.5])), Walk(), 1, budget),
            (bx.Case("kink", KINK, np.array([2.0]), signature="b"), Walk(), 1, budget),
        )
    ):
        for _ in range(2):
            assert len(compare(*other).rows) == 1
            assert len(calls) == i + 1


def test_a_damaged_file_is_left_alone(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"id": "a"}\nno row\n{"id": "b"}\n')
    with pytest.raises(ValueError, match="line 2 is no row"):
        Journal(path)
    assert path.read_text() == '{"id": "a"}\nno row\n{"id": "b"}\n'


def test_rows_are_strict_json(tmp_path):
    journal = Journal(tmp_path / "rows.jsonl")
    row = journal.append(dict(id="a", value=[1.0, np.nan, np.inf]))
    assert row["value"] == [1.0, None, None]
    text = (tmp_path / "rows.jsonl").read_text()
    assert json.loads(text, parse_constant=pytest.fail) == row
