"""Forces along flat directions, next to stiff ones: small beside them, but they decide.

`min_y P/2 (a.y - x)^2 + c.y` over a box. With a large `P` a residual that is small next
to the stiff force says nothing about `c`. The right answer follows from the multiplier
`nu = P (a.y - x)`: every `y_i` sits at the bound that `c_i + nu a_i` pushes it to, but
for at most one, whose `c_i + nu a_i` is zero.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.tree_util import Partial

import bilevax as bx

N = 3


def spring(stiffness, a, c, x, y):
    return 0.5 * stiffness * (a @ y - x[0]) ** 2 + c @ y


def evaluate(stiffness, a, c, t, x):
    problem = bx.Problem(
        Partial(lambda t, x, y: t @ y, t),
        Partial(spring, stiffness, a, c),
        bx.Box(-jnp.ones(N), jnp.ones(N)),
    )
    return bx.hypergradient(problem, x, throw=False)


EVALUATE = jax.jit(jax.vmap(evaluate))


def expected(stiffness, a, c, x):
    """The answer and the index of the `y_i` between its bounds, if there is one."""
    corner = lambda nu: -np.sign(c + nu * a)
    breaks = np.sort(-c / a)
    for nu in breaks:
        i = int(np.argmin(np.abs(-c / a - nu)))
        y = corner(nu)
        y[i] = 0
        y[i] = (nu / stiffness + x - a @ y) / a[i]
        if abs(y[i]) <= 1:
            return y, i
    between = 0.5 * (breaks[:-1] + breaks[1:])
    inner = np.concatenate([[breaks[0] - 1], between, [breaks[-1] + 1]])
    ends = np.concatenate([[-np.inf], breaks, [np.inf]])
    for nu, low, high in zip(inner, ends[:-1], ends[1:], strict=True):
        y = corner(nu)
        if low < stiffness * (a @ y - x) < high:
            return y, None
    raise AssertionError("one of these holds")


@pytest.mark.parametrize(
    ("stiffness", "least"), [(1e4, 400), (1e7, 400), (1e8, 398), (1e10, 390)]
)
def test_flat_directions_are_decided_next_to_stiff_ones(stiffness, least):
    rng = np.random.default_rng(5)
    a, c, t = rng.normal(size=(3, 400, N))
    x = rng.uniform(-0.9, 0.9, size=(400, 1))
    e = EVALUATE(np.full(400, stiffness), a, c, t, x)
    names = bx.status_name(e.status)
    good = names == "successful"
    # Where forces are lost in the rounding of stiff ones it says so.
    assert np.sum(good) >= least
    assert set(names[~good]) <= {"not_strongly_convex", "iteration_limit"}
    for i in np.flatnonzero(good):
        y, inside = expected(stiffness, a[i], c[i], x[i, 0])
        np.testing.assert_allclose(e.lower.y[i], y, atol=1e-5, err_msg=str(i))
        slope = 0 if inside is None else t[i, inside] / a[i, inside]
        np.testing.assert_allclose(e.grad[i, 0], slope, rtol=1e-6, atol=1e-6)


def test_curvature_that_vanishes_at_the_answer_leaves_the_rows_alone():
    problem = bx.Problem(
        lambda x, y: y[0] * x[0],
        lambda x, y: 0.25 * y[1] ** 4 - 0.1 * y[0] + 1.4 * y[1],
        bx.Box(jnp.zeros(2), jnp.full(2, 3.0)),
    )
    e = bx.hypergradient(problem, jnp.array([1.0]))
    np.testing.assert_allclose(e.lower.y, [3, 0], atol=1e-12)
    np.testing.assert_array_equal(e.lower.active, [False, True, True, False])
    np.testing.assert_allclose(e.lower.multipliers, [0, 1.4, 0.1, 0], atol=1e-12)
    np.testing.assert_allclose(e.margin, 0.1, atol=1e-12)
    np.testing.assert_allclose(e.grad, 3)
