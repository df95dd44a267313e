"""The command line: what a user types, what a user sees."""

import gc
import json
import signal
import textwrap
import time

import jax
import pytest

from bilevax._cli import compare
from bilevax._cli.interrupt import interrupts_kept
from bilevax._cli.main import main

GOOD = """
import jax.numpy as jnp
import bilevax as bx

problem = bx.Problem(
    lambda x, y: x[0] ** 2 / 4 + x[0] / 2 - y[0],
    lambda x, y: 0.5 * (y[0] - x[0]) ** 2,
    bx.Polyhedron(A=[[1.0]], b=[0.0]),
)
x0 = jnp.array([2.0])
"""


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    path = tmp_path_factory.mktemp("cli") / "toy.py"
    path.write_text(GOOD)
    return str(path)


def test_solve_prints_and_speaks_json(good, capsys, tmp_path):
    checkpoint = str(tmp_path / "run.npz")
    assert main(["solve", good, "--json", "--checkpoint", checkpoint]) == 0
    out = json.loads(capsys.readouterr().out)
    assert out["success"]
    assert abs(out["x"][0][0]) < 1e-6
    assert out["work"]["lower_solves"] == 300
    # The second call finds the finished run.
    assert main(["solve", good, "--checkpoint", checkpoint]) == 0
    text = capsys.readouterr().out
    assert text.startswith("F ")
    assert "converged  yes" in text
    assert "300 lower_solves" in text
    assert " 0 " not in text


def test_solve_tells_of_upper_constraints_and_fails_where_none_is_met(capsys, tmp_path):
    text = GOOD.replace("b=[0.0]),", "b=[0.0]), upper_constraints=lambda x, y: y + {},")
    met, empty = tmp_path / "met.py", tmp_path / "empty.py"
    met.write_text(text.format("0.5"))
    empty.write_text(text.format("1 + y**2"))
    assert main(["solve", str(met), "--json"]) == 0
    out = json.loads(capsys.readouterr().out)
    assert out["violation"] < 1e-8
    # F = x^2/4 + x/2 - min(x, 0) at x = -0.5, where its slope is -0.75.
    assert out["x"][0][0] == pytest.approx(-0.5)
    assert out["upper_multipliers"][0][0] == pytest.approx(0.75)
    assert main(["solve", str(empty)]) == 1
    told = capsys.readouterr().out
    assert "upper_infeasible" in told
    assert "violated by 0.75" in told


def test_explain_and_certify(good, capsys):
    assert main(["explain", good]) == 0
    assert "strong convexity" in capsys.readouterr().out
    assert main(["explain", good, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["status"] == "successful"
    assert main(["certify", good, "--radius", "0.01", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["measure"] == pytest.approx(1.5, abs=0.01)
    assert told["x"] == [[2.0]]
    assert main(["certify", good]) == 0
    assert "x = [2.]" in capsys.readouterr().out


def test_the_help_of_an_experiment_has_every_default(capsys):
    with pytest.raises(SystemExit):
        main(["experiment", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    for default in ("results/numerical", "5", "100", "7", "10,50"):
        assert f"(default: {default})" in text


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("x0 = 1 +\nproblem = 3\n", ["line 1", "SyntaxError"]),
        ("import nothing_of_this_name\n", ["line 1", "nothing_of_this_name"]),
        ("x0 = 1.0\nproblem = 3\n", ["`problem` must be", "int"]),
        ("x0 = 1.0\n", ["must define `problem`"]),
        (
            GOOD.replace("b=[0.0]", "b=[0.0, 1.0]"),
            ["toy.py, line", "agree on the number of rows"],
        ),
        (GOOD.replace("y[0] - x[0]", "y[0] - x[0] + undefined_name"), ["line 7"]),
    ],
)
def test_a_mistake_in_the_file_shows_the_line_of_the_file(
    source, expected, tmp_path, capsys
):
    path = tmp_path / "toy.py"
    path.write_text(textwrap.dedent(source))
    assert main(["solve", str(path)]) == 1
    error = capsys.readouterr().err
    for part in expected:
        assert part in error
    assert "site-packages" not in error


def test_a_missing_file_is_told(capsys):
    assert main(["solve", "no/such/file.py"]) == 1
    assert "no such file" in capsys.readouterr().err


def test_compare_writes_a_report_and_goes_on(good, capsys, tmp_path):
    out = tmp_path / "out"
    arguments = [
        "compare", "--problems", good, "--methods", "ds-blo", "--seeds", "2",
        "--steps", "8", "--look-every", "4", "--tune", "2", "--out", str(out),
    ]  # fmt: skip
    assert main(arguments) == 0
    text = capsys.readouterr().out
    assert "DS-BLO" in text
    assert f"report: {out}/report.html" in text
    rows = (out / "rows.jsonl").read_bytes()
    assert rows.count(b"\n") == 4
    assert main([*arguments, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (out / "rows.jsonl").read_bytes() == rows
    (result,) = told["results"]
    assert result["runs"] == result["trials"] == 2
    assert result["solves of trials"] == 16
    assert told["trouble"] == []


def test_compare_takes_families_and_ablations():
    chosen = compare.methods(None, True)
    assert list(chosen) == [
        "DS-BLO", "no q", "one fixed q", "no segment", "no momentum",
    ]  # fmt: skip
    assert "DS-BLO" in compare.methods(None, False)
    two = ["DS-BLO", "[S]SIGD"]
    assert list(compare.methods(["ds-blo,", "SSIGD"], False)) == two
    assert list(compare.methods(["ds-blo, ssigd"], False)) == two
    case = compare.case("tight-10")
    assert case.name == "tight-10"
    problem = case.instance(0).problem.draw(jax.random.key(0))
    assert problem.constraints.num_inequalities == 5


def test_a_changed_file_is_another_problem(tmp_path):
    path = tmp_path / "toy.py"
    path.write_text(GOOD)
    first = compare.case(str(path))
    path.write_text(GOOD.replace("x[0] / 2", "x[0] / 3") + "target = -1.0\n")
    second = compare.case(str(path))
    assert first.signature != second.signature
    assert second.instance(0).target == -1.0


def test_compare_names_what_it_does_not_know(capsys):
    assert main(["compare", "--methods", "ds-blo,nothing"]) == 1
    assert "'nothing' is no method" in capsys.readouterr().err
    assert main(["compare", "--problems", "loose-10"]) == 1
    assert "'loose-10' is no family" in capsys.readouterr().err


def test_an_interrupted_comparison_says_that_runs_are_kept(
    capsys, monkeypatch, tmp_path
):
    def interrupt(*arguments, **named):
        raise KeyboardInterrupt

    monkeypatch.setattr(compare, "compare", interrupt)
    assert main(["compare", "--out", str(tmp_path)]) == 130
    error = capsys.readouterr().err
    assert f"kept in {tmp_path}/rows.jsonl" in error
    assert "the same command goes on" in error


def test_the_numerical_experiment_in_small(capsys, tmp_path):
    out = tmp_path / "out"
    arguments = [
        "experiment", "numerical", "--sizes", "2", "--seeds", "1", "--steps", "8",
        "--tune", "2", "--out", str(out), "--json",
    ]  # fmt: skip
    assert main(arguments) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["trouble"] == []
    methods = {row["method"] for row in told["results"]}
    assert "DS-BLO" in methods
    problems = {row["problem"] for row in told["results"]}
    assert problems == {"uniform-2", "tight-2"}
    for row in told["results"]:
        assert row["trials"] == 2
        assert row["step"] in (1e-3, 1e-1)
    page = (out / "report.html").read_text()
    assert "The objective against time" in page


def test_an_interrupt_that_the_garbage_collector_swallows_is_sent_again():
    met = []

    def swallow(phase, info):
        if not met:
            met.append(phase)
            raise KeyboardInterrupt

    def waiting():
        gc.collect()
        assert met
        time.sleep(60)

    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    gc.callbacks.append(swallow)
    try:
        with pytest.raises(KeyboardInterrupt), interrupts_kept():
            waiting()
    finally:
        gc.callbacks.remove(swallow)
        signal.signal(signal.SIGINT, handler)
