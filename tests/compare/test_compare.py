"""Comparisons: the same rules, tuning and budget for all."""

import jax.random as jr
import numpy as np
import pytest

import bilevax as bx
from bilevax._compare.budget import solves_at_looks
from bilevax._compare.curves import read_looks
from bilevax._compare.grid import best_trial
from bilevax._driver.history import History

from .. import zoo
from ..comparisons import GRID, METHODS, Walk, of, outcome, run_all

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
    assert read_looks(row).step.tolist() == looks


def test_a_budget_of_seconds_ends_runs():
    budget = bx.Budget(20, seconds=1e-9, look_every=5)
    row = run_all(None, {"walk": Walk()}, tune=None, budget=budget).rows[0]
    assert row["step"] == [0, 5]
    assert read_looks(row).step.tolist() == [0]
