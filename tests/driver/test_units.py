"""Coordinates in units that are far apart: the same minimiser in all of them."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bilevax as bx
from bilevax._problem.chart import chart_of

LOW, HIGH = jnp.array([0.1, 0.0]), jnp.array([1e4, 1.0])


def follow(x, y):
    return 0.5 * jnp.sum((y - jnp.array([x[1], 1.0])) ** 2) + 0.1 * x[1] * y[1]


def upper(x, y):
    """Least at x0 = 3, early in a range of 10^4, on a kink of the second."""
    decades = jnp.log10(x[0] / 3.0)
    return decades**2 + jnp.abs(y[0] - 0.3) + 0.5 * (y[0] - 0.3) * decades


PROBLEM = bx.Problem(upper, follow, y0=jnp.zeros(2), domain=bx.Box(LOW, HIGH))


@pytest.mark.parametrize("x0", [None, jnp.array([9e3, 0.9])])
def test_a_minimiser_in_a_thousandth_of_the_range_is_found_by_one_start(x0):
    s = bx.solve(PROBLEM, x0=x0, key=0, num_starts=1)
    np.testing.assert_allclose(s.x, [3.0, 0.3], rtol=1e-4)
    np.testing.assert_allclose(s.value, 0, atol=1e-7)
    # What is reported is in the units of the caller.
    e = bx.hypergradient(PROBLEM, s.x)
    np.testing.assert_allclose(s.value, e.value, atol=1e-12)
    np.testing.assert_allclose(s.y, e.lower.y, atol=1e-9)
    assert s.bounds == {}
    assert s.converged


def test_in_units_f_and_its_gradient_are_those_of_the_chain_rule():
    rows = bx.Polyhedron(
        A=jnp.array([[1.0, 0.0]]), B=jnp.array([[0.0, -2.0]]), b=jnp.array([0.1])
    )
    problem = bx.Problem(upper, follow, rows, domain=bx.Box(LOW, HIGH))
    chart = chart_of(problem)
    assert chart is not None
    np.testing.assert_array_equal(chart.ratio, [True, False])
    x = jnp.array([40.0, 0.2])
    u = chart.u(x)
    np.testing.assert_allclose(chart.x(u), x, rtol=1e-13)
    here = bx.hypergradient(problem, x)
    there = bx.hypergradient(chart.applied(problem), u)
    np.testing.assert_allclose(there.value, here.value, rtol=1e-12)
    np.testing.assert_allclose(there.grad, here.grad * chart.slopes(u), rtol=1e-10)
    slopes = jax.jacfwd(chart.x)(u)
    np.testing.assert_allclose(np.diag(slopes), chart.slopes(u), rtol=1e-12)


def test_a_bound_that_is_a_function_of_x_is_one_of_the_units_too():
    rows = bx.Intersection(
        room=bx.Box(0.0, lambda x: jnp.log(x[0]) * jnp.ones(2)),
        total=bx.Polyhedron(
            A=jnp.ones((1, 2)), B=jnp.array([[0.0, -1.0]]), b=jnp.array([0.5])
        ),
    )
    problem = bx.Problem(upper, follow, rows, y0=jnp.zeros(2), domain=bx.Box(LOW, HIGH))
    chart = chart_of(problem)
    assert chart is not None
    np.testing.assert_array_equal(chart.ratio, [True, False])
    for x in (jnp.array([1.2, 0.6]), jnp.array([40.0, 0.2])):
        u = chart.u(x)
        here = bx.hypergradient(problem, x)
        there = bx.hypergradient(chart.applied(problem), u)
        np.testing.assert_allclose(there.value, here.value, rtol=1e-10)
        np.testing.assert_allclose(there.grad, here.grad * chart.slopes(u), rtol=1e-8)


def test_a_coordinate_in_the_rows_stays_straight():
    rows = bx.Polyhedron(
        A=jnp.array([[1.0, 0.0]]), B=jnp.array([[-2.0, 0.0]]), b=jnp.array([0.1])
    )
    problem = bx.Problem(upper, follow, rows, domain=bx.Box(LOW, HIGH))
    chart = chart_of(problem)
    assert chart is not None
    assert not chart.ratio.any()


def test_a_bound_that_holds_is_told_in_the_units_of_the_caller():
    falls = lambda x, y: -jnp.log(x[0]) + (x[1] - 0.5) ** 2 + 0 * jnp.sum(y)
    problem = bx.Problem(falls, follow, y0=jnp.zeros(2), domain=bx.Box(LOW, HIGH))
    s = bx.solve(problem, key=0, num_starts=1, num_steps=20)
    assert s.bounds == {"x[0]": "at its upper bound 10000"}
    np.testing.assert_allclose(s.x, [1e4, 0.5], rtol=1e-6)


@pytest.mark.parametrize(
    "domain",
    [
        bx.Box(jnp.zeros(2), jnp.array([1.0, 50.0])),
        bx.Box(jnp.array([0.1, 0.0]), jnp.array([jnp.inf, 1.0])),
        None,
    ],
)
def test_units_that_are_alike_or_unknown_are_left_alone(domain: Any):
    problem = bx.Problem(upper, follow, y0=jnp.zeros(2), domain=domain)
    assert chart_of(problem) is None


def test_without_a_polish_the_method_sees_x_as_it_is():
    seen = []
    watch = lambda step, x, value, history: seen.append(np.asarray(x))
    x0 = jnp.array([9e3, 0.9])
    bx.solve(PROBLEM, x0=x0, key=0, num_steps=2, polish=False, callback=watch)
    assert np.all(np.concatenate(seen) >= 0.0)
    assert seen[-1][0] > 1
