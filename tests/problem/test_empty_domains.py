"""A domain without a point is refused, and the sentence says where it has none."""

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

import bilevax as bx

INF, NAN = np.inf, np.nan


def problem(domain):
    return bx.Problem(
        lambda x, y: jnp.sum((ravel_pytree(x)[0] - 2) ** 2),
        lambda x, y: 0.5 * jnp.sum(y**2),
        y0=jnp.zeros(1),
        domain=domain,
    )


@pytest.mark.parametrize(
    ("low", "high", "words"),
    [
        ([0.0, 1.0], [1.0, 0.0], ["empty", "x[1]", "1 and", "bound 0"]),
        ([0.0, NAN], [1.0, 1.0], ["NaN", "x[1]"]),
        ([0.0, 0.0], [NAN, 1.0], ["NaN", "x[0]"]),
        ([INF], [INF], ["empty", "x[0]"]),
        ([-INF], [-INF], ["empty", "x[0]"]),
        ([[0.0, 0.0], [0.0, 2.0]], 1.0, ["empty", "x[1, 1]"]),
        ({"a": 0.0, "b": [3.0]}, {"a": 1.0, "b": [1.0]}, ["empty", "x['b'][0]"]),
        (2.0, 1.0, ["empty", "at x the"]),
    ],
)
def test_a_box_without_a_point_names_the_coordinate(low, high, words):
    with pytest.raises(ValueError, match="`domain`") as info:
        problem(bx.Box(low, high))
    for word in words:
        assert word in str(info.value)


def test_a_box_of_one_point_and_one_without_bounds_are_domains():
    for low, high in (([1.0], [1.0]), ([-INF], [INF]), ([1.0], [INF])):
        problem(bx.Box(low, high))


def test_an_empty_box_that_is_traced_is_left_to_the_program():
    @jax.jit
    def value(low):
        box = bx.Box(low, jnp.ones(2))
        return bx.hypergradient(problem(box), jnp.zeros(2), throw=False).value

    assert value(jnp.full(2, 2.0)) == 8


def solve(domain, size=2):
    return bx.solve(
        problem(domain), bx.DSBLO(), jnp.zeros(size), key=jr.key(0), num_steps=2
    )


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        (
            dict(A=[[1.0, 0], [0, 1], [-1, 0]], b=[0.0, 9, -1]),
            ["row 0 of `A`", "row 2"],
        ),
        (
            dict(A=[[-1.0, 0], [0, -1]], b=[0.0, 0], A_eq=[[1.0, 1]], b_eq=[-1.0]),
            ["row 0 of `A`", "row 1 of `A`", "row 0 of `A_eq`"],
        ),
        (dict(A_eq=[[1.0, 1], [2, 2]], b_eq=[1.0, 3]), ["row 0", "row 1"]),
        (dict(A=[[0.0, 0], [1, 0]], b=[-1.0, 0]), ["row 0 of `A`"]),
        (dict(A=[[1.0, 0]], b=[-INF]), ["row 0 of `A`"]),
        # Rows of any length.
        (dict(A=[[1e-9, 0], [-1e9, 0]], b=[0.0, -1e9]), ["row 0", "row 1"]),
    ],
)
def test_a_polyhedron_without_a_point_names_the_rows(rows, words):
    with pytest.raises(ValueError, match="`domain` is empty") as info:
        solve(bx.Polyhedron(**rows))
    for word in words:
        assert word in str(info.value)


@pytest.mark.parametrize(
    "rows", [dict(A=[[NAN, 0.0]], b=[0.0]), dict(A=[[1.0, 0.0]], b=[NAN])]
)
def test_a_polyhedron_with_a_nan_is_refused(rows):
    with pytest.raises(ValueError, match=r"NaN.*row 0 of `A`"):
        solve(bx.Polyhedron(**rows))


def test_a_polyhedron_that_is_a_point_or_a_line_is_a_domain():
    for rows, best in (
        (dict(A=[[1.0, 0], [-1, 0]], b=[1.0, -1]), [1, 2]),
        (dict(A_eq=[[1.0, 0], [0, 1]], b_eq=[1.0, 1]), [1, 1]),
        (dict(A=[[1.0, 0], [0, 1]], b=[INF, 1.0]), [2, 1]),
    ):
        domain = bx.Polyhedron(**rows)
        s = bx.solve(problem(domain), bx.DSBLO(), jnp.zeros(2), key=jr.key(0))
        np.testing.assert_allclose(s.x, best, atol=1e-6)
