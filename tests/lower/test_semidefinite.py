"""Lower levels whose curvature and rows decide `y` only together."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.optimize import minimize

import bilevax as bx


def drawn(seed, n=5, m=6):
    """A quadratic of random rank over random rows and a box, as arrays."""
    rng = np.random.default_rng(seed)
    root = rng.normal(size=(n, n)) * (np.arange(n) < seed % (n + 1))
    A = np.concatenate([rng.normal(size=(m, n)), np.eye(n), -np.eye(n)])
    B = np.concatenate([0.3 * rng.normal(size=(m, 2)), np.zeros((2 * n, 2))])
    b = np.concatenate([rng.uniform(0.1, 1, m), np.full(2 * n, 3.0)])
    linear, target = rng.normal(size=n), rng.normal(size=n)
    shift, x = rng.normal(size=(n, 2)), 0.3 * rng.normal(size=2)
    return dict(root=root, A=A, B=B, b=b, c=linear, t=target, C=shift), x


def quadratic(data):
    return bx.Problem(
        lambda x, y: jnp.sum((y - data["t"]) ** 2),
        lambda x, y: (
            0.5 * jnp.sum((data["root"].T @ (y - data["C"] @ x)) ** 2) + data["c"] @ y
        ),
        bx.Polyhedron(A=data["A"], B=data["B"], b=data["b"]),
        y0=jnp.zeros(data["t"].shape),
    )


def test_quadratics_of_any_rank_are_solved_and_differentiated():
    # The second half is pushed against its rows ten thousand times as hard.
    draws = [drawn(seed) for seed in range(48)]
    draws += [(d | dict(c=1e4 * d["c"]), x) for d, x in draws]
    many, x = jax.tree.map(lambda *leaves: jnp.stack(leaves), *draws)
    evaluate = jax.jit(
        jax.vmap(lambda d, x: bx.hypergradient(quadratic(d), x, throw=False))
    )
    e = evaluate(many, x)
    assert e.success.all()
    # The KKT conditions of a convex program are proof enough.
    y, multipliers = e.lower.y, e.lower.multipliers
    slack = many["b"] - jnp.einsum("skn,sn->sk", many["A"], y)
    slack = slack - jnp.einsum("skm,sm->sk", many["B"], x)
    moved = y - jnp.einsum("snm,sm->sn", many["C"], x)
    bent = jnp.einsum("snr,smr,sm->sn", many["root"], many["root"], moved)
    force = bent + many["c"] + jnp.einsum("skn,sk->sn", many["A"], multipliers)
    pushed = jnp.linalg.norm(many["c"], axis=1)[:, None]
    np.testing.assert_allclose(force / pushed, 0, atol=1e-10)
    assert slack.min() > -1e-10
    assert multipliers.min() >= 0
    np.testing.assert_allclose(multipliers * slack / pushed, 0, atol=1e-10)
    h = 1e-6
    for i, d in enumerate(np.eye(2)):
        ahead, behind = evaluate(many, x + h * d), evaluate(many, x - h * d)
        slope = (ahead.value - behind.value) / (2 * h)
        np.testing.assert_allclose(e.grad[:, i], slope, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("seed", range(4))
def test_totals_of_other_variables_change_nothing(seed):
    rng = np.random.default_rng(seed)
    n, m = 5, 3
    sums, pull = rng.normal(size=(m, n)), rng.normal(size=(n, 2))
    bound = rng.uniform(0.1, 0.5, m)
    upper = lambda y: jnp.sum((y - 1) ** 2)
    # Two coordinates have no curvature but that of the sums.
    bends = jnp.array([1.0, 2.0, 1.0, 0.0, 0.0])
    own = lambda x, y: 0.5 * jnp.sum(bends * y**2) - y @ (pull @ x)
    direct = bx.Problem(
        lambda x, y: upper(y),
        lambda x, y: own(x, y) + 0.5 * jnp.sum((sums @ y) ** 2),
        bx.Polyhedron(
            A=np.concatenate([sums, -np.eye(n)]),
            b=np.concatenate([bound, np.zeros(n)]),
        ),
    )
    free, zero = np.zeros((n, m)), np.zeros((m, n))
    with_totals = bx.Problem(
        lambda x, y: upper(y[:n]),
        lambda x, y: own(x, y[:n]) + 0.5 * jnp.sum(y[n:] ** 2),
        bx.Polyhedron(
            A=np.block([[zero, np.eye(m)], [-np.eye(n), free]]),
            b=np.concatenate([bound, np.zeros(n)]),
            A_eq=np.block([sums, -np.eye(m)]),
            b_eq=np.zeros(m),
        ),
    )
    x = jnp.asarray(rng.normal(size=2))
    expected, e = bx.hypergradient(direct, x), bx.hypergradient(with_totals, x)
    np.testing.assert_allclose(e.lower.y[:n], expected.lower.y, atol=1e-9)
    np.testing.assert_allclose(e.lower.y[n:], sums @ e.lower.y[:n], atol=1e-12)
    np.testing.assert_allclose(e.grad, expected.grad, atol=1e-9)


def lasso(dtype=float):
    """Absolute values as `t` with `-t <= u <= t`: the answer is a threshold."""
    eye = np.eye(4, dtype=dtype)
    return bx.Problem(
        lambda x, y: 0.5 * jnp.sum((y[:4] - 1) ** 2),
        lambda x, y: 0.5 * jnp.sum((y[:4] - x[:4]) ** 2) + x[4] * jnp.sum(y[4:]),
        bx.Polyhedron(A=np.block([[eye, -eye], [-eye, -eye]]), b=np.zeros(8, dtype)),
        y0=jnp.zeros(8, dtype),
    )


@pytest.mark.filterwarnings("ignore:bilevax runs below float64")
@pytest.mark.parametrize(("dtype", "atol"), [("float64", 1e-10), ("float32", 1e-5)])
def test_absolute_values_give_soft_thresholds(dtype, atol):
    x = jnp.array([2.0, -3.0, 0.2, -0.4, 0.7], dtype)
    e = bx.hypergradient(lasso(dtype), x)
    u = np.array([1.3, -2.3, 0, 0])
    np.testing.assert_allclose(e.lower.y, [*u, *np.abs(u)], atol=atol)
    # u = x - weight sign(u) where it is not zero.
    slope = [u[0] - 1, u[1] - 1, 0, 0, -(u[0] - 1) + (u[1] - 1)]
    np.testing.assert_allclose(e.grad, slope, atol=10 * atol)
    # Without a weight nothing holds `t` from below.
    loose = bx.hypergradient(lasso(dtype), x.at[4].set(0.0), throw=False)
    assert not loose.success
    both = jax.vmap(lambda x: bx.hypergradient(lasso(dtype), x, throw=False))(
        jnp.stack([x, x.at[4].set(0.0), x.at[0].set(jnp.nan), x.at[0].add(1.0)])
    )
    assert both.success.tolist() == [True, False, False, True]
    np.testing.assert_allclose(both.grad[0], e.grad, atol=atol)


def hinge(seed=0, count=12):
    """A classifier `sign(<w, a>)` with slacks for the hinge, and its margin weight."""
    rng = np.random.default_rng(seed)
    side = np.where(np.arange(count) % 2, 1.0, -1.0)
    points = side[:, None] * (rng.normal(size=(count, 2)) + np.array([0.7, 0.2]))
    fresh = rng.normal(size=(40, 2)) + np.array([0.7, 0.2])
    none = np.zeros((count, 2))
    rows = bx.Polyhedron(
        A=np.block([[-points * side[:, None], -np.eye(count)], [none, -np.eye(count)]]),
        b=np.concatenate([-np.ones(count), np.zeros(count)]),
    )
    return bx.Problem(
        lambda x, y: jnp.mean(jax.nn.softplus(-fresh @ y[:2])),
        lambda x, y: 0.5 * jnp.sum(y[:2] ** 2) + jnp.exp(x[0]) * jnp.sum(y[2:]),
        rows,
        domain=bx.Box(jnp.array([-6.0]), jnp.array([4.0])),
        y0=jnp.zeros(2 + count),
    )


@pytest.mark.parametrize("x", [-4.0, -2.0, -0.7, 0.9])
def test_slacks_of_a_classifier_are_no_obstacle(x):
    problem = hinge()
    e = bx.hypergradient(problem, jnp.array([x]))
    rows: Any = problem.constraints
    found = minimize(
        lambda y: float(0.5 * y[:2] @ y[:2] + np.exp(x) * y[2:].sum()),
        np.concatenate([np.zeros(2), np.ones(12)]),
        jac=lambda y: np.concatenate([y[:2], np.full(12, np.exp(x))]),
        method="SLSQP",
        constraints=[dict(type="ineq", fun=lambda y: rows.b - rows.A @ y)],
        options=dict(ftol=1e-14, maxiter=500),
    )
    np.testing.assert_allclose(e.lower.y, found.x, atol=1e-6)
    value = lambda x: bx.hypergradient(problem, jnp.array([x])).value
    slope = (value(x + 1e-6) - value(x - 1e-6)) / 2e-6
    np.testing.assert_allclose(e.grad[0], slope, atol=1e-7)


def test_explain_tells_where_the_curvature_is():
    # `t` follows `u`, so unit steps along what is open have half of its curvature.
    found = bx.explain(lasso(), jnp.array([2.0, -3.0, 0.2, -0.4, 0.7]))
    finding = next(f for f in found.findings if "strong convexity" in f.assumption)
    assert finding.holds is None
    assert finding.number == 0
    assert "along what active constraints leave open it is 0.5" in finding.text


def test_the_margin_weight_of_a_classifier_is_chosen():
    problem = hinge()
    s = bx.solve(problem, bx.DSBLO(), jnp.array([-4.0]), key=jax.random.key(0))
    assert s.success
    grid = jnp.linspace(-6, 4, 401)[:, None]
    values = jax.vmap(lambda x: bx.hypergradient(problem, x, throw=False).value)(grid)
    assert float(s.value) <= float(jnp.nanmin(values)) + 1e-6


def test_what_neither_curvature_nor_rows_decide_is_refused():
    problem = bx.Problem(
        lambda x, y: jnp.sum(y),
        lambda x, y: 0.5 * (y[0] + y[1] - x[0]) ** 2,
        bx.Polyhedron(A=-np.eye(2), b=np.zeros(2)),
    )
    e = bx.hypergradient(problem, jnp.array([1.0]), throw=False)
    assert bx.status_name(e.status) == "not_strongly_convex"
    assert np.isnan(e.value)
    # At zero the bounds decide.
    e = bx.hypergradient(problem, jnp.array([-1.0]))
    np.testing.assert_allclose(e.lower.y, 0, atol=1e-12)
    np.testing.assert_allclose(e.grad, 0, atol=1e-12)
