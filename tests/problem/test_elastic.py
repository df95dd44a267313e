"""Rows at a price: exact where they can be met, priced where they cannot."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import bilevax as bx

A, b = jnp.array([[1.0], [-1.0]]), jnp.array([2.0, -1.0])
# 1 <= y <= 2 - x: empty for x > 1.
ROWS = bx.Polyhedron(A=A, B=jnp.array([[1.0], [0.0]]), b=b)


def near_three(x, y):
    return 0.5 * jnp.sum((y - 3.0) ** 2)


def upper(x, y):
    return jnp.sum((y - 1.2) ** 2) + 0.1 * jnp.sum(x**2)


def problem(price: Any = 100.0, rows: Any = ROWS, **more) -> bx.Problem:
    return bx.Problem(upper, near_three, rows, elastic=price, **more)


@pytest.mark.parametrize("x", [-0.5, 0.3, 0.9])
def test_where_rows_can_be_met_the_answer_is_that_of_hard_rows(x):
    x = jnp.array([x])
    hard = bx.hypergradient(bx.Problem(upper, near_three, ROWS), x)
    soft = bx.hypergradient(problem(), x)
    assert bx.status_name(soft.status) == "successful"
    np.testing.assert_allclose(soft.lower.y["y"], hard.lower.y, atol=1e-9)
    np.testing.assert_allclose(soft.value, hard.value, atol=1e-9)
    np.testing.assert_allclose(soft.grad, hard.grad, atol=1e-8)
    prices = soft.lower.prices["rows"]
    np.testing.assert_allclose(prices, hard.lower.multipliers, atol=1e-8)


def test_where_they_cannot_the_violation_is_that_of_the_cheapest_answer():
    # x = 1.5: y <= 0.5 and y >= 1. One unit costs 100 either way and the follower
    # wants 3, so the second row holds (y = 1) and the first is broken by 0.5 + more:
    # beyond y = 1 a unit costs 100 and gains at most 2.
    e = bx.hypergradient(problem(), jnp.array([1.5]))
    assert bx.status_name(e.status) == "violated"
    assert bool(e.success)
    np.testing.assert_allclose(e.lower.y["violation"]["rows"], [0.5, 0.0], atol=1e-9)
    np.testing.assert_allclose(e.lower.y["y"], [1.0], atol=1e-9)
    np.testing.assert_allclose(e.value, 0.04 + 0.225, atol=1e-9)
    np.testing.assert_allclose(e.grad, [0.3], atol=1e-8)
    assert "rows by up to 0.5" in e.message


def test_below_the_multiplier_the_price_is_what_a_violation_costs():
    # x = 0: y = 2 has the multiplier 1; at a price of 0.25 the follower stops where a
    # further unit gains as much: 3 - y = 0.25.
    e = bx.hypergradient(problem(0.25), jnp.zeros(1))
    assert bx.status_name(e.status) == "violated"
    np.testing.assert_allclose(e.lower.y["y"], [2.75], atol=1e-9)
    np.testing.assert_allclose(e.lower.prices["rows"], [0.25, 0.0], atol=1e-9)


def test_equality_rows_are_violated_to_either_side_and_boxes_stay():
    rows = bx.Intersection(
        total=bx.Polyhedron(
            A_eq=jnp.ones((1, 2)), B_eq=-jnp.ones((1, 1)), b_eq=jnp.zeros(1)
        ),
        bounds=bx.Box(jnp.zeros(2), jnp.ones(2)),
    )
    soft = problem(10.0, rows)
    for x, violation in ((1.5, 0.0), (2.5, 0.5), (-0.5, 0.5)):
        e = bx.hypergradient(soft, jnp.array([x]))
        y = np.asarray(e.lower.y["y"])
        np.testing.assert_allclose(
            np.sum(e.lower.y["violation"]["total"]), violation, atol=1e-8
        )
        assert np.all((y > -1e-9) & (y < 1 + 1e-9))


def test_a_run_that_starts_where_hard_rows_are_empty_finds_the_minimiser():
    s = bx.solve(problem(), x0=jnp.array([3.0]), key=0, num_steps=50)
    assert s.success
    # F = (2 - x - 1.2)^2 + 0.1 x^2 for x <= 1: x = 0.8 / 1.1.
    np.testing.assert_allclose(s.x, [0.8 / 1.1], atol=1e-6)
    assert s.status_name == "successful"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (dict(price=-1.0), ("`elastic`", "positive price", "-1.0")),
        (dict(price="much"), ("`elastic`", "'much'")),
        (dict(rows=bx.Box(jnp.zeros(1), jnp.ones(1))), ("Polyhedron", "Box")),
        (dict(rows=bx.Intersection(violations=ROWS)), ('"violations"', "name")),
    ],
)
def test_what_cannot_be_elastic_is_told(change, words):
    with pytest.raises(ValueError, match=".") as info:
        problem(**change)
    for word in words:
        assert word in str(info.value)


def test_elastic_rows_and_prices_do_not_go_together():
    seen = lambda x, y, prices: jnp.sum(y)
    with pytest.raises(ValueError, match="elastic.*prices"):
        bx.Problem(seen, near_three, ROWS, prices=True, elastic=1.0)
