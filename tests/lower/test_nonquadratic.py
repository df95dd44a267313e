"""General strongly convex lower levels against SciPy, and finite differences of F."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.optimize import LinearConstraint, minimize

import bilevax as bx

from .. import zoo

RNG = np.random.default_rng(11)
DATA = jnp.asarray(RNG.normal(size=(12, 4)))
ROWS = dict(A=RNG.normal(size=(5, 4)), B=0.3 * RNG.normal(size=(5, 2)), b=np.ones(5))
MIX = jnp.asarray(RNG.normal(size=(4, 2)))


def logistic(x, y):
    return jnp.mean(jnp.logaddexp(0, -DATA @ y)) + 0.05 * y @ y - y @ MIX @ x


def log_sum_exp(x, y):
    return jax.nn.logsumexp(DATA @ y) + 0.1 * y @ y - y @ MIX @ x


def entropy(x, y):
    return jnp.sum(y * jnp.log(y)) + 0.05 * y @ y - y @ MIX @ x


def upper(x, y):
    return jnp.sum((y - 0.5) ** 2) + 0.1 * jnp.sum(x**2) + x @ MIX.T @ y


# The lower level, its start, and an `x` that presses against the rows.
CASES = {
    "logistic": (logistic, np.zeros(4), np.array([2.0, 1.5])),
    "log-sum-exp": (log_sum_exp, np.zeros(4), np.array([2.0, 1.5])),
    "entropy": (entropy, np.full(4, 0.1), np.array([0.5, -0.3])),
}


def scipy_solution(lower, y0, x):
    gradient = jax.jit(jax.grad(lower, argnums=1))
    hessian = jax.jit(jax.hessian(lower, argnums=1))
    limit = ROWS["b"] - ROWS["B"] @ x
    y = minimize(
        lambda y: float(lower(x, y)),
        y0,
        jac=lambda y: np.asarray(gradient(x, y)),
        hess=lambda y: np.asarray(hessian(x, y)),
        constraints=[LinearConstraint(ROWS["A"], ub=limit)],
        method="trust-constr",
        options=dict(gtol=1e-11, xtol=1e-13, barrier_tol=1e-12, maxiter=2000),
    ).x
    # SciPy stops at 1e-5 or so; Newton on the rows it found tight does the rest.
    A = ROWS["A"][limit - ROWS["A"] @ y < 1e-3]
    limit = limit[limit - ROWS["A"] @ y < 1e-3]
    for _ in range(20):
        matrix = np.block([[hessian(x, y), A.T], [A, np.zeros((len(A), len(A)))]])
        rhs = np.concatenate([-gradient(x, y), limit - A @ y])
        step = np.linalg.solve(matrix, rhs)
        y = y + step[: len(y)]
    assert np.all(step[len(y) :] > -1e-9)
    assert np.all(ROWS["A"] @ y <= ROWS["b"] - ROWS["B"] @ x + 1e-12)
    return y


@pytest.mark.filterwarnings("ignore:delta_grad == 0.0")
@pytest.mark.parametrize("case", CASES)
def test_solution_and_derivative(case):
    lower, y0, pressing = CASES[case]
    problem = bx.Problem(upper, lower, bx.Polyhedron(**ROWS), y0=y0)
    evaluate = eqx.filter_jit(lambda x: bx.hypergradient(problem, x, throw=False))
    for x in (np.array([0.4, -0.2]), pressing):
        e = evaluate(jnp.asarray(x))
        assert e.success, e.message
        np.testing.assert_allclose(
            e.lower.y, scipy_solution(lower, y0, x), atol=zoo.REFERENCE
        )
        differences = zoo.central_differences(
            lambda x: float(evaluate(jnp.asarray(x)).value), x
        )
        np.testing.assert_allclose(e.grad, differences, rtol=zoo.DIFFERENCES, atol=1e-7)
    assert np.any(e.lower.active)


@pytest.mark.parametrize("case", CASES)
def test_the_interior_point_agrees_with_the_active_set(case):
    lower, y0, x = CASES[case]
    problem = bx.Problem(upper, lower, bx.Polyhedron(**ROWS), y0=y0)
    expected = bx.hypergradient(problem, x)
    out = bx.hypergradient(problem, x, solver=bx.InteriorPoint())
    np.testing.assert_allclose(out.lower.y, expected.lower.y, atol=zoo.EXACT)
    np.testing.assert_array_equal(out.lower.active, expected.lower.active)
    np.testing.assert_allclose(out.grad, expected.grad, rtol=zoo.EXACT, atol=zoo.EXACT)
    assert out.lower.iterations.safeguard == 0


def test_a_newton_step_that_overshoots_is_cut():
    # Newton on sqrt(1 + y^2) diverges from |y| > 1; the damped one does not.
    lower = lambda x, y: jnp.sum(jnp.sqrt(1 + (y - x) ** 2)) + 1e-3 * jnp.sum(y**2)
    rows = bx.Polyhedron(A=np.ones((1, 2)), b=np.array([30.0]))
    problem = bx.Problem(lambda x, y: jnp.sum(y), lower, rows, y0=np.full(2, -9.0))
    e = bx.hypergradient(problem, np.array([4.0, 5.0]))
    gradient = jax.grad(lower, argnums=1)(jnp.array([4.0, 5.0]), e.lower.y)
    np.testing.assert_allclose(gradient, 0, atol=zoo.EXACT)


def test_warm_starts_follow_a_curved_lower_level():
    lower, y0, _ = CASES["logistic"]
    problem = bx.Problem(upper, lower, bx.Polyhedron(**ROWS), y0=y0)
    points = jnp.asarray(np.linspace([0.0, 0.0], [2.0, 1.5], 12))

    @eqx.filter_jit
    def scanned(points):
        first = bx.hypergradient(problem, points[0], throw=False).lower

        def step(lower, x):
            e = bx.hypergradient(problem, x, warm=lower, throw=False)
            return e.lower, (e.grad, e.status)

        return jax.lax.scan(step, first, points)[1]

    grads, statuses = scanned(points)
    assert np.all(statuses == bx.Status.successful)
    cold = jax.jit(jax.vmap(lambda x: bx.hypergradient(problem, x, throw=False).grad))
    np.testing.assert_allclose(grads, cold(points), rtol=zoo.REFERENCE, atol=zoo.EXACT)
