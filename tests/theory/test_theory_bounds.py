"""The constants of the analysis, against brute force."""

import itertools
import math

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bilevax as bx
from bilevax import theory

from .. import zoo
from ..theory_tools import NO_ROWS, ROUNDING, box, norm

N, K, M, SAMPLES = 4, 5, 3, 300
SEEDS = range(4)


# Brute force on random quadratic problems.


@eqx.filter_jit
def evaluations(data, xs, qs):
    problem = zoo.quadratic_problem(data)
    evaluate = lambda x, q: bx.hypergradient(problem.perturbed(q), x, throw=False)
    return jax.vmap(evaluate)(xs, qs)


def well_scaled(rng, coupled):
    """A problem whose bounds are not vacuous: rows far from dependent."""
    basis, _ = np.linalg.qr(rng.normal(size=(N, N)))
    H = (basis * rng.uniform(0.5, 2, size=N)) @ basis.T
    A = np.concatenate([np.eye(N), -np.ones((1, N))]) + 0.05 * rng.normal(size=(K, N))
    return dict(
        H=(H + H.T) / 2,
        C=0.5 * rng.normal(size=(N, M)),
        c=rng.normal(size=N),
        A=A,
        B=0.3 * rng.normal(size=(K, M)) * coupled,
        b=rng.uniform(0.2, 1.5, size=K),
        R=rng.normal(size=(M, N)),
        p=rng.normal(size=N),
    )


class Cloud(eqx.Module):
    """A random problem with its solutions at many `x`, tilted and not."""

    data: dict
    xs: np.ndarray
    qs: np.ndarray
    plain: bx.Evaluation
    tilted: bx.Evaluation
    base: theory.BaseConstants
    values: theory.DerivedConstants

    def jacobians(self, active):
        """Of `y*` and of the active multipliers, from the KKT system."""
        d, rows = self.data, np.flatnonzero(active)
        A, B = d["A"][rows], d["B"][rows]
        matrix = np.block([[d["H"], A.T], [A, np.zeros((len(rows),) * 2)]])
        both = -np.linalg.solve(matrix, np.concatenate([d["C"], B]))
        return both[:N], both[N:]

    def gradient(self, x, y, active):
        d = self.data
        f_x, f_y = x + d["R"] @ y, d["R"].T @ x + y + d["p"]
        return f_x + self.jacobians(active)[0].T @ f_y

    def same_active(self):
        return (self.plain.lower.active == self.tilted.lower.active).all(1)


@pytest.fixture(scope="module", params=SEEDS)
def cloud(request):
    rng = np.random.default_rng(request.param)
    data = well_scaled(rng, coupled=request.param % 2 == 0)
    xs = rng.uniform(-1, 1, size=(SAMPLES, M))
    scale = 10 ** rng.uniform(-4, 0, size=(SAMPLES, 1))
    qs = rng.normal(size=(SAMPLES, N)) * scale
    all_x, all_q = np.concatenate([xs, xs]), np.concatenate([0 * qs, qs])
    found = jax.tree.map(np.asarray, evaluations(data, all_x, all_q))
    fine = np.asarray(found.success).reshape(2, -1).all(0)
    assert fine.sum() > SAMPLES / 4
    take = lambda half: jax.tree.map(
        lambda leaf: leaf[half * SAMPLES : (half + 1) * SAMPLES][fine],
        eqx.tree_at(lambda e: (e.status, e.lower.status), found, (None, None)),
    )
    plain, tilted = take(0), take(1)
    ys = np.concatenate([plain.lower.y, tilted.lower.y])
    base = theory.measure(
        zoo.quadratic_problem(data),
        bx.Box(xs.min(0), xs.max(0)),
        bx.Box(ys.min(0), ys.max(0)),
    )
    values = theory.derived(base)
    return Cloud(data, xs[fine], qs[fine], plain, tilted, base, values)


def test_constants_of_a_quadratic_are_exact(cloud):
    base, H, C = cloud.base, cloud.data["H"], cloud.data["C"]
    assert base.mu_g == pytest.approx(np.linalg.eigvalsh(H).min(), rel=zoo.EXACT)
    assert base.Lbar_gxy == pytest.approx(np.linalg.norm(C, 2), rel=zoo.EXACT)
    assert base.L_g == pytest.approx(np.linalg.norm(np.hstack([C, H]), 2))
    assert (base.L_gyy, base.L_gxy) == (0, 0)
    assert not base.estimates
    assert not base.bounds
    assert any(text.startswith("ass:grad_f_bound") for text in base.broken)


def test_jacobians_stay_below_their_bounds(cloud):
    patterns = np.unique(cloud.plain.lower.active, axis=0)
    assert len(patterns) > 3
    for active in patterns:
        dy, dlam = cloud.jacobians(active)
        assert norm(dy) <= cloud.values.Lbar_y
        if active.any():
            A = cloud.data["A"][active]
            inner = np.linalg.inv(A @ np.linalg.solve(cloud.data["H"], A.T))
            assert norm(inner) <= cloud.values.Lbar_A * ROUNDING
            assert norm(dlam) <= cloud.values.Lbar_lambda


def test_gradients_stay_below_their_bound(cloud):
    norms = np.linalg.norm(cloud.plain.grad, axis=1)
    assert norms.max() <= cloud.values.Lbar_F
    d, x, y = cloud.data, cloud.xs, cloud.plain.lower.y
    both = np.hstack([x + y @ d["R"].T, x @ d["R"] + y + d["p"]])
    assert np.linalg.norm(both, axis=1).max() <= cloud.base.Lbar_f * ROUNDING


def test_an_error_of_y_biases_the_gradient_by_at_most_its_constant(cloud):
    rng = np.random.default_rng(0)
    for x, y, active, grad in zip(
        cloud.xs[:50],
        cloud.plain.lower.y,
        cloud.plain.lower.active,
        cloud.plain.grad,
        strict=False,
    ):
        assert np.allclose(cloud.gradient(x, y, active), grad, rtol=zoo.REFERENCE)
        error = rng.normal(size=N)
        bias = cloud.gradient(x, y + error, active) - cloud.gradient(x, y, active)
        assert norm(bias) <= cloud.values.L_F * norm(error)


def test_a_tilt_moves_the_value_by_at_most_its_bound(cloud):
    moved = np.abs(cloud.tilted.value - cloud.plain.value)
    for change, q in zip(moved, cloud.qs, strict=True):
        assert change <= theory.perturbation_gap(
            Lbar_f=cloud.base.Lbar_f, mu_g=cloud.base.mu_g, norm=norm(q)
        )


def test_a_tilt_moves_the_gradient_by_at_most_its_bound(cloud):
    same = cloud.same_active()
    assert same.sum() > 20
    moved = np.linalg.norm(cloud.tilted.grad - cloud.plain.grad, axis=1)
    norms = np.linalg.norm(cloud.qs, axis=1)
    assert np.all((moved <= cloud.values.C_q * norms)[same])


def test_small_tilts_leave_the_active_set_alone(cloud):
    lower = cloud.plain.lower
    lengths = np.linalg.norm(cloud.data["A"], axis=1)
    inside = 0
    for i, q in enumerate(cloud.qs):
        on = lower.active[i]
        radius = theory.active_set_radius(
            cloud.base,
            multiplier=lower.multipliers[i][on].min(initial=np.inf),
            slack=(lower.slack[i] / lengths)[~on].min(initial=np.inf),
        )
        if norm(q) < radius:
            inside += 1
            assert np.array_equal(on, cloud.tilted.lower.active[i])
    assert inside > 0


def test_solutions_and_gradients_are_lipschitz(cloud):
    values, lower = cloud.values, cloud.plain.lower
    coupled = cloud.base.L_B > 0
    slope = values.Lbar_y
    if not coupled:
        slope = theory.y_lipschitz(mu_g=cloud.base.mu_g, Lbar_gxy=cloud.base.Lbar_gxy)
    for i, j in itertools.combinations(range(60), 2):
        distance = norm(cloud.xs[i] - cloud.xs[j])
        assert norm(lower.y[i] - lower.y[j]) <= slope * distance
        if np.array_equal(lower.active[i], lower.active[j]):
            change = norm(cloud.plain.grad[i] - cloud.plain.grad[j])
            assert change <= values.Ltilde_F * distance


# A lower level that is not quadratic, its constants known in closed form.


class Curved(eqx.Module):
    """`y^T H y / 2 + sum log cosh(y + P x) + y^T C x` on the plane `A y + B x = 0`."""

    H: np.ndarray
    C: np.ndarray
    P: np.ndarray
    A: np.ndarray
    B: np.ndarray

    def __call__(self, x, y):
        u = y + self.P @ x
        wave = jnp.sum(jnp.logaddexp(u, -u))
        return 0.5 * y @ (self.H @ y) + wave + y @ (self.C @ x)

    def derivatives(self, x, y):
        u = y + self.P @ x
        bend = np.diag(1 / np.cosh(u) ** 2)
        gradient = self.H @ y + np.tanh(u) + self.C @ x
        return gradient, self.H + bend, self.C + bend @ self.P

    def solution(self, x, q):
        y, k = np.zeros(len(self.H)), len(self.A)
        for _ in range(30):
            gradient, G, _ = self.derivatives(x, y)
            matrix = np.block([[G, self.A.T], [self.A, np.zeros((k, k))]])
            rhs = np.concatenate([-gradient - q, -self.A @ y - self.B @ x])
            step = np.linalg.solve(matrix, rhs)[: len(y)]
            if np.linalg.norm(step) < zoo.IDENTITY:
                break
            y = y + step / max(1, np.linalg.norm(step))
        return y

    def jacobians(self, x, y):
        """`eq:grad_yast1` and `eq:grad_l`, as printed."""
        _, G, mixed = self.derivatives(x, y)
        inverse = np.linalg.inv(G)
        inner = np.linalg.inv(self.A @ inverse @ self.A.T)
        dlam = -inner @ (self.A @ inverse @ mixed - self.B)
        return inverse @ (-mixed - self.A.T @ dlam), dlam

    def upper_gradient(self, x, y):
        """Of `f(x, y) = sum(sin x) + sum(sin y)` through `y`."""
        return np.cos(x) + self.jacobians(x, y)[0].T @ np.cos(y)

    def constants(self):
        # The third derivative of log cosh is at most 4 / (3 sqrt 3).
        steep, eye = 4 / (3 * math.sqrt(3)), np.eye(len(self.H))
        joint = norm(np.hstack([self.P, eye]))
        P, C, H = (norm(part) for part in (self.P, self.C, self.H))
        return theory.BaseConstants(
            mu_g=np.linalg.eigvalsh(self.H).min(),
            L_g=H + C + P + 1,
            Lbar_gyy=H + 1,
            Lbar_gxy=C + P,
            L_gyy=steep * joint,
            L_gxy=steep * joint * P,
            Lbar_f=math.sqrt(len(self.H) + self.P.shape[1]),
            L_f=1.0,
            L_A=norm(self.A),
            L_B=norm(self.B),
            lambda_min=np.linalg.eigvalsh(self.A @ self.A.T).min(),
        )


def curved(seed, n=3, m=2, k=1):
    rng = np.random.default_rng(seed)
    basis, _ = np.linalg.qr(rng.normal(size=(n, n)))
    H = (basis * rng.uniform(0.05, 2, size=n)) @ basis.T
    draw = lambda *shape: rng.normal(size=shape)
    return Curved((H + H.T) / 2, draw(n, m), draw(n, m), draw(k, n), draw(k, m)), rng


@pytest.mark.parametrize("seed", range(8))
def test_bounds_hold_where_the_lower_level_is_not_quadratic(seed):
    lower, rng = curved(seed, k=1 + seed % 2)
    base = lower.constants()
    values = theory.derived(base)
    for _ in range(30):
        size = 10 ** rng.uniform(-3, 0.5)
        x, y = rng.normal(size=2), rng.normal(size=3)
        error = size * rng.normal(size=3)
        (dy, dlam), (dy_hat, dlam_hat) = (
            lower.jacobians(x, point) for point in (y, y + error)
        )
        assert norm(dy) <= values.Lbar_y
        assert norm(dlam) <= values.Lbar_lambda
        assert norm(dlam - dlam_hat) <= values.L_lambda * norm(error)
        assert norm(dy - dy_hat) <= values.L_y * norm(error)
        bias = lower.upper_gradient(x, y) - lower.upper_gradient(x, y + error)
        assert norm(bias) <= values.L_F * norm(error)

        q, move = size * rng.normal(size=3), size * rng.normal(size=2)
        here, tilted = lower.solution(x, 0), lower.solution(x, q)
        there = lower.solution(x + move, 0)
        assert norm(lower.A @ here + lower.B @ x) < zoo.EXACT
        assert norm(here - tilted) <= norm(q) / base.mu_g
        grad = lower.upper_gradient(x, here)
        change = grad - lower.upper_gradient(x, tilted)
        assert norm(change) <= values.C_q * norm(q)
        change = grad - lower.upper_gradient(x + move, there)
        assert norm(change) <= values.Ltilde_F * norm(move)
        change = lower.jacobians(x, here)[0] - lower.jacobians(x + move, there)[0]
        assert norm(change) <= values.Ltilde_y * norm(move)


def test_the_printed_constant_of_the_tilt_fails_for_weak_curvature():
    # g = (mu + x) y^2 / 2 and f = y: at x = 0, y* = -q / mu and dy*/dx = q / mu^2.
    mu, q = 0.01, 1e-5
    smooth = dict(L_gyy=1, L_gxy=1, Lbar_f=1, L_f=0)
    base = theory.BaseConstants(
        mu_g=mu, L_g=mu, Lbar_gyy=mu, Lbar_gxy=q / mu, **smooth, **NO_ROWS
    )
    change = q / mu**2
    printed = base.Lbar_f * (base.L_gyy * base.Lbar_gxy / mu**2 + base.L_gxy / mu)
    assert printed * q < change <= theory.derived(base).C_q * q


def test_estimates_are_labelled_and_below_the_truth():
    lower, _ = curved(0)
    problem = bx.Problem(
        lambda x, y: jnp.sum(jnp.sin(x)) + jnp.sum(jnp.sin(y)),
        lower,
        bx.Polyhedron(A_eq=lower.A, B_eq=lower.B, b_eq=np.zeros(1)),
    )
    region = box((-2, 2), (-2, 2)), box((-2, 2), (-2, 2), (-2, 2))
    base, truth = theory.measure(problem, *region), lower.constants()
    sampled = ("L_g", "Lbar_gyy", "Lbar_gxy", "Lbar_f", "L_f", "L_gyy", "L_gxy")
    for name in sampled:
        assert base.label(name) == "estimate"
        assert 0 < getattr(base, name)
    # The third derivatives are measured in the Frobenius norm, so may exceed it.
    for name in sampled[:5]:
        assert getattr(base, name) <= getattr(truth, name) * ROUNDING
    assert base.mu_g >= truth.mu_g
    assert base.L_gyy <= truth.L_gyy * math.sqrt(3)
    assert base.label("lambda_min") == "exact"
    assert base.lambda_min == pytest.approx(truth.lambda_min, rel=zoo.EXACT)
    assert theory.derived(base).label == "estimate"
