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


def beside(far, stiffness, soft, force, bound, growth):
    """A spring to `far`, and beside it a soft part that is no quadratic."""
    rows = bx.Polyhedron(A=jnp.eye(2), b=jnp.stack([bound, 1e9]))

    def g(x, y):
        u = y[1] - x[0]
        bent = growth * u**4 / 4 + soft * (u - 1) ** 2 / 2 - force * u
        return stiffness * (y[0] - far) ** 2 / 2 + bent

    problem = bx.Problem(lambda x, y: y[1], g, rows)
    return bx.hypergradient(problem, jnp.array([0.3]), throw=False)


def test_a_coordinate_or_a_bound_far_away_hides_no_way_that_is_left():
    rng, n = np.random.default_rng(0), 200
    far, bound = rng.choice([0, 1e4, 4e5, 1e6], n), rng.choice([1.0, 4e5, 1e7], n)
    stiffness, soft = 10 ** rng.uniform(-3, 8, n), 10 ** rng.uniform(-10, -3, n)
    force, growth = 10 ** rng.uniform(-9, 1, n), 10 ** rng.uniform(-4, 1, n)
    low, high = np.full(n, -1e3, np.longdouble), np.full(n, 1e5, np.longdouble)
    for _ in range(120):
        u = (low + high) / 2
        slope = growth * u**3 + soft * (u - 1) - force
        low, high = np.where(slope < 0, u, low), np.where(slope < 0, high, u)
    u = u.astype(float)
    e = jax.jit(jax.vmap(beside))(far, stiffness, soft, force, bound, growth)
    names = bx.status_name(e.status)
    valued = np.isin(names, ("successful", "kink", "adjoint_limit"))
    assert np.mean(valued) > 0.98
    error = np.abs(np.asarray(e.lower.y)[:, 1] - 0.3 - u) / (1 + np.abs(u))
    assert not np.any(valued & (error > 1e-6))


def test_coordinates_that_share_no_curvature_may_differ_in_it_at_will():
    stiff = 2.0 ** np.array([39.0, -14, -30, -32])
    rows = bx.Polyhedron(A=np.eye(4), b=np.array([9.0, 9.0, 9.0, 1.0]))
    answer = np.array([3.0, -2.0, 5.0, 2.0])
    problem = bx.Problem(
        lambda x, y: y[1] + y[2], lambda x, y: 0.5 * stiff @ (y - answer * x[0]) ** 2,
        rows,
    )  # fmt: skip
    e = bx.hypergradient(problem, jnp.ones(1), throw=False)
    assert e.success
    np.testing.assert_allclose(e.lower.y, [3, -2, 5, 1], rtol=1e-9)
    np.testing.assert_allclose(e.lower.multipliers[3], stiff[3], rtol=1e-9)
    np.testing.assert_allclose(e.value, 3, rtol=1e-9)


def test_a_spring_at_rest_along_no_axis_blurs_nothing():
    # However stiff it is, its rounding points along itself.
    for angle in (0.3, 0.8, 2.0):
        turn = np.array(
            [[np.cos(angle), np.sin(angle)], [-np.sin(angle), np.cos(angle)]]
        )
        rows = bx.Polyhedron(A=np.eye(2), b=np.full(2, 50.0))

        def g(x, y, turn=turn):
            u = turn @ y - jnp.array([0.0, 1.0]) * x[0]
            return 2.0**27 * u[0] ** 2 / 2 + u[1] ** 2 / 2**9

        e = bx.hypergradient(
            bx.Problem(lambda x, y: y @ y, g, rows), jnp.array([3.0]), throw=False
        )
        assert bx.status_name(e.status) in ("successful", "adjoint_limit")
        np.testing.assert_allclose(e.lower.y, 3 * turn[1], atol=1e-6)
