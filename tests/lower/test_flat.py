"""Lower levels without curvature along coordinates that bounds hold."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.optimize import Bounds, minimize

import bilevax as bx

DEMAND = 10.0


class Delay(eqx.Module):
    """Costs `t (1 + 0.15 (v / c)^power)` per road, and the toll `x`."""

    free: jax.Array
    capacity: jax.Array
    power: int = eqx.field(static=True)

    def __call__(self, x, y):
        congested = 0.15 * y * (y / self.capacity) ** self.power / (self.power + 1)
        return jnp.sum((self.free + x) * y + self.free * congested)


def income(x, y):
    return -jnp.sum(x * y)


def roads(seed, power=4, count=6):
    """Flows on parallel roads."""
    rng = np.random.default_rng(seed)
    free, capacity = rng.uniform(1, 3, count), rng.uniform(2, 6, count)
    delay = Delay(jnp.asarray(free), jnp.asarray(capacity), power)
    rows = bx.Polyhedron(
        A=-np.eye(count), b=np.zeros(count), A_eq=np.ones((1, count)), b_eq=[DEMAND]
    )
    problem = bx.Problem(income, delay, rows)
    return problem, jnp.asarray(rng.uniform(0, 2, count))


@eqx.filter_jit
def cost_slope(problem, x, y):
    return jax.grad(problem.lower, argnums=1)(x, y)


@eqx.filter_jit
def value_at(problem, x):
    return bx.hypergradient(problem, x, throw=False).value


def reference(problem, x):
    """Flows by a general solver, from a point inside."""
    found = minimize(
        lambda y: float(problem.lower(x, y)),
        np.full(x.size, DEMAND / x.size),
        jac=lambda y: np.asarray(cost_slope(problem, x, y)),
        method="SLSQP",
        bounds=Bounds(0, np.inf),
        constraints=[dict(type="eq", fun=lambda y: y.sum() - DEMAND)],
        options=dict(ftol=1e-14, maxiter=500),
    )
    return found.x


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("power", [2, 4])
def test_roads_that_nobody_takes_are_no_obstacle(seed, power):
    problem, x = roads(seed, power)
    e = bx.hypergradient(problem, x)
    assert bx.status_name(e.status) == "successful"
    flows = np.asarray(e.lower.y)
    np.testing.assert_allclose(flows, reference(problem, x), atol=1e-5)
    assert np.sum(flows < 1e-12) >= 1
    assert float(e.lower.kkt_residual) < 1e-9

    value, h = lambda x: value_at(problem, x), 1e-5
    slope = [(value(x + h * d) - value(x - h * d)) / (2 * h) for d in np.eye(x.size)]
    np.testing.assert_allclose(e.grad, slope, atol=1e-6)


@pytest.mark.parametrize("tiny", [1e-14, -1e-15, 1e-9])
def test_a_start_that_is_almost_flat_is_no_trap(tiny):
    problem, x = roads(2)
    start = jnp.full(6, tiny).at[0].set(DEMAND)
    near = bx.Problem(problem.upper, problem.lower, problem.constraints, y0=start)
    e, expected = bx.hypergradient(near, x), bx.hypergradient(problem, x)
    np.testing.assert_allclose(e.lower.y, expected.lower.y, atol=1e-8)
    np.testing.assert_allclose(e.grad, expected.grad, atol=1e-6)


def test_a_warm_start_follows_a_road_that_comes_into_use():
    problem, x = roads(0)
    e = bx.hypergradient(problem, x)
    unused = int(np.argmin(np.asarray(e.lower.y) - np.asarray(e.lower.multipliers[:6])))
    for toll in np.linspace(float(x[unused]), -3.0, 12):
        x = x.at[unused].set(toll)
        cold, e = (
            bx.hypergradient(problem, x),
            bx.hypergradient(problem, x, warm=e.lower),
        )
        np.testing.assert_allclose(e.lower.y, cold.lower.y, atol=1e-8)
        np.testing.assert_allclose(e.grad, cold.grad, atol=1e-6)
    assert e.lower.y[unused] > 1


def test_a_batch_keeps_flat_and_bent_members_apart():
    problem, x = roads(3)
    xs = jnp.stack([x, x + 0.3, jnp.full_like(x, jnp.nan), x.at[0].add(1.0)])
    both = jax.vmap(lambda x: bx.hypergradient(problem, x, throw=False))(xs)
    assert both.success.tolist() == [True, True, False, True]
    for i in (0, 1, 3):
        alone = bx.hypergradient(problem, xs[i])
        np.testing.assert_allclose(both.grad[i], alone.grad, rtol=1e-9, atol=1e-12)


def test_a_linear_program_has_an_answer_at_its_vertex():
    problem = bx.Problem(
        lambda x, y: jnp.sum(x * y),
        lambda x, y: jnp.sum((jnp.array([1.0, 2.0]) + x) * y),
        bx.Polyhedron(A=[[-1.0, 0.0], [0.0, -1.0], [-1.0, -1.0]], b=[0.0, 0.0, -1.0]),
    )
    e = bx.hypergradient(problem, jnp.array([0.1, 0.2]))
    np.testing.assert_allclose(e.lower.y, [1, 0], atol=1e-12)
    np.testing.assert_allclose(e.grad, [1, 0], atol=1e-12)
    # Both ways cost the same: any of them is an answer.
    tie = bx.hypergradient(problem, jnp.array([1.1, 0.1]), throw=False)
    assert not tie.success


@pytest.mark.parametrize("start", [0.0, 1.0])
def test_a_coordinate_that_nothing_decides_is_refused(start):
    problem = bx.Problem(
        lambda x, y: jnp.sum(y),
        lambda x, y: 0.5 * y[0] ** 2 - x[0] * y[0],
        bx.Polyhedron(A=-np.eye(2), b=np.zeros(2)),
        y0=jnp.array([1.0, start]),
    )
    e = bx.hypergradient(problem, jnp.array([1.0]), throw=False)
    assert bx.status_name(e.status) == "not_strongly_convex"
    assert np.isnan(e.value)


def test_a_tie_of_a_flat_road_is_a_kink_with_a_value():
    # At zero force the flow is zero, but its derivative is not finite on one side.
    problem = bx.Problem(
        lambda x, y: y[0] + y[1],
        lambda x, y: 0.25 * y[0] ** 4 - x[0] * y[0] + 0.5 * (y[1] - x[0]) ** 2,
        bx.Polyhedron(A=-np.eye(2), b=np.zeros(2)),
    )
    e = bx.hypergradient(problem, jnp.array([0.0]), throw=False)
    assert bx.status_name(e.status) == "kink"
    np.testing.assert_allclose(e.value, 0, atol=1e-9)
    e = bx.hypergradient(problem, jnp.array([-1.0]))
    np.testing.assert_allclose(e.lower.y, 0, atol=1e-12)


def test_an_indefinite_hessian_is_not_taken_for_a_flat_one():
    problem = bx.Problem(
        lambda x, y: jnp.sum(y),
        lambda x, y: y[0] * y[1] + 0.5 * y[1] ** 2 + x[0] * y[0],
        bx.Polyhedron(A=-np.eye(2), b=np.zeros(2)),
    )
    e = bx.hypergradient(problem, jnp.array([1.0]), throw=False)
    assert bx.status_name(e.status) == "not_strongly_convex"


def test_tolls_on_congested_roads_are_set():
    problem, _ = roads(1)
    tolled = bx.Problem(
        problem.upper, problem.lower, problem.constraints,
        domain=bx.Box(jnp.zeros(6), jnp.full(6, 3.0)),
    )  # fmt: skip
    s = bx.solve(tolled, bx.DSBLO(), jnp.ones(6), key=jax.random.key(0))
    assert s.success
    # Captive travellers pay the largest toll on every road they take.
    assert s.value < -29.99
