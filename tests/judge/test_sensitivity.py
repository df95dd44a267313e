"""The envelope against solving again with other data."""

from typing import Any

import equinox as eqx
import jax.numpy as jnp
import numpy as np
import pytest

import bilevax as bx


class Follower(eqx.Module):
    """Wants `d`, less what is charged."""

    d: Any

    def __call__(self, x, y):
        return 0.5 * jnp.sum((y - (self.d - x)) ** 2)


class Leader(eqx.Module):
    """Sells at a cost, with a tax on the price."""

    cost: Any
    tax: Any

    def __call__(self, x, y):
        return -jnp.sum((x - self.cost) * y) + 0.5 * self.tax * jnp.sum(x**2)


def market(d, cost, tax, most, room) -> bx.Problem:
    """Buyers take d - x, at most `room` in all, none of them less than nothing."""
    rows = bx.Polyhedron(
        A=jnp.array([[1.0, 1.0], [-1.0, 0.0], [0.0, -1.0]]),
        b=jnp.concatenate([jnp.reshape(room, 1), jnp.zeros(2)]),
    )
    box = bx.Box(jnp.zeros(2), jnp.full(2, 1.0) * most)
    return bx.Problem(Leader(cost, tax), Follower(d), rows, domain=box)


DATA = dict(
    d=jnp.array([1.0, 1.4]),
    cost=jnp.array(0.1),
    tax=jnp.array(0.2),
    room=jnp.array(5.0),
)


def best(**changes) -> float:
    problem = market(**{**DATA, **changes})
    found = bx.solve(problem, x0=jnp.array([0.4, 0.6]), key=0, num_starts=1)
    return found.value


CASES = {
    "inside": dict(most=3.0),
    "at a bound": dict(most=0.45),
    # All of the room is sold, and prices sit where it is just so.
    "on a kink": dict(most=3.0, room=jnp.array(0.9)),
}


@pytest.mark.parametrize("name", list(CASES))
def test_the_best_value_moves_as_the_envelope_says(name):
    fixed = CASES[name]
    problem = market(**{**DATA, **fixed})
    x = bx.solve(problem, x0=jnp.array([0.4, 0.6]), key=0, num_starts=1).x
    found = bx.sensitivity(problem, x)
    assert found.is_stationary
    assert (found.sides > 1) == (name == "on a kink")
    h = 1e-4
    moved = lambda key, step: best(**{**fixed, key: {**DATA, **fixed}[key] + step})
    for key, told in (
        ("cost", found.data.upper.cost),
        ("tax", found.data.upper.tax),
        ("d", jnp.sum(found.data.lower.d)),
        ("room", found.data.constraints.b[0]),
        ("most", jnp.sum(found.data.domain.upper)),
    ):
        slope = (moved(key, h) - moved(key, -h)) / (2 * h)
        np.testing.assert_allclose(told, slope, atol=1e-5, err_msg=key)


def test_away_from_a_minimiser_the_result_says_so():
    found = bx.sensitivity(market(**DATA, most=3.0), jnp.array([0.2, 0.2]))
    assert not found.is_stationary
    assert "not stationary" in str(found)


def test_of_followers_each_has_a_derivative_of_its_own():
    # F = mean of -x (d - x): dF / dd_i = -x / 2 for two followers.
    one = lambda d: bx.Problem(
        lambda x, y: -jnp.sum(x * y),
        lambda x, y: 0.5 * jnp.sum((y - (d - x)) ** 2),
        bx.Box(jnp.zeros(1), jnp.ones(1)),
    )
    buyers = bx.Followers(one, jnp.array([0.8, 1.0]))
    found = bx.sensitivity(buyers, jnp.array([0.45]))
    np.testing.assert_allclose(found.data.data, [-0.225, -0.225], atol=1e-9)
    assert found.is_stationary
