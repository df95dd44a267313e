"""BLOCC: the gradient of the penalty, its bias, and the minima of a published toy."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

import bilevax as bx
from bilevax._methods.base import Scales
from bilevax._methods.blocc import _exact, penalty_gradient

from .. import zoo

T1, TIGHT = zoo.t1(), zoo.t2()
UNIT = Scales(*(jnp.ones(()) for _ in range(3)))


def test_the_minimiser_on_the_kink_is_the_analytic_one():
    # argmin Phi = -1 / (2 gamma + 1) and min Phi = -1 / (4 (2 gamma + 1)).
    for gamma in (0.5, 5.0, 50.0):
        method = bx.BLOCC(gamma=gamma, step_size=0.4 / (1 + gamma))
        s = bx.solve(
            T1, method, np.array([0.5]), key=jr.key(0), num_steps=600, polish=False
        )
        np.testing.assert_allclose(s.x[0], -1 / (2 * gamma + 1), rtol=1e-7)
        bottom = s.history["value"][-1]
        np.testing.assert_allclose(bottom, -1 / (4 * (2 * gamma + 1)), rtol=1e-7)


@eqx.filter_jit
def penalty(x, gamma):
    """`Phi`, its gradient, and the gradient without the multipliers."""
    e = bx.hypergradient(TIGHT, x, throw=False)
    state = bx.BLOCC(gamma=gamma).init(TIGHT, x, e.lower, UNIT, key=jr.key(0))
    weights = jnp.stack([0.0 * gamma, 1 / gamma])
    saddles = _exact(TIGHT, x, weights, state.saddles)
    value, grad = penalty_gradient(TIGHT, x, saddles, gamma)
    without = eqx.tree_at(
        lambda s: s.multipliers, saddles, jnp.zeros_like(saddles.multipliers)
    )
    return value, grad, penalty_gradient(TIGHT, x, without, gamma)[1], e


def test_the_gradient_needs_the_multipliers():
    x, gamma = np.full(10, -0.3), jnp.asarray(5.0)
    _, grad, without, e = penalty(jnp.asarray(x), gamma)
    assert int(e.lower.active.sum()) == 3
    value = lambda x: float(penalty(jnp.asarray(x), gamma)[0])
    central = zoo.central_differences(value, x)
    np.testing.assert_allclose(grad, central, rtol=zoo.DIFFERENCES, atol=1e-6)
    assert np.linalg.norm(without - central) > 0.1 * np.linalg.norm(central)


def test_the_bias_falls_like_one_over_gamma():
    x = jnp.full(10, -0.3)
    gaps, errors = [], []
    for gamma in (1e2, 1e3, 1e4):
        value, grad, _, e = penalty(x, jnp.asarray(gamma))
        gaps.append(float(e.value - value))
        errors.append(float(jnp.linalg.norm(grad - e.grad)))
    assert min(gaps) > 0
    for parts in (gaps, errors):
        np.testing.assert_allclose(parts[0] / parts[1], 10, rtol=0.1)
        np.testing.assert_allclose(parts[1] / parts[2], 10, rtol=0.1)


def toy():
    """`y <= x` with `g = (y - 2x)^2`, so that `y* = x`, and a wavy `f` on [0, 3]."""

    def f(x, y):
        waves = jnp.exp(2 - y[0]) / (2 + jnp.cos(6 * x[0]))
        return waves + jnp.log((4 * x[0] - 2) ** 2 + 1) / 2

    return bx.Problem(
        f,
        lambda x, y: (y[0] - 2 * x[0]) ** 2,
        bx.Polyhedron(A=[[1.0]], B=[[-1.0]], b=[0.0]),
        domain=bx.Box(np.zeros(1), np.full(1, 3.0)),
    )


def test_random_starts_end_at_the_minima_of_the_toy():
    problem, method = toy(), bx.BLOCC(gamma=5.0, step_size=0.01)
    minima = np.array([0.14889, 0.98622, 2.01973, 2.99077])
    values = (2.968499, 1.721879, 2.156115, 2.445735)
    for x, value in zip(minima, values, strict=True):
        F = bx.hypergradient(problem, np.array([x])).value
        np.testing.assert_allclose(F, value, atol=1e-6)

    @jax.jit
    @jax.vmap
    def run(x):
        lower = bx.hypergradient(problem, x, throw=False).lower
        state = method.init(problem, x, lower, UNIT, key=jr.key(0))
        dynamic, static = eqx.partition(state, eqx.is_array)

        def body(t, dynamic):
            new, _ = method.step(
                problem,
                eqx.combine(dynamic, static),
                step=t,
                num_steps=jnp.asarray(1),
                key=jr.key(0),
            )
            return eqx.filter(new, eqx.is_array)

        return jax.lax.fori_loop(0, 500, body, dynamic).x

    starts = jr.uniform(jr.key(1), (60, 1), maxval=3.0)
    ends = np.asarray(run(starts))
    distance = np.min(np.abs(ends - minima), axis=1)
    assert np.all(distance < 0.005)
    assert len(set(np.argmin(np.abs(ends - minima), axis=1))) == 4


@pytest.mark.parametrize("problem", [T1, TIGHT], ids=["T1", "tight"])
def test_first_order_saddles_agree_with_exact_ones(problem):
    x0 = np.full(1 if problem is T1 else 10, -0.3)
    runs = [
        bx.solve(
            problem,
            bx.BLOCC(gamma=5.0, step_size=0.01, inner=inner, rounds=300),
            x0, key=jr.key(0), num_steps=5, polish=False,
        )
        for inner in ("exact", "first-order")
    ]  # fmt: skip
    np.testing.assert_allclose(runs[0].x, runs[1].x, rtol=1e-5)
    assert runs[1].history["factorisations"].sum() == 0


def test_the_default_run_ends_near_an_optimum():
    for problem in (T1, zoo.t1b()):
        s = bx.solve(problem, bx.BLOCC(), np.array([2.0]), key=jr.key(0), polish=False)
        assert abs(float(s.x[0])) < 1e-2
    s = bx.solve(TIGHT, bx.BLOCC(), np.ones(10), key=jr.key(0), polish=False)
    # A local minimum of the family.
    assert abs(s.value - (-2.058496)) < 1e-2


def test_a_penalty_that_is_not_convex_is_reported():
    problem = bx.Problem(
        lambda x, y: jnp.sum(x**2 - 10 * y**2), T1.lower, T1.constraints
    )
    method = bx.BLOCC(gamma=1.0, step_size=0.1)
    # F has no lower bound, which is told beside it.
    s = bx.solve(
        problem, method, np.array([-2.0]), key=jr.key(0), num_steps=3, polish=False,
        throw=False,
    )  # fmt: skip
    failed = int(bx.Status.not_strongly_convex._value)
    assert np.all(s.history["status"] == failed)
    assert float(s.x[0]) == -2.0
    with pytest.raises(ValueError, match="inner"):
        bx.BLOCC(inner="newton")
