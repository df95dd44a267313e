"""The tables that today's tools fail: near kinks, with copies, in mixed batches."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bilevax as bx

from .. import zoo


def slope(problem, x):
    # As an array: a number would be part of the program.
    return slope_at(problem, jnp.asarray(x))


@eqx.filter_jit
def slope_at(problem, x):
    e = bx.hypergradient(problem, jnp.reshape(x, (1,)), throw=False)
    return e.value, e.grad[0], e.margin, e.status


def upwards(x, y):
    """A follower that wants to go up."""
    return 0.5 * jnp.sum((y - 5) ** 2)


@pytest.mark.parametrize("copies", [1, 2, 3])
@pytest.mark.parametrize(
    ("x", "expected"),
    [(-1e-1, 1), (-1e-3, 1), (-1e-6, 1), (1e-6, 0), (1e-3, 0), (1e-1, 0)],
)
def test_the_slope_beside_a_kink_is_one_sided_and_exact(copies, x, expected):
    value, grad, margin, status = slope(zoo.clipped(copies), x)
    assert bx.status_name(status) == "successful"
    np.testing.assert_allclose(value, min(x, 0), atol=zoo.IDENTITY)
    np.testing.assert_allclose(grad, expected, atol=zoo.IDENTITY)
    # Copies share the multiplier evenly at best; the slack they have in common.
    share = copies if x > 0 else 1
    np.testing.assert_allclose(margin, abs(x) / share, rtol=zoo.EXACT)


@pytest.mark.parametrize("copies", [1, 2, 3])
def test_the_kink_itself_is_flagged(copies):
    value, grad, margin, status = slope(zoo.clipped(copies), 0.0)
    assert bx.status_name(status) == "kink"
    assert value == 0
    assert 0 <= grad <= 1
    assert margin <= zoo.IDENTITY


def test_a_batch_with_an_infeasible_member():
    # y <= h and y >= 1, for h = 2, 0, 3; the follower wants to go up.
    def problem(h):
        rows = bx.Polyhedron(A=np.array([[1.0], [-1.0]]), b=jnp.stack([h, -1.0]))
        return bx.Problem(zoo.answer, upwards, rows)

    h = jnp.array([2.0, 0.0, 3.0])
    evaluate = lambda h: bx.hypergradient(problem(h), jnp.zeros(1), throw=False)
    out = eqx.filter_jit(jax.vmap(evaluate))(h)
    np.testing.assert_array_equal(out.success, [True, False, True])
    np.testing.assert_allclose(out.value, [2, np.nan, 3], atol=zoo.IDENTITY)
    assert "1 of 3 (1) infeasible" in out.message

    flow = lambda h: jax.vmap(lambda h: bx.solution_map(problem(h), jnp.zeros(1)))(h)
    np.testing.assert_allclose(flow(h)[:, 0], [2, np.nan, 3], atol=zoo.IDENTITY)
    grad = jax.grad(lambda h: jnp.nansum(flow(h)))(h)
    np.testing.assert_allclose(grad, [1, 0, 1], atol=zoo.IDENTITY)


@pytest.mark.parametrize("x", [-2.0, -1e-6, 1e-6, 0.5])
def test_rows_that_meet_at_a_kink_of_the_set(x):
    # y <= x and y <= -x: y* = -|x| for a follower that wants to go up.
    rows = bx.Polyhedron(np.ones((2, 1)), np.array([[-1.0], [1.0]]), np.zeros(2))
    problem = bx.Problem(zoo.answer, upwards, rows)
    value, grad, _, status = slope(problem, x)
    assert bx.status_name(status) == "successful"
    np.testing.assert_allclose(value, -abs(x), atol=zoo.IDENTITY)
    np.testing.assert_allclose(grad, -np.sign(x), atol=zoo.IDENTITY)
    _, _, _, status = slope(problem, 0.0)
    assert bx.status_name(status) == "dependent_rows"


def test_the_edge_of_the_set_of_feasible_x_is_flagged():
    # y <= x and y >= 1: empty for x < 1, a single point at x = 1.
    rows = bx.Polyhedron(
        np.array([[1.0], [-1.0]]), np.array([[-1.0], [0.0]]), np.array([0.0, -1.0])
    )
    problem = bx.Problem(zoo.answer, upwards, rows)
    names = [bx.status_name(slope(problem, x)[3]) for x in (0.9, 1.0, 1.1)]
    assert names == ["infeasible", "dependent_rows", "successful"]


def test_rows_that_pin_y_from_both_sides_and_share_their_dependence():
    # y <= x and y >= x: y* = x whatever the follower wants, so F' = 1.
    rows = bx.Polyhedron(
        np.array([[1.0], [-1.0]]), np.array([[-1.0], [1.0]]), np.zeros(2)
    )
    problem = bx.Problem(zoo.answer, upwards, rows)
    value, grad, _, status = slope(problem, 0.3)
    assert bx.status_name(status) == "successful"
    np.testing.assert_allclose((value, grad), (0.3, 1), atol=zoo.IDENTITY)


def test_a_redundant_row_at_a_vertex_does_not_hide_the_others():
    # y1 <= 0, y2 <= 0 and their sum: the third row alone would leave a free direction.
    rows = bx.Polyhedron(np.array([[1.0, 0], [0, 1], [1, 1]]), b=np.zeros(3))
    problem = bx.Problem(
        lambda x, y: y[0] - 2 * y[1], lambda x, y: 0.5 * jnp.sum((y - x) ** 2), rows
    )
    e = bx.hypergradient(problem, np.array([1.0, 1.0]))
    assert np.all(e.lower.active)
    np.testing.assert_allclose(e.grad, [0, 0], atol=zoo.IDENTITY)


def test_the_minimiser_of_t1_sits_on_its_kink():
    for problem in (zoo.t1(), zoo.t1b()):
        for x in (-0.3, 0.3):
            e = bx.hypergradient(problem, np.array([x]))
            np.testing.assert_allclose(e.value, x**2 / 4 + abs(x) / 2, atol=zoo.EXACT)
            np.testing.assert_allclose(e.grad, [x / 2 + np.sign(x) / 2], atol=zoo.EXACT)
        e = bx.hypergradient(problem, np.zeros(1))
        assert bx.status_name(e.status) == "kink"
        assert e.success
