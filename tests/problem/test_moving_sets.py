"""Sets of which every part may be a function of `x`, and columns by name."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.sparse

import bilevax as bx

from ..zoo import DIFFERENCES, EXACT, IDENTITY

N, M = 5, 3


def levels(seed, bent=0.3):
    rng = np.random.default_rng(seed)
    root = rng.normal(size=(N, N))
    H, C = jnp.asarray(root @ root.T + np.eye(N)), jnp.asarray(rng.normal(size=(N, M)))
    c, p = jnp.asarray(3 * rng.normal(size=N)), jnp.asarray(rng.normal(size=N))

    def upper(x, y, *prices):
        sold = sum(jnp.sum(jnp.sin(leaf)) for leaf in jax.tree.leaves(prices))
        return jnp.sum(jnp.sin(y) * p) + 0.5 * x @ x + sold

    def lower(x, y):
        return 0.5 * y @ H @ y + y @ (C @ x + c) + bent * jnp.sum(jnp.exp(0.3 * y))

    return upper, lower, rng


def sets(rng):
    """Sets that move with `x` in every way, by name."""
    A, B = jnp.asarray(rng.normal(size=(4, N))), jnp.asarray(rng.normal(size=(4, M)))
    turn = jnp.asarray(0.2 * rng.normal(size=(4, N, M)))
    slack = jnp.asarray(rng.uniform(0.05, 0.5, 4))
    inside = jnp.asarray(0.1 * rng.normal(size=N))
    ones = jnp.ones((1, N))
    return {
        "b": bx.Polyhedron(A, b=lambda x: A @ inside + slack + 0.3 * jnp.sin(x[0])),
        "b beside B": bx.Polyhedron(
            A, B=B, b=lambda x: A @ inside + B @ x + slack * jnp.exp(0.2 * x[1])
        ),
        "A": bx.Polyhedron(
            lambda x: A + turn @ x, b=A @ inside + slack, A_eq=ones, b_eq=jnp.zeros(1)
        ),
        "A and b": bx.Polyhedron(
            lambda x: A + turn @ jnp.tanh(x),
            b=lambda x: (A + turn @ jnp.tanh(x)) @ inside + slack * (1 + x[2] ** 2),
            names=["a", "b", "c", "d"],
        ),
        "A_eq and b_eq": bx.Polyhedron(
            A_eq=lambda x: ones * (1 + 0.1 * x[0]) + 0.3 * x[1] * turn[:1, :, 0],
            b_eq=lambda x: jnp.sin(x[:1]), names_eq=["all"],
        ),
        "upper": bx.Box(-1.0, lambda x: 0.1 * jnp.exp(0.1 * x[0]) * jnp.arange(1.0, 6)),
        "both bounds": bx.Box(
            lambda x: -0.1 - 0.01 * x[0] * ones[0], lambda x: 0.2 + 0.1 * jnp.cos(x[0])
        ),
        "total": bx.Simplex(N, total=lambda x: 1 + jnp.sum(x**2)),
        "intersection": bx.Intersection(
            lines=bx.Polyhedron(A, b=lambda x: A @ inside + slack + 0.2 * x[0] ** 2),
            bounds=bx.Box(np.full(N, -0.6), lambda x: 0.5 + 0.1 * jnp.sin(x[1])),
            turning=bx.Polyhedron(A_eq=lambda x: ones + 0.1 * x[2], b_eq=jnp.zeros(1)),
        ),
    }  # fmt: skip


KINDS = tuple(sets(np.random.default_rng(0)))


def instance(kind, seed=0, **options):
    upper, lower, rng = levels(seed)
    x = jnp.asarray(0.5 * rng.normal(size=M))
    return bx.Problem(upper, lower, sets(rng)[kind], y0=jnp.zeros(N), **options), x


def differences(problem, x, step=1e-5):
    F = lambda x: float(bx.hypergradient(problem, jnp.asarray(x)).value)
    x, eye = np.asarray(x), np.eye(x.size)
    return np.array([(F(x + step * e) - F(x - step * e)) / (2 * step) for e in eye])


@pytest.mark.parametrize("prices", [False, True], ids=["y", "prices"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_gradient_is_that_of_differences(kind, prices):
    problem, x = instance(kind, prices=prices)
    e = bx.hypergradient(problem, x)
    assert np.asarray(e.lower.active).any()
    assert e.margin > 1e-4
    np.testing.assert_allclose(
        e.grad, differences(problem, x), rtol=DIFFERENCES, atol=DIFFERENCES
    )


@pytest.mark.parametrize("kind", ["A and b", "intersection", "upper"])
def test_programs_batches_and_solution_maps_agree(kind):
    problem, x = instance(kind)
    e = bx.hypergradient(problem, x)

    @jax.jit
    @jax.vmap
    def batch(x):
        e = bx.hypergradient(problem, x, throw=False)
        return e.value, e.grad

    values, grads = batch(jnp.stack([x, x + 0.01]))
    np.testing.assert_allclose(values[0], e.value, rtol=EXACT)
    np.testing.assert_allclose(grads[0], e.grad, atol=1e2 * EXACT)
    F = lambda x: problem.upper(x, bx.solution_map(problem, x))
    np.testing.assert_allclose(jax.grad(F)(x), e.grad, atol=1e2 * EXACT)


@pytest.mark.parametrize("kind", ["b", "A and b", "intersection"])
@pytest.mark.parametrize(
    "solver", [bx.InteriorPoint(), bx.SparseActiveSet()], ids=lambda s: type(s).__name__
)
def test_every_solver_takes_them(kind, solver):
    problem, x = instance(kind)
    e, other = bx.hypergradient(problem, x), bx.hypergradient(problem, x, solver=solver)
    np.testing.assert_allclose(other.grad, e.grad, atol=1e3 * EXACT)


def test_boxes_that_move_take_products_and_projections():
    target = jnp.asarray(np.random.default_rng(1).normal(size=6))
    top = lambda x: 0.3 * jnp.exp(x[0]) * jnp.ones(6)
    lower = lambda x, y: jnp.sum((y - 2 * target) ** 2)
    upper = lambda x, y: jnp.sum(y * jnp.arange(6.0)) + x[0] ** 2
    x, exact = jnp.array([0.2]), None
    cases: Any = (
        {}, dict(solver=bx.ProjectedGradient()),
        dict(solver=bx.ClosedForm(2.0), adjoint=bx.ScaledIdentity(2.0)),
    )  # fmt: skip
    for options in cases:
        problem = bx.Problem(upper, lower, bx.Box(np.full(6, -0.5), top), **options)
        e = bx.hypergradient(problem, x)
        exact = differences(problem, x) if exact is None else exact
        np.testing.assert_allclose(e.grad, exact, rtol=DIFFERENCES)


def test_derivatives_reach_data_that_functions_hold():
    A = jnp.asarray(np.random.default_rng(0).normal(size=(2, 2)))

    def F(scale):
        rows = bx.Polyhedron(A, b=lambda x: scale * jnp.sin(x))
        problem = bx.Problem(
            lambda x, y: y @ y, lambda x, y: 0.5 * jnp.sum((y - 3) ** 2), rows
        )
        return jnp.sum(bx.solution_map(problem, jnp.array([0.5, 1.0])) ** 3)

    slope = (F(1 + 1e-5) - F(1 - 1e-5)) / 2e-5
    np.testing.assert_allclose(jax.grad(F)(1.0), slope, rtol=DIFFERENCES)


def test_followers_may_have_sets_that_move():
    upper, lower, rng = levels(0)
    A = jnp.asarray(rng.normal(size=(3, N)))

    def instance(d):
        rows = bx.Polyhedron(A, b=lambda x: 0.1 + d * jnp.cosh(x))
        return bx.Problem(upper, lower, rows)

    data, x = jnp.array([0.1, 0.2]), jnp.asarray(0.5 * rng.normal(size=M))
    many = bx.Followers(instance, data)
    e = bx.hypergradient(many, x)
    each = [bx.hypergradient(many[i], x).grad for i in range(2)]
    np.testing.assert_allclose(e.grad, np.mean(each, axis=0), atol=1e2 * EXACT)


def test_runs_leave_where_the_set_is_empty_and_end_at_the_optimum():
    # y <= 1 - x^2 and y >= 0 need |x| <= 1; F = (x - 0.5)^2 - y with y = 1 - x^2.
    rows = bx.Intersection(
        cap=bx.Polyhedron(A=np.ones((1, 1)), b=lambda x: 1 - x**2),
        floor=bx.Polyhedron(A=-np.ones((1, 1)), b=np.zeros(1)),
    )
    problem = bx.Problem(
        lambda x, y: jnp.sum((x - 0.5) ** 2 - y),
        lambda x, y: 0.5 * jnp.sum((y - 3) ** 2), rows,
    )  # fmt: skip
    e = bx.hypergradient(problem, jnp.array([2.0]), throw=False)
    assert bx.status_name(e.status) == "infeasible"
    s = bx.solve(problem, bx.DSBLO(), jnp.array([2.0]), key=jax.random.key(0))
    np.testing.assert_allclose(s.x, [0.25], atol=1e-5)


def test_the_theorem_that_still_covers_it_is_named():
    problem, x = instance("A and b")
    text = str(bx.explain(problem, x))
    assert "implicit function theorem" in text
    linear = bx.Polyhedron(A=np.eye(N), B=np.zeros((N, M)), b=np.ones(N))
    problem = bx.Problem(problem.upper, problem.lower, linear)
    assert "implicit function theorem" not in str(bx.explain(problem, x))


def test_methods_on_rows_and_the_theory_refuse():
    problem, x = instance("b")
    for method in (bx.LVHBA(), bx.BLOCC(), bx.IGBA(), bx.GAM(), bx.AiPOD()):
        with pytest.raises(ValueError, match="linear in `x`"):
            bx.solve(problem, method, x, key=jax.random.key(0), num_steps=2)
    with pytest.raises(ValueError, match="linear in `x`"):
        bx.penalty_gradient(problem, x)


def test_columns_by_name_are_those_of_the_raveled_dictionary():
    rng = np.random.default_rng(0)
    # The order of names is not that of the alphabet, nor is every entry there.
    price, flow = rng.normal(size=(2, 2)), rng.normal(size=(2, 3))
    toll, b = rng.normal(size=(2, 2)), np.full(2, 0.1)
    y0 = {"price": jnp.zeros(2), "flow": jnp.zeros(3), "other": jnp.zeros(())}
    named = bx.Polyhedron(
        A={"price": price, "flow": scipy.sparse.csr_array(flow)},
        B={"toll": toll}, b=b,
    )  # fmt: skip
    plain = bx.Polyhedron(
        A=np.concatenate([flow, np.zeros((2, 1)), price], axis=1),
        B=np.concatenate([np.zeros((2, 1)), toll], axis=1), b=b,
    )  # fmt: skip
    x = {"toll": jnp.array([0.3, -0.2]), "area": jnp.array([1.0])}

    def lower(x, y):
        flat = jnp.concatenate([jnp.ravel(leaf) for leaf in jax.tree.leaves(y)])
        return 0.5 * jnp.sum((flat - 1) ** 2) + x["area"][0] * jnp.sum(y["price"])

    upper = lambda x, y: jnp.sum(y["flow"] ** 2) + x["area"][0] * y["other"]
    ours, theirs = (
        bx.hypergradient(bx.Problem(upper, lower, rows, y0=y0), x)
        for rows in (named, plain)
    )
    assert np.asarray(ours.lower.active).any()
    np.testing.assert_allclose(ours.value, theirs.value, rtol=IDENTITY)
    for name in x:
        np.testing.assert_allclose(ours.grad[name], theirs.grad[name], atol=IDENTITY)


def test_names_tell_the_structure_of_y():
    sets = bx.Intersection(
        flows=bx.Polyhedron(A={"flow": np.eye(2)}, b=np.ones(2)),
        prices=bx.Polyhedron(A={"price": np.eye(1)}, b=np.ones(1)),
    )
    problem = bx.Problem(
        lambda x, y: jnp.sum(y["flow"]) + y["price"][0],
        lambda x, y: jnp.sum((y["flow"] - x) ** 2) + 0.5 * (y["price"][0] - 3) ** 2,
        sets,
    )  # fmt: skip
    e = bx.hypergradient(problem, jnp.array(2.0))
    np.testing.assert_allclose(e.lower.y["flow"], [1, 1], atol=IDENTITY)
    np.testing.assert_allclose(e.lower.prices["prices"], [2], atol=IDENTITY)


def problem_with(rows, y0=None):
    return bx.Problem(lambda x, y: 0.0, lambda x, y: 0.0, rows, y0=y0)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: bx.Polyhedron(lambda x: x, b=lambda x: x), "rows is unknown"),
        (
            lambda: problem_with(bx.Polyhedron(lambda x: x, b=np.ones(2))),
            "`y0` is needed",
        ),
        (lambda: problem_with(bx.Box(lambda x: x, 1.0)), "`y0` is needed"),
        (
            lambda: bx.Polyhedron(np.eye(2), B=lambda x: x, b=np.ones(2)),
            "let `b` be a function",
        ),
        (
            lambda: bx.hypergradient(
                problem_with(bx.Polyhedron(np.eye(2), b=lambda x: jnp.ones(3))), 1.0
            ),
            "`b(x)` must have one entry per row; expected 2, got 3",
        ),
        (
            lambda: bx.hypergradient(
                problem_with(bx.Polyhedron(np.eye(2), b=lambda x: x["a"])), 1.0
            ),
            "`b(x)` could not be evaluated",
        ),
        (
            lambda: problem_with(
                bx.Polyhedron(A={"floe": np.eye(2)}, b=np.ones(2)),
                y0={"flow": np.ones(2)},
            ),
            "columns for 'floe', which is not in `y`; there are 'flow'",
        ),
        (
            lambda: problem_with(
                bx.Polyhedron(A={"flow": np.eye(2)}, b=np.ones(2)), y0=np.ones(2)
            ),
            "`y` has no names",
        ),
        (
            lambda: problem_with(
                bx.Polyhedron(A={"flow": np.eye(2)}, b=np.ones(2)),
                y0={"flow": np.ones(3)},
            ),
            "`A['flow']` must have one column per entry of `y['flow']`; expected 3",
        ),
        (
            lambda: bx.hypergradient(
                problem_with(
                    bx.Polyhedron(A=np.eye(2), B={"toll": np.eye(2)}, b=np.ones(2))
                ),
                {"tol": np.ones(2)},
            ),
            "columns for 'toll', which is not in `x`",
        ),
        (
            lambda: bx.Problem(
                lambda x, y: 0.0, lambda x, y: 0.0, bx.Box(0.0, np.ones(2)),
                domain=bx.Box(0.0, lambda x: x),
            ),
            "takes no functions of `x`",
        ),
    ],
)  # fmt: skip
def test_mistakes_are_told(make, text):
    with pytest.raises(ValueError) as told:  # noqa: PT011
        make()
    assert text in str(told.value)
