"""The verdict of `check` on gradients that are right, wrong, and those of one side."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bilevax as bx

ROADS = bx.Polyhedron(
    A=jnp.array([[1.0, 1.0], [-1, 0], [0, -1]]), b=jnp.array([2.0, 0, 0])
)


def revenue(x, y):
    return -jnp.sum(x * y)


def travel(x, y):
    return 0.5 * jnp.sum(y**2) + jnp.sum((x - 4) * y)


TOLLS = bx.Problem(revenue, travel, ROADS)


def of_x(F) -> bx.Problem:
    g = lambda x, y: 0.5 * jnp.sum(y**2)
    return bx.Problem(lambda x, y: F(x) + 0 * jnp.sum(y), g, y0=jnp.zeros(1))


def test_a_right_gradient_agrees_to_eight_digits():
    found = bx.check(TOLLS, jnp.array([2.5, 3.0]))
    assert found.agrees
    assert found.kinks == ()
    assert found.error < 1e-8
    assert "agrees" in str(found)


def test_at_the_best_tolls_there_is_a_kink_along_both():
    found = bx.check(TOLLS, jnp.array([3.0, 3.0]))
    assert found.agrees
    assert {"x[0]", "x[1]"} <= set(found.kinks)
    # To the right of (3, 3) nobody is at the limit: the slope of x (4 - x) is known.
    slope = found.slopes[0]
    np.testing.assert_allclose(slope.right, 2.0, rtol=1e-6)
    np.testing.assert_allclose(slope.left, -1.0, rtol=1e-6)


@pytest.mark.parametrize(
    ("upper", "lower", "where"),
    [
        (
            lambda x, y: -jnp.sum(jax.lax.stop_gradient(x) * y),
            travel,
            "`upper` with respect to x",
        ),
        (
            lambda x, y: -jnp.sum(x * jax.lax.stop_gradient(y)),
            travel,
            "`upper` with respect to y",
        ),
        (
            revenue,
            lambda x, y: (
                0.5 * jnp.sum(y**2) + jnp.sum((jax.lax.stop_gradient(x) - 4) * y)
            ),
            "`lower` with respect to x",
        ),
    ],
)
def test_a_stopped_gradient_is_found_where_it_is(upper, lower, where):
    found = bx.check(bx.Problem(upper, lower, ROADS), jnp.array([2.5, 3.0]))
    assert not found.agrees
    assert "DISAGREES along x[0]" in str(found)
    assert f"derivative of {where} is not" in str(found)


def test_danskin_in_the_wrong_place_is_named():
    problem = bx.Problem(revenue, travel, ROADS, adjoint=bx.Danskin())
    found = bx.check(problem, jnp.array([2.5, 3.0]))
    assert not found.agrees
    assert "Danskin" in str(found)


@pytest.mark.parametrize(
    ("F", "x"),
    [
        (lambda x: jnp.sum(x**2), jnp.array([1e6, 1e-3])),
        (lambda x: jnp.exp(x[0]) + jnp.sin(30 * x[1]), jnp.array([0.1, 0.2])),
        (lambda x: 1e-9 * jnp.sum(x**3), jnp.array([2.0, 1.0])),
        (lambda x: jnp.sum(x**2), jnp.zeros(2)),
    ],
)
def test_units_and_curvature_do_not_mislead_the_differences(F, x):
    assert bx.check(of_x(F), x).agrees


def test_where_f_ends_one_side_is_enough():
    # y <= x - 1 and y >= 0: no y for x < 1.
    edge = bx.Problem(
        lambda x, y: x[0] ** 2 + y[0],
        lambda x, y: 0.5 * jnp.sum((y - 0.1) ** 2),
        bx.Polyhedron(A=[[1.0], [-1.0]], B=[[-1.0], [0.0]], b=[-1.0, 0.0]),
    )
    found = bx.check(edge, jnp.array([0.5]))
    assert not found.agrees
    assert "infeasible" in str(found)
    assert bx.check(edge, jnp.array([3.0])).agrees


def test_of_followers_the_mean_is_checked():
    class Buyer:
        def __call__(self, d):
            g = lambda x, y: 0.5 * jnp.sum((y - (d - x)) ** 2)
            return bx.Problem(
                lambda x, y: -jnp.sum(x * y), g, bx.Box(jnp.zeros(1), jnp.ones(1))
            )

    buyers = bx.Followers(Buyer(), jnp.array([0.8, 0.9]))
    assert bx.check(buyers, jnp.array([0.3])).agrees


def test_of_a_leader_who_sees_prices_the_gradient_agrees():
    seen = lambda x, y, prices: -jnp.sum(x * y) + prices["limit"][0] ** 2
    roads = bx.Intersection(
        limit=bx.Polyhedron(A=jnp.ones((1, 2)), b=jnp.array([2.0])),
        bounds=bx.Box(jnp.zeros(2), jnp.inf),
    )
    problem = bx.Problem(seen, travel, roads, prices=True)
    x = jnp.array([2.5, 3.0])
    assert bx.check(problem, x).agrees
    # The price is (4 - x0 + 4 - x1 - 2) / 2 and enters squared.
    line = bx.profile(problem, x, 0, span=(2.0, 2.5), points=2)
    assert line.rows[0] == "limit[0]"
    np.testing.assert_allclose(line.multipliers[:, 0], [0.5, 0.25], atol=1e-9)
    found = bx.sensitivity(problem, x)
    assert not found.is_stationary
    stopped = lambda x, y, prices: (
        seen(x, y, jax.tree.map(jax.lax.stop_gradient, prices)) + 0 * jnp.sum(x)
    )
    wrong = bx.check(bx.Problem(stopped, travel, roads, prices=True), x)
    assert not wrong.agrees
