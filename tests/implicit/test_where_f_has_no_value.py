"""A NaN is never an answer, whatever else is true at that point."""

import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

import bilevax as bx

ROWS = bx.Polyhedron(A=[[1.0], [-1.0]], b=[1.0, 1.0])


def logarithm(rows=ROWS):
    """F = x - log x, with kinks where the follower meets her rows, at x = -1 and 1."""
    return bx.Problem(
        lambda x, y: jnp.sum(x - jnp.log(x)),
        lambda x, y: 0.5 * jnp.sum((y - x) ** 2),
        rows,
    )


@pytest.mark.parametrize("x", [-1.0, -0.5, -3.0, 0.0])
def test_a_value_that_is_not_finite_outranks_a_kink(x):
    e = bx.hypergradient(logarithm(), jnp.array([x]), throw=False)
    assert not np.isfinite(e.value)
    assert bx.status_name(e.status) == "non_finite"
    assert not e.success


def test_a_value_that_is_not_finite_outranks_dependent_rows():
    # y <= x and y >= -1: one point is left at x = -1, and none to the left of it.
    rows = bx.Polyhedron(A=[[1.0], [-1.0]], B=[[-1.0], [0.0]], b=[0.0, 1.0])
    for upper, name in (
        (lambda x, y: jnp.sum(jnp.log(x)), "non_finite"),
        (lambda x, y: jnp.sum(y), "dependent_rows"),
    ):
        problem = bx.Problem(upper, lambda x, y: 0.5 * jnp.sum((y - x) ** 2), rows)
        e = bx.hypergradient(problem, jnp.array([-1.0]), throw=False)
        assert bx.status_name(e.status) == name


@pytest.mark.parametrize("method", [bx.DSBLO(), bx.GAM(), bx.ZeroOrder()])
@pytest.mark.parametrize("x0", [-1.0, -0.5])
def test_a_solve_whose_value_is_nan_is_no_success(method, x0):
    s = bx.solve(
        logarithm(), method, jnp.array([x0]), key=jr.key(0), num_steps=5, throw=False
    )
    assert np.isfinite(s.value) or not s.success
    assert s.success or s.message


def test_without_looks_a_nan_is_no_success():
    # A value that turns into a NaN on the way, where the gradient still is a number.
    problem = bx.Problem(
        lambda x, y: jnp.sum(x + jnp.where(x < 0, jnp.nan, 0.0) + 0 * y),
        lambda x, y: 0.5 * jnp.sum((y - x) ** 2),
        ROWS,
    )
    s = bx.solve(
        problem, bx.DSBLO(), jnp.array([0.1]), key=jr.key(0), num_steps=20,
        looks=False, throw=False,
    )  # fmt: skip
    assert np.isfinite(s.value) or not s.success
    assert s.success or s.message


def test_an_evaluation_and_a_solve_agree_on_success():
    two = lambda B, b: bx.Polyhedron(A=[[1.0], [-1.0]], B=[[B], [0.0]], b=b)
    upper, lower = lambda x, y: jnp.sum(y), lambda x, y: 0.5 * jnp.sum((y - x) ** 2)
    for rows, x, name in (
        (two(0.0, [1.0, 1.0]), 1.0, "kink"),
        (two(0.0, [1.0, 1.0]), 0.5, "successful"),
        (two(-1.0, [0.0, 1.0]), -1.0, "dependent_rows"),
        (two(0.0, [-1.0, -1.0]), 0.0, "infeasible"),
    ):
        problem = bx.Problem(upper, lower, rows, domain=bx.Box([x], [x]))
        e = bx.hypergradient(problem, jnp.array([x]), throw=False)
        assert bx.status_name(e.status) == name
        s = bx.solve(
            problem, bx.DSBLO(), jnp.array([x]), key=jr.key(0), num_steps=1,
            polish=False, throw=False,
        )  # fmt: skip
        assert bool(e.success) == s.success == (name != "infeasible")


def test_a_gradient_that_stopped_early_raises_though_f_is_right():
    rng = np.random.default_rng(0)
    H = rng.normal(size=(8, 8))
    H = jnp.asarray(H @ H.T + np.diag(np.arange(8)))
    problem = bx.Problem(
        lambda x, y: jnp.sum(y**3),
        lambda x, y: 0.5 * y @ H @ y - jnp.sum(x * y),
        y0=jnp.zeros(8),
    )
    adjoint = bx.ConjugateGradient(max_steps=1)
    x = jnp.arange(8.0)
    e = bx.hypergradient(problem, x, adjoint=adjoint, throw=False)
    assert bx.status_name(e.status) == "adjoint_limit"
    assert e.success
    with pytest.raises(bx.BilevelError, match="adjoint linear solve"):
        bx.hypergradient(problem, x, adjoint=adjoint)
