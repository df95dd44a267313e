"""The two first-order oracles: their bias laws, signs, and how they fail."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bilevax as bx
from bilevax.experiments.families import Member

from .. import zoo


@functools.cache
def tight():
    """A point of the tight family with active rows, and the exact gradient there."""
    problem = Member("tight", 10, 0).problem
    x = np.random.default_rng(3).normal(size=10)
    exact = bx.hypergradient(problem, x)
    assert 0 < int(np.sum(exact.lower.active)) < 5
    return problem, x, exact


@functools.cache
def as_equalities():
    """The same point with its active rows as equality rows."""
    problem, x, exact = tight()
    rows, keep = problem.constraints, np.asarray(exact.lower.active)
    assert isinstance(rows, bx.Polyhedron)
    A, B, b = (np.asarray(part)[keep] for part in (rows.A, rows.B, rows.b))
    return bx.Problem(
        problem.upper, problem.lower, bx.Polyhedron(A_eq=A, B_eq=B, b_eq=b)
    )


def relative_error(e):
    exact = tight()[2].grad
    return float(np.linalg.norm(e.grad - exact) / np.linalg.norm(exact))


def test_the_bias_of_the_penalty_oracle_is_one_over_its_weight():
    problem, x, exact = tight()
    errors = []
    for a1, listed in ((10.0, 7.1e-2), (100.0, 7.9e-3), (1000.0, 8.0e-4)):
        e = bx.penalty_gradient(problem, x, a1=a1, a2=a1**2)
        errors.append(relative_error(e))
        # The listed errors belong to another random instance: same order.
        assert listed / 5 < errors[-1] < listed * 5
        # The theory writes a1 = eps^-2 and a2 = eps^-4: the same pair.
        eps = a1**-0.5
        again = bx.penalty_gradient(problem, x, a1=eps**-2, a2=eps**-4)
        np.testing.assert_allclose(again.grad, e.grad, rtol=1e-6)
    ratios = np.divide(errors[:-1], errors[1:])
    assert np.all((ratios > 8) & (ratios < 12))
    np.testing.assert_allclose(e.value, exact.value, rtol=zoo.EXACT)


def test_heavier_rows_leave_the_law_alone_and_lighter_ones_break_it():
    problem, x, _ = tight()
    error = lambda a1, a2: relative_error(bx.penalty_gradient(problem, x, a1=a1, a2=a2))
    heavy = [error(a1, 100 * a1**2) for a1 in (10.0, 100.0, 1000.0)]
    ratios = np.divide(heavy[:-1], heavy[1:])
    assert np.all((ratios > 8) & (ratios < 12))
    # With a2 = 10 a1 the rows stay open however large both are.
    assert error(1000.0, 1e4) > 0.5 * error(100.0, 1e3) > 1e-3


def test_natural_weights_make_the_bias_small():
    problem, x, _ = tight()
    assert relative_error(bx.penalty_gradient(problem, x)) < 3e-4
    assert relative_error(bx.equality_gradient(as_equalities(), x)) < 3e-4


def test_the_bias_of_the_equality_oracle_is_its_share():
    _, x, _ = tight()
    problem, errors = as_equalities(), []
    for delta, listed in ((1e-1, 4.0e-2), (1e-2, 4.4e-3), (1e-3, 4.4e-4)):
        e = bx.equality_gradient(problem, x, delta=delta)
        errors.append(relative_error(e))
        assert listed / 5 < errors[-1] < listed * 5
    ratios = np.divide(errors[:-1], errors[1:])
    assert np.all((ratios > 8) & (ratios < 12))
    # Exact solves: far below what two approximate ones would allow.
    assert relative_error(bx.equality_gradient(problem, x, delta=1e-6)) < 1e-6


def test_the_kink_in_closed_form():
    problem = zoo.t1()
    for x in (1.3, 0.2):
        for a1, a2 in ((10.0, 100.0), (1000.0, 1e6), (50.0, 70.0)):
            e = bx.penalty_gradient(problem, [x], a1=a1, a2=a2)
            want = x / 2 + 1 / 2 - a1 / (a1 + a2)
            np.testing.assert_allclose(e.grad[0], want, rtol=1e-10)
            e = bx.penalty_gradient(problem, [-x], a1=a1, a2=a2)
            np.testing.assert_allclose(e.grad[0], -x / 2 - 1 / 2, rtol=1e-10)
    at = bx.penalty_gradient(problem, [0.0], throw=False)
    assert bx.status_name(at.status) == "kink"


def test_the_sign_of_the_coupling():
    # Here y* = max(x, 0) through the row x - y <= 0 alone.
    for x, want in ((1.3, 1.3 / 2 + 1 / 2), (-0.7, -0.7 / 2 - 1 / 2)):
        e = bx.penalty_gradient(zoo.t1b(), [x])
        np.testing.assert_allclose(e.grad[0], want, rtol=1e-3)
    moving = bx.Polyhedron(A_eq=[[-1.0]], B_eq=[[1.0]], b_eq=[0.0])
    problem = bx.Problem(zoo.t1b().upper, zoo.t1b().lower, moving)
    e = bx.equality_gradient(problem, [1.3])
    np.testing.assert_allclose(e.grad[0], 1.3 / 2 + 1 / 2, rtol=1e-3)


def test_a_second_solve_that_is_not_convex_says_so():
    problem = bx.Problem(
        lambda x, y: jnp.sum(x**2) - 5 * jnp.sum(y**2),
        zoo.Clipped(),
        bx.Polyhedron(A=[[1.0]], b=[0.0]),
    )
    e = bx.penalty_gradient(problem, [-1.0], a1=1.0, throw=False)
    assert bx.status_name(e.status) == "not_strongly_convex"
    assert bx.status_name(e.lower.status) == "successful"
    assert np.isfinite(e.value)
    assert np.isnan(e.grad[0])
    with pytest.raises(bx.BilevelError, match="second solve"):
        bx.penalty_gradient(problem, [-1.0], a1=1.0)
    # A heavier lower level outweighs f, and the natural weight always does.
    for weight in (1e4, None):
        e = bx.penalty_gradient(problem, [-1.0], a1=weight)
        np.testing.assert_allclose(e.grad[0], -2 + 10, rtol=5e-3)


def test_misuse_is_named():
    problem, x, _ = tight()
    with pytest.raises(ValueError, match="5 inequality rows"):
        bx.equality_gradient(problem, x)
    with pytest.raises(ValueError, match="`a1` must be positive"):
        bx.penalty_gradient(problem, x, a1=-1.0)
    with pytest.raises(ValueError, match="`a2` needs `a1`"):
        bx.penalty_gradient(problem, x, a2=1.0)
    with pytest.raises(ValueError, match="`delta` must be positive"):
        bx.equality_gradient(as_equalities(), x, delta=0.0)
    noisy: Any = bx.StochasticProblem(lambda key: key, lambda key: problem)
    with pytest.raises(ValueError, match="StochasticProblem"):
        bx.penalty_gradient(noisy, x)


def test_infinite_bounds_and_batches():
    rows = bx.Polyhedron(A=[[1.0], [1.0]], b=[0.0, np.inf])
    problem = bx.Problem(zoo.t1().upper, zoo.Clipped(), rows)
    oracle = lambda x: bx.penalty_gradient(problem, x, a1=1e4, throw=False).grad
    gradient = jax.jit(jax.vmap(oracle))
    got = gradient(jnp.array([[1.3], [-0.7]]))[:, 0]
    np.testing.assert_allclose(got, [1.15, -0.85], rtol=1e-3)
