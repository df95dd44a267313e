"""Flows on networks: sparse, degenerate where nobody passes, and large."""

from typing import Any

import clarabel as peer
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.sparse as sp

import bilevax as bx

from ..networks import Flows

clarabel: Any = peer
X = jnp.array([0.3, 0.2, 0.5])


def by_clarabel(flows: Flows, x):
    H, c = flows.quadratic(np.asarray(x))
    A = sp.csc_matrix(sp.vstack([flows.A_eq, -sp.eye_array(flows.size)]))
    b = np.concatenate([flows.b_eq, np.zeros(flows.size)])
    cones = [
        clarabel.ZeroConeT(len(flows.b_eq)), clarabel.NonnegativeConeT(flows.size)
    ]  # fmt: skip
    settings = clarabel.DefaultSettings()
    settings.verbose = False
    settings.tol_gap_abs = settings.tol_gap_rel = settings.tol_feas = 1e-12
    found = clarabel.DefaultSolver(sp.triu(H, format="csc"), c, A, b, cones, settings)
    return np.array(found.solve().x)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("power", [1, 4])
def test_small_networks_have_the_answers_of_the_dense_solver(seed, power):
    flows = Flows(seed, side=4, goods=2, power=power, trips=0.4)
    problem = flows.problem()
    dense = bx.hypergradient(problem, X, solver=bx.ActiveSet())
    e = bx.hypergradient(problem, X, solver=bx.SparseActiveSet())
    assert bx.status_name(e.status) == "successful"
    assert np.allclose(e.lower.y, dense.lower.y, atol=1e-8)
    assert np.array_equal(e.lower.active, dense.lower.active)
    assert np.allclose(e.grad, dense.grad, rtol=1e-8, atol=1e-8)


def test_a_thousand_variables_solve_the_conditions_and_are_near_those_of_clarabel():
    flows = Flows(0, side=10, goods=3)
    assert flows.size > 1000
    e = bx.hypergradient(flows.problem(), X)
    H, c = flows.quadratic(np.asarray(X))
    y, other = np.asarray(e.lower.y), by_clarabel(flows, X)
    bound, price = np.split(np.asarray(e.lower.multipliers), [flows.size])
    force = H @ y + c - bound + flows.A_eq.T @ price
    assert np.abs(force).max() < 1e-10
    assert np.abs(flows.A_eq @ y - flows.b_eq).max() < 1e-10
    assert y.min() > -1e-12
    assert bound.min() >= 0
    assert np.abs(bound * y).max() < 1e-10
    # Interior points stop earlier, and above the least value.
    value = lambda y: 0.5 * y @ (H @ y) + c @ y
    assert value(y) <= value(other) + 1e-9
    assert np.allclose(y, other, atol=1e-3)


def test_one_flow_may_be_a_thousand_times_the_others():
    flows = Flows(4, side=8, goods=3)
    flows.b_eq[5] = -1000.0
    e = bx.hypergradient(flows.problem(), X)
    assert bx.status_name(e.status) == "successful"
    assert np.abs(flows.A_eq @ np.asarray(e.lower.y) - flows.b_eq).max() < 1e-9


def test_large_sparse_rows_choose_their_solver_whatever_they_are_written_in():
    flows = Flows(1, side=8, goods=3)
    found = [
        bx.hypergradient(flows.problem(kind), X)
        for kind in (lambda M: M, lambda M: jnp.asarray(M.toarray()))
    ]
    for e in found:
        assert int(e.lower.iterations.safeguard) == 0
        assert type(e.lower.factor).__name__ == "SparseFactor"
    assert np.allclose(found[0].lower.y, found[1].lower.y, atol=1e-10)
    assert np.allclose(found[0].grad, found[1].grad, rtol=1e-10)


@pytest.mark.parametrize("power", [1, 4])
def test_gradients_are_slopes(power):
    flows = Flows(2, side=8, goods=3, power=power)
    problem = flows.problem()
    e = bx.hypergradient(problem, X)
    assert bx.status_name(e.status) == "successful"
    ahead = jnp.array([1.0, -0.5, 0.3])
    step = min(1e-4, 0.1 * float(e.margin))
    values = [
        float(bx.hypergradient(problem, X + t * ahead, warm=e.lower).value)
        for t in (step, -step)
    ]
    slope = (values[0] - values[1]) / (2 * step)
    assert np.isclose(slope, e.grad @ ahead, rtol=1e-4, atol=1e-4)


def test_warm_starts_along_a_path_need_no_interior_point():
    flows = Flows(3, side=8, goods=3, power=4)
    problem = flows.problem()
    e = bx.hypergradient(problem, X)
    for k in range(5):
        x = X + 0.01 * k
        e = bx.hypergradient(problem, x, warm=e.lower)
        assert int(e.lower.iterations.factorisations) <= 6
    cold = bx.hypergradient(problem, x)
    assert np.allclose(e.lower.y, cold.lower.y, atol=1e-9)
    assert np.allclose(e.grad, cold.grad, rtol=1e-8)


def test_a_demand_that_no_road_can_carry_is_infeasible():
    flows = Flows(4, side=8, goods=3)
    problem = flows.problem()
    eye = sp.eye_array(flows.size)
    narrow = bx.Polyhedron(
        A=sp.vstack([-eye, eye]), b=np.repeat([0.0, 0.01], flows.size),
        A_eq=flows.A_eq, b_eq=flows.b_eq,
    )  # fmt: skip
    problem = bx.Problem(problem.upper, problem.lower, narrow)
    e = bx.hypergradient(problem, X, throw=False)
    assert bx.status_name(e.status) == "infeasible"


def test_a_run_on_a_large_network_lowers_the_cost():
    flows = Flows(5, side=8, goods=3, power=4)
    domain = bx.Box(jnp.zeros(3), jnp.full(3, 4.0))
    problem = flows.problem(domain=domain)
    s = bx.solve(problem, bx.DSBLO(), jnp.zeros(3), key=0, num_steps=30)
    at = lambda x: float(bx.hypergradient(problem, x).value)
    assert s.value <= at(jnp.zeros(3)) + 1e-9
    assert np.isclose(s.value, at(s.x), rtol=1e-12)
    assert len(s.history) == 30
    for i in range(3):
        for side in (0.05, -0.05):
            x = jnp.clip(s.x.at[i].add(side), 0, 4)
            assert s.value <= at(x) + 1e-9


def test_many_instances_of_a_large_network_are_solved_one_by_one():
    flows = Flows(6, side=8, goods=3)
    problem = flows.problem(domain=bx.Box(jnp.zeros(2), jnp.full(2, 2.0)))
    x0s = jnp.array([[0.0, 0.0], [1.0, 1.0]])
    found = bx.solve_many([problem, problem], x0s, 0, num_steps=5)
    keys = jax.random.split(jax.random.key(0), 2)
    for x0, key, s in zip(x0s, keys, found, strict=True):
        one = bx.solve(problem, x0=x0, key=key, num_steps=5)
        assert np.isclose(s.value, one.value, rtol=1e-9)
