"""Many instances at once: the same answers as one by one."""

from typing import Any

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from jax.tree_util import Partial

import bilevax as bx

DOMAIN = bx.Box(np.zeros(2), np.full(2, 5.0))


def revenue(x, y):
    return -jnp.sum(x * y)


def travel(value, x, y):
    return 0.5 * jnp.sum(y**2) + jnp.sum((x - value) * y)


def distance(target, x, y):
    return jnp.sum((x - target) ** 2) + jnp.sum((y - 0.2) ** 2)


def follow(x, y):
    return 0.5 * jnp.sum((y - x) ** 2)


def tolls(value, capacity):
    rows = bx.Polyhedron(
        A=jnp.array([[1.0, 1.0], [-1, 0], [0, -1]]),
        b=jnp.array([capacity, 0.0, 0.0]),
    )
    return bx.Problem(revenue, Partial(travel, value), rows, domain=DOMAIN)


def moving(target):
    """`y = x` where `x <= 1`; beyond, the lower level is empty."""
    rows = bx.Polyhedron(A=[[-1.0], [1.0]], B=[[1.0], [0.0]], b=[0.0, 1.0])
    upper = Partial(distance, jnp.asarray(target))
    return bx.Problem(upper, follow, rows, y0=jnp.zeros(1))


VALUES = 4 + jr.uniform(jr.key(1), (6, 2))
START = jnp.array([1.0, 2.0])


@pytest.fixture(scope="module")
def six():
    problems = [tolls(value, 2.0) for value in VALUES]
    problems[2] = tolls(VALUES[2], -1.0)
    return problems, bx.solve_many(problems, [START] * 6, 0)


def test_members_are_those_of_solve(six):
    problems, found = six
    keys = jr.split(jr.key(0), 6)
    for i in (0, 2, 5):
        alone: Any = dict(key=keys[i], throw=False, num_starts=1)
        one = bx.solve(problems[i], None, START, **alone)
        assert found[i].converged == one.converged
        assert str(found[i]).startswith("F ")
        # The two ways agree to rounding, and the best tolls lie on kinks.
        names = {found[i].status_name, one.status_name}
        assert len(names) == 1 or names == {"kink", "successful"}
        np.testing.assert_allclose(found[i].value, one.value, rtol=1e-9)
        np.testing.assert_allclose(found[i].x, one.x, atol=1e-6)
        np.testing.assert_allclose(found[i].y, one.y, atol=1e-6)
        assert isinstance(found[i].x, jax.Array)
        assert len(found[i].history) == len(one.history)


def test_one_without_an_answer_spoils_no_other(six):
    """With a common value `v` per road of capacity 2 the best toll is `v - 1`."""
    problems, found = six
    assert [s.success for s in found] == [True, True, False, True, True, True]
    assert found[2].status_name == "infeasible"
    for value, s in zip(VALUES, found, strict=True):
        if s.success:
            # Both roads: y = v/2 each, or 2 in all, whichever earns more.
            assert s.value < -0.99 * best_of_grid(value)


def best_of_grid(value):
    """Revenue on a grid of tolls, with the flows of the follower in closed form."""
    p = np.linspace(0, 5, 401)
    a, b = np.meshgrid(p, p, indexing="ij")
    u, v = np.maximum(value[0] - a, 0), np.maximum(value[1] - b, 0)
    over = np.maximum(u + v - 2, 0) / 2
    u2, v2 = np.maximum(u - over, 0), np.maximum(v - over, 0)
    # Where one flow is at zero the other takes all of what is left.
    u2 = np.where(v2 == 0, np.minimum(u, 2), u2)
    v2 = np.where(u2 == 0, np.minimum(v, 2), v2)
    return np.max(a * u2 + b * v2)


def test_the_way_back_is_that_of_each_member():
    """Targets beyond 1 end at the edge of the set where the lower level has a point."""
    targets = [0.4, 3.0, -2.0]
    found = bx.solve_many(
        [moving([t]) for t in targets], [jnp.zeros(1)] * 3, 0, num_steps=120
    )
    for target, s in zip(targets, found, strict=True):
        best = min((target + 0.2) / 2, 1.0)
        np.testing.assert_allclose(s.x, [best], atol=1e-5)


def test_starts_and_methods_are_those_of_solve():
    problems = [tolls(value, 2.0) for value in VALUES[:2]]
    found = bx.solve_many(
        problems, jnp.stack([START] * 2), 0, bx.SSIGD(), num_starts=3, num_steps=150,
        certify=1e-3,
    )  # fmt: skip
    for s in found:
        assert len(s.starts) == 3
        assert s.value == min(start.value for start in s.starts)
        assert s.certificate is not None


def test_problems_of_different_shapes_go_together():
    problems = [tolls(VALUES[0], 2.0), moving([0.4])]
    found = bx.solve_many(problems, [START, jnp.zeros(1)], 0, num_steps=100)
    assert found[0].success
    np.testing.assert_allclose(found[1].x, [0.3], atol=1e-6)


def test_no_problems_have_no_solutions():
    assert bx.solve_many([], [], 0) == []


def test_mistakes_are_told():
    three: Any = [3.0]
    with pytest.raises(ValueError, match="`x0s` must have one entry per problem"):
        bx.solve_many([tolls(VALUES[0], 2.0)] * 2, [START], 0)
    with pytest.raises(ValueError, match="`keys` must have one entry per problem"):
        bx.solve_many([tolls(VALUES[0], 2.0)], [START], list(jr.split(jr.key(0), 3)))
    with pytest.raises(ValueError, match="batch"):
        bx.solve_many([tolls(VALUES[0], 2.0)], [START], 0, batch=0)
    with pytest.raises(ValueError, match="Problem, Followers or a StochasticProblem"):
        bx.solve_many(three, [START], 0)


def test_functions_of_their_own_are_told():
    problems = [
        bx.Problem(
            lambda x, y, c=c: c * jnp.sum(x**2) + jnp.sum(y), follow, y0=jnp.zeros(1)
        )
        for c in (1.0, 2.0)
    ]
    with pytest.warns(UserWarning, match="functions of their own"):
        found = bx.solve_many(problems, [jnp.ones(1)] * 2, 0, num_steps=50)
    np.testing.assert_allclose([s.x[0] for s in found], [-0.5, -0.25], atol=1e-6)
