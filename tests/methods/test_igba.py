"""IGBA: the barrier problem and its gradient, and what the default run reaches."""

import equinox as eqx
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

import bilevax as bx
from bilevax._methods.igba import barrier_gradient

from .. import zoo

barrier = eqx.filter_jit(barrier_gradient)
T1, TIGHT = zoo.t1(), zoo.t2()


@pytest.mark.parametrize("t", [1e-1, 1e-4, 1e-9, 1e-12])
@pytest.mark.parametrize("x", [2.0, 0.3, 0.0, -1.7])
def test_the_centre_of_the_kink_has_a_closed_form(x, t):
    # y - x - t / y = 0 with y < 0.
    found = barrier(T1, jnp.array([x]), jnp.asarray(t))
    y = (
        -2 * t / (x + np.sqrt(x**2 + 4 * t))
        if x > 0
        else (x - np.hypot(x, 2 * t**0.5)) / 2
    )
    slope = (1 - x / np.sqrt(x**2 + 4 * t)) / 2
    assert bx.status_name(found.status) == "successful"
    np.testing.assert_allclose(found.centre.y[0], y, rtol=1e-8)
    np.testing.assert_allclose(found.value, x**2 / 4 + x / 2 - y, rtol=1e-9)
    np.testing.assert_allclose(found.grad[0], x / 2 + 0.5 - slope, rtol=1e-8, atol=1e-9)
    if x == 0:
        # The minimiser for every t, with F_t = sqrt(t).
        np.testing.assert_allclose(found.value, np.sqrt(t), rtol=1e-9)
        assert abs(float(found.grad[0])) < 1e-9


def test_the_error_of_the_gradient_is_linear_in_t():
    x = jnp.full(10, -0.3)
    exact = bx.hypergradient(TIGHT, x)
    assert int(exact.lower.active.sum()) == 3
    gradients, centres = [], []
    for t in (1e-1, 1e-2, 1e-3, 1e-4, 1e-8, 1e-12):
        found = barrier(TIGHT, x, jnp.asarray(t))
        gradients.append(float(jnp.linalg.norm(found.grad - exact.grad)))
        centres.append(float(jnp.linalg.norm(found.centre.y - exact.lower.y)))
    # Orders of magnitude of a random program in the literature.
    for error, listed in zip(gradients, (0.36, 0.076, 0.0071, 0.0007), strict=False):
        assert listed / 3 < error < 3 * listed
    for error, listed in zip(centres, (0.25, 0.031, 0.0033, 0.00033), strict=False):
        assert listed / 3 < error < 3 * listed
    for errors in (gradients, centres):
        np.testing.assert_allclose(errors[2] / errors[3], 10, rtol=0.05)
        np.testing.assert_allclose(errors[3] / errors[4], 1e4, rtol=0.05)
        assert errors[5] < 1e-10


def bounded(kind):
    """A follower in a box with two bounds, or in a simplex."""
    sets = dict(
        box=bx.Box(-0.5 * np.ones(3), [0.2, 1.0, np.inf]), simplex=bx.Simplex(3)
    )
    return bx.Problem(
        lambda x, y: jnp.sum(jnp.sin(y) * jnp.arange(1.0, 4.0)) + x @ x * y[0],
        lambda x, y: jnp.sum(jnp.cosh(y - x)) + 0.3 * (y @ x) ** 2,
        sets[kind],
    )


@pytest.mark.parametrize("kind", ["coupled", "box", "simplex"])
def test_the_gradient_is_the_derivative_of_the_barrier_value(kind):
    problem = TIGHT if kind == "coupled" else bounded(kind)
    x = np.full(10, -0.3) if kind == "coupled" else np.array([0.7, -0.4, 0.1])
    t = jnp.asarray(1e-2)
    value = lambda x: float(barrier(problem, jnp.asarray(x), t).value)
    found = barrier(problem, jnp.asarray(x), t)
    central = zoo.central_differences(value, x)
    np.testing.assert_allclose(found.grad, central, rtol=zoo.DIFFERENCES, atol=1e-6)
    y = found.centre.y
    if kind == "box":
        assert np.all((y > -0.5) & (y < np.array([0.2, 1.0, np.inf])))
    if kind == "simplex":
        assert np.all(y > 0)
        np.testing.assert_allclose(y.sum(), 1, rtol=zoo.IDENTITY)


def test_a_start_need_not_be_feasible():
    # The centre of a far away x is no interior point here, and still a fine start.
    far = barrier(TIGHT, jnp.full(10, -3.0), jnp.asarray(1e-10))
    near = barrier(TIGHT, jnp.full(10, -0.3), jnp.asarray(1e-10))
    again = barrier(TIGHT, jnp.full(10, -0.3), jnp.asarray(1e-10), far.centre)
    rows = TIGHT.constraints
    room = rows.rhs(jnp.full(10, -0.3)) - rows.push(far.centre.y)
    assert float(room.min()) < 0
    np.testing.assert_allclose(again.centre.y, near.centre.y, rtol=1e-8)


def test_the_default_run_ends_near_the_optimum():
    for problem in (T1, zoo.t1b()):
        s = bx.solve(problem, bx.IGBA(), np.array([2.0]), key=jr.key(0), polish=False)
        assert abs(float(s.x[0])) < 1e-2
    s = bx.solve(TIGHT, bx.IGBA(), np.ones(10), key=jr.key(0), polish=False)
    assert -2.144208 < s.value < -2.144207 + 1e-2
    assert s.history["lower_solves"].sum() == 0
    assert s.history["penalty_solves"].sum() == len(s.history["value"])


def test_a_fixed_t_is_the_published_method():
    t, eta, x = 0.01, 0.05, 2.0
    method = bx.IGBA(t=t, step_size=eta)
    s = bx.solve(T1, method, np.array([x]), key=jr.key(0), num_steps=50, polish=False)
    for _ in range(50):
        x -= eta * (x / 2 + 0.5 - (1 - x / np.sqrt(x**2 + 4 * t)) / 2)
    np.testing.assert_allclose(s.x[0], x, rtol=1e-9)


def test_where_there_is_no_interior_x_goes_back():
    # x <= y <= 0 is empty for x > 0, and f pulls x there.
    problem = bx.Problem(
        lambda x, y: jnp.sum(y**2 - 3 * x),
        lambda x, y: 0.5 * jnp.sum(y**2),
        bx.Polyhedron(A=[[1.0], [-1.0]], B=[[0.0], [1.0]], b=[0.0, 0.0]),
    )
    method = bx.IGBA(t=1e-6, step_size=0.3)
    s = bx.solve(
        problem, method, np.array([-1.0]), key=jr.key(0), num_steps=60, polish=False
    )
    assert s.history["recovered"].sum() > 0
    assert np.all(np.isfinite(s.history["move"]))
    assert -0.5 < float(s.x[0]) <= 1e-8
