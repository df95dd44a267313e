"""Boxes and simplices by products alone, small ones against the dense solver."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bilevax as bx

from .. import zoo

RNG = np.random.default_rng(4)
ROOT = RNG.normal(size=(8, 8))
H = jnp.asarray(ROOT @ ROOT.T + 0.5 * np.eye(8))
MIX = jnp.asarray(RNG.normal(size=(8, 3)))
SETS = {
    "box": bx.Box(np.full(8, -0.3), np.linspace(0.05, 0.4, 8)),
    "half-open box": bx.Box(np.full(8, -np.inf), np.linspace(0.05, 0.4, 8)),
    "pinned box": bx.Box(np.linspace(-0.2, 0.1, 8), np.full(8, 0.1)),
    "simplex": bx.Simplex(8, total=2.0),
    "simplices": bx.Simplex((2, 4), total=np.array([1.0, 0.5])),
}


def lower(x, y):
    y = y.reshape(-1)
    return 0.5 * y @ H @ y - y @ MIX @ x


def upper(x, y):
    return jnp.sum((y.reshape(-1) - 0.2) ** 2) + x @ x


@pytest.mark.parametrize("name", SETS)
def test_agreement_with_the_dense_solver(name):
    problem = bx.Problem(upper, lower, SETS[name])
    x = np.array([0.3, -0.5, 0.8])
    dense = bx.hypergradient(problem, x, solver=bx.ActiveSet())
    products = bx.hypergradient(problem, x, solver=bx.ProjectedGradient())
    np.testing.assert_allclose(products.lower.y, dense.lower.y, atol=zoo.EXACT)
    np.testing.assert_array_equal(products.lower.active, dense.lower.active)
    np.testing.assert_allclose(products.grad, dense.grad, atol=zoo.EXACT)
    np.testing.assert_allclose(products.margin, dense.margin, rtol=1e-6)
    assert products.lower.factor is None


def test_a_box_of_a_million_variables_with_x_a_pytree():
    n = 1_000_000
    weights = jnp.linspace(1, 5, n)
    wave = jnp.sin(1e-3 * jnp.arange(n))

    def lower(x, y):
        pull = x["slope"] * wave + x["shift"][0]
        chain = 0.1 * jnp.sum(y[1:] * y[:-1])
        return 0.5 * jnp.sum(weights * y**2) + chain - jnp.sum(pull * y)

    def upper(x, y):
        return jnp.mean((y - 0.3) ** 2) + x["slope"] ** 2

    problem = bx.Problem(upper, lower, bx.Box(jnp.full(n, -0.1), jnp.full(n, 0.2)))
    F = lambda slope: bx.hypergradient(
        problem, {"slope": slope, "shift": np.array([0.1])}, throw=False
    )
    e = F(1.5)
    assert e.lower.success, e.message
    assert e.lower.kkt_residual < 1e-12
    assert 0.1 < np.mean(e.lower.active) < 0.5
    slope = (F(1.5 + 1e-5).value - F(1.5 - 1e-5).value) / 2e-5
    # A million kinks: with this step a few of them are crossed.
    np.testing.assert_allclose(e.grad["slope"], slope, rtol=1e-4)


def test_a_separable_box_is_solved_by_projection():
    # The attack of adversarial training: <c, y> + lambda/2 |y - z|^2 over a box.
    c, z = jnp.asarray(RNG.normal(size=(2, 400)))
    problem = bx.Problem(
        lambda x, y: jnp.sum(jnp.cos(y)),
        lambda x, y: x * (c @ y) + 5.0 * jnp.sum((y - z) ** 2),
        bx.Box(np.full(400, -0.5), np.full(400, 0.5)),
    )
    e = bx.hypergradient(problem, 2.0)
    expected = jnp.clip(z - 2.0 * c / 10, -0.5, 0.5)
    np.testing.assert_allclose(e.lower.y, expected, atol=zoo.EXACT)
    free = jnp.abs(expected) < 0.5
    grad = jnp.sum(jnp.where(free, jnp.sin(expected) * c / 10, 0))
    np.testing.assert_allclose(e.grad, grad, rtol=zoo.EXACT)


def test_warm_start_and_accuracy():
    problem = bx.Problem(upper, lower, SETS["box"])
    solver = eqx.filter_jit(bx.ProjectedGradient(accuracy=1e-4))
    exact = bx.hypergradient(problem, np.array([0.3, -0.5, 0.8])).lower
    rough = solver(problem, jnp.array([0.3, -0.5, 0.8]))
    assert np.linalg.norm(rough.y - exact.y) <= 1e-4
    again = solver(problem, jnp.array([0.3, -0.5, 0.8]), rough)
    assert again.iterations.passes <= rough.iterations.passes


def test_empty_sets_have_a_status():
    x = np.array([0.3, -0.5, 0.8])
    for constraints in (bx.Box(np.ones(8), np.zeros(8)), bx.Simplex(8, total=-1.0)):
        problem = bx.Problem(upper, lower, constraints)
        for solver in (bx.ProjectedGradient(), bx.ActiveSet()):
            e = bx.hypergradient(problem, x, solver=solver, throw=False)
            assert bx.status_name(e.status) == "infeasible"
            assert np.isnan(e.value)


def test_coordinates_without_curvature_need_a_bound():
    n = 150
    box = bx.Box(-np.ones(n), np.ones(n))
    pinned = bx.Box(box.lower, box.upper.at[75:].set(-1))
    upper = lambda x, y: y[0] + jnp.sum(jnp.sin(2 * jnp.pi * y[75:]) ** 2)
    undecided = lambda x, y: 0.5 * jnp.sum((y[:75] - x[0]) ** 2)
    pushed = lambda x, y: undecided(x, y) + jnp.sum(y[75:])
    solver, x = bx.ProjectedGradient(), np.array([0.3])
    at = lambda lower, rows: bx.hypergradient(
        bx.Problem(upper, lower, rows), x, solver=solver, throw=False
    )
    assert bx.status_name(at(undecided, box).status) == "not_strongly_convex"
    for e in (at(pushed, box), at(undecided, pinned)):
        assert e.success
        np.testing.assert_allclose(e.value, 0.3)
        np.testing.assert_allclose(e.grad, 1)


def test_projection_onto_simplices_is_nearest():
    simplices = SETS["simplices"]
    y = jnp.asarray(RNG.normal(size=8))
    near = simplices.project(y)
    np.testing.assert_allclose(near.reshape(2, 4).sum(1), [1.0, 0.5], rtol=zoo.IDENTITY)
    problem = bx.Problem(
        lambda x, y: jnp.sum(y),
        lambda x, z: 0.5 * jnp.sum((z.reshape(-1) - y) ** 2),
        simplices,
    )
    exact = bx.hypergradient(problem, np.zeros(1)).lower.y
    np.testing.assert_allclose(near, exact.reshape(-1), atol=zoo.EXACT)


def test_the_million_never_forms_a_matrix():
    n = 100_000
    problem = bx.Problem(
        lambda x, y: jnp.sum(y),
        lambda x, y: 0.5 * jnp.sum((y - x) ** 2),
        bx.Box(jnp.zeros(n), jnp.ones(n)),
    )
    text = str(
        jax.make_jaxpr(lambda x: bx.hypergradient(problem, x, throw=False).grad)(0.5)
    )
    assert f"{n},{n}" not in text
    assert f"{2 * n},{n}" not in text


def test_a_box_of_moderate_size_is_solved_exactly_by_default():
    # The dual of a support vector machine: a kernel matrix, bounds, hardly any margin.
    rng = np.random.default_rng(0)
    points, label = rng.normal(size=(120, 3)), np.sign(rng.normal(size=120))
    distance = np.sum((points[:, None] - points) ** 2, axis=2)
    kernel = jnp.asarray(label[:, None] * label * np.exp(-distance / 4))
    problem = bx.Problem(
        lambda x, y: jnp.sum(y),
        lambda x, y: 0.5 * y @ kernel @ y + 5e-7 * y @ y - jnp.exp(x[0]) * jnp.sum(y),
        bx.Box(jnp.zeros(120), 3 * jnp.ones(120)),
    )
    e = bx.hypergradient(problem, jnp.zeros(1))
    y = np.asarray(e.lower.y)
    force = np.asarray(kernel @ e.lower.y + 1e-6 * e.lower.y - 1)
    low, high = np.split(np.asarray(e.lower.active | e.lower.weak), 2)
    np.testing.assert_allclose(y[low], 0, atol=1e-12)
    np.testing.assert_allclose(y[high], 3, rtol=1e-12)
    assert np.all(np.abs(force[~low & ~high]) < 1e-9)
    assert np.all(force[low] > -1e-9)
    assert np.all(force[high] < 1e-9)


def test_another_solver_takes_over_where_products_reach_their_limit():
    problem = bx.Problem(upper, lower, SETS["box"])
    x = np.array([0.3, -0.5, 0.8])
    short: Any = dict(max_steps=1, gradient_steps=1, cg_steps=1)
    alone = bx.ProjectedGradient(**short)
    given_up = bx.hypergradient(problem, x, solver=alone, throw=False)
    assert bx.status_name(given_up.status) == "iteration_limit"
    helped = bx.ProjectedGradient(**short, fallback=bx.ActiveSet())
    e = bx.hypergradient(problem, x, solver=helped)
    exact = bx.hypergradient(problem, x)
    np.testing.assert_allclose(e.lower.y, exact.lower.y, atol=zoo.EXACT)
    np.testing.assert_allclose(e.grad, exact.grad, atol=zoo.EXACT)


def test_a_stiff_half_hides_no_error_of_the_soft_half():
    rng, half = np.random.default_rng(0), 40
    t, c = rng.normal(size=(2, 2 * half))
    for stiffness in (1.0, 1e9, 1e12):
        weight = np.repeat([stiffness, 1.0], half)
        share = np.where(np.arange(2 * half - 1) == half - 1, 0, 0.1 * weight[1:])

        def g(x, y, weight=weight, share=share):
            u = y - 2 * t * x[0]
            return 0.5 * weight @ u**2 + share @ (u[1:] * u[:-1])

        box = bx.Box(-np.ones(2 * half), np.ones(2 * half))
        problem = bx.Problem(lambda x, y: c @ y, g, box)
        solve = lambda solver, p=problem: bx.hypergradient(
            p, np.ones(1), solver=solver, throw=False
        )
        e, exact = solve(bx.ProjectedGradient()), solve(bx.ActiveSet())
        if bx.status_name(e.status) != "iteration_limit":
            np.testing.assert_allclose(e.value, exact.value, rtol=1e-5)
