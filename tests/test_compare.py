"""The comparison: same draws, honest counts, runs that are never lost or repeated."""

import csv
import io
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

import bilevax as bx
from bilevax._compare import runs
from bilevax._compare.budget import solves_at_looks
from bilevax._compare.curves import curves, gaps, references
from bilevax._compare.grid import best_trial
from bilevax._compare.profiles import cost_to_target, profiles, target_table
from bilevax._compare.report import write_report
from bilevax._compare.rows import Journal, read_rows
from bilevax._compare.tables import (
    summary,
    to_csv,
    to_latex,
    to_markdown,
    to_text,
    trouble_table,
)
from bilevax._history import History
from bilevax._methods.base import AbstractMethod, Number, draws, number, report
from bilevax._methods.catalogue import CATALOGUE, as_markdown
from bilevax._methods.oracle import gradient_at

from . import zoo

REPOSITORY = Path(__file__).parent.parent
KINK = zoo.t1()
BUDGET = bx.Budget(20, look_every=5)
GRID = bx.StepGrid(2)


class State(eqx.Module):
    x: jax.Array
    lower: bx.LowerSolution


class Descent(AbstractMethod):
    """Plain implicit gradient descent with a constant step."""

    first_step: Number = number(0.1)

    def init(self, problem, x, lower, scales, *, key):
        return State(x, lower)

    def step(self, problem, state, *, step, num_steps, key):
        now = problem.draw(draws(key).sample)
        oracle = gradient_at(now, state.x, state.x, state.lower)
        x = oracle.ahead - self.first_step * oracle.e.grad
        record = report(problem, oracle.e, state.lower, state.x, x)
        return State(x, oracle.e.lower), record


class Walk(AbstractMethod):
    """Draws of all four kinds move `x`; some lines of work are left out of the count.

    `also` makes another program and another method of it with the same draws.
    """

    first_step: Number = number(0.1)
    also: int = 0
    lower_solves: int = 1
    penalty_solves: int = 0

    def init(self, problem, x, lower, scales, *, key):
        return State(x, lower)

    def step(self, problem, state, *, step, num_steps, key):
        keys = draws(key)
        extra = jr.normal(jr.fold_in(key, 7), (self.also,))
        parts = (keys.sample, keys.tilt, keys.segment, keys.direction)
        move = sum(jr.normal(part, state.x.shape) for part in parts)
        x = state.x - self.first_step * move + 0 * jnp.sum(extra)
        e = bx.Evaluation(
            jnp.zeros(()), None, x, state.lower, bx.Status.successful, None
        )
        solves = dict(
            lower_solves=self.lower_solves, penalty_solves=self.penalty_solves
        )
        return State(x, state.lower), report(
            problem, e, state.lower, state.x, x, **solves
        )


class Refuser(Walk):
    """Refuses everything."""

    def refusal(self, problem):
        return "Refuser needs a lower level without rows; this one has 1."


class Faulty(Walk):
    """Fails while it is traced."""

    def step(self, problem, state, *, step, num_steps, key):
        raise RuntimeError("nothing works here")


METHODS = {
    "descent": Descent(),
    "twin": Descent(),
    "walk": Walk(),
    "other walk": Walk(also=3),
    "refuser": Refuser(),
    "faulty": Faulty(),
}
CASES = [bx.Case("kink", KINK, lambda seed: np.array([2.0 + seed]), target=0.0)]


def run_all(folder, methods=METHODS, budget=BUDGET, tune: Any = GRID):
    return bx.compare(CASES, methods, 2, budget, tune=tune, folder=folder)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A small comparison with everything that can happen in one."""
    return run_all(tmp_path_factory.mktemp("compare"))


def of(comparison, method, seed=0):
    rows = [
        row
        for row in comparison.rows
        if row["method"] == method and row["seed"] == seed
    ]
    assert len(rows) == 1
    return rows[0]


OUTCOME = ("status", "message", "x0", "step", "value", "solves", "totals")


def outcome(row):
    return {name: row[name] for name in OUTCOME}


# --- the same rules for all -----------------------------------------------------------


@pytest.mark.parametrize("pair", [("descent", "twin"), ("walk", "other walk")])
@pytest.mark.parametrize("seed", [0, 1])
def test_methods_that_do_the_same_do_the_same(finished, pair, seed):
    """Two names of one method, and two programs that use the same draws, agree."""
    one, other = (of(finished, name, seed) for name in pair)
    assert outcome(one) == outcome(other)
    assert one["tuning"]["values"] == other["tuning"]["values"]
    assert len(set(one["value"])) > 3


def test_seeds_change_starts_and_methods_share_them(finished):
    for seed, start in ((0, 2.0), (1, 3.0)):
        ran = [r for r in finished.rows if r["seed"] == seed and r["value"]]
        assert len(ran) == 4
        assert {row["value"][0] for row in ran} == {start**2 / 4 + start / 2}
        assert len({row["x0"] for row in finished.rows if row["seed"] == seed}) == 1
    assert of(finished, "walk", 0)["value"][1:] != of(finished, "walk", 1)["value"][1:]


def test_a_walk_is_evaluated_with_an_unperturbed_tight_lower_level(finished):
    """F = x^2/4 + |x|/2, whatever the method itself looked at."""
    row = of(finished, "walk")
    step, key = row["tuning"]["chosen"], jr.fold_in(jr.split(jr.key(0), 3)[2], 0)
    x, expected = 2.0, [2.0]
    for t in range(20):
        parts = jr.split(jr.fold_in(key, t), 4)
        x -= step * float(sum(jr.normal(part, (1,))[0] for part in parts))
        if t % 5 == 4:
            expected.append(x * x / 4 + abs(x) / 2)
    np.testing.assert_allclose(row["value"], expected, rtol=zoo.EXACT)


def test_work_is_counted_at_every_look(finished):
    row = of(finished, "descent")
    assert row["step"] == [0, 5, 10, 15, 20]
    assert row["lower_solves"] == row["solves"] == [0, 5, 10, 15, 20]
    totals = row["totals"]
    for name in ("lower_solves", "upper_gradients", "hessian_products"):
        assert totals[name] == 20
    assert totals["linear_solves"] == 20
    assert totals["lower_passes"] >= 20
    assert totals["penalty_solves"] == totals["samples"] == 0
    seconds = np.array(row["seconds"])
    assert seconds[0] == 0
    assert np.all(np.diff(seconds) > 0)
    assert row["compile_seconds"] >= 0


def test_solves_in_y_of_any_kind_count_and_steps_without_are_charged_one():
    steps = dict(lower_solves=np.array([1, 1, 0]), penalty_solves=np.array([1, 0, 0]))
    history = History(steps, evaluated_at=np.array([0, 1, 3]))
    assert solves_at_looks(history).tolist() == [0, 2, 3]
    history = History({k: 0 * v for k, v in steps.items()}, np.array([0, 1, 3]))
    assert solves_at_looks(history).tolist() == [0, 1, 3]


def test_a_refusal_is_a_row_and_no_trial(finished):
    row = of(finished, "refuser")
    assert row["status"] == "refused"
    assert row["message"].startswith("Refuser needs")
    assert row["value"] == []
    assert row["tuning"] is None
    assert not [row for row in finished.trials if row["method"] == "refuser"]


def test_a_failure_is_a_row_and_stops_nothing(finished):
    row = of(finished, "faulty")
    assert row["status"] == "failed"
    assert row["message"] == "RuntimeError: nothing works here"
    assert len(finished.rows) == 2 * len(METHODS)


# --- tuning ---------------------------------------------------------------------------


def test_every_method_gets_the_same_trials_and_its_best_runs(finished):
    for name in ("descent", "twin", "walk", "other walk"):
        trials = [row for row in finished.trials if row["method"] == name]
        assert [row["tuning"]["value"] for row in trials] == list(GRID.values)
        assert {row["seed"] for row in trials} == set(GRID.seeds)
        tuning = of(finished, name)["tuning"]
        ends = [row["value"][-1] for row in trials]
        assert tuning["values"] == [[end] for end in ends]
        assert tuning["chosen"] == GRID.values[int(np.argmin(ends))]
        assert tuning["trials"] == 2
        assert tuning["lower_solves"] == 40
        assert tuning["seconds"] == sum(row["seconds"][-1] for row in trials)
    # The kink is far away and F falls along descent: the longer step is better.
    assert of(finished, "descent")["tuning"]["chosen"] == pytest.approx(0.1)
    assert of(finished, "descent")["tuning"]["at_the_edge"]


def test_a_grid_value_is_a_field_or_a_function():
    grid = bx.StepGrid(3, by={"a": lambda v: Walk(2 * v), "b": "first_step"})
    assert grid.values == pytest.approx((1e-3, 1e-2, 1e-1))
    field = lambda method: float(getattr(method, "first_step"))  # noqa: B009
    steps = lambda name: [field(m) for m in grid.candidates(name, Walk())]
    assert steps("a") == pytest.approx((2e-3, 2e-2, 2e-1))
    assert steps("b") == steps("not named") == pytest.approx(grid.values)


def test_the_best_trial_has_the_smallest_mean_share():
    starts = np.array([10.0, 1000.0])
    # Shares on the first seed: 0, 0.1, -; on the second: 0.5, 0, -.
    ends = np.array([[0.0, 500.0], [1.0, 0.0], [np.nan, 0.0]])
    assert best_trial(ends, starts) == 1
    assert best_trial(np.full((3, 2), np.nan), starts) == 0
    # A seed that failed for all does not count.
    ends = np.array([[2.0, np.nan], [1.0, np.nan]])
    assert best_trial(ends, starts) == 1


def test_tuning_seeds_are_not_those_that_count():
    with pytest.raises(ValueError, match="must not be among"):
        run_all(None, tune=bx.StepGrid(2, seeds=(1,)))
    with pytest.raises(ValueError, match="'second_step' is not set"):
        run_all(None, tune=bx.StepGrid(2, by="second_step"))


def test_without_tuning_methods_run_as_they_are(finished):
    plain = run_all(None, {"walk": Walk()}, tune=None)
    assert plain.trials == []
    assert of(plain, "walk")["tuning"] is None
    # The grid ends at 0.1, the default step.
    if of(finished, "walk")["tuning"]["chosen"] == pytest.approx(0.1):
        np.testing.assert_allclose(
            of(plain, "walk")["value"], of(finished, "walk")["value"]
        )


# --- budgets --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "looks"),
    [
        (Walk(), [0, 5, 10]),
        (Walk(penalty_solves=1), [0, 5]),
        (Walk(lower_solves=0), [0, 5, 10]),
    ],
)
def test_a_budget_of_solves_ends_runs_and_cuts_curves(method, looks):
    budget = bx.Budget(20, lower_solves=12, look_every=5)
    row = run_all(None, {"walk": method}, tune=None, budget=budget).rows[0]
    # One look more than counts: there the run learns that its budget is spent.
    assert row["step"][:-1] == looks
    assert row["ended"] == "the callback asked"
    assert runs.read_looks(row).step.tolist() == looks


def test_a_budget_of_seconds_ends_runs():
    budget = bx.Budget(20, seconds=1e-9, look_every=5)
    row = run_all(None, {"walk": Walk()}, tune=None, budget=budget).rows[0]
    assert row["step"] == [0, 5]
    assert runs.read_looks(row).step.tolist() == [0]


# --- runs are never lost or repeated --------------------------------------------------


def counted(monkeypatch, stop_after=np.inf):
    """How many runs start, warm-ups aside; the one after `stop_after` is killed."""
    calls, solve = [], runs.solve

    def watched(*arguments, **named):
        if named["num_steps"] == BUDGET.steps:
            if len(calls) >= stop_after:
                raise KeyboardInterrupt
            calls.append(arguments)
        return solve(*arguments, **named)

    monkeypatch.setattr(runs, "solve", watched)
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


# --- from rows to numbers -------------------------------------------------------------


def handmade(problem, method, seed, value, cost=1, status="finished", **others):
    """Looks every 10 steps, `cost` solves and 0.1 `cost` seconds per step."""
    step = [10 * i for i in range(len(value))]
    budget = bx.Budget(30).as_dict()
    return dict(
        kind="run", problem=problem, method=method, seed=seed, status=status,
        message="" if status == "finished" else "It did not.", value=value, step=step,
        target=None, budget=budget, totals={}, tuning=None, compile_seconds=1.0,
        solves=[cost * s for s in step], seconds=[0.1 * cost * s for s in step],
        jax="0", device="cpu",
    ) | others  # fmt: skip


ROWS = [
    # F start 1, F best 0.
    handmade("p", "A", 0, [1.0, 0.5, 0.05, 0.0]),
    handmade("p", "B", 0, [1.0, 0.05, 0.06, 0.05], cost=4),
    handmade("p", "C", 0, [], status="failed"),
    # F start 11, F best 1, by the target.
    handmade("p", "A", 1, [11.0, 6.0, 6.0, 6.0], target=1.0),
    handmade("p", "B", 1, [11.0, 3.0, 1.05, 2.0], cost=4),
    handmade("p", "C", 1, [11.0, None, 1.5, 12.0], cost=2),
    handmade("q", "A", 0, [3.0, 2.0, 1.0, 1.0]),
    handmade("q", "B", 0, [3.0, 2.0, 1.0, 1.0], cost=2),
    handmade("q", "C", 0, [], status="refused"),
]


def test_gaps_are_shares_of_the_way_to_the_best_known_value():
    known = references(ROWS)
    assert known == {("p", 0): (1.0, 0.0), ("p", 1): (11.0, 1.0), ("q", 0): (3.0, 1.0)}
    np.testing.assert_allclose(gaps(ROWS[4], known), [1, 0.2, 0.005, 0.1])
    np.testing.assert_allclose(gaps(ROWS[5], known), [1, np.inf, 0.05, 1.1])


def test_costs_to_a_target_are_those_of_the_first_look_there():
    known = references(ROWS)
    cost = lambda i, axis, gap: cost_to_target(ROWS[i], axis, gap, known)
    assert cost(0, "step", 0.1) == 20
    assert cost(1, "solves", 0.1) == 40
    assert cost(1, "seconds", 0.1) == pytest.approx(4.0)
    assert cost(1, "solves", 0.01) == np.inf
    assert cost(2, "step", 0.1) == np.inf
    assert cost(4, "step", 0.01) == 20
    assert cost(5, "solves", 0.1) == 40


def test_performance_profiles_by_hand():
    """Solves to a gap of 0.1: A 20, -, 20; B 40, 80, 40; C -, 40, -."""
    a, b, c = profiles(ROWS, "solves", 0.1)
    assert [a.method, b.method, c.method] == ["A", "B", "C"]
    assert [p.instances for p in (a, b, c)] == [3, 3, 3]
    assert a.ratios.tolist() == [1, 1]
    assert b.ratios.tolist() == [2, 2, 2]
    assert c.ratios.tolist() == [1]
    assert [a.share(f) for f in (1, 1.9, 2, 10)] == pytest.approx([2 / 3] * 4)
    assert [b.share(f) for f in (1, 1.9, 2, 10)] == pytest.approx([0, 0, 1, 1])
    assert [c.share(f) for f in (1, 10)] == pytest.approx([1 / 3] * 2)
    # To 0.01: A 30, -, 20; B -, 80, 40.
    a, b, c = profiles(ROWS, "seconds", 0.01)
    assert a.ratios.tolist() == [1, 1]
    assert b.ratios == pytest.approx([1, 2])
    assert len(c.ratios) == 0


def test_time_to_target_by_hand():
    table = {
        (row["problem"], row["gap"], row["method"]): row
        for row in target_table(ROWS, targets=(0.6, 0.1))
    }
    row = table["p", 0.6, "A"]
    assert (row["runs"], row["reached"]) == (2, 2)
    assert (row["iterations"], row["solves"]) == (10, 10)
    assert row["seconds"] == pytest.approx(1.0)
    # One run of two never came there: the median is infinite.
    row = table["p", 0.1, "A"]
    assert (row["reached"], row["iterations"]) == (1, np.inf)
    row = table["p", 0.1, "B"]
    assert (row["reached"], row["iterations"], row["solves"]) == (2, 15, 60)
    assert ("q", 0.1, "C") not in table


def test_a_curve_of_seconds_ends_with_the_last_look():
    # The slow method sets the grid; the fast one still shows where it ended.
    fast = handmade("p", "fast", 0, [4.0, 2.0, 1.0])
    slow = handmade("p", "slow", 0, [4.0, 3.0, 2.0])
    slow["seconds"] = [10 * s for s in slow["seconds"]]
    found = {curve.method: curve for curve in curves([fast, slow], "seconds", "value")}
    assert found["fast"].at[-1] == pytest.approx(fast["seconds"][-1])
    assert found["fast"].median[-1] == 1.0
    assert found["slow"].median[-1] == 2.0


def test_a_budget_spent_before_the_first_look_is_told():
    row = handmade("p", "A", 0, [4.0, 2.0])
    row["budget"] = row["budget"] | dict(lower_solves=1)
    (told,) = trouble_table([row])
    assert told["what"] == "has no result"
    assert "A on p has no result" in summary([row])


def test_curves_hold_medians_and_quartiles_of_what_is_known_by_then():
    rows = [handmade("p", "A", s, [4.0, 2.0 + s, float(s)]) for s in range(5)]
    (curve,) = curves(rows, "step", "value")
    assert curve.at.tolist() == [0, 10, 20]
    assert curve.median.tolist() == [4, 4, 2]
    assert curve.low.tolist() == [4, 3, 1]
    assert curve.high.tolist() == [4, 5, 3]
    rows.append(handmade("p", "B", 0, [4.0, 1.0], cost=15))
    slow = curves(rows, "solves", "value")[1]
    # B has looks at 0 and 150 solves; A ends at 20.
    assert slow.at.tolist() == [0, 10, 20, 150]
    assert slow.median.tolist() == [4, 4, 4, 1]


def test_runs_that_fail_are_infinitely_bad_in_a_median():
    rows = [handmade("p", "A", s, [4.0, 2.0]) for s in range(2)]
    rows += [handmade("p", "A", s, [], status="failed") for s in (2, 3, 4)]
    (curve,) = curves(rows, "step", "value")
    assert np.all(np.isinf(curve.median))
    assert curve.low.tolist() == [4, 2]


def test_a_start_that_is_best_costs_nothing_worse_than_one():
    rows = [handmade("p", "A", 0, [1.0, 2.0]), handmade("p", "B", 0, [1.0, 1.0])]
    a, b = profiles(rows, "seconds", 0.1)
    assert a.ratios.tolist() == b.ratios.tolist() == [1]


# --- tables, figures and the page -----------------------------------------------------

TABLE = [
    {"name": "a_b & 50 %", "n": 3, "F": 1 / 3},
    {"name": "c|d", "n": 12345, "F": np.inf},
]


def test_tables_as_text():
    back = list(csv.reader(io.StringIO(to_csv(TABLE))))
    assert back[0] == ["name", "n", "F"]
    assert back[1] == ["a_b & 50 %", "3", repr(1 / 3)]
    assert back[2] == ["c|d", "12345", ""]
    latex = to_latex(TABLE).splitlines()
    assert latex[0] == r"\begin{tabular}{lrr}"
    assert latex[4] == r"a\_b \& 50 \% & 3 & 0.3333 \\"
    assert latex[5] == r"c|d & 12345 & - \\"
    assert to_markdown(TABLE).splitlines()[1:] == [
        "| --- | ---: | ---: |",
        "| a_b & 50 % | 3 | 0.3333 |",
        r"| c\|d | 12345 | - |",
    ]
    assert to_text(TABLE).splitlines()[1] == "a_b & 50 %      3  0.3333"


class Reader(HTMLParser):
    """Counts elements, checks that they close, gathers addresses and names."""

    def __init__(self):
        super().__init__()
        self.open, self.count, self.addresses, self.names = [], {}, [], []

    def handle_starttag(self, tag, attrs):
        self.count[tag] = self.count.get(tag, 0) + 1
        found = dict(attrs)
        self.names += [found["id"]] if "id" in found else []
        for name in ("href", "src", "xlink:href"):
            self.addresses += [found[name]] if name in found else []
        if tag not in ("meta", "br", "link"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


@pytest.fixture(scope="module")
def written(finished, tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    return finished.report(folder, title="A <title>", intro="Some words.")


def test_the_page_is_whole_and_needs_nothing_else(written, finished):
    text = Path(written["report"]).read_text()
    reader = Reader()
    reader.feed(text)
    assert reader.open == []
    assert reader.count["svg"] == 2
    assert reader.count["table"] == 4
    assert "script" not in reader.count
    assert all(address.startswith("#") for address in reader.addresses)
    assert set(re.findall(r"url\(([^)]{2})", text)) <= {"#f"}
    assert len(reader.names) == len(set(reader.names))
    assert "A &lt;title&gt;" in text
    assert "prefers-color-scheme: dark" in text
    assert "currentColor" in text
    assert "Refuser needs a lower level" in text
    assert "nothing works here" in text
    assert "6 methods on 1 problems, 2 seeds" in text


def test_a_report_has_all_its_files(written):
    for name, path in written.items():
        assert Path(path).stat().st_size > 0, name
    endings = {"csv", "tex", "md"}
    for table in ("results", "targets", "work", "trouble"):
        assert {f"{table}.{ending}" for ending in endings} <= set(written)
    for figure in ("gap-kink", "profiles"):
        assert {f"{figure}.png", f"{figure}.svg"} <= set(written)
    assert Path(written["profiles.png"]).read_bytes()[:4] == b"\x89PNG"
    with open(written["results.csv"]) as file:
        results = {row["method"]: row for row in csv.DictReader(file)}
    assert set(results) == {"descent", "twin", "walk", "other walk", "faulty"}
    assert results["faulty"]["failed"] == "2"
    assert float(results["descent"]["step"]) == pytest.approx(0.1)
    assert results["descent"]["solves of trials"] == "40"
    with open(written["curves"]) as file:
        points = list(csv.DictReader(file))
    assert {p["axis"] for p in points} == {"step", "solves", "seconds"}


def test_a_report_of_handmade_rows_and_of_none_that_ran(tmp_path):
    paths = write_report(tmp_path / "a", ROWS, values_first=True)
    assert {"values.png", "gap-p.svg", "gap-q.svg"} <= set(paths)
    refused = [handmade("q", "C", 0, [], status="refused")]
    paths = write_report(tmp_path / "b", refused)
    assert "It did not." in Path(paths["report"]).read_text()


# --- cases, methods, ablations, catalogue ---------------------------------------------


def test_problems_and_methods_can_be_given_in_several_ways():
    box = bx.Problem(
        KINK.upper, KINK.lower, KINK.constraints,
        domain=bx.Box(np.array([1.0]), np.array([2.0])),
    )  # fmt: skip
    names = runs.as_cases({"a": (KINK, np.ones(1)), "b": box})
    assert [case.name for case in names] == ["a", "b"]
    drawn = [float(names[1].instance(seed).x0[0]) for seed in range(3)]
    assert len(set(drawn)) == 3
    assert all(1 <= x <= 2 for x in drawn)
    assert list(runs.as_methods([Walk(), Descent()])) == ["Walk", "Descent"]
    one: Any = Walk()
    assert list(runs.as_methods(one)) == ["Walk"]
    with pytest.raises(ValueError, match="must be a Budget"):
        bx.compare({"a": (KINK, np.ones(1))}, [Walk()], budget=5)  # pyright: ignore
    assert runs.as_seeds(3) == [0, 1, 2]
    with pytest.raises(ValueError, match="needs a start"):
        runs.as_cases({"a": KINK})[0].instance(0)
    with pytest.raises(ValueError, match="Walk came twice"):
        runs.as_methods([Walk(), Walk()])
    with pytest.raises(ValueError, match="got Walk"):
        runs.as_methods({"a": Walk})  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="`steps` must be a positive integer"):
        bx.Budget(0)


def test_ablations_switch_off_one_part_each():
    method = bx.DSBLO(first_step=0.02, perturbation=bx.UniformBall(1e-3))
    found = bx.ablations(method)
    assert found["DS-BLO"] is method
    no_q = found["no q"]
    assert no_q.perturbation is None
    assert float(no_q.first_tilt) == 0
    assert not found["one fixed q"].fresh_tilt
    assert not found["no segment"].segment
    assert float(found["no momentum"].beta) == 0
    for other in found.values():
        assert float(other.first_step) == 0.02


def test_the_page_of_methods_is_made_from_the_catalogue():
    """Regenerate with `python -m bilevax._methods.catalogue > docs/methods.md`."""
    assert (REPOSITORY / "docs" / "methods.md").read_text() == as_markdown()


def test_every_method_of_the_catalogue_can_be_compared():
    assert len(CATALOGUE) == 16
    for entry in CATALOGUE.values():
        method: Any = entry.kind()
        assert float(method.first_step) > 0
        assert getattr(bx, entry.kind.__name__) is entry.kind
        assert (REPOSITORY / "tests" / entry.tests).exists()
