"""Sets that hold at once, with names."""

from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.sparse

import bilevax as bx

from ..zoo import EXACT, IDENTITY

# Its stub takes one diagonal.
diagonals: Any = scipy.sparse.diags_array


def parts(seed, n=6, m=3):
    """Rows of a random feasible program, once apart and once as one polyhedron."""
    rng = np.random.default_rng(seed)
    A, B = rng.normal(size=(4, n)), rng.normal(size=(4, m))
    A_eq, B_eq = rng.normal(size=(1, n)), rng.normal(size=(1, m))
    C, C_eq = rng.normal(size=(2, n)), rng.normal(size=(1, n))
    low, high = -rng.uniform(0.1, 0.6, n), rng.uniform(0.1, 0.6, n)
    inside = rng.uniform(0.5 * low, 0.5 * high)
    x = rng.normal(size=m)
    slack = rng.uniform(0, 0.3, 4)
    b, b_eq = A @ inside + B @ x + slack, A_eq @ inside + B_eq @ x
    c, c_eq = C @ inside + 0.1, C_eq @ inside
    sets = dict(
        lines=bx.Polyhedron(A=A, B=B, b=b),
        bounds=bx.Box(low, high),
        balance=bx.Polyhedron(A_eq=A_eq, B_eq=B_eq, b_eq=b_eq),
        both=bx.Polyhedron(A=C, b=c, A_eq=C_eq, b_eq=c_eq),
    )
    eye, zeros = np.eye(n), np.zeros
    whole = bx.Polyhedron(
        A=np.concatenate([A, -eye, eye, C]),
        B=np.concatenate([B, zeros((2 * n + 2, m))]),
        b=np.concatenate([b, -low, high, c]),
        A_eq=np.concatenate([A_eq, C_eq]),
        B_eq=np.concatenate([B_eq, zeros((1, m))]),
        b_eq=np.concatenate([b_eq, c_eq]),
    )
    return sets, whole, jnp.asarray(x), rng


def levels(rng, n=6, m=3):
    root = rng.normal(size=(n, n))
    H, C = jnp.asarray(root @ root.T + np.eye(n)), jnp.asarray(rng.normal(size=(n, m)))
    c, p = jnp.asarray(3 * rng.normal(size=n)), jnp.asarray(rng.normal(size=n))
    upper = lambda x, y: jnp.sum(jnp.sin(y) * p) + 0.5 * x @ x
    lower = lambda x, y: 0.5 * y @ H @ y + y @ (C @ x + c)
    return upper, lower


SOLVERS = (bx.ActiveSet(), bx.InteriorPoint(), bx.SparseActiveSet())


@pytest.mark.parametrize("solver", SOLVERS, ids=lambda s: type(s).__name__)
@pytest.mark.parametrize("seed", range(3))
def test_an_intersection_is_the_polyhedron_of_all_rows(solver, seed):
    sets, whole, x, rng = parts(seed)
    upper, lower = levels(rng)
    e = bx.hypergradient(
        bx.Problem(upper, lower, bx.Intersection(**sets)), x, solver=solver
    )
    by_hand = bx.hypergradient(bx.Problem(upper, lower, whole), x)
    assert e.success
    np.testing.assert_allclose(e.value, by_hand.value, rtol=EXACT)
    np.testing.assert_allclose(e.grad, by_hand.grad, atol=EXACT)
    np.testing.assert_allclose(e.lower.y, by_hand.lower.y, atol=EXACT)
    # The order of rows is that of the library: inequalities of all, then equations.
    np.testing.assert_allclose(
        e.lower.multipliers, by_hand.lower.multipliers, atol=1e2 * EXACT
    )
    np.testing.assert_array_equal(e.lower.active, by_hand.lower.active)
    np.testing.assert_allclose(e.lower.slack, by_hand.lower.slack, atol=EXACT)


def test_multipliers_slacks_and_active_rows_come_back_by_name():
    sets, _, x, rng = parts(0)
    problem = bx.Problem(*levels(rng), bx.Intersection(**sets))
    e = bx.hypergradient(problem, x)
    lam, prices = np.asarray(e.lower.multipliers), e.lower.prices
    assert list(prices) == ["lines", "bounds", "balance", "both"]
    np.testing.assert_array_equal(prices["lines"], lam[:4])
    np.testing.assert_array_equal(prices["bounds"]["lower"], lam[4:10])
    np.testing.assert_array_equal(prices["bounds"]["upper"], lam[10:16])
    np.testing.assert_array_equal(prices["both"]["A"], lam[16:18])
    np.testing.assert_array_equal(prices["balance"], lam[18:19])
    np.testing.assert_array_equal(prices["both"]["A_eq"], lam[19:])
    active = e.lower.named("active")
    assert active["balance"].all()
    assert active["both"]["A_eq"].all()
    np.testing.assert_array_equal(active["lines"], e.lower.active[:4])
    slack = e.lower.named("slack")["bounds"]
    np.testing.assert_allclose(slack["upper"] + slack["lower"],
                               sets["bounds"].upper - sets["bounds"].lower,
                               atol=IDENTITY)  # fmt: skip
    with pytest.raises(ValueError, match="must be one of"):
        e.lower.named("price")


def test_rows_have_the_names_of_their_sets_and_their_labels():
    y = {"flow": jnp.zeros(2), "price": jnp.zeros(())}
    sets = bx.Intersection(
        lines=bx.Polyhedron(A=np.eye(3), b=np.ones(3), names=["a-b", "b-c", "c-a"]),
        bounds=bx.Box(jax.tree.map(lambda v: v - 5, y), 5.0),
        balance=bx.Polyhedron(A_eq=np.ones((1, 3)), b_eq=np.ones(1)),
    )
    problem = bx.Problem(
        lambda x, y: jnp.sum(y["flow"]) * x,
        lambda x, y: 0.5 * jnp.sum(y["flow"] ** 2) + 0.5 * (y["price"] - x) ** 2,
        sets,
    )
    e = bx.hypergradient(problem, jnp.array(2.0))
    assert e.lower.row_names == [
        "lines[a-b]", "lines[b-c]", "lines[c-a]",
        "bounds.lower['flow'][0]", "bounds.lower['flow'][1]", "bounds.lower['price']",
        "bounds.upper['flow'][0]", "bounds.upper['flow'][1]", "bounds.upper['price']",
        "balance[0]",
    ]  # fmt: skip
    assert jax.tree.structure(e.lower.prices["bounds"]["upper"]) == jax.tree.structure(
        y
    )
    assert e.lower.prices["bounds"]["lower"]["flow"].shape == (2,)


def test_a_set_of_its_own_has_plain_prices():
    problem = bx.Problem(
        lambda x, y: jnp.sum(y), lambda x, y: 0.5 * jnp.sum((y - x) ** 2),
        bx.Polyhedron(A=np.eye(2), b=np.ones(2), names=["north", "south"]),
    )  # fmt: skip
    e = bx.hypergradient(problem, jnp.array([3.0, 0.0]))
    np.testing.assert_allclose(e.lower.prices, [2, 0], atol=IDENTITY)
    assert e.lower.row_names == ["north", "south"]


def test_weakly_active_rows_are_explained_by_name():
    problem = bx.Problem(
        lambda x, y: jnp.sum(y), lambda x, y: 0.5 * jnp.sum((y - x) ** 2),
        bx.Intersection(
            sums=bx.Polyhedron(A=np.ones((1, 2)), b=np.full(1, 9.0)),
            lines=bx.Polyhedron(A=np.eye(2), b=np.ones(2)),
        ),
    )  # fmt: skip
    text = str(bx.explain(problem, jnp.array([0.0, 1.0])))
    assert "row lines[1] is weakly active" in text


def test_a_simplex_meets_a_polyhedron_and_a_box():
    n = 5
    sets = bx.Intersection(
        shares=bx.Simplex(n), caps=bx.Box(-1.0, np.full(n, 0.4)),
        pair=bx.Polyhedron(A=np.eye(n)[:1] + np.eye(n)[1:2], b=np.full(1, 0.5)),
    )  # fmt: skip
    problem = bx.Problem(
        lambda x, y: y @ y, lambda x, y: 0.5 * jnp.sum((y - x) ** 2), sets
    )
    x = jnp.array([0.9, 0.3, 0.1, 0.05, -1.0])
    e = bx.hypergradient(problem, x)
    prices = e.lower.prices
    # Stationarity, name by name.
    force = (
        e.lower.y - x + prices["shares"]["sums"] - prices["shares"]["lower"]
        + prices["caps"]["upper"] - prices["caps"]["lower"]
        + prices["pair"] * jnp.array([1.0, 1, 0, 0, 0])
    )  # fmt: skip
    np.testing.assert_allclose(force, 0, atol=IDENTITY)
    np.testing.assert_allclose(jnp.sum(e.lower.y), 1, atol=IDENTITY)


def test_it_maps_compiles_and_perturbs():
    sets, whole, x, rng = parts(1)
    upper, lower = levels(rng)
    named, plain = (
        bx.Problem(upper, lower, s) for s in (bx.Intersection(**sets), whole)
    )
    xs = x + 0.05 * jnp.asarray(rng.normal(size=(4, 3)))

    @jax.jit
    @jax.vmap
    def both(x):
        es = [bx.hypergradient(p, x, throw=False) for p in (named, plain)]
        return [(e.value, e.grad) for e in es], es[0].lower.prices["lines"]

    (ours, theirs), lines = both(xs)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=EXACT), ours, theirs
    )
    assert lines.shape == (4, 4)
    q = jnp.asarray(rng.normal(size=6))
    values = [bx.hypergradient(p.perturbed(q), x).value for p in (named, plain)]
    np.testing.assert_allclose(*values, rtol=EXACT)
    slopes = [
        jax.jacobian(lambda x, p=p: bx.solution_map(p, x))(x) for p in (named, plain)
    ]
    np.testing.assert_allclose(*slopes, atol=1e2 * EXACT)


def test_followers_have_prices_by_name():
    sets, _, x, rng = parts(2)
    upper, lower = levels(rng)

    def instance(d):
        return bx.Problem(
            upper, lambda x, y: lower(x, y) + d @ y, bx.Intersection(**sets)
        )

    tilts = jnp.asarray(rng.normal(size=(3, 6)))
    e = bx.hypergradient(bx.Followers(instance, tilts), x)
    assert e.lower.prices["bounds"]["upper"].shape == (3, 6)
    one = bx.hypergradient(instance(tilts[1]), x)
    jax.tree.map(
        lambda all, one: np.testing.assert_allclose(all[1], one, atol=1e2 * EXACT),
        e.lower.prices, one.lower.prices,
    )  # fmt: skip
    assert len(e.lower.row_names) == e.lower.multipliers.shape[1]


def test_large_sparse_intersections_take_the_sparse_solver():
    n = 400
    rows = diagonals([np.ones(n - 1), -np.ones(n - 1)], offsets=[0, 1],
                     shape=(n - 1, n))  # fmt: skip
    sets = bx.Intersection(
        steps=bx.Polyhedron(A=rows, b=np.full(n - 1, 0.1)),
        bounds=bx.Box(0.0, np.ones(n)),
    )
    target = jnp.asarray(np.random.default_rng(0).uniform(-0.5, 1.5, n))
    problem = bx.Problem(
        lambda x, y: jnp.sum(y**2),
        lambda x, y: 0.5 * jnp.sum((y - x * target) ** 2),
        sets,
    )
    x = jnp.array(1.0)
    e = bx.hypergradient(problem, x)
    assert type(e.lower.factor).__name__ == "SparseFactor"
    dense = bx.hypergradient(problem, x, solver=bx.ActiveSet())
    np.testing.assert_allclose(e.grad, dense.grad, rtol=1e2 * EXACT)
    np.testing.assert_allclose(
        e.lower.prices["steps"], dense.lower.prices["steps"], atol=1e2 * EXACT
    )


def test_a_solve_ends_where_the_polyhedron_of_all_rows_does():
    sets, whole, x, rng = parts(3)
    upper, lower = levels(rng)
    ends = []
    for s in (bx.Intersection(**sets), whole):
        problem = bx.Problem(upper, lower, s, domain=bx.Box(x - 0.1, x + 0.1))
        ends.append(
            bx.solve(problem, bx.DSBLO(), x, key=jax.random.key(0), num_steps=60)
        )
    np.testing.assert_allclose(ends[0].value, ends[1].value, rtol=1e-6)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: bx.Intersection(), "at least one set"),
        (
            lambda: bx.Intersection(a=cast(Any, np.ones(3))),
            "`a` must be a Polyhedron, a Box",
        ),
        (
            lambda: bx.Intersection(a=bx.Intersection(b=bx.Box(0.0, np.ones(2)))),
            "side by side",
        ),
        (
            lambda: bx.Intersection(
                bounds=bx.Box(0.0, np.ones(3)),
                lines=bx.Polyhedron(A=np.eye(2), b=np.ones(2)),
            ),
            "`lines` and `bounds` must be sets over the same `y`",
        ),
        (
            lambda: bx.Polyhedron(A=np.eye(2), b=np.ones(2), names=["one"]),
            "one label per row of `A`; expected 2, got 1",
        ),
        (
            lambda: bx.Polyhedron(A=np.eye(2), b=np.ones(2), names=["one", "one"]),
            "'one' is there more than once",
        ),
        (lambda: bx.Polyhedron(A=np.eye(2), b=np.ones(2), names="ab"), "a list with"),
    ],
)  # fmt: skip
def test_mistakes_are_told(make, text):
    with pytest.raises(ValueError, match=text.replace("[", r"\[")):
        make()


def test_followers_of_different_sizes_keep_the_names_of_their_sets():
    def instance(d):
        n, k = len(d["target"]), len(d["cap"])
        sets = bx.Intersection(
            caps=bx.Polyhedron(A=d["rows"], b=d["cap"]),
            sum=bx.Polyhedron(A_eq=np.ones((1, n)), b_eq=np.ones(1)),
            bounds=bx.Box(np.full(n, -2.0), 2.0),
        )
        assert k == len(d["rows"])
        return bx.Problem(
            lambda x, y, prices: jnp.sum(y**2) * x + jnp.sum(prices["caps"]),
            lambda x, y: 0.5 * jnp.sum((y - x * d["target"]) ** 2),
            sets, prices=True,
        )  # fmt: skip

    rng = np.random.default_rng(0)
    sizes = ((3, 1), (5, 2))
    data = [
        dict(target=3 * rng.normal(size=n), rows=rng.normal(size=(k, n)),
             cap=np.full(k, 0.1))
        for n, k in sizes
    ]  # fmt: skip
    x = jnp.array(0.8)
    many = bx.hypergradient(bx.Followers.padded(instance, data), x)
    each = [bx.hypergradient(instance(d), x) for d in data]
    assert max(float(jnp.max(one.lower.prices["caps"])) for one in each) > 0
    np.testing.assert_allclose(many.value, np.mean([e.value for e in each]), rtol=EXACT)
    np.testing.assert_allclose(many.grad, np.mean([e.grad for e in each]), atol=EXACT)
    for i, (n, k) in enumerate(sizes):
        ours, alone = many.lower.prices, each[i].lower.prices
        np.testing.assert_allclose(ours["caps"][i, :k], alone["caps"], atol=EXACT)
        np.testing.assert_allclose(
            ours["bounds"]["upper"][i, :n], alone["bounds"]["upper"], atol=EXACT
        )
