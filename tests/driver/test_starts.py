"""How many starts a call makes where it does not say, and where they are."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import bilevax as bx

from .test_worth import of_x

WELLS = bx.Box(jnp.full(1, -2.0), jnp.full(1, 2.0))


def wells(x):
    """Two wells; the left one is lower."""
    return (x[0] ** 2 - 1) ** 2 + 0.3 * x[0]


def test_the_lower_of_two_wells_is_found_from_the_other_one():
    problem = of_x(wells, WELLS)
    x0 = jnp.array([1.0])
    one = bx.solve(problem, x0=x0, key=0, num_starts=1, num_steps=30)
    several = bx.solve(problem, x0=x0, key=0, num_steps=30)
    assert one.x[0] > 0
    assert several.x[0] < 0
    assert not one.starts


def test_starts_end_when_the_best_value_has_come_three_times():
    bowl = of_x(lambda x: jnp.sum((x - 1) ** 2), WELLS)
    s = bx.solve(bowl, key=0, num_steps=30)
    assert len(s.starts) == 3
    assert len(bx.solve(bowl, key=0, num_steps=30, num_starts=4).starts) == 4


@pytest.mark.parametrize(
    "single",
    [
        dict(num_starts=1),
        dict(polish=False),
        dict(callback=lambda *_: False),
        dict(output="random"),
    ],
)
def test_a_single_run_is_one_where_it_is_asked_for(single):
    s = bx.solve(of_x(wells, WELLS), key=0, num_steps=5, **single)
    assert s.starts == []


@pytest.mark.parametrize(
    "domain",
    [None, bx.Box(jnp.full(1, -2.0), jnp.full(1, jnp.inf))],
)
def test_without_finite_bounds_there_is_one_start_and_it_must_be_given(domain):
    problem = of_x(lambda x: jnp.sum(x**2), domain)
    assert not bx.solve(problem, x0=jnp.ones(1), key=0, num_steps=5).starts
    with pytest.raises(ValueError, match="`x0` is needed.*finite bounds"):
        bx.solve(problem, key=0)


def test_without_x0_a_run_begins_in_the_middle_of_the_box():
    problem = of_x(lambda x: jnp.sum(x**2), bx.Box(jnp.ones(2), jnp.full(2, 5.0)))
    options: dict[str, Any] = dict(key=0, num_steps=3, num_starts=1)
    s = bx.solve(problem, **options)
    same = bx.solve(problem, x0=jnp.full(2, 3.0), **options)
    np.testing.assert_array_equal(s.history["value"], same.history["value"])
