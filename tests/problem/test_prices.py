"""Leaders who see prices: multipliers in the upper objective and their derivatives."""

from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bilevax as bx

from ..zoo import DIFFERENCES, EXACT, IDENTITY

N, M = 5, 3


def instance(seed, bent=0.0, named=False, prices=True):
    """A random program; with `bent` its lower level is not quadratic."""
    rng = np.random.default_rng(seed)
    root = rng.normal(size=(N, N))
    H, C = jnp.asarray(root @ root.T + np.eye(N)), jnp.asarray(rng.normal(size=(N, M)))
    c, weights = jnp.asarray(3 * rng.normal(size=N)), jnp.asarray(rng.normal(size=30))
    A, B = rng.normal(size=(4, N)), rng.normal(size=(4, M))
    A_eq, B_eq = rng.normal(size=(1, N)), rng.normal(size=(1, M))
    inside, x = 0.1 * rng.normal(size=N), rng.normal(size=M)
    b = A @ inside + B @ x + rng.uniform(0.05, 0.4, 4)
    b_eq = A_eq @ inside + B_eq @ x
    if named:
        sets = bx.Intersection(
            lines=bx.Polyhedron(A=A, B=B, b=b), bounds=bx.Box(np.full(N, -0.7), 0.7),
            balance=bx.Polyhedron(A_eq=A_eq, B_eq=B_eq, b_eq=b_eq),
        )  # fmt: skip
    else:
        sets = bx.Polyhedron(A=A, B=B, b=b, A_eq=A_eq, B_eq=B_eq, b_eq=b_eq)

    def upper(x, y, prices):
        flat = jnp.concatenate([jnp.ravel(leaf) for leaf in jax.tree.leaves(prices)])
        scale = weights[: flat.size]
        return flat @ scale + 0.1 * jnp.sum(flat**2 * jnp.sin(scale)) + y @ y * x[0]

    def lower(x, y):
        quadratic = 0.5 * y @ H @ y + y @ (C @ x + c)
        return quadratic + bent * jnp.sum(jnp.exp(0.5 * y) * (1 + x[1] ** 2))

    return bx.Problem(upper, lower, sets, prices=prices), jnp.asarray(x), rng


def differences(problem, x, step=1e-5):
    F = lambda x: float(bx.hypergradient(problem, jnp.asarray(x)).value)
    x = np.asarray(x)
    eye = np.eye(x.size)
    return np.array([(F(x + step * e) - F(x - step * e)) / (2 * step) for e in eye])


@pytest.mark.parametrize("bent", [0.0, 0.7], ids=["quadratic", "bent"])
@pytest.mark.parametrize("named", [False, True], ids=["array", "named"])
@pytest.mark.parametrize("seed", range(3))
def test_the_gradient_through_prices_is_that_of_differences(seed, named, bent):
    problem, x, rng = instance(seed, bent, named)
    e = bx.hypergradient(problem, x)
    rows = np.asarray(e.lower.active)
    # Rows of both kinds, and inactive ones beside active ones.
    assert rows[-1]
    assert e.margin > 1e-3
    found = differences(problem, x)
    np.testing.assert_allclose(e.grad, found, rtol=DIFFERENCES, atol=DIFFERENCES)
    tilted = problem.perturbed(jnp.asarray(0.3 * rng.normal(size=N)))
    e = bx.hypergradient(tilted, x)
    np.testing.assert_allclose(
        e.grad, differences(tilted, x), rtol=DIFFERENCES, atol=DIFFERENCES
    )


def test_some_instances_have_active_inequalities_and_some_rows_that_are_not():
    seen = [
        np.asarray(bx.hypergradient(*instance(seed, named=True)[:2]).lower.active)
        for seed in range(3)
    ]
    lines = np.array([one[:4] for one in seen])
    bounds = np.array([one[4:14] for one in seen])
    for part in (lines, bounds):
        assert part.any()
        assert not part.all()


@pytest.mark.parametrize(
    "options",
    [
        dict(solver=bx.ActiveSet(), adjoint=bx.ConjugateGradient()),
        dict(solver=bx.InteriorPoint()),
        dict(solver=bx.SparseActiveSet()),
        dict(solver=bx.ActiveSet(), adjoint=bx.Neumann(terms=2000)),
    ],
    ids=["conjugate-gradient", "interior-point", "sparse", "neumann"],
)
def test_every_solver_and_adjoint_gives_the_same_gradient(options):
    problem, x, _ = instance(2, named=True)
    ours = bx.hypergradient(problem, x, **options)
    e = bx.hypergradient(problem, x)
    np.testing.assert_allclose(ours.grad, e.grad, rtol=1e2 * EXACT, atol=1e2 * EXACT)


def test_boxes_and_simplices_have_prices_without_a_matrix():
    target = jnp.asarray(np.random.default_rng(0).normal(size=6))
    w = jnp.arange(1.0, 7)
    for rows, solver, adjoint in (
        (bx.Box(0.0, np.full(6, 0.5)), bx.ProjectedGradient(), None),
        (bx.Box(0.0, np.full(6, 0.5)), bx.ClosedForm(2.0), bx.ScaledIdentity(2.0)),
        (bx.Simplex(6), bx.ProjectedGradient(), None),
    ):
        problem = bx.Problem(
            lambda x, y, p: jnp.sum(p[:6] * w) + jnp.sum(p[6:] ** 2) + y @ w * x[0],
            lambda x, y: jnp.sum((y - x * target) ** 2), rows,
            solver=solver, adjoint=adjoint, prices=True,
        )  # fmt: skip
        x = jnp.full(6, 1.1)
        e = bx.hypergradient(problem, x)
        np.testing.assert_allclose(
            e.grad, differences(problem, x), rtol=DIFFERENCES, atol=DIFFERENCES
        )


def test_it_compiles_and_maps():
    problem, x, rng = instance(2, named=True)
    xs = x + 0.01 * jnp.asarray(rng.normal(size=(4, M)))
    alone = [bx.hypergradient(problem, x) for x in xs]

    @jax.jit
    @jax.vmap
    def together(x):
        e = bx.hypergradient(problem, x, throw=False)
        return e.value, e.grad

    values, grads = together(xs)
    np.testing.assert_allclose(values, [e.value for e in alone], rtol=EXACT)
    np.testing.assert_allclose(grads, [e.grad for e in alone], atol=1e2 * EXACT)


def test_prices_are_differentiable_outputs():
    problem, x, _ = instance(0, named=True, prices=True)

    def F(x):
        y, prices = bx.solution_map(problem, x, prices=True)
        return problem.upper(x, y, prices)

    e = bx.hypergradient(problem, x)
    np.testing.assert_allclose(F(x), e.value, rtol=EXACT)
    np.testing.assert_allclose(jax.grad(F)(x), e.grad, atol=1e2 * EXACT)
    np.testing.assert_allclose(jax.jacfwd(F)(x), e.grad, atol=1e2 * EXACT)


def test_the_sign_of_an_equality_price_is_that_of_the_lagrangian():
    # min (y - 3)^2 / 2 with y = x has nu = 3 - x.
    problem = bx.Problem(
        lambda x, y, prices: prices[0],
        lambda x, y: 0.5 * jnp.sum((y - 3) ** 2),
        bx.Polyhedron(A_eq=np.eye(1), B_eq=-np.eye(1), b_eq=np.zeros(1)),
        prices=True,
    )
    e = bx.hypergradient(problem, jnp.array([1.0]))
    np.testing.assert_allclose(e.value, 2, atol=IDENTITY)
    np.testing.assert_allclose(e.grad, [-1], atol=IDENTITY)


def doubled(price, **options):
    """A row that is there twice; `price` makes a number of both multipliers."""
    return bx.Problem(
        lambda x, y, prices: price(prices) + 0 * jnp.sum(x),
        lambda x, y: 0.5 * jnp.sum((y - x) ** 2),
        bx.Polyhedron(A=np.array([[1.0, 0], [2.0, 0]]), b=np.array([1.0, 2.0])),
        prices=True, **options,
    )  # fmt: skip


@pytest.mark.parametrize(
    "price", [lambda p: p[0], lambda p: p[1] ** 2, lambda p: (p[0] - 2 * p[1]) ** 2]
)
@pytest.mark.parametrize("solver", [None, bx.SparseActiveSet()])
def test_prices_that_are_not_unique_are_flagged(price, solver):
    problem = doubled(price, solver=solver)
    e = bx.hypergradient(problem, jnp.array([3.0, 0.0]), throw=False)
    assert bx.status_name(e.status) == "prices_not_unique"
    assert not e.success
    assert np.isnan(e.value)
    assert np.isnan(e.grad).all()
    with pytest.raises(bx.BilevelError, match="multipliers are not unique"):
        bx.hypergradient(problem, jnp.array([3.0, 0.0]))
    # Where they are not tight nothing is wrong.
    assert bx.hypergradient(problem, jnp.array([0.5, 0.0])).success


@pytest.mark.parametrize("solver", [None, bx.SparseActiveSet()])
def test_what_all_multipliers_agree_on_is_a_price(solver):
    # The force of both rows together is x - 1, however they share it.
    problem = doubled(lambda p: p[0] + 2 * p[1], solver=solver)
    e = bx.hypergradient(problem, jnp.array([3.0, 0.0]))
    np.testing.assert_allclose(e.value, 2, atol=IDENTITY)
    np.testing.assert_allclose(e.grad, [1, 0], atol=EXACT)


def test_bounds_that_pin_a_variable_leave_other_prices_alone():
    problem = lambda price: bx.Problem(
        lambda x, y, prices: price(prices) + 0 * x[0],
        lambda x, y: 0.5 * jnp.sum((y - x) ** 2),
        bx.Intersection(
            sum=bx.Polyhedron(A_eq=np.ones((1, 2)), b_eq=np.ones(1)),
            bounds=bx.Box(np.array([0.0, -9.0]), np.array([0.0, 9.0])),
        ),
        prices=True,
    )
    x = jnp.array([3.0, 5.0])
    e = bx.hypergradient(problem(lambda p: p["sum"][0]), x)
    np.testing.assert_allclose(e.value, 4, atol=IDENTITY)
    np.testing.assert_allclose(e.grad, [0, 1], atol=EXACT)
    e = bx.hypergradient(problem(lambda p: p["bounds"]["upper"][0]), x, throw=False)
    assert bx.status_name(e.status) == "prices_not_unique"
    _, prices = bx.solution_map(problem(lambda p: 0.0), x, prices=True)
    np.testing.assert_allclose(prices["sum"], 4, atol=IDENTITY)
    assert np.isnan(prices["bounds"]["upper"][0])
    assert np.isfinite(prices["bounds"]["upper"][1])


def test_one_follower_without_unique_prices_does_not_spoil_a_batch():
    problem = doubled(lambda p: p[0])
    xs = jnp.array([[3.0, 0], [0.5, 0], [0.2, 1.0]])
    e = jax.vmap(lambda x: bx.hypergradient(problem, x, throw=False))(xs)
    names = list(bx.status_name(e.status))
    assert names == ["prices_not_unique", "successful", "successful"]
    np.testing.assert_allclose(e.value[1:], 0, atol=IDENTITY)


def followers(rng, upper=None):
    problem, x, _ = instance(0, named=True)

    def one(d):
        lower = lambda x, y: problem.lower(x, y) + d @ y
        return bx.Problem(problem.upper, lower, problem.constraints, prices=True)

    tilts = jnp.asarray(0.2 * rng.normal(size=(3, N)))
    return bx.Followers(one, tilts, upper=upper), x


def test_followers_show_their_prices():
    many, x = followers(np.random.default_rng(0))
    e = bx.hypergradient(many, x)
    each = [bx.hypergradient(many[i], x) for i in range(3)]
    np.testing.assert_allclose(
        e.value, np.mean([one.value for one in each]), rtol=EXACT
    )
    mean = np.mean([one.grad for one in each], axis=0)
    np.testing.assert_allclose(e.grad, mean, atol=1e2 * EXACT)
    # An upper level of all prices at once.
    joint = lambda x, ys, prices, data: jnp.prod(prices["balance"][:, 0]) + jnp.sum(ys)
    many, x = followers(np.random.default_rng(0), upper=joint)
    e = bx.hypergradient(many, x)
    np.testing.assert_allclose(
        e.grad, differences(many, x), rtol=DIFFERENCES, atol=DIFFERENCES
    )
    quality: Any = bx.hypergradient(many, x, quality=True).quality
    assert quality.bias < DIFFERENCES


def test_at_a_kink_the_value_is_right():
    # lambda = max(x - 1, 0)
    problem = bx.Problem(
        lambda x, y, prices: jnp.sum(prices), lambda x, y: 0.5 * jnp.sum((y - x) ** 2),
        bx.Polyhedron(A=np.eye(1), b=np.ones(1)), prices=True,
    )  # fmt: skip
    e = bx.hypergradient(problem, jnp.array([1.0]))
    assert bx.status_name(e.status) == "kink"
    np.testing.assert_allclose(e.value, 0, atol=IDENTITY)
    assert float(e.grad[0]) in (0.0, 1.0)


def test_runs_certificates_and_explanations_take_prices():
    # A leader who sells what the follower's capacity is worth: F = -(x (3 - x)).
    problem = bx.Problem(
        lambda x, y, prices: -jnp.sum(x * prices["capacity"]),
        lambda x, y: 0.5 * jnp.sum((y - 3) ** 2),
        bx.Intersection(
            capacity=bx.Polyhedron(A=np.eye(1), B=-np.eye(1), b=np.zeros(1))
        ),
        domain=bx.Box(np.zeros(1), np.full(1, 2.9)), prices=True,
    )  # fmt: skip
    x0 = jnp.array([0.4])
    for method in (bx.DSBLO(), bx.SSIGD(), bx.DSIGD(), bx.INGD(), bx.ZeroOrder()):
        s = bx.solve(problem, method, x0, key=jax.random.key(0), num_steps=80)
        np.testing.assert_allclose(s.x, [1.5], atol=1e-3)
        np.testing.assert_allclose(s.value, -2.25, atol=1e-5)
    c = bx.certify(problem, jnp.array([1.5]), 1e-3, key=jax.random.key(1))
    assert c.measure < 1e-2
    assert bx.moreau(problem, jnp.array([1.5]), 0.1) < 1e-5
    assert bx.explain(problem, x0).holds is not None


def test_methods_that_move_y_alone_refuse():
    problem, x, _ = instance(0)
    for method in (
        bx.LVHBA(),
        bx.BLOCC(),
        bx.IGBA(),
        bx.GAM(),
        bx.AiPOD(),
        bx.EAiPOD(),
    ):
        with pytest.raises(ValueError, match="takes? prices"):
            bx.solve(problem, method, x, key=jax.random.key(0), num_steps=2)
    for oracle in (bx.penalty_gradient, bx.equality_gradient):
        with pytest.raises(ValueError, match="takes prices"):
            oracle(problem, x)
    with pytest.raises(ValueError, match="prices, which move"):
        bx.hypergradient(problem, x, adjoint=bx.Danskin())


def test_the_bias_estimate_sees_errors_of_prices():
    problem, x, _ = instance(1, bent=0.5, named=True)
    quality: Any = bx.hypergradient(problem, x, quality=True).quality
    assert 0 < quality.bias < DIFFERENCES
    assert not quality.bias_is_bound


def test_a_missing_or_a_needless_flag_is_told():
    lower = lambda x, y: 0.5 * jnp.sum((y - x) ** 2)
    rows = bx.Polyhedron(A=np.eye(1), b=np.ones(1))
    with pytest.raises(ValueError, match="prices=True"):
        bx.hypergradient(
            bx.Problem(lambda x, y, p: jnp.sum(p), lower, rows), jnp.ones(1)
        )
    with pytest.raises(ValueError, match="`upper\\(x, y, prices\\)` could not"):
        bx.hypergradient(
            bx.Problem(lambda x, y: jnp.sum(y), lower, rows, prices=True), jnp.ones(1)
        )
    with pytest.raises(ValueError, match="True or False"):
        bx.Problem(lambda x, y: jnp.sum(y), lower, rows, prices=cast(Any, "all"))


def triangle(limit):
    """Three buses with equal lines; `x` is a mark-up at bus 2 and the load at bus 3."""
    out = np.array([[2.0, -1, -1], [-1, 2, -1], [-1, -1, 2]])
    sets = bx.Intersection(
        balance=bx.Polyhedron(
            A_eq={"output": -np.eye(3)[:, :2], "angle": out},
            B_eq={"load": np.eye(3)[:, 2:]}, b_eq=np.zeros(3),
            names_eq=["one", "two", "three"],
        ),
        reference=bx.Polyhedron(A_eq={"angle": np.eye(3)[:1]}, b_eq=np.zeros(1)),
        line=bx.Polyhedron(A={"angle": np.array([[1.0, 0, -1]])}, b=np.array([limit])),
        plants=bx.Polyhedron(A={"output": -np.eye(2)}, b=np.zeros(2)),
    )  # fmt: skip
    lower = lambda x, y: (
        0.5 * jnp.sum(jnp.array([2.0, 3.0]) * y["output"] ** 2)
        + x["mark-up"][0] * y["output"][1]
    )
    upper = lambda x, y, prices: prices["balance"] @ jnp.array([1.0, 10, 100])
    return bx.Problem(upper, lower, sets, prices=True)


def test_nodal_prices_of_three_buses_are_known_with_and_without_congestion():
    x = {"mark-up": jnp.array([0.5]), "load": jnp.array([9.0])}
    # A third of what goes from 2 to 3 passes by 1: 2 p1 + p2 <= 3 limit.
    e = bx.hypergradient(triangle(4.5), x)
    p1, p2 = 13.5 - 9, 18 - 13.5
    one, two = 2 * p1, 3 * p2 + 0.5
    wanted = [one, two, 2 * two - one]
    np.testing.assert_allclose(e.lower.y["output"], [p1, p2], atol=EXACT)
    np.testing.assert_allclose(e.lower.prices["balance"], wanted, atol=EXACT)
    # The line is worth what moving one unit from 2 to 1 saves, three times.
    np.testing.assert_allclose(e.lower.prices["line"], [3 * (two - one)], atol=EXACT)
    np.testing.assert_allclose(e.grad["mark-up"], [10 + 200], atol=1e2 * EXACT)
    slopes = np.array([-2, 6, 2 * 6 + 2])
    np.testing.assert_allclose(
        e.grad["load"], [slopes @ [1, 10, 100]], atol=1e2 * EXACT
    )
    # Without congestion one price holds everywhere.
    e = bx.hypergradient(triangle(50.0), x)
    price = 2 * (3 * 9.0 + 0.5) / 5
    np.testing.assert_allclose(e.lower.prices["balance"], price, atol=EXACT)
    np.testing.assert_allclose(e.grad["mark-up"], [111 * 2 / 5], atol=1e2 * EXACT)
    assert e.lower.row_names[-4:] == [
        "balance[one]", "balance[two]", "balance[three]", "reference[0]"
    ]  # fmt: skip
