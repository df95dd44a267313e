"""The interior point on programs where interiors are thin or absent."""

import equinox as eqx
import jax.numpy as jnp
import numpy as np

import bilevax as bx

from .. import zoo
from ..quadratics import KINDS, random_quadratic

interior = eqx.filter_jit(bx.InteriorPoint())
active_set = eqx.filter_jit(bx.ActiveSet())


def test_random_programs_degenerate_ones_included():
    rng = np.random.default_rng(8)
    for kind in KINDS * 3:
        data = random_quadratic(rng, 6, 8, 3, kind, 1e3)
        data = {name: jnp.asarray(part) for name, part in data.items()}
        problem = zoo.quadratic_problem(data)
        out, expected = interior(problem, data["x"]), active_set(problem, data["x"])
        assert out.success
        np.testing.assert_allclose(
            out.y, expected.y, rtol=zoo.REFERENCE, atol=zoo.EXACT
        )
        np.testing.assert_array_equal(out.active, expected.active)


def test_a_set_without_interior_and_an_empty_one():
    rows = lambda top: bx.Polyhedron(
        A=np.array([[1.0, 0], [-1, 0], [0, 1]]), b=jnp.array([top, -1.0, 5.0])
    )
    lower = lambda x, y: 0.5 * jnp.sum((y - x) ** 2)
    problem = lambda top: bx.Problem(lambda x, y: jnp.sum(y), lower, rows(top))
    thin = interior(problem(1.0), jnp.zeros(2))
    np.testing.assert_allclose(thin.y, [1, 0], atol=zoo.EXACT)
    empty = interior(problem(0.5), jnp.zeros(2))
    assert bx.status_name(empty.status) == "infeasible"


def test_equality_rows():
    problem = bx.Problem(
        lambda x, y: jnp.sum(y),
        lambda x, y: 0.5 * jnp.sum((y - x) ** 2),
        bx.Polyhedron(
            A=-np.eye(3), b=np.zeros(3), A_eq=np.ones((1, 3)), b_eq=np.ones(1)
        ),
    )
    out = interior(problem, jnp.array([0.9, 0.5, -1.0]))
    np.testing.assert_allclose(out.y, [0.7, 0.3, 0], atol=zoo.EXACT)
    np.testing.assert_array_equal(out.active, [False, False, True, True])
