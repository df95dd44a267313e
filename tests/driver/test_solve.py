"""The driver: domains, empty lower levels, polish, early stopping, several starts."""

import pathlib
import runpy
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

import bilevax as bx
from bilevax._implicit.feasible import nearest, onto_domain

from .. import zoo
from ..methods.test_ds_blo import kink


class Pull(eqx.Module):
    """`|x - target|^2 + |y|^2 / 2`."""

    target: jax.Array

    def __call__(self, x, y):
        return jnp.sum((x - self.target) ** 2) + 0.5 * jnp.sum(y**2)


def tracking(target, domain):
    """`y*(x) = min(x, 0)`; without a domain the optimum has a closed form."""
    return bx.Problem(
        Pull(jnp.asarray(target, float)),
        zoo.Clipped(),
        bx.Polyhedron(A=np.eye(2), b=np.zeros(2)),
        domain=domain,
    )


BOX = bx.Box(np.array([-1.0, -2.0]), np.array([0.5, 2.0]))
TRIANGLE = bx.Polyhedron(
    A=np.array([[-1.0, 0.0], [0.0, -1.0], [1.0, 1.0]]), b=np.array([0.0, 0.0, 1.0])
)


@pytest.mark.parametrize(
    ("target", "best"),
    [((3.0, 1.0), (0.5, 1.0)), ((-0.6, -9.0), (-0.4, -2.0)), ((0.1, 0.2), (0.1, 0.2))],
)
def test_a_box_holds_x(target, best):
    s = bx.solve(tracking(target, BOX), bx.DSBLO(), np.zeros(2), key=jr.key(0))
    np.testing.assert_allclose(s.x, best, atol=1e-6)
    np.testing.assert_allclose(s.stochastic[0], best, atol=1e-2)


def test_a_polyhedron_holds_x():
    for target, best in (((1.0, 2.0), (0.0, 1.0)), ((-1.0, 0.3), (0.0, 0.3))):
        problem = tracking(target, TRIANGLE)
        s = bx.solve(problem, bx.DSBLO(), np.full(2, 0.2), key=jr.key(0))
        np.testing.assert_allclose(s.x, best, atol=1e-6)


def test_projections_are_nearest_points():
    problem = tracking((0.0, 0.0), TRIANGLE)
    for x, best in (((2.0, 2.0), (0.5, 0.5)), ((-1.0, 0.5), (0.0, 0.5))):
        out = onto_domain(problem, jnp.asarray(x))
        np.testing.assert_allclose(out, best, atol=zoo.EXACT)
    near = nearest(problem, jnp.array([2.0, 1.0]), coupled=False)
    slope = near.pull_back(jnp.array([1.0, 0.0]))
    np.testing.assert_allclose(slope, [0.5, -0.5], atol=zoo.EXACT)


def leftwards(x, y):
    return (x[0] + 3) ** 2 + y[0]


def near_one(x, y):
    return 0.5 * (y[0] - 1) ** 2


def market():
    """The lower level is empty for x < 1 and for x > 5; F falls towards -3."""
    return bx.Problem(
        leftwards,
        near_one,
        bx.Polyhedron(
            A=[[1.0], [-1.0], [1.0]], B=[[-1.0], [0.0], [1.0]], b=[-1.0, 0.0, 5.0]
        ),
    )


def test_an_empty_lower_level_is_left_again():
    # y <= x - 1, y >= 0, y <= 5 - x: at the edge x = 1 only y = 0 is left.
    problem = market()
    for x0 in (4.0, -20.0, 9.0):
        s = bx.solve(problem, bx.DSBLO(), jnp.array([x0]), key=jr.key(0))
        assert s.success
        np.testing.assert_allclose(s.x, [1.0], atol=1e-6)
        np.testing.assert_allclose(s.value, 16.0, rtol=1e-6)


def test_a_lower_level_that_is_empty_everywhere_is_told():
    problem = bx.Problem(
        lambda x, y: jnp.sum(x**2),
        lambda x, y: 0.5 * jnp.sum((y - x) ** 2),
        bx.Polyhedron(A=[[1.0], [-1.0]], b=[-1.0, -1.0]),
    )
    with pytest.raises(bx.BilevelError, match="No `y` satisfies"):
        bx.solve(problem, bx.DSBLO(), jnp.zeros(1), key=jr.key(0))
    s = bx.solve(problem, bx.DSBLO(), jnp.zeros(1), key=jr.key(0), throw=False)
    assert not s.success
    assert s.status_name == "infeasible"
    assert np.isnan(s.value)


def test_history_counts_and_chunks_do_not_matter():
    run = lambda **options: bx.solve(
        kink(), bx.DSBLO(), jnp.array([2.0]), key=jr.key(2), num_steps=90,
        polish=False, **options,
    )  # fmt: skip
    whole, pieces = run(chunk=90), run(chunk=13)
    np.testing.assert_array_equal(whole.x, pieces.x)
    for name, column in whole.history.steps.items():
        np.testing.assert_array_equal(column, pieces.history[name])
    assert len(pieces.history) == 90
    assert pieces.history.evaluated_at.tolist() == [0, 13, 26, 39, 52, 65, 78, 90]
    assert whole.history.totals["lower_solves"] == 90
    assert pieces.history.seconds.shape == pieces.history.value.shape


def test_early_stopping_and_callbacks():
    seen = []

    def callback(step, x, value, history):
        seen.append((step, float(value)))
        return step >= 40

    options: dict[str, Any] = dict(key=jr.key(2), num_steps=200, chunk=20, polish=False)
    x0 = jnp.array([2.0])
    s = bx.solve(kink(), bx.DSBLO(), x0, callback=callback, **options)
    assert [step for step, _ in seen] == [20, 40]
    assert s.stopped == "the callback asked"
    s = bx.solve(kink(), bx.DSBLO(), x0, stop=bx.Stop(seconds=0.0), **options)
    assert s.stopped == "the time is spent"
    assert len(s.history) == 20
    s = bx.solve(kink(), bx.DSBLO(), x0, stop=bx.Stop(move=1.0), **options)
    assert s.stopped == "the steps vanished"
    certificate = bx.Stop(certificate=(0.1, 1e-6))
    s = bx.solve(kink(), bx.DSBLO(), x0, stop=certificate, **options)
    assert s.stopped.startswith("certified")
    assert len(s.history) < 200


def test_the_best_of_several_starts_wins():
    s = bx.solve(
        kink(), bx.DSBLO(), jnp.array([2.0]), key=jr.key(0), num_steps=5, polish=False,
        starts=[jnp.array([-1.0])], num_starts=4,
    )  # fmt: skip
    assert len(s.starts) == 4
    assert s.value == min(one.value for one in s.starts)


def test_a_pytree_x_and_pytree_y():
    problem = bx.Problem(
        lambda x, y: jnp.sum((x["a"] - 1) ** 2) + (x["b"] + 2) ** 2 + jnp.sum(y["u"]),
        lambda x, y: 0.5 * jnp.sum((y["u"] - x["a"]) ** 2),
        bx.Box({"u": jnp.zeros(2)}, {"u": jnp.ones(2)}),
    )
    x0 = {"a": jnp.zeros(2), "b": jnp.asarray(0.0)}
    s = bx.solve(problem, bx.DSBLO(), x0, key=jr.key(0))
    # On 0 <= a <= 1 the objective is (a - 1)^2 + a, with its minimum at 1/2.
    np.testing.assert_allclose(s.x["a"], 0.5, atol=1e-6)
    np.testing.assert_allclose(s.x["b"], -2.0, atol=1e-6)
    np.testing.assert_allclose(s.y["u"], 0.5, atol=1e-6)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (dict(method=bx.DSBLO), "DSBLO"),
        (dict(x0=None), "x0"),
        (dict(num_steps=0), "num_steps"),
        (dict(chunk=2.5), "chunk"),
        (dict(output="best"), "output"),
        (dict(problem=3), "Problem"),
    ],
)
def test_mistakes_are_told_before_anything_runs(options, text):
    arguments: dict[str, Any] = dict(
        problem=kink(), method=bx.DSBLO(), x0=jnp.array([2.0])
    )
    arguments |= options
    with pytest.raises(ValueError, match=text):
        bx.solve(**arguments, key=jr.key(0))


def test_a_run_that_falls_off_the_edge_returns_the_best_it_saw():
    # F falls towards x = -1, where g is undefined.
    problem = bx.Problem(
        lambda x, y: x[0] + 0 * y[0],
        lambda x, y: 0.5 * y[0] ** 2 / (1 + x[0]),
        bx.Polyhedron(A=[[1.0]], b=[1.0]),
        domain=bx.Box([-1.0], [2.0]),
    )
    s = bx.solve(problem, bx.DSBLO(), jnp.array([1.0]), key=jr.key(0), throw=False)
    assert s.success
    assert np.isfinite(s.value)
    assert -1 < float(s.x[0]) < 1


def test_a_problem_that_is_empty_everywhere_says_so():
    rows = bx.Polyhedron(A=[[-1.0], [1.0]], B=[[1.0], [-1.0]], b=[-3.0, 2.0])
    problem = bx.Problem(
        lambda x, y: jnp.sum((x - y) ** 2), lambda x, y: 0.5 * jnp.sum(y**2), rows
    )
    s = bx.solve(problem, bx.DSBLO(), jnp.zeros(1), key=jr.key(0), throw=False)
    assert not s.success
    assert s.status_name == "infeasible"
    np.testing.assert_array_equal(s.x, jnp.zeros(1))


def test_a_run_that_is_carried_to_a_flat_part_comes_back():
    """Tolls without a domain: beyond the last traveller F is zero and flat."""
    roads = bx.Polyhedron(A=[[1.0, 1.0], [-1.0, 0.0], [0.0, -1.0]], b=[2.0, 0.0, 0.0])
    problem = bx.Problem(
        lambda x, y: -jnp.sum(x * y),
        lambda x, y: 0.5 * jnp.sum(y**2) + jnp.sum((x - 4) * y),
        roads,
    )
    for seed in range(3):
        x0 = jnp.array([1.0, 2.0])
        far = bx.DSBLO(first_step=10.0)
        s = bx.solve(problem, far, x0, key=jr.key(seed))
        assert s.stochastic[1] > -1e-6
        assert s.value < s.history.value[0] - 1


@pytest.fixture(scope="module")
def tolls() -> bx.Problem:
    """The problem of the README's picture."""
    example = pathlib.Path(__file__).parent.parent.parent / "examples" / "tolls.py"
    return runpy.run_path(str(example))["problem"]


@pytest.mark.parametrize("seed", [0, 1, 3, 5])
def test_runs_that_jump_over_the_best_part_or_stop_on_a_kink_end_at_the_optimum(
    tolls, seed
):
    # Seeds 3 and 5 are carried to a toll that nobody pays, where F is flat; with seeds
    # 0 and 1 the first round of the polish gives up 1e-4 away, on the kink.
    x0 = np.array([1.0, 2.0])
    s = bx.solve(tolls, bx.DSBLO(), x0, key=jr.key(seed), num_starts=1)
    if seed in (3, 5):
        assert s.stochastic[1] > -4
    assert s.value == pytest.approx(-6, abs=zoo.EXACT)
    np.testing.assert_allclose(s.x, [3, 3], atol=1e-6)
    assert s.polish is not None
    assert s.polish.value == s.value
    assert s.polish.start_value <= s.stochastic[1]


def test_the_first_step_which_stays_does_not_end_a_run(tolls):
    steps = []
    s = bx.solve(
        tolls, bx.DSBLO(), np.array([1.0, 2.0]), key=jr.key(0), chunk=1, polish=False,
        callback=lambda step, x, value, history: steps.append(step),
    )  # fmt: skip
    assert s.stopped == "all steps taken"
    assert steps == list(range(1, 301))


POLE = bx.Problem(
    lambda x, y: x[0] + (x[1] - 3) ** 2 + y[0] ** 2,
    lambda x, y: y[0] ** 2 / (2 * x[0]),
    bx.Box(np.zeros(1), np.ones(1)),
    domain=bx.Box(np.zeros(2), np.full(2, 5.0)),
)


@pytest.mark.parametrize("x0", [(4.0, 0.5), (0.0, 1.0)])
def test_a_bound_on_which_f_is_undefined_stops_nothing(x0):
    # The infimum 0 is approached as the first entry falls to 0, where g has a pole.
    s = bx.solve(POLE, bx.DSBLO(), np.array(x0), key=jr.key(0))
    assert s.success
    assert 0 < s.value < 1e-6
    np.testing.assert_allclose(s.x, [0, 3], atol=1e-6)
    assert "moved inside" in s.stopped


def test_bounds_move_inside_by_their_range_or_their_size():
    box = bx.Box(
        np.array([0.0, -np.inf, 200.0, -np.inf]), np.array([10.0, 5, 200, np.inf])
    )
    inside = box.shrunk(0.01)
    np.testing.assert_allclose(inside.lower, [0.1, -np.inf, 200, -np.inf])
    np.testing.assert_allclose(inside.upper, [9.9, 4.95, 200, np.inf])
