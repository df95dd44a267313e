"""LV-HBA: two published toys with a merely convex follower, and the default run."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

import bilevax as bx
from bilevax._methods.base import Scales

from .. import zoo

UNIT = Scales(*(jnp.ones(()) for _ in range(3)))


def toy(n, upper):
    """`g = |y1|^2 / 2 - x y1 + sum(y2)` with `sum(x + y1 + y2) = 0`; flat in `y2`."""

    def lower(x, y):
        y1, y2 = y["1"], y["2"]
        return 0.5 * y1 @ y1 - x @ y1 + jnp.sum(y2)

    rows = bx.Polyhedron(
        A_eq=np.ones((1, 2 * n)), B_eq=np.ones((1, n)), b_eq=np.zeros(1)
    )
    return bx.Problem(upper, lower, rows, y0={"1": np.zeros(n), "2": np.zeros(n)})


def states(problem, method, n, counts):
    """States after so many steps from zero, with multipliers 1 and -1."""
    x = jnp.zeros(n)
    lower = bx.hypergradient(problem, x, throw=False).lower
    assert not bool(lower.success)
    state = method.init(problem, x, lower, UNIT, key=jr.key(0))
    start = lambda s: (s.inner_dual, s.z)
    state = eqx.tree_at(start, state, (jnp.ones(1), -jnp.ones(1)))
    dynamic, static = eqx.partition(state, eqx.is_array)

    @jax.jit
    def advance(first, last, dynamic):
        def body(t, dynamic):
            new, _ = method.step(
                problem,
                eqx.combine(dynamic, static),
                step=t,
                num_steps=jnp.asarray(1),
                key=jr.key(0),
            )
            return eqx.filter(new, eqx.is_array)

        return jax.lax.fori_loop(first, last, body, dynamic)

    done = 0
    for count in counts:
        dynamic, done = advance(done, count, dynamic), count
        yield eqx.combine(dynamic, static)


def test_the_toy_of_the_paper_converges_as_listed():
    n = 100
    problem = toy(
        n,
        lambda x, y: (
            0.5 * jnp.sum((x - y["2"]) ** 2) + 0.5 * jnp.sum((y["1"] - 1) ** 2)
        ),
    )
    method = bx.LVHBA(
        alpha=0.008, beta=0.02, eta=0.01, g1=10.0, g2=10.0, bound=1.0, p=0.3
    )
    best = np.concatenate([np.full(n, 0.7), np.full(n, -0.4)])
    split = lambda y: {"1": y[:n], "2": y[n:]}
    listed = {500: (0.024, 0.039), 1000: (0.032, 0.024), 3000: (0.028, 0.014)}
    for state, (want_x, want_y) in zip(
        states(problem, method, n, listed), listed.values(), strict=True
    ):
        x_error = np.linalg.norm(state.x + 0.3) / (0.3 * np.sqrt(n))
        y_error = np.linalg.norm(state.y - best) / np.linalg.norm(best)
        np.testing.assert_allclose(x_error, want_x, rtol=0.05)
        np.testing.assert_allclose(y_error, want_y, rtol=0.05)
        # The pair always satisfies the rows.
        assert abs(float(state.x.sum() + state.y.sum())) < 1e-8
    np.testing.assert_allclose(state.inner_dual, -1, rtol=1e-2)
    # F* = n / 20; a follower that is a little off makes F smaller, by O(1 / c_k).
    gap = 0.05 * n - float(problem.upper(state.x, split(state.y)))
    assert 0 < gap < 0.05 * n / 10
    optimum = problem.upper(jnp.full(n, -0.3), split(best))
    np.testing.assert_allclose(optimum, 0.05 * n, rtol=zoo.IDENTITY)


def test_a_second_toy_with_a_saddle_on_top():
    n = 10
    problem = toy(n, lambda x, y: (y["1"] - 2) @ (x - 1) + jnp.sum((y["2"] + 3) ** 2))
    method = bx.LVHBA(
        alpha=0.005, beta=0.002, eta=0.03, g1=10.0, g2=1.0, bound=1.0, p=0.3
    )
    (state,) = states(problem, method, n, [20000])
    np.testing.assert_allclose(state.x, 1, rtol=0.03)
    np.testing.assert_allclose(state.y[:n], 2, rtol=0.03)
    np.testing.assert_allclose(state.y[n:], -3, rtol=0.03)


def test_the_default_run_ends_near_the_optimum():
    s = bx.solve(zoo.t1(), bx.LVHBA(), np.array([2.0]), key=jr.key(0), polish=False)
    assert abs(float(s.x[0])) < 1e-2
    assert s.history["lower_solves"].sum() == 0
    # A single loop needs longer runs than methods that solve the lower level.
    s = bx.solve(
        zoo.t2(), bx.LVHBA(), np.ones(10), key=jr.key(0), num_steps=1000, polish=False
    )
    assert -2.144208 < s.value < -2.144207 + 1e-2


def test_boxes_and_domains_need_no_multipliers():
    # y* = clip(x, -1, 1), F = |x - 2|^2 + |y|^2 on x in [-3, 3]: x = 2 beyond the kink.
    problem = bx.Problem(
        lambda x, y: jnp.sum((x - 2) ** 2 + y**2),
        lambda x, y: 0.5 * jnp.sum((y - x) ** 2),
        bx.Box(-np.ones(2), np.ones(2)),
        domain=bx.Box(np.full(2, -3.0), np.full(2, 3.0)),
    )
    s = bx.solve(problem, bx.LVHBA(), np.zeros(2), key=jr.key(0), polish=False)
    np.testing.assert_allclose(s.x, 2, atol=0.02)
    assert s.history["penalty_solves"].sum() == 0


def test_some_constants_alone_are_refused():
    with pytest.raises(ValueError, match="belong together"):
        bx.LVHBA(alpha=0.1)
