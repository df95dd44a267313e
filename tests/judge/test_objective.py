"""SciPy's optimisers find on `F` what they find on the same function by hand."""

import jax.numpy as jnp
import numpy as np
import pytest
from scipy.optimize import check_grad, minimize

import bilevax as bx


def track(x, y):
    return 0.5 * jnp.sum((y - x["want"]) ** 2)


def cost(x, y):
    return jnp.sum((y - 3.0) ** 2) + 0.5 * jnp.sum(x["want"] ** 2)


TRACKING = bx.Problem(
    cost,
    track,
    y0=jnp.zeros(2),
    domain=bx.Box(
        {"want": jnp.array([0.0, -jnp.inf])}, {"want": jnp.array([9.0, 1.0])}
    ),
)


def test_a_quadratic_is_minimised_within_its_bounds():
    # y = x, so F = |x - 3|^2 + |x|^2 / 2, least at x = 2; the second is bounded by 1.
    objective = bx.scipy_objective(TRACKING)
    fun, jac = objective
    assert objective.bounds == [(0.0, 9.0), (None, 1.0)]
    found = minimize(fun, objective.x0, jac=jac, bounds=objective.bounds)
    assert found.success
    np.testing.assert_allclose(found.x, [2.0, 1.0], atol=1e-6)
    np.testing.assert_allclose(objective.point(found.x)["want"], found.x)
    assert check_grad(fun, jac, np.array([0.3, 0.4])) < 1e-6


def test_value_and_gradient_at_a_point_are_one_evaluation():
    objective = bx.scipy_objective(TRACKING)
    fun, jac = objective
    v = np.array([0.5, 0.5])
    np.testing.assert_allclose(fun(v), 2 * 2.5**2 + 0.25)
    np.testing.assert_allclose(jac(v), [-4.5, -4.5])
    assert fun(v) == fun(v.copy())
    assert objective.evaluations == 1
    # SciPy moves its vectors in place.
    v += 1
    fun(v)
    assert objective.evaluations == 2


def test_where_f_has_no_value_it_is_infinite_and_the_reason_is_kept():
    edge = bx.Problem(
        lambda x, y: jnp.sum((x + 1) ** 2) + jnp.sum(y),
        lambda x, y: 0.5 * jnp.sum(y**2),
        bx.Polyhedron(A=[[1.0], [-1.0]], B=[[-1.0], [0.0]], b=[-1.0, 0.0]),
    )
    objective = bx.scipy_objective(edge, jnp.array([2.0]))
    assert objective.fun([0.5]) == np.inf
    assert objective.failures[0][1] == "infeasible"
    with pytest.raises(bx.BilevelError, match="No `y` satisfies"):
        bx.scipy_objective(edge, jnp.array([2.0]), throw=True).fun([0.5])
    # A simplex search steps back from there.
    found = minimize(objective.fun, objective.x0, method="Nelder-Mead")
    np.testing.assert_allclose(found.x, [1.0], atol=1e-3)
