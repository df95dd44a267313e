"""The default solver: its safeguard, its warm starts, its classification."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bilevax as bx

from .. import zoo
from ..quadratics import random_quadratic

# On this program the bare primal–dual active-set iteration cycles for ever.
CYCLING = dict(
    H=np.array([[4.0, 8.0, -4.0], [8.0, 17.0, -10.0], [-4.0, -10.0, 12.0]]),
    c=np.array([1.0, -5.0, -3.0]),
    A=np.array([[3.0, -2.0, -3.0], [3.0, 3.0, -2.0], [-2.0, 3.0, 1.0]]),
    b=np.array([3.0, -3.0, -3.0]),
)

solve = eqx.filter_jit(bx.ActiveSet())


def bare_iteration(H, c, A, b, active, num_steps):
    """Solve on the active set, drop negative multipliers, add violated rows."""
    visited = []
    for _ in range(num_steps):
        visited.append(tuple(active.tolist()))
        n, k = len(c), int(active.sum())
        matrix = np.zeros((n + k, n + k))
        matrix[:n, :n], matrix[:n, n:], matrix[n:, :n] = H, A[active].T, A[active]
        z = np.linalg.solve(matrix, np.concatenate([-c, b[active]]))
        multipliers = np.zeros(len(b))
        multipliers[active] = z[n:]
        active = np.where(active, multipliers > 0, A @ z[:n] > b)
    return visited


def cycling_problem():
    data = CYCLING
    return bx.Problem(
        lambda x, y: jnp.sum(y),
        zoo.QuadraticLower(
            jnp.asarray(data["H"]), jnp.zeros((3, 1)), jnp.asarray(data["c"])
        ),
        bx.Polyhedron(data["A"], b=data["b"]),
    )


def test_the_bare_iteration_cycles_and_the_safeguard_does_not():
    visited = bare_iteration(**CYCLING, active=np.zeros(3, bool), num_steps=60)
    assert len(set(visited)) < 10
    assert visited[-1] in visited[:-1]
    assert visited[-1] != visited[-2]

    problem, x = cycling_problem(), jnp.zeros(1)
    cold = solve(problem, x)
    assert cold.success
    # The same start as the bare iteration: the fast path fails, the safeguard solves.
    warm = eqx.tree_at(
        lambda s: (s.y, s.multipliers, s.active),
        cold,
        (jnp.zeros(3), jnp.zeros(3), jnp.zeros(3, bool)),
    )
    guarded = solve(problem, x, warm)
    assert guarded.success
    assert guarded.iterations.safeguard > 0
    np.testing.assert_allclose(guarded.y, cold.y, atol=zoo.IDENTITY)
    gradient = CYCLING["H"] @ cold.y + CYCLING["c"]
    stationarity = gradient + cold.multipliers @ CYCLING["A"]
    np.testing.assert_allclose(stationarity, 0, atol=1e-11)


def test_a_warm_start_needs_one_pass_and_no_factorisation():
    problem = zoo.t2()
    first = solve(problem, jnp.full(10, -0.5))
    second = solve(problem, jnp.full(10, -0.49), first)
    assert second.success
    assert second.iterations.passes == 1
    assert second.iterations.factorisations == 0
    np.testing.assert_allclose(
        second.y, solve(problem, jnp.full(10, -0.49)).y, atol=zoo.IDENTITY
    )


def test_a_warm_start_changes_no_answer():
    # From far away, from a failure, and from a problem with another Hessian.
    rng = np.random.default_rng(3)
    many = [random_quadratic(rng, 6, 8, 3, "plain", 1e4) for _ in range(8)]
    arrays = [{k: jnp.asarray(v) for k, v in d.items()} for d in many]
    problems = [zoo.quadratic_problem(d) for d in arrays]
    failed = solve(problems[0], jnp.full(3, jnp.nan))
    assert bx.status_name(failed.status) == "non_finite"
    warm = failed
    for problem, data in zip(problems, arrays, strict=True):
        cold = solve(problem, data["x"])
        for start in (warm, failed):
            out = solve(problem, data["x"], start)
            assert out.success
            np.testing.assert_allclose(out.y, cold.y, rtol=zoo.REFERENCE)
            np.testing.assert_array_equal(out.active, cold.active)
        warm = cold


def test_a_warm_start_notices_a_new_hessian_where_y_stands_still():
    # y* = 0 for every x, but the curvature there is x.
    problem = bx.Problem(
        lambda x, y: jnp.sum(y) + x**2,
        lambda x, y: 0.5 * x * jnp.sum(y**2),
        bx.Polyhedron(A=np.ones((1, 2)), b=np.ones(1)),
    )
    first = bx.hypergradient(problem, 1.0)
    again = bx.hypergradient(problem, 50.0, warm=first.lower, quality=True)
    assert again.lower.iterations.factorisations == 1
    np.testing.assert_allclose(again.grad, 100.0, rtol=zoo.EXACT)


def test_multipliers_follow_the_stated_signs_and_order():
    # min (y1 - 2)^2/2 + y2^2/2 with y1 <= 1 and y1 + y2 = 2.
    problem = bx.Problem(
        lambda x, y: jnp.sum(y),
        lambda x, y: 0.5 * (y[0] - 2) ** 2 + 0.5 * y[1] ** 2,
        bx.Polyhedron(
            A=np.array([[1.0, 0.0]]),
            b=np.ones(1),
            A_eq=np.ones((1, 2)),
            b_eq=np.array([2.0]),
        ),
    )
    e = bx.hypergradient(problem, np.zeros(1))
    np.testing.assert_allclose(e.lower.y, [1, 1], atol=zoo.IDENTITY)
    # grad g + lam (1, 0) + nu (1, 1) = 0 at y = (1, 1): nu = -1, lam = 2.
    np.testing.assert_allclose(e.lower.multipliers, [2, -1], atol=zoo.IDENTITY)
    np.testing.assert_array_equal(e.lower.active, [True, True])


def test_infinite_bounds_and_zero_rows_are_kept_and_idle():
    problem = bx.Problem(
        lambda x, y: jnp.sum(y),
        zoo.Clipped(),
        bx.Polyhedron(A=np.array([[1.0], [0.0], [-1.0]]), b=np.array([0.0, 0, np.inf])),
    )
    e = bx.hypergradient(problem, np.ones(1))
    np.testing.assert_allclose(e.lower.y, [0], atol=zoo.IDENTITY)
    np.testing.assert_allclose(e.lower.multipliers, [1, 0, 0], atol=zoo.IDENTITY)
    np.testing.assert_array_equal(e.lower.active, [True, False, False])
    assert e.lower.slack[2] == np.inf


@pytest.mark.parametrize("scale", [1e-9, 1.0, 1e9])
def test_scaling_rows_or_the_objective_changes_nothing(scale):
    data = random_quadratic(np.random.default_rng(5), 6, 8, 3, "plain", 1e2)
    reference = zoo.quadratic_problem({k: jnp.asarray(v) for k, v in data.items()})
    expected = solve(reference, data["x"])
    rows = {k: jnp.asarray(data[k] * scale) for k in ("A", "B", "b")}
    force = {k: jnp.asarray(data[k] * scale) for k in ("H", "C", "c")}
    for change in (rows, force):
        problem = zoo.quadratic_problem({**data, **change} | {})
        problem = jax.tree.map(jnp.asarray, problem)
        out = solve(problem, jnp.asarray(data["x"]))
        assert out.success
        np.testing.assert_allclose(out.y, expected.y, rtol=zoo.EXACT)
        np.testing.assert_array_equal(out.active, expected.active)


def test_the_fall_back_of_one_member_leaves_the_batch_alone():
    problem = cycling_problem()
    cold = solve(problem, jnp.zeros(1))
    start = eqx.tree_at(
        lambda s: (s.y, s.multipliers, s.active),
        cold,
        (jnp.zeros(3), jnp.zeros(3), jnp.zeros(3, bool)),
    )
    stacked = jax.tree.map(lambda a, b: jnp.stack([a, b]), cold, start)
    out = jax.vmap(lambda w: bx.ActiveSet()(problem, jnp.zeros(1), w))(stacked)
    assert np.all(out.success)
    np.testing.assert_array_equal(out.iterations.safeguard > 0, [False, True])
    np.testing.assert_allclose(out.y[0], out.y[1], atol=zoo.IDENTITY)


def test_the_fall_back_stays_inside_its_loop():
    # XLA likes to move work out of loops, and then every batch would pay for it.
    rng = np.random.default_rng(5)
    many = [random_quadratic(rng, 4, 5, 2, "plain", 10.0) for _ in range(3)]
    data = {k: jnp.asarray(np.stack([d[k] for d in many])) for k in many[0]}
    solver = bx.ActiveSet()
    run = jax.vmap(lambda d: solver(zoo.quadratic_problem(d), d["x"]).y)
    # With all passes, which the suite does without.
    program = jax.jit(run).lower(data).compile({"xla_disable_hlo_passes": ""})
    text = program.as_text() or ""
    entry = text[text.index("ENTRY") :].split("\n\n")[0]
    assert "lapack" in text
    assert "lapack" not in entry


def test_huge_forces_at_a_vertex_move_nothing():
    """All rows nearly balance forces of 1e23, but only one vertex is feasible."""
    A = np.array([[-0.333, 1.0], [1.0, -0.333], [-1.0, 0.0], [0.0, -1.0]])
    b = np.array([2.0, 2.0, 0.0, 0.0])
    H = jnp.array([[1.0, 3.0], [3.0, 10.0]])
    problem = bx.Problem(
        lambda x, y: jnp.sum(y),
        lambda x, y: 0.5 * y @ H @ y - x @ y,
        bx.Polyhedron(A=A, b=b),
    )
    vertex = np.linalg.solve(A[:2], b[:2])
    for x in ([1e15, 1e15], [1e12, 2e12], [229.6, 1064.8]):
        lower = bx.hypergradient(problem, jnp.array(x)).lower
        np.testing.assert_allclose(lower.y, vertex, rtol=zoo.EXACT)
        assert list(lower.active) == [True, True, False, False]
    # Beyond what digits can tell it must at least say so.
    e = bx.hypergradient(problem, jnp.array([2.46e23, 1.9e23]), throw=False)
    assert not e.success or np.allclose(e.lower.y, vertex, rtol=zoo.EXACT)
