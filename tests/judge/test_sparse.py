"""What a point is worth where the lower level has sparse rows: nothing dense."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import scipy.sparse as sp

import bilevax as bx
from bilevax._constraints import SparseMatrix
from bilevax._implicit.feasible import onto_allowed
from bilevax._judge.matrices import least_eigenvalue, least_singular_value

from ..networks import Flows

X = jnp.array([0.3, 0.8])


@pytest.fixture
def nothing_dense(monkeypatch):
    """No matrix of rows with many entries may be written out."""

    def dense(self, dtype):
        raise AssertionError(f"a matrix of {self.shape} was made dense")

    monkeypatch.setattr(SparseMatrix, "dense", dense)


def both(flows: Flows, **options):
    """One problem with sparse rows and a sparse solver, and the same one dense."""
    return (
        flows.problem(solver=bx.SparseActiveSet(), **options),
        flows.problem(lambda M: M.toarray(), solver=bx.ActiveSet(), **options),
    )


def test_certificates_are_those_of_dense_rows():
    flows = Flows(0, side=4, goods=2)
    sparse, dense = (
        bx.certify(problem, X, 1e-3, key=0, num_samples=12) for problem in both(flows)
    )
    np.testing.assert_allclose(sparse.measure, dense.measure, rtol=1e-7)
    assert sparse.samples == dense.samples == 12
    assert sparse.gradient_error < 1e-7


def test_condition_and_bias_are_those_of_dense_rows():
    flows = Flows(1, side=4, goods=2)
    sparse, dense = (bx.hypergradient(p, X, quality=True) for p in both(flows))
    found: Any = sparse.quality
    wanted: Any = dense.quality
    np.testing.assert_allclose(found.condition, wanted.condition, rtol=0.05)
    assert float(found.bias) < 1e-8 * float(jnp.linalg.norm(sparse.grad))


def test_assumptions_are_those_of_dense_rows():
    flows = Flows(2, side=4, goods=2, trips=1.0)
    sparse, dense = (bx.explain(problem, X) for problem in both(flows))
    for found, wanted in zip(sparse.findings, dense.findings, strict=True):
        assert found.assumption == wanted.assumption
        assert found.holds == wanted.holds, (found, wanted)
        if np.isfinite(wanted.number):
            np.testing.assert_allclose(found.number, wanted.number, rtol=1e-5)


def test_thousands_of_variables_are_judged_without_a_dense_matrix(nothing_dense):
    flows = Flows(3, side=16, goods=3)
    assert flows.size > 2500
    problem = flows.problem()
    found = bx.certify(problem, X, 1e-3, key=0, num_samples=3)
    slope = bx.hypergradient(problem, X).grad
    np.testing.assert_allclose(found.measure, float(jnp.linalg.norm(slope)), rtol=1e-2)
    told = bx.explain(problem, X)
    assert told.findings[1].holds
    np.testing.assert_allclose(told.findings[1].number, flows.flat, rtol=1e-6)


class Pipes:
    """Flows with capacities: `x` trips more than demand, up to what links carry."""

    def __init__(self, side, goods):
        flows = Flows(4, side=side, goods=goods, trips=0.3)
        n, demand = flows.size, flows.b_eq
        most = 4 * demand.sum()
        self.flows = flows
        # Demand grows with `x`; all of it leaves by links of a limited capacity.
        self.rows: Any = bx.Polyhedron(
            A=sp.vstack([-sp.eye_array(n), sp.eye_array(n)]).tocsr(),
            b=np.concatenate([np.zeros(n), np.full(n, most)]),
            A_eq=flows.A_eq,
            B_eq=sp.csr_array(-demand[:, None]),
            b_eq=np.zeros(len(demand)),
        )
        self.dense = bx.Polyhedron(
            A=self.rows.A.csr().toarray(), b=self.rows.b,
            A_eq=flows.A_eq.toarray(), B_eq=-demand[:, None], b_eq=self.rows.b_eq,
        )  # fmt: skip

    def problem(self, rows, solver):
        inner = self.flows.problem()
        return bx.Problem(inner.upper, self.lower, rows, solver=solver)

    def lower(self, x, y):
        return jnp.sum(y**2) / 2


def test_the_way_back_is_that_of_dense_rows():
    pipes = Pipes(side=3, goods=2)
    far = jnp.array([1000.0])
    sparse = pipes.problem(pipes.rows, bx.SparseActiveSet())
    dense = pipes.problem(pipes.dense, bx.ActiveSet())
    assert bx.status_name(bx.hypergradient(sparse, far, throw=False).status) == (
        "infeasible"
    )
    x = onto_allowed(sparse, far)
    np.testing.assert_allclose(x, onto_allowed(dense, far), rtol=1e-5)
    assert bx.hypergradient(sparse, x).success


def test_thousands_of_variables_find_the_way_back(nothing_dense):
    pipes = Pipes(side=14, goods=3)
    assert pipes.flows.size > 2000
    problem = pipes.problem(pipes.rows, None)
    s = bx.solve(
        problem, bx.DSBLO(), jnp.array([1e4]), key=0, num_steps=3, polish=False
    )
    assert s.success
    assert 1 < float(s.x[0]) < 1e4


def test_least_eigenvalues_are_those_of_dense_matrices():
    random = np.random.default_rng(0)
    A = sp.random_array((80, 120), density=0.1, rng=random).tocsr()
    H = (A @ A.T + 0.1 * sp.eye_array(80)).tocsr()
    np.testing.assert_allclose(
        least_eigenvalue(H), np.linalg.eigvalsh(H.toarray())[0], rtol=1e-8
    )
    unit = A.toarray() / np.linalg.norm(A.toarray(), axis=1, keepdims=True)
    np.testing.assert_allclose(
        least_singular_value(A), np.linalg.svd(unit)[1][-1], rtol=1e-6
    )
    assert least_singular_value(A.T.tocsr()) == 0
