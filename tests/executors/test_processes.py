"""Runs in worker processes are those of one process; a death costs one run."""

import dataclasses
import warnings
from typing import Any

import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from jax.tree_util import Partial

import bilevax as bx
from bilevax._compare.rows import read_rows

from ..comparisons import CASES, METHODS, Descent, Walk, of, outcome, run_all
from .tools import (
    START,
    Failing,
    Here,
    Revenue,
    assert_same,
    fitted,
    from_lambdas,
    halves,
    pool,
    tolls,
)  # fmt: skip

VALUES = 4 + np.arange(6).reshape(3, 2) / 5
BRIEF: Any = dict(num_steps=20, polish=False)


@pytest.fixture(scope="module")
def workers():
    with pool() as executor:
        yield executor


# --- comparisons ----------------------------------------------------------------------


def compared(folder, executor, methods=METHODS):
    """As `run_all`, by an executor."""
    from ..comparisons import BUDGET, GRID

    return bx.compare(
        CASES, methods, 2, BUDGET, tune=GRID, folder=folder, executor=executor
    )


def test_rows_are_those_of_one_process(workers, finished, tmp_path, capfd):
    there = compared(tmp_path, workers)
    assert len(there.rows) == len(finished.rows)
    for one, other in zip(
        there.rows + there.trials, finished.rows + finished.trials, strict=True
    ):
        assert one["id"] == other["id"]
        assert outcome(one) | {"value": 0} == outcome(other) | {"value": 0}
        np.testing.assert_allclose(one["value"], other["value"], rtol=1e-12)
        assert list(one) == list(other)
        assert one["lower_solves"] == other["lower_solves"]
        assert (one["compile_seconds"] is None) == (other["compile_seconds"] is None)
    kept = read_rows(tmp_path / "rows.jsonl")
    assert {r["id"] for r in kept} == {r["id"] for r in there.rows + there.trials}
    # What is there is not handed out again, in whatever process.
    again = run_all(tmp_path)
    assert again.rows == there.rows
    executor = Here()
    assert compared(tmp_path, executor).rows == there.rows
    assert executor.texts == []


def test_a_run_that_is_lost_has_a_row_and_is_tried_by_the_next_call(tmp_path):
    methods = {"walk": Walk()}
    # Two trials, then two runs, of which the first is lost and lost again.
    executor = Failing(lose=[2, 4])
    there = compared(tmp_path, executor, methods)
    row = of(there, "walk", 0)
    assert row["status"] == "failed"
    assert row["message"] == (
        "walk on kink from seed 0 was lost twice by its executor: ConnectionError: the "
        "worker is gone"
    )
    assert row["value"] == []
    assert "walk on kink" in str(there)
    assert of(there, "walk", 1)["status"] == "finished"
    again = compared(tmp_path, Here(), methods)
    assert [row["status"] for row in again.rows] == ["finished"] * 2
    assert len(read_rows(tmp_path / "rows.jsonl")) == 4


def test_a_choice_that_misses_a_trial_is_not_kept(tmp_path):
    there = compared(tmp_path, Failing(lose=[0, 2]), {"walk": Walk()})
    assert [row["status"] for row in there.trials] == ["failed", "finished"]
    assert [row["status"] for row in there.rows] == ["finished"] * 2
    assert there.rows[0]["tuning"]["values"][0] == [None]
    assert len(read_rows(tmp_path / "rows.jsonl")) == 1


def test_a_problem_that_cannot_travel_is_made_there():
    budget = bx.Budget(4, look_every=2)
    run = lambda problem, executor: bx.compare(
        [bx.Case("made", problem, np.ones(2))], [Walk()], 2, budget,
        executor=executor,
    )  # fmt: skip
    executor = Here()
    there, here = run(from_lambdas, executor), run(from_lambdas, None)
    assert len(executor.texts) == 2
    for one, other in zip(there.rows, here.rows, strict=True):
        assert outcome(one) == outcome(other)
    with pytest.raises(ValueError, match="`problem.upper` is a lambda"):
        run(from_lambdas(0), executor)
    with pytest.raises(ValueError, match="Walk on made from seed 0: "):
        run(lambda seed: from_lambdas(seed), executor)
    assert len(executor.texts) == 2


# --- many instances, many starts ------------------------------------------------------


def test_instances_are_those_of_one_process(workers):
    problems = [tolls(VALUES[0]), tolls(VALUES[1], -1.0), tolls(VALUES[2])]
    keys = jr.split(jr.key(0), 3)
    given = ([START] * 3, keys, Walk())
    there = bx.solve_many(problems, *given, executor=workers, num_starts=2, **BRIEF)
    here = bx.solve_many(problems, *given, num_starts=2, **BRIEF)
    assert [s.status_name for s in there][1] == "infeasible"
    for one, other in zip(there, here, strict=True):
        assert_same(one, other)
        for start, expected in zip(one.starts, other.starts, strict=True):
            assert_same(start, expected)


def test_pieces_of_many_instances_are_solved_together():
    problems = [tolls(VALUES[0] + i / 100) for i in range(40)]
    executor = Here()
    given = (problems, [START] * 40, 0, Walk())
    there = bx.solve_many(*given, executor=executor, **BRIEF)
    assert len(executor.texts) == 20
    here = bx.solve_many(*given, **BRIEF)
    for one, other in zip(there, here, strict=True):
        assert_same(one, other)


def test_starts_are_those_of_one_process(workers, tmp_path):
    given: Any = dict(key=3, num_starts=2, num_steps=20, certify=1e-2)
    problem = tolls(VALUES[0])
    there = bx.solve(
        problem, None, START, executor=workers, checkpoint=tmp_path / "run.npz", **given
    )
    here = bx.solve(problem, None, START, **given)
    for one, other in zip(there.starts, here.starts, strict=True):
        assert one.polish is not None
        np.testing.assert_allclose(one.value, other.value, rtol=1e-9)
        np.testing.assert_allclose(one.x, other.x, atol=1e-6)
    assert there.certificate is not None
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["run-0.npz", "run-1.npz"]


def test_samples_travel_as_data_and_the_function_of_a_batch():
    data = {"u": np.linspace(0, 1, 8), "v": np.linspace(1, 2, 8)}
    for problem in (
        bx.StochasticProblem.from_data(data, 4, fitted, epochs=True),
        bx.StochasticProblem(Partial(halves, jnp.asarray(data["u"])), fitted),
    ):
        given: Any = dict(key=1, num_starts=2, num_steps=12)
        executor = Here()
        there = bx.solve(problem, Descent(), jnp.ones(1), executor=executor, **given)
        here = bx.solve(problem, Descent(), jnp.ones(1), **given)
        assert len(executor.texts) == 2
        for one, other in zip(there.starts, here.starts, strict=True):
            assert_same(one, other)
    other = dataclasses.replace(problem, population=fitted(data))
    with pytest.raises(ValueError, match="`problem.population.upper` is a lambda"):
        bx.solve(other, Descent(), jnp.ones(1), executor=executor, **given)


def test_mistakes_are_told_before_anything_is_submitted():
    executor = Here()
    problem = tolls(VALUES[0])
    own = bx.Problem(lambda x, y: jnp.sum(x), problem.lower, y0=jnp.ones(2))
    with pytest.raises(ValueError, match="start 0: `problem.upper` is a lambda"):
        bx.solve(own, None, START, key=0, starts=[START], executor=executor)
    with pytest.raises(ValueError, match="instance 0: `problem.upper` is a lambda"):
        bx.solve_many([own] * 2, [START] * 2, 0, executor=executor)
    with pytest.raises(ValueError, match="`callback` is a function of this process"):
        bx.solve(
            problem, None, START, key=0, executor=executor, callback=lambda *a: None
        )
    with pytest.raises(ValueError, match="must have `submit"):
        bx.solve(problem, None, START, key=0, executor=3)
    with pytest.raises(ValueError, match="must have `submit"):
        bx.compare({"tolls": (problem, START)}, [bx.DSBLO()], 1, executor=3)
    assert executor.texts == []


# --- deaths ---------------------------------------------------------------------------


@pytest.mark.parametrize("times", [1, 9])
def test_a_worker_that_dies_costs_one_run_if_any(times, tmp_path):
    """Once, and the run is done by another; always, and it is reported."""
    deadly = Revenue(str(tmp_path), times)
    problems = [tolls(VALUES[0]), tolls(VALUES[1], revenue=deadly), tolls(VALUES[2])]
    given = ([START] * 3, 0, Walk())
    with pool() as executor, pytest.warns(UserWarning, match="A worker died"):
        there = bx.solve_many(problems, *given, executor=executor, **BRIEF)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        here = bx.solve_many([tolls(value) for value in VALUES], *given, **BRIEF)
    assert_same(there[0], here[0])
    assert_same(there[2], here[2])
    if times == 1:
        assert_same(there[1], here[1])
    else:
        assert len(list(tmp_path.iterdir())) == 2
        assert not there[1].success
        assert there[1].status_name == "lost"
        assert there[1].message.startswith("instance 1 was lost (BrokenProcessPool: ")
        assert np.isnan(there[1].value)
        assert there[1].x.tolist() == START.tolist()


def test_a_start_that_is_lost_is_not_the_best():
    given: Any = dict(key=0, num_starts=2, num_steps=20, polish=False)
    found = bx.solve(
        tolls(VALUES[0]), Walk(), START, executor=Failing(lose=[0, 2]), **given
    )
    assert [s.status_name for s in found.starts][0] == "lost"
    assert found.success
    with pytest.raises(bx.BilevelError, match="start 0 was lost"):
        bx.solve(
            tolls(VALUES[0]), Walk(), START, executor=Failing(lose=range(9)),
            **given,
        )  # fmt: skip
