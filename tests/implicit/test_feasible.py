"""The way back to where the lower level has a point."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bilevax as bx
from bilevax._implicit.feasible import onto_allowed


def quadratic(x, y):
    return 0.5 * jnp.sum(y**2)


def coupled(rows, seed=0):
    """Rows `A y - x_i <= -1` that are empty at small `x`, and `0 <= x <= 4`."""
    rng = np.random.default_rng(seed)
    A = rng.normal(size=(rows, 5))
    constraints = bx.Polyhedron(A=A, B=-np.eye(rows), b=-np.ones(rows))
    domain = bx.Box(np.zeros(rows), np.full(rows, 4.0))
    return bx.Problem(quadratic, quadratic, constraints, domain=domain)


def distance_to_optimum(problem, x, found):
    """How much a projection misses the variational inequality of the nearest point.

    At the true one, `<x - found, z - found> <= 0` for every allowed `z`; the worst
    `z` of a box is found by a linear program in `(z, y)`.
    """
    from scipy.optimize import linprog

    rows = problem.constraints
    k, n = rows.A.shape
    result = linprog(
        -np.concatenate([np.asarray(x - found), np.zeros(n)]),
        A_ub=np.concatenate([np.asarray(rows.B), np.asarray(rows.A)], axis=1),
        b_ub=np.asarray(rows.b),
        bounds=[(0, 4)] * k + [(None, None)] * n,
    )
    return -result.fun - float((x - found) @ found)


# The larger one starts from an interior point.
@pytest.mark.parametrize("rows", [30, 110])
def test_the_nearest_allowed_point_is_nearest(rows):
    problem = coupled(rows)
    x = jnp.asarray(np.random.default_rng(1).uniform(0, 0.5, rows))
    before = bx.hypergradient(problem, x, throw=False)
    assert bx.status_name(before.lower.status) == "infeasible"
    found = onto_allowed(problem, x)
    after = bx.hypergradient(problem, found, throw=False)
    assert bx.status_name(after.lower.status) == "successful"
    moved = float(jnp.linalg.norm(found - x))
    assert moved > 0.1
    assert distance_to_optimum(problem, x, found) < 1e-6 * moved**2
    # One that is allowed already stays where it is.
    again = onto_allowed(problem, found)
    np.testing.assert_allclose(again, found, atol=1e-6)


class Spring(eqx.Module):
    stiffness: jax.Array

    def __call__(self, x, y):
        return self.stiffness * jnp.sum((y - x) ** 2)


def test_an_interior_path_ends_in_the_units_of_the_program():
    # Forces of 1e-9: a gap that is small beside one says nothing about them.
    A = jnp.asarray(np.random.default_rng(2).normal(size=(40, 6)))
    rows, x = bx.Polyhedron(A=A, b=jnp.ones(40)), jnp.full(6, 2.0)
    by_path, by_faces = (
        eqx.filter_jit(bx.InteriorPoint()),
        eqx.filter_jit(bx.ActiveSet()),
    )
    for stiffness in (1.0, 1e-9, 1e9):
        spring = Spring(jnp.asarray(stiffness))
        problem = bx.Problem(spring, spring, rows, y0=jnp.zeros(6))
        path, exact = by_path(problem, x), by_faces(problem, x)
        np.testing.assert_allclose(path.y, exact.y, atol=1e-9)
        np.testing.assert_array_equal(path.active, exact.active)
        assert int(path.iterations.safeguard) == 0


@pytest.mark.parametrize(
    ("A", "B", "b", "x", "expected"),
    [
        # An infinite bound is no bound.
        ([[1, 0], [-1, 0], [0, 1]], [[1], [1], [0]], [0, 0, np.inf], 3, 0),
        # Two opposite rows leave no interior: y_0 = 1 - x, and y_0 <= x.
        ([[1, 0], [-1, 0], [1, 0]], [[1], [-1], [-1]], [1, -1, 0], -2, 0.5),
        # Rows far longer in y than in x, and far shorter.
        ([[1e4, 0], [-1e4, 0], [0, 1e4]], [[1], [1], [0]], [-1, -1, 1], 3, -1),
        ([[1e-6, 0], [-1e-6, 0], [0, 1e-6]], [[1], [1], [0]], [-1, -1, 1], 3, -1),
    ],
)
def test_the_way_back_knows_odd_rows(A, B, b, x, expected):
    A, B, b = (np.asarray(part, float) for part in (A, B, b))
    rows = bx.Polyhedron(A=A, B=B, b=b)
    problem = bx.Problem(quadratic, quadratic, rows, y0=jnp.zeros(2))
    found = onto_allowed(problem, jnp.array([float(x)]))
    # It stays inside by a tiny part of the lengths of the rows.
    np.testing.assert_allclose(found, expected, atol=1e-8 * (1 + abs(A).max()))
    after = bx.hypergradient(problem, found, throw=False)
    assert bx.status_name(after.lower.status) != "infeasible"


def test_members_of_a_large_batch_do_not_lose_their_nans():
    # Large reductions lose NaNs on CPUs: failed factors must be noticed all the same.
    rng = np.random.default_rng(0)
    count, n, k = 200, 3, 60
    A, b = rng.normal(size=(count, k, n)), rng.uniform(0.1, 1, (count, k))
    pull = 5 * rng.normal(size=(count, n))
    A[7, 3] = np.nan

    def status(A, b, pull):
        lower = lambda x, y: 0.5 * jnp.sum((y - pull * x[0]) ** 2)
        rows = bx.Polyhedron(A=A, b=b)
        problem = bx.Problem(lower, lower, rows, y0=jnp.zeros(n))
        solution = bx.ActiveSet()(problem, jnp.ones(1))
        return solution.success, jnp.all(jnp.isfinite(solution.y))

    success, finite = jax.jit(jax.vmap(status))(A, b, pull)
    np.testing.assert_array_equal(np.flatnonzero(~success), [7])
    np.testing.assert_array_equal(np.flatnonzero(~finite), [7])
