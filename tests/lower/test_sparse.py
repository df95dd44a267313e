"""Sparse lower levels beside the dense solver and beside other codes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.sparse as sp
from jax.experimental.sparse import BCOO

import bilevax as bx

EXACT = 1e-9


def bits(rng, rows, columns, share):
    """A sparse matrix without rows of zeros."""
    A = sp.random_array((rows, columns), density=share, rng=rng).tolil()
    for i in range(rows):
        A[i, rng.integers(columns)] = rng.normal()
    return A.tocsr()


def random_program(seed, n=30, k=25, equalities=5, m=3, box=True):
    """A feasible program with sparse rows, as dense arrays and matrices."""
    rng = np.random.default_rng(seed)
    half = bits(rng, n, n, 2 / n)
    H = (half.T @ half + sp.diags_array(rng.uniform(0.1, 2, n))).toarray()
    A, A_eq = bits(rng, k, n, 0.1).toarray(), bits(rng, equalities, n, 0.2).toarray()
    if box:
        A = np.concatenate([A, np.eye(n), -np.eye(n)])
    B, B_eq = rng.normal(size=(len(A), m)), rng.normal(size=(equalities, m))
    B[k:] = 0
    inside, x = rng.normal(size=n), rng.normal(size=m)
    room = np.where(rng.uniform(size=len(A)) < 0.3, 0.0, rng.exponential(size=len(A)))
    return dict(
        H=H, C=rng.normal(size=(n, m)), c=3 * rng.normal(size=n), A=A, B=B,
        b=A @ inside + B @ x + room + 0.05, A_eq=A_eq, B_eq=B_eq,
        b_eq=A_eq @ inside + B_eq @ x, p=rng.normal(size=n), x=x,
    )  # fmt: skip


def quadratic(d, kind=jnp.asarray, **options):
    H, C, c, p = (jnp.asarray(d[name]) for name in ("H", "C", "c", "p"))
    lower = lambda x, y: 0.5 * y @ (H @ y) + (C @ x + c) @ y
    upper = lambda x, y: jnp.sum((y - p) ** 2) + jnp.sum(x**2)
    names = [name for name in ("A", "B", "A_eq", "B_eq") if name in d]
    parts = {name: kind(d[name]) for name in names}
    rows = bx.Polyhedron(**parts, b=d["b"], b_eq=d.get("b_eq"))
    return bx.Problem(upper, lower, rows, **options)


def assert_same(a, b, margin=True):
    assert bx.status_name(a.status) == bx.status_name(b.status)
    size = np.abs(b.lower.multipliers).max() + 1
    assert np.allclose(a.lower.y, b.lower.y, rtol=EXACT, atol=EXACT)
    assert np.array_equal(a.lower.active, b.lower.active)
    assert np.array_equal(a.lower.weak, b.lower.weak)
    assert np.isclose(a.value, b.value, rtol=EXACT)
    assert np.allclose(a.grad, b.grad, rtol=EXACT, atol=EXACT * size)
    if margin:
        assert np.allclose(a.lower.multipliers, b.lower.multipliers, atol=EXACT * size)
        assert np.isclose(a.margin, b.margin, rtol=1e-6, atol=EXACT)


@pytest.mark.parametrize("seed", range(12))
def test_random_programs_have_the_answers_of_the_dense_solver(seed):
    d = random_program(seed, box=seed % 3 > 0)
    problem = quadratic(d)
    dense = bx.hypergradient(problem, d["x"], solver=bx.ActiveSet())
    assert_same(bx.hypergradient(problem, d["x"], solver=bx.SparseActiveSet()), dense)


@pytest.mark.parametrize("seed", range(4))
def test_warm_starts_end_where_cold_ones_do(seed):
    d = random_program(seed)
    problem, solver = quadratic(d), bx.SparseActiveSet()
    e = bx.hypergradient(problem, d["x"], solver=solver)
    again = bx.hypergradient(problem, d["x"], solver=solver, warm=e.lower)
    assert int(again.lower.iterations.factorisations) == 0
    assert_same(again, e)
    x = d["x"] + 0.02
    warm = bx.hypergradient(problem, x, solver=solver, warm=e.lower)
    assert_same(warm, bx.hypergradient(problem, x, solver=bx.ActiveSet()))


def test_dense_scipy_and_bcoo_rows_are_the_same_rows():
    d = random_program(3)
    x = d["x"]
    kinds = (
        jnp.asarray, sp.csr_matrix, sp.csc_array, sp.coo_array,
        lambda M: BCOO.fromdense(jnp.asarray(M)),
    )  # fmt: skip
    for solver in (bx.SparseActiveSet(), bx.ActiveSet(), bx.InteriorPoint()):
        found = [
            bx.hypergradient(quadratic(d, kind), x, solver=solver) for kind in kinds
        ]
        for other in found[1:]:
            assert_same(other, found[0])


def test_entries_that_are_given_twice_are_added():
    d = random_program(5)
    A = sp.coo_array(d["A"])
    twice = sp.coo_array(
        (np.r_[A.data, A.data] / 2, (np.r_[A.row, A.row], np.r_[A.col, A.col])), A.shape
    )
    places = jnp.stack([jnp.asarray(twice.row), jnp.asarray(twice.col)], axis=1)
    of_jax = BCOO((jnp.asarray(twice.data), places), shape=d["A"].shape)
    plain = bx.Polyhedron(A=d["A"], b=d["b"])
    for matrix in (twice, of_jax):
        rows = bx.Polyhedron(A=matrix, b=d["b"])
        assert np.array_equal(rows.matrix(30, float), plain.matrix(30, float))


def test_integers_become_numbers_and_columns_may_be_empty():
    A = sp.csr_matrix(np.array([[1, 0, 2], [0, 0, -1]]))
    rows = bx.Polyhedron(A=A, b=jnp.array([1.0, 0.0]))
    assert rows.matrix(3, float).dtype == np.float64
    problem = bx.Problem(
        lambda x, y: jnp.sum(x * y), lambda x, y: 0.5 * jnp.sum((y - x) ** 2), rows
    )
    for solver in (bx.ActiveSet(), bx.SparseActiveSet()):
        e = bx.hypergradient(problem, jnp.array([2.0, 5.0, 1.0]), solver=solver)
        assert np.allclose(e.lower.y, [1.0, 5.0, 0.0])


@pytest.mark.parametrize(("rows", "text"), [
    (dict(A=sp.eye_array(3), b=jnp.ones(2)), "agree on the number of rows"),
    (dict(A=sp.eye_array(2), b=jnp.ones(2), A_eq=sp.eye_array(3), b_eq=jnp.ones(3)),
     "one column per entry of `y`"),
    (dict(A=1j * sp.eye_array(2), b=jnp.ones(2)), "must be real"),
    (dict(A=sp.eye_array(2), b=sp.coo_array(np.ones((2, 1)))), "`b` is sparse"),
    (dict(A=BCOO.fromdense(jnp.ones((2, 2)), n_batch=1), b=jnp.ones(2)), "1 batch"),
    (dict(A=BCOO.fromdense(jnp.ones(2)), b=jnp.ones(2)), "must be a matrix"),
])  # fmt: skip
def test_sparse_rows_that_do_not_fit_are_refused_in_a_sentence(rows, text):
    with pytest.raises(ValueError, match=text):
        bx.Polyhedron(**rows)


def test_a_sparse_domain_is_refused_with_a_remedy():
    domain = bx.Polyhedron(A=sp.eye_array(2), b=jnp.ones(2))
    with pytest.raises(ValueError, match=r"`domain` is sparse.*toarray"):
        bx.Problem(lambda x, y: 0.0, lambda x, y: 0.0, y0=jnp.zeros(1), domain=domain)


def test_inside_a_program_it_says_what_to_do():
    d = random_program(0)
    problem = quadratic(d, solver=bx.SparseActiveSet())
    with pytest.raises(ValueError, match="host.*ActiveSet"):
        jax.jit(lambda x: bx.hypergradient(problem, x).value)(jnp.asarray(d["x"]))


def test_sparse_rows_serve_programs_too():
    d = random_program(1)
    problem = quadratic(d, sp.csr_array)
    eager = bx.hypergradient(problem, d["x"])
    inside = jax.jit(lambda x: bx.hypergradient(problem, x).grad)(jnp.asarray(d["x"]))
    assert np.allclose(inside, eager.grad, atol=1e-8)
    through = jax.grad(lambda x: jnp.sum(bx.solution_map(problem, x) ** 2))
    plain = jax.grad(lambda x: jnp.sum(bx.solution_map(quadratic(d), x) ** 2))
    x = jnp.asarray(d["x"])
    assert np.allclose(through(x), plain(x), atol=1e-8)


def test_its_solutions_are_warm_starts_of_the_dense_solver_and_back():
    d = random_program(4)
    x, sparse, dense = d["x"], bx.SparseActiveSet(), bx.ActiveSet()
    problem = quadratic(d)
    e = bx.hypergradient(problem, x, solver=sparse)
    again = jax.jit(
        lambda x, warm: bx.hypergradient(problem, x, solver=dense, warm=warm)
    )(jnp.asarray(x), e.lower)
    assert_same(again, e)
    assert_same(bx.hypergradient(problem, x, solver=sparse, warm=again.lower), e)


def test_equality_rows_that_say_the_same_change_nothing():
    d = random_program(7)
    again = dict(d)
    for name in ("A_eq", "B_eq", "b_eq"):
        again[name] = np.concatenate(
            [d[name], 2 * d[name][:2], d[name][:1] + d[name][1:2]]
        )
    solver = bx.SparseActiveSet()
    e = bx.hypergradient(quadratic(again), d["x"], solver=solver)
    plain = bx.hypergradient(quadratic(d), d["x"], solver=solver)
    assert bx.status_name(e.status) == "successful"
    assert np.allclose(e.lower.y, plain.lower.y, atol=EXACT)
    assert np.allclose(e.grad, plain.grad, atol=1e-8)


def test_dependent_rows_that_move_apart_are_told():
    d = random_program(7)
    d["A_eq"] = np.concatenate([d["A_eq"], d["A_eq"][:1]])
    d["B_eq"] = np.concatenate([d["B_eq"], 0 * d["B_eq"][:1]])
    d["b_eq"] = np.append(d["b_eq"], d["b_eq"][0] - d["B_eq"][0] @ d["x"])
    e = bx.hypergradient(quadratic(d), d["x"], solver=bx.SparseActiveSet())
    assert bx.status_name(e.status) == "dependent_rows"


@pytest.mark.parametrize("gap", [1e-4, 1.0, 1e4])
def test_rows_without_a_point_are_infeasible(gap):
    d = random_program(2)
    d["A_eq"] = np.concatenate([d["A_eq"], d["A_eq"][:1]])
    d["B_eq"] = np.concatenate([d["B_eq"], d["B_eq"][:1]])
    d["b_eq"] = np.append(d["b_eq"], d["b_eq"][0] + gap)
    e = bx.hypergradient(quadratic(d), d["x"], solver=bx.SparseActiveSet(), throw=False)
    assert bx.status_name(e.status) == "infeasible"
    assert np.isnan(e.value)


def test_a_nan_in_the_data_is_told():
    d = random_program(2)
    d["c"][3] = np.nan
    e = bx.hypergradient(quadratic(d), d["x"], solver=bx.SparseActiveSet(), throw=False)
    assert bx.status_name(e.status) == "non_finite"


def test_a_follower_without_curvature_is_refused():
    d = random_program(2, box=False)
    d["H"] = 0 * d["H"]
    d["H"][0, 0] = 1.0
    e = bx.hypergradient(quadratic(d), d["x"], solver=bx.SparseActiveSet(), throw=False)
    assert bx.status_name(e.status) == "not_strongly_convex"


def test_a_linear_program_at_a_vertex_is_exact():
    c = jnp.array([1.0, 2.0, 0.5, 3.0])
    rows = bx.Polyhedron(
        A=sp.csr_array(-np.eye(4)), b=jnp.zeros(4),
        A_eq=sp.csr_array(np.ones((1, 4))), B_eq=sp.csr_array([[-1.0]]),
        b_eq=jnp.zeros(1),
    )  # fmt: skip
    problem = bx.Problem(lambda x, y: jnp.sum(c**2 * y), lambda x, y: c @ y, rows)
    e = bx.hypergradient(problem, jnp.array([2.0]), solver=bx.SparseActiveSet())
    assert np.allclose(e.lower.y, [0, 0, 2, 0], atol=1e-12)
    assert np.allclose(e.grad, 0.25)
    assert bx.status_name(e.status) == "successful"


def test_kinks_and_margins_are_those_of_the_dense_solver():
    H = jnp.diag(jnp.array([1.0, 2.0, 4.0]))
    lower = lambda x, y: 0.5 * y @ (H @ y) - x @ y
    rows = bx.Polyhedron(A=-jnp.eye(3), b=jnp.zeros(3))
    problem = bx.Problem(lambda x, y: jnp.sum(y), lower, rows)
    for first in (0.0, 1e-6, -1e-6, 0.3):
        x = jnp.array([first, 1.0, -2.0])
        dense = bx.hypergradient(problem, x, solver=bx.ActiveSet())
        e = bx.hypergradient(problem, x, solver=bx.SparseActiveSet())
        assert_same(e, dense)
        assert bx.status_name(e.status) == ("successful" if first else "kink")


def test_variables_without_room_have_both_bounds():
    low, high = jnp.array([-1.0, 0.5, -2.0]), jnp.array([1.0, 0.5, 3.0])
    problem = bx.Problem(
        lambda x, y: jnp.sum(x * y), lambda x, y: 0.5 * jnp.sum((y - x) ** 2),
        bx.Polyhedron(A=jnp.concatenate([-jnp.eye(3), jnp.eye(3)]),
                      b=jnp.concatenate([-low, high])),
    )  # fmt: skip
    x = jnp.array([2.0, 3.0, 0.1])
    e = bx.hypergradient(problem, x, solver=bx.SparseActiveSet())
    assert np.allclose(e.lower.y, [1.0, 0.5, 0.1])
    assert np.allclose(e.grad, e.lower.y + np.array([0, 0, 0.1]))
    assert np.all(e.lower.multipliers >= 0)
    assert np.allclose(e.lower.multipliers, [0, 0, 0, 1.0, 2.5, 0])
