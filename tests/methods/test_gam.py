"""GAM: which pieces it sees, the shortest combination of them, and descent at kinks."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

import bilevax as bx
from bilevax._lower.active_set import ActiveSet
from bilevax._methods.gam import neighbours, shortest

from .. import zoo

T1, TIGHT = zoo.t1(), zoo.t2()
pieces = eqx.filter_jit(lambda p, x, low, eps: neighbours(p, x, low, eps, 4))
gradient = eqx.filter_jit(lambda x: bx.hypergradient(TIGHT, x, throw=False))


@pytest.mark.parametrize("x0", [2.0, -1.7])
def test_the_kink_is_found_to_rounding(x0):
    method = bx.GAM(eps0=0.5, nu0=0.1, step_size=1.0)
    s = bx.solve(T1, method, np.array([x0]), key=jr.key(0), num_steps=60, polish=False)
    assert abs(float(s.x[0])) < 1e-12


def test_the_shortest_element_of_a_hull():
    rng = np.random.default_rng(0)
    hull = jax.jit(shortest)
    for case in range(20):
        points = rng.normal(size=(16, 6)) * 10.0 ** rng.integers(-6, 6)
        points = points + rng.normal(size=6) * np.abs(points).max() * (case % 3) / 2
        points[3], points[7] = points[5], points[0]
        valid = rng.uniform(size=16) < 0.8
        d = np.asarray(hull(jnp.asarray(points), jnp.asarray(valid)))
        # The projection theorem: <p, d> >= |d|^2 for every point of the hull.
        size = np.abs(points).max() ** 2
        assert np.min(points[valid] @ d) >= d @ d - 1e-12 * size
    two = np.array([[3.0, 1.0], [-1.0, 1.0]])
    found = hull(jnp.asarray(two), jnp.ones(2, bool))
    np.testing.assert_allclose(found, [0.0, 1.0], atol=1e-12)


def kink_of_the_tight_family():
    """A point where one row changes sides, by bisection between two active sets."""
    low, high = np.full(10, -0.6), np.full(10, 0.4)
    side = lambda x: np.asarray(gradient(jnp.asarray(x)).lower.active)
    start = side(low)
    for _ in range(52):
        middle = (low + high) / 2
        if np.array_equal(side(middle), start):
            low = middle
        else:
            high = middle
    return low, high


def test_every_subset_of_the_ambiguous_rows_is_seen():
    low, high = kink_of_the_tight_family()
    x = jnp.asarray(low)
    lower = gradient(x).lower
    near = pieces(TIGHT, x, lower, 1e-9)
    assert int(near.ambiguous.sum()) == 1
    assert len({tuple(row) for row in np.asarray(near.subsets)}) == 2
    # Both pieces have the gradient that holds on their side.
    for side in (low, high):
        e = gradient(
            jnp.asarray(side - 1e-7 * np.sign(high[0] - low[0]) * (side is low))
        )
        match = np.all(np.asarray(near.subsets) == np.asarray(e.lower.active), axis=1)
        assert match.any()
        np.testing.assert_allclose(
            np.asarray(near.gradients)[match][0], e.grad, rtol=1e-5
        )
    # A huge radius makes all five rows ambiguous: the cap leaves the four nearest.
    far = pieces(TIGHT, x, lower, 1e6)
    assert int(far.ambiguous.sum()) == 4
    assert len({tuple(row) for row in np.asarray(far.subsets)}) == 16
    assert float(far.eps) < 1e6


def test_dependent_subsets_are_left_out():
    # The same row twice: at most one of the copies can be active.
    problem = zoo.clipped(2)
    solve = eqx.filter_jit(lambda x: ActiveSet()(problem, x))
    x = jnp.array([1e-3])
    near = pieces(problem, x, solve(x), 0.1)
    both = np.all(np.asarray(near.subsets), axis=1)
    assert not np.any(np.asarray(near.valid)[both])
    assert np.any(np.asarray(near.valid))
    slopes = np.asarray(near.gradients)[np.asarray(near.valid)][:, 0]
    assert set(np.round(slopes, 12)) <= {0.0, 1.0}


def armijo(gradient, x, solves):
    """Plain descent along one-sided gradients, with the constants of GAM."""
    e, used = gradient(x), 0
    while used < solves:
        t = 1.0
        while used < solves:
            trial, used = gradient(x - t * e.grad), used + 1
            if trial.value <= e.value - 0.5 * t * jnp.sum(e.grad**2):
                x, e = x - t * e.grad, trial
                break
            t /= 2
    return e


def test_it_slides_along_a_kink_where_plain_descent_stalls():
    # F = 10 (x1^2 / 4 + |x1| / 2) + (x2 - 1)^2 / 2 from the kink x1 = 0: neither
    # one-sided gradient (+-5, -1) points downhill, their shortest combination does.
    problem = bx.Problem(
        lambda x, y: (
            10 * (x[0] ** 2 / 4 + x[0] / 2 - y[0]) + 0.5 * jnp.sum((x[1:] - 1) ** 2)
        ),
        lambda x, y: 0.5 * jnp.sum((y - x[0]) ** 2),
        T1.constraints,
    )
    s = bx.solve(
        problem, bx.GAM(), np.zeros(2), key=jr.key(0), num_steps=60, polish=False
    )
    np.testing.assert_allclose(s.x, [0, 1], atol=1e-6)
    at = eqx.filter_jit(lambda x: bx.hypergradient(problem, x, throw=False))
    plain = armijo(at, jnp.zeros(2), int(s.history["lower_solves"].sum()))
    assert float(plain.value) > 0.49
    assert s.value < 1e-6


def test_from_a_kink_of_the_tight_family_it_finds_the_best_value():
    _, x = kink_of_the_tight_family()
    s = bx.solve(TIGHT, bx.GAM(), x, key=jr.key(0), num_steps=60, polish=False)
    assert abs(s.value - (-2.144207)) < 1e-6
    # Plain descent is no worse here: the minima of this family are smooth points.
    plain = armijo(gradient, jnp.asarray(x), int(s.history["lower_solves"].sum()))
    assert s.value < float(plain.value) + 1e-6


def test_the_default_run_ends_at_a_local_minimum():
    for problem in (T1, zoo.t1b()):
        s = bx.solve(problem, bx.GAM(), np.array([2.0]), key=jr.key(0), polish=False)
        assert abs(float(s.x[0])) < 1e-9
    s = bx.solve(TIGHT, bx.GAM(), np.ones(10), key=jr.key(0), polish=False)
    # A stationary point of the family, though not its best.
    assert abs(s.value - (-2.058496)) < 1e-5
    polished = bx.solve(TIGHT, bx.GAM(), np.ones(10), key=jr.key(0), num_steps=100)
    assert s.value - polished.value < 1e-6


def test_a_sampled_problem_is_refused():
    sampled = bx.StochasticProblem.from_data(np.ones(4), 2, lambda batch: zoo.t1())
    with pytest.raises(ValueError, match="GAM needs a deterministic problem"):
        bx.solve(sampled, bx.GAM(), np.ones(1), key=jr.key(0))
