"""Followers from cvxpy: answers, prices and derivatives, names and shapes, refusals."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bilevax as bx

from ..zoo import DIFFERENCES, EXACT

cp = pytest.importorskip("cvxpy", reason="needs the extra `cvxpy`")

# As exact as Clarabel gets: prices of its are right to about the root of this.
TIGHT = dict(
    tol_gap_abs=1e-14, tol_gap_rel=1e-14, tol_feas=1e-14, tol_ktratio=1e-12,
    max_iter=500, reduced_tol_gap_abs=1e-12, reduced_tol_gap_rel=1e-12,
)  # fmt: skip
AGREE = 1e-6


def by_clarabel(follower, leader, x):
    for parameter in leader:
        parameter.value = np.asarray(x[parameter.name()])
    follower.solve(solver=cp.CLARABEL, **TIGHT)
    assert follower.status in ("optimal", "optimal_inaccurate")


def check(follower, leader, x, names):
    """Answers and prices equal Clarabel's; the evaluation, for more."""
    problem = bx.from_cvxpy(follower, leader)
    x = {name: jnp.asarray(value, float) for name, value in x.items()}
    e = bx.hypergradient(problem, x)
    by_clarabel(follower, leader, x)
    for variable in follower.variables():
        found = e.lower.y[variable.name()]
        assert found.shape == variable.shape
        np.testing.assert_allclose(found, variable.value, atol=AGREE, rtol=AGREE)
    for name, constraint in names.items():
        dual = np.asarray(constraint.dual_value)
        found = np.asarray(e.lower.prices[name]).reshape(dual.shape)
        np.testing.assert_allclose(found, dual, atol=AGREE, rtol=AGREE)
    return problem, x, e


def labelled(**constraints):
    """Constraints with labels, and the same by name."""
    for name, constraint in constraints.items():
        constraint.set_label(name)
    return list(constraints.values()), constraints


def differences(problem, x, step=1e-6):
    F = lambda x: float(bx.hypergradient(problem, x).value)

    def slope(name, i):
        moved = [
            x | {name: x[name].ravel().at[i].add(s).reshape(x[name].shape)}
            for s in (step, -step)
        ]
        return (F(moved[0]) - F(moved[1])) / (2 * step)

    return {
        name: np.reshape([slope(name, i) for i in range(x[name].size)], x[name].shape)
        for name in x
    }


def check_gradient(problem, x):
    e = bx.hypergradient(problem, x)
    assert bx.status_name(e.status) == "successful"
    for name, found in differences(problem, x).items():
        np.testing.assert_allclose(e.grad[name], found, rtol=1e-5, atol=DIFFERENCES)


@pytest.mark.parametrize("seed", range(6))
def test_random_programs_have_clarabels_answers_and_prices(seed):
    rng = np.random.default_rng(seed)
    n, m = 6, 4
    root = rng.normal(size=(n, n))
    y = cp.Variable(n, name="y")
    tilt, limit, total = (
        cp.Parameter(n, name="tilt"), cp.Parameter(m, name="limit"),
        cp.Parameter(name="total"),
    )  # fmt: skip
    A, E = rng.normal(size=(m, n)), rng.normal(size=(1, n))
    rows, names = labelled(
        below=A @ y <= limit,
        above=y >= -1,
        balance=E @ y == total,
        turned=total == cp.sum(y[:3]) if seed % 2 else y[0] <= 5,
    )
    follower = cp.Problem(
        cp.Minimize(0.5 * cp.quad_form(y, root @ root.T + np.eye(n)) + tilt @ y), rows
    )
    inside = rng.uniform(-0.3, 0.3, n)
    inside[:3] += (E @ inside - inside[:3].sum()) / 3 if seed % 2 else 0
    E_inside = (E @ inside)[0]
    x = dict(
        tilt=3 * rng.normal(size=n),
        limit=A @ inside + rng.uniform(0.05, 0.5, m),
        total=E_inside if not seed % 2 else inside[:3].sum(),
    )
    if seed % 2:
        rows[2] = E @ y == E_inside
        rows[2].set_label("balance")
        names["balance"] = rows[2]
        follower = cp.Problem(follower.objective, rows)
    check(follower, [tilt, limit, total], x, names)


def portfolio():
    rng = np.random.default_rng(1)
    n = 8
    F = rng.normal(size=(3, n))
    w = cp.Variable(n, name="weights")
    mu = cp.Parameter(n, name="returns")
    rows, names = labelled(
        budget=cp.sum(w) == 1, long_only=w >= 0, sector=cp.sum(w[:3]) <= 0.5
    )
    risk = cp.sum_squares(F @ w) + 0.1 * cp.sum_squares(w)
    follower = cp.Problem(cp.Maximize(mu @ w - 2 * risk), rows)
    return follower, [mu], dict(returns=rng.normal(size=n)), names


def dispatch():
    """Three buses and three lines; the balance of each bus has a price."""
    buses, lines = 3, [(0, 1), (1, 2), (0, 2)]
    generation = cp.Variable(
        buses, name="generation", bounds=[0, np.array([3, 2, 1.5])]
    )
    flow = cp.Variable(len(lines), name="flow")
    bid = cp.Parameter(buses, name="bid", nonneg=True)
    incidence = np.zeros((buses, len(lines)))
    for k, (i, j) in enumerate(lines):
        incidence[i, k], incidence[j, k] = -1, 1
    demand = np.array([0.5, 1.0, 2.0])
    rows, names = labelled(
        balance=generation + incidence @ flow == demand,
        lines=cp.hstack([flow, -flow]) <= 0.8,
        loop=flow[0] + flow[1] == flow[2],
    )
    cost = bid @ generation + cp.sum_squares(generation) / 2
    follower = cp.Problem(cp.Minimize(cost), rows)
    return follower, [bid], dict(bid=np.array([1.0, 2.0, 4.0])), names


def machine():
    """A support vector machine: hinge losses under weights of the leader's."""
    rng = np.random.default_rng(3)
    images = rng.normal(size=(12, 2))
    labels = np.sign(images @ [1.0, -0.5] + 0.3 * rng.normal(size=12))
    w, offset = cp.Variable(2, name="w"), cp.Variable(name="offset")
    cost = cp.Parameter(12, name="cost", nonneg=True)
    margins = cp.multiply(labels, images @ w + offset)
    loss = cost @ cp.pos(1 - margins)
    rows, names = labelled(bound=w <= 2)
    follower = cp.Problem(
        cp.Minimize(0.5 * cp.sum_squares(w) + 0.05 * cp.square(offset) + loss), rows
    )
    return follower, [cost], dict(cost=rng.uniform(0.5, 1.5, 12)), names


def transport():
    """A matrix of shipments, row sums and column sums."""
    rng = np.random.default_rng(4)
    ship = cp.Variable((3, 4), name="ship", nonneg=True)
    toll = cp.Parameter((3, 4), name="toll")
    supply = cp.Parameter(3, name="supply")
    rows, names = labelled(
        supplies=cp.sum(ship, axis=1) <= supply,
        demands=cp.sum(ship, axis=0) == np.array([1.0, 0.5, 0.7, 0.9]),
        each=ship <= 0.8 * np.ones((3, 4)),
    )
    cost = cp.sum(cp.multiply(toll, ship)) + 0.3 * cp.sum_squares(ship)
    follower = cp.Problem(cp.Minimize(cost), rows)
    x = dict(toll=rng.uniform(0, 2, (3, 4)), supply=np.array([1.2, 1.4, 1.3]))
    return follower, [toll, supply], x, names


@pytest.mark.parametrize("model", [portfolio, dispatch, machine, transport])
def test_models_of_every_trade_agree_with_clarabel_and_with_differences(model):
    follower, leader, x, names = model()
    _, x, e = check(follower, leader, x, names)
    weights = jax.tree.map(
        lambda leaf: jnp.cos(1.0 + jnp.arange(leaf.size)).reshape(leaf.shape), e.lower.y
    )

    def upper(x, y):
        total = sum(jnp.sum(weights[name] * y[name]) for name in y)
        return total + 0.1 * sum(
            jnp.sum(leaf**2) for leaf in (*x.values(), *y.values())
        )

    problem = bx.from_cvxpy(follower, leader, upper)
    check_gradient(problem, x)


def test_the_leader_sees_prices_in_the_shapes_of_cvxpy():
    follower, leader, x, names = transport()
    weights = np.cos(1.0 + np.arange(12)).reshape(3, 4)

    def upper(x, y, prices):
        assert prices["each"].shape == (3, 4)
        assert prices["supplies"].shape == (3,)
        revenue = jnp.sum(prices["demands"] ** 2) + prices["supplies"] @ x["supply"]
        return revenue + jnp.sum(weights * prices["each"])

    problem = bx.from_cvxpy(follower, leader, upper, prices=True)
    x = {name: jnp.asarray(value) for name, value in x.items()}
    check_gradient(problem, x)
    by_clarabel(follower, leader, x)
    told = {name: row.dual_value for name, row in names.items()}
    expected = upper(x, None, told)
    value = bx.hypergradient(problem, x).value
    np.testing.assert_allclose(value, expected, rtol=1e-5)


def test_constraints_without_labels_go_by_their_places():
    y, p = cp.Variable(2, name="y"), cp.Parameter(2, name="p")
    follower = cp.Problem(cp.Minimize(cp.sum_squares(y - p)), [y >= 0, cp.sum(y) <= 1])
    problem = bx.from_cvxpy(follower, p)
    e = bx.hypergradient(problem, {"p": jnp.array([2.0, -1.0])})
    np.testing.assert_allclose(e.lower.prices["constraints[1]"], [2.0], atol=EXACT)
    np.testing.assert_allclose(e.lower.prices["constraints[0]"], [0, 4.0], atol=EXACT)


@pytest.mark.parametrize("sense", ["upper", "Minimize", "Maximize"])
def test_what_the_leader_wants_may_be_an_expression(sense):
    follower, leader, x, _ = dispatch()
    (bid,), (generation, flow) = leader, follower.variables()
    wanted = -bid @ generation + 0.2 * cp.sum_squares(generation - 1) + cp.sum(flow[:2])
    built = {
        "upper": wanted,
        "Minimize": cp.Minimize(wanted),
        "Maximize": cp.Maximize(-wanted),
    }
    problem = bx.from_cvxpy(follower, leader, built[sense])
    x = {name: jnp.asarray(value) for name, value in x.items()}
    by_clarabel(follower, leader, x)
    e = bx.hypergradient(problem, x)
    np.testing.assert_allclose(e.value, wanted.value, atol=AGREE)
    check_gradient(problem, x)


def test_what_parameters_were_made_with_is_the_domain():
    y = cp.Variable(2, name="y")
    toll = cp.Parameter(2, name="toll", nonneg=True)
    cap = cp.Parameter(name="cap", bounds=[1, 3])
    follower = cp.Problem(cp.Minimize(cp.sum_squares(y) + toll @ y), [y <= cap])
    domain = bx.from_cvxpy(follower, [toll, cap]).domain
    assert isinstance(domain, bx.Box)
    assert domain.lower["toll"].tolist() == [0, 0]
    assert domain.upper["toll"].tolist() == [np.inf, np.inf]
    assert (float(domain.lower["cap"]), float(domain.upper["cap"])) == (1, 3)
    wider = bx.Box(
        {"toll": jnp.zeros(2), "cap": 0.5}, {"toll": jnp.ones(2), "cap": 9.0}
    )
    assert bx.from_cvxpy(follower, [toll, cap], domain=wider).domain is wider


def test_curvature_may_depend_on_the_leader():
    y, stiff = cp.Variable(2, name="y"), cp.Parameter(name="stiff", nonneg=True)
    follower = cp.Problem(
        cp.Minimize(stiff * cp.sum_squares(y) - cp.sum(y)), [y <= 0.6]
    )
    problem = bx.from_cvxpy(follower, [stiff], lambda x, y: jnp.sum(y["y"] ** 3))
    check_gradient(problem, {"stiff": jnp.asarray(1.5)})
    e = bx.hypergradient(problem, {"stiff": jnp.asarray(1.5)})
    np.testing.assert_allclose(e.lower.y["y"], [1 / 3, 1 / 3], atol=EXACT)


def test_parameters_may_multiply_variables_within_squares():
    y = cp.Variable(2, name="y")
    F, d = cp.Parameter((3, 2), name="F"), cp.Parameter(3, name="d")
    rows, names = labelled(most=cp.sum(y) <= 0.2)
    follower = cp.Problem(cp.Minimize(cp.sum_squares(F @ y - d)), rows)
    rng = np.random.default_rng(6)
    x = dict(F=rng.normal(size=(3, 2)), d=rng.normal(size=3) + 1)
    _, x, e = check(follower, [F, d], x, names)
    # Nothing of cvxpy's own is left in the follower.
    assert set(e.lower.y) == {"y"}
    check_gradient(
        bx.from_cvxpy(follower, [F, d], lambda x, y: jnp.sum(y["y"] ** 3)), x
    )


def test_parameters_of_the_follower_keep_their_values():
    y = cp.Variable(name="y")
    p, own = cp.Parameter(name="p"), cp.Parameter(name="own", value=2.0)
    follower = cp.Problem(cp.Minimize(cp.square(y - p)), [y <= own])
    problem = bx.from_cvxpy(follower, [p])
    own.value = -7.0
    e = bx.hypergradient(problem, {"p": jnp.asarray(5.0)})
    assert float(e.lower.y["y"]) == pytest.approx(2.0)
    # And the model is as it was.
    assert p.value is None


def test_the_best_tolls_are_found_by_one_default_call():
    road = cp.Variable(2, name="road", nonneg=True)
    toll = cp.Parameter(2, name="toll", bounds=[0, 5])
    follower = cp.Problem(
        cp.Minimize(cp.sum_squares(road) / 2 + (toll - 4) @ road), [cp.sum(road) <= 2]
    )
    problem = bx.from_cvxpy(follower, [toll], -toll @ road)
    s = bx.solve(problem, bx.DSBLO(), {"toll": jnp.array([1.0, 2.0])}, key=0)
    np.testing.assert_allclose(s.x["toll"], [3, 3], atol=1e-5)
    assert s.value == pytest.approx(-6, abs=1e-6)


Y, P, Q = cp.Variable(3, name="y"), cp.Parameter(3, name="p"), cp.Parameter(3, name="q")
GOOD = cp.Minimize(cp.sum_squares(Y - P))


def model(*rows, objective=GOOD, leader=(P,), upper=None, **options):
    build = lambda: bx.from_cvxpy(
        cp.Problem(objective, list(rows)), list(leader), upper, **options
    )
    return build


def minimise(objective):
    return model(objective=cp.Minimize(objective))


def labelled_twice():
    rows = [(Y <= 1).set_label("a"), (Y >= 0).set_label("a")]
    return model(*rows)()


def twice():
    row = Y <= 1
    return model(row, row)()


def with_nan():
    bad = cp.Parameter(3, name="bad")
    bad.value = np.array([1.0, np.inf, 0])
    return model(Y <= bad)()


def at(x):
    return lambda: bx.hypergradient(model(Y <= 1)(), x)


def variable(**kind):
    v = cp.Variable((2, 2), name="v", **kind)
    return model(cp.real(v) <= 1)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: bx.from_cvxpy(GOOD, [P]), ("`follower`", "cvxpy.Problem", "Minimize")),
        (model(leader=()), ("`leader`", "at least one")),
        (model(leader=(Y,)), ("leader[0]", "Variable", "cp.Parameter")),
        (model(leader=("p",)), ("leader[0]", "str")),
        (model(leader=(Q,)), ("`q`", "not in the follower", "`p`")),
        (model(leader=(P, P)), ("`leader`", "`p`", "twice")),
        (
            model(Y <= cp.Parameter(3, name="p")),
            ("`p` has no value", "`leader`"),
        ),
        (model(Y <= Q), ("`q` has no value", ".value =")),
        (with_nan, ("`bad`", "infinity")),
        (model(cp.sum_squares(Y) <= 1), ("constraints[0]", "not linear", "quad_over")),
        (model(cp.norm1(Y) <= 1), ("constraints[0]", "norm1(y)", "penalty")),
        (model(cp.abs(Y) <= 1), ("constraints[0]", "abs(y)", "`[y <= c, y >= -c]`")),
        (model(Y <= 1, cp.norm(Y) <= 1), ("constraints[1]", "Pnorm")),
        (model(cp.SOC(cp.sum(Y), Y)), ("constraints[0]", "SOC")),
        (model(cp.log(Y) >= 0), ("constraints[0]", "log(y)")),
        (model(cp.exp(Y) <= 1), ("constraints[0]", "exp(y)")),
        (model(cp.sqrt(Y) <= 1), ("constraints[0]", "DCP")),
        (minimise(cp.sum(cp.exp(Y)) + cp.sum(P)), ("objective", "exp(y)")),
        (minimise(-cp.sum_squares(Y - P)), ("objective", "DCP", "concave")),
        (minimise(P @ P * cp.sum(Y)), ("objective", "DPP", "p")),
        (model(cp.multiply(P, P) @ Y <= 1), ("constraints[0]", "DPP")),
        (model(cp.multiply(P, Y) <= 1), ("constraints[0]", "turn")),
        (variable(integer=True), ("`v`", "integer", "Relax")),
        (variable(boolean=True), ("`v`", "boolean")),
        (variable(complex=True), ("`v`", "complex")),
        (variable(symmetric=True), ("`v`", "symmetric")),
        (variable(PSD=True), ("`v`", "PSD")),
        (
            minimise(cp.sum_squares(Y - P) + cp.Variable(name="y") ** 2),
            ("variables", "`y`", "name"),
        ),
        (
            model(Y <= cp.Parameter(name="p"), leader=(P, cp.Parameter(name="p"))),
            ("`p`", "not in"),
        ),
        (labelled_twice, ("labelled `a`", "set_label")),
        (twice, ("constraints[1]", "twice")),
        (model((Y <= 1).set_label("bounds")), ("`bounds`", "label")),
        (model(upper="revenue"), ("`upper`", "function", "str")),
        (model(upper=Y), ("`upper`", "scalar", "(3,)")),
        (model(upper=cp.sum(cp.Variable(name="z"))), ("`z`", "not in the follower")),
        (model(upper=cp.lambda_max(cp.diag(Y))), ("`upper`", "lambda_max", "JAX")),
        (model(upper=cp.sum(Y), prices=True), ("`prices=True`", "JAX function")),
        (at(jnp.zeros(3)), ("`x`", "dictionary", "'p'")),
        (at({"q": jnp.zeros(3)}), ("`x`", "'p'", "['q']")),
        (at({"p": jnp.zeros(2)}), ("`x['p']`", "(3,)", "(2,)")),
        (at({"p": jnp.zeros((3, 1))}), ("`x['p']`", "(3,)", "(3, 1)")),
    ],
)  # fmt: skip
def test_mistakes_are_told_with_their_remedy(call, words):
    with pytest.raises(ValueError, match=".") as info:
        call()
    for word in words:
        assert word in str(info.value)


def test_a_leader_who_leaves_the_follower_nothing_is_told_so():
    problem = model(Y <= -1, Y >= P)()
    with pytest.raises(bx.BilevelError, match="No `y` satisfies"):
        bx.hypergradient(problem, {"p": jnp.zeros(3)})
    with pytest.raises(bx.BilevelError, match="NaN"):
        bx.hypergradient(problem, {"p": jnp.full(3, jnp.nan)})
