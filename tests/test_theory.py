"""The constants of the analysis, against hand computation and brute force."""

import itertools
import math
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bilevax as bx
from bilevax import theory

from . import zoo

ROUNDING = 1 + zoo.IDENTITY
N, K, M, SAMPLES = 4, 5, 3, 300
SEEDS = range(4)
NO_ROWS: dict[str, Any] = dict(L_A=0, L_B=0, lambda_min=math.inf)


def norm(part) -> float:
    """The Euclidean norm of a vector, the spectral norm of a matrix."""
    return float(np.linalg.norm(part, 2))


def box(*bounds):
    return bx.Box(*(np.asarray(bound, float) for bound in zip(*bounds, strict=True)))


def test_the_clipped_follower_by_hand():
    # y* = min(x, 0): the true Jacobians are at most 1, the bounds 2 and 1.
    base = theory.measure(zoo.t1(), box((-2, 2)), box((-2, 0)))
    expected = dict(
        mu_g=1, L_g=math.sqrt(2), Lbar_gyy=1, Lbar_gxy=1, L_gyy=0, L_gxy=0
    ) | dict(Lbar_f=math.sqrt(3.25), L_f=0.5, L_A=1, L_B=0, lambda_min=1, sigma_f=0)
    for name, value in expected.items():
        assert getattr(base, name) == pytest.approx(value, rel=zoo.IDENTITY), name
        assert base.label(name) == "exact"
    values = theory.derived(base)
    bound = 3 * math.sqrt(3.25)
    expected = dict(Lbar_A=1, Lbar_lambda=1, Lbar_y=2, L_lambda=0, L_y=0, L_F=1.5)
    expected |= dict(Lbar_F=bound, sigma_F=0, delta_q=2 * bound, delta_v=2 * bound)
    expected |= dict(C_q=1.5, Ltilde_y=0, Ltilde_F=4.5)
    for name, value in expected.items():
        assert getattr(values, name) == pytest.approx(value, rel=zoo.IDENTITY), name
    assert values.label == "bound"


def test_the_coupled_follower_by_hand():
    # The same F with y >= x: without `L_B` all constants of y* would be zero.
    base = theory.measure(zoo.t1b(), box((-2, 2)), box((0, 2)))
    assert (base.L_g, base.Lbar_gxy, base.L_A, base.L_B) == (1, 0, 1, 1)
    assert base.Lbar_f == pytest.approx(math.sqrt(3.25), rel=zoo.IDENTITY)
    values = theory.derived(base)
    assert (values.Lbar_lambda, values.Lbar_y) == (1, 1)
    assert (values.L_F, values.C_q, values.Ltilde_F) == (1, 1, 2)
    assert any(text.startswith("ass: additional_LL") for text in base.broken)


def test_every_formula_by_hand():
    base = theory.BaseConstants(
        mu_g=2,
        L_g=7,
        Lbar_gyy=6,
        Lbar_gxy=4,
        L_gyy=8,
        L_gxy=10,
        Lbar_f=5,
        L_f=3,
        L_A=2,
        L_B=1,
        lambda_min=3,
        sigma_f=2,
    )
    # Lbar_A = 6/3; Lbar_lambda = 2 (2*4/2 + 1); Lbar_y = (4 + 2*10) / 2;
    # L_lambda = (2*2/2)^2 8 (4 + 1) + 2*2 (10/2 + 8*4/4) = 160 + 52;
    # L_y = 8 (4 + 20) / 4 + (10 + 2*212) / 2 = 48 + 217.
    values = theory.derived(base)
    expected = dict(Lbar_A=2, Lbar_lambda=10, Lbar_y=12, L_lambda=212, L_y=265)
    # L_F = 3*13 + 5*265; Lbar_F = 13*5; sigma_F^2 = 2*4 (1 + 144).
    expected |= dict(L_F=1364, Lbar_F=65, sigma_F=math.sqrt(1160), delta_q=130)
    expected |= dict(delta_v=math.sqrt(16900 + 1160), C_q=682)
    # Ltilde_y = 265*13; Ltilde_F = 3*13 + 5*3445 + 12*3*13.
    expected |= dict(Ltilde_y=3445, Ltilde_F=17732)
    for name, value in expected.items():
        assert getattr(values, name) == pytest.approx(value, rel=zoo.IDENTITY), name
    assert theory.y_lipschitz(mu_g=2, Lbar_gxy=4) == 2
    assert theory.lambda_lipschitz(mu_g=2, L_g=7, Lbar_gxy=4, sigma_min=3) == 7


@pytest.mark.parametrize("mu", [0.1, 3.0])
@pytest.mark.parametrize("a", [0.2, 1.0, 5.0])
@pytest.mark.parametrize(("mixed", "coupling"), [(0.0, 2.0), (0.7, 2.0), (0.7, 0.0)])
def test_bounds_are_attained_in_one_dimension(mu, a, mixed, coupling):
    # g = mu y^2 / 2 - mixed x y, active row a y + coupling x = b, f = y.
    base = theory.BaseConstants(
        mu_g=mu,
        L_g=math.hypot(mu, mixed),
        Lbar_gyy=mu,
        Lbar_gxy=mixed,
        L_gyy=0,
        L_gxy=0,
        Lbar_f=1,
        L_f=0,
        L_A=a,
        L_B=coupling,
        lambda_min=a**2,
    )
    values = theory.derived(base)
    # a lambda = mixed x - mu y and y = (b - coupling x) / a.
    dlam = (mixed + mu * coupling / a) / a
    assert values.Lbar_lambda == pytest.approx(dlam, rel=zoo.IDENTITY)
    dy = -coupling / a
    assert abs(dy) <= values.Lbar_y * ROUNDING
    if mixed == 0:
        assert values.Lbar_y == pytest.approx(abs(dy), rel=zoo.IDENTITY)
    # Inactive, y = (mixed x - q) / mu: the value moves by q / mu, the whole bound.
    assert theory.perturbation_gap(Lbar_f=1, mu_g=mu, norm=0.3) == 0.3 / mu
    if coupling == 0:
        slope = theory.y_lipschitz(mu_g=mu, Lbar_gxy=mixed)
        assert slope == pytest.approx(mixed / mu, rel=zoo.IDENTITY)
        assert dlam <= theory.lambda_lipschitz(
            mu_g=mu, L_g=base.L_g, Lbar_gxy=mixed, sigma_min=a
        )


def test_the_local_constant_is_the_one_printed():
    # `eq:lip_y_const` written out, against the short form of the library.
    mu, gxy, Lyy, Lxy, LA, LB, LbA = 1.3, 0.7, 0.9, 0.4, 1.1, 0.6, 2.2
    common = dict(mu_g=mu, Lbar_gxy=gxy, L_A=LA)
    lam = theory.Lbar_lambda(**common, L_B=LB, Lbar_A=LbA)
    y = theory.Lbar_y(**common, Lbar_lambda=lam)
    change = theory.L_lambda(**common, L_gyy=Lyy, L_gxy=Lxy, L_B=LB, Lbar_A=LbA)
    y_change = theory.L_y(
        **common, L_gyy=Lyy, L_gxy=Lxy, Lbar_lambda=lam, L_lambda=change
    )
    first = Lxy / mu + gxy * Lyy / mu**2 + lam * LA * Lyy / mu**2
    second = (LA * gxy / mu + LB) * LA**2 * LbA**2 * Lyy / mu**2
    second += LbA * LA * (Lxy / mu + gxy * Lyy / mu**2)
    printed = (first + LA / mu * second) * (1 + y)
    assert theory.Ltilde_y(Lbar_y=y, L_y=y_change) == pytest.approx(printed)


def test_the_inputs_of_the_method_by_hand():
    values = _constants(L_F=3, Lbar_F=1, delta_v=2)
    inputs = theory.algorithm_inputs(values, eps=1, delta_bar=0.5, Delta=2)
    # s = 4, S = 6, beta = 1 - 1/5760, log(128) / -log(beta) = 27945.3.
    assert inputs.K == 27946
    assert (inputs.gamma1, inputs.gamma2) == (55892, 16 * 55892)
    assert inputs.beta == 1 - 1 / 5760
    assert (inputs.delta_y, inputs.lower_accuracy) == (1 / 5120, 1 / 15360)
    assert inputs.T == 640 * 16 * 55892
    # With Delta = 0 the second term decides: 460800 * 36.
    assert theory.algorithm_inputs(values, eps=1, delta_bar=0.5, Delta=0).T == 16588800


@pytest.mark.parametrize("eps", [4.0, 1.0, 0.03])
@pytest.mark.parametrize("noise", [2.0, 11.0])
def test_the_inputs_satisfy_what_the_proof_needs(eps, noise):
    values = _constants(L_F=3, Lbar_F=1, delta_v=noise)
    inputs = theory.algorithm_inputs(values, eps=eps, delta_bar=0.1, Delta=5)
    s, S = noise + 2, noise**2 + 2
    rest = eps**2 / (960 * S)
    assert inputs.beta == 1 - rest >= 0.5
    # beta^K s <= eps / 32, in logarithms: beta itself is rounded.
    assert inputs.K * math.log1p(-rest) <= math.log(eps / (32 * s))
    assert inputs.T > inputs.K
    terms = (
        4 * inputs.gamma2 * inputs.delta_y / inputs.gamma1,
        4 * inputs.gamma2 * 5 / inputs.T,
        6 * rest / (1 - rest) * S,
        6 / rest * S / inputs.T,
    )
    assert all(term <= eps**2 / 80 * ROUNDING for term in terms)


def test_the_transfer_by_hand():
    values = _constants(C_q=4, Ltilde_F=10)
    moved = theory.transfer(values, eps=0.2, delta_bar=0.1)
    assert moved.radius == 0.05
    assert (moved.eps, moved.delta_bar) == pytest.approx((0.6, 0.12))


def _constants(**given):
    names = theory.DerivedConstants.__dataclass_fields__
    values: dict[str, Any] = {name: 1.0 for name in names if name != "label"} | given
    return theory.DerivedConstants(**values)


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


# Rows.


def total(x, y):
    return jnp.sum(y)


def measured_rows(constraints, n):
    problem = bx.Problem(total, zoo.Clipped(), constraints)
    return theory.measure(problem, box((-1, 1)), box(*[(-1, 1)] * n))


def all_active_sets(A, equality):
    """Extremes over every independent set, by the definition."""
    fixed = [i for i in range(len(A)) if equality[i]]
    free = [i for i in range(len(A)) if not equality[i]]
    extremes = []
    for size in range(len(free) + 1):
        for chosen in itertools.combinations(free, size):
            rows = A[[*fixed, *chosen]]
            if len(rows) and np.linalg.matrix_rank(rows) == len(rows):
                values = np.linalg.svd(rows, compute_uv=False)
                extremes.append((values.min() ** 2, values.max()))
    smallest, largest = zip(*extremes, strict=True)
    return min(smallest), max(largest)


@pytest.mark.parametrize("equalities", [0, 1])
def test_active_sets_are_enumerated(equalities):
    rng = np.random.default_rng(equalities)
    A = rng.normal(size=(6, 3))
    A[3], A[4] = 2 * A[0], A[1] - A[2]
    A_eq = rng.normal(size=(equalities, 3))
    rows = bx.Polyhedron(
        A=A,
        b=np.ones(6),
        A_eq=A_eq if equalities else None,
        b_eq=np.ones(1) if equalities else None,
    )
    base = measured_rows(rows, 3)
    flags = np.arange(6 + equalities) >= 6
    smallest, largest = all_active_sets(np.concatenate([A, A_eq]), flags)
    assert base.lambda_min == pytest.approx(smallest, rel=zoo.EXACT)
    assert base.L_A == pytest.approx(largest, rel=zoo.EXACT)
    assert base.label("lambda_min") == base.label("L_A") == "exact"


def test_boxes_and_simplices_agree_with_their_rows():
    for constraints, flags in (
        (bx.Box(-np.ones(3), np.ones(3)), np.zeros(6, bool)),
        (bx.Simplex(3), np.arange(4) == 3),
    ):
        base = measured_rows(constraints, 3)
        A = np.asarray(constraints.matrix(3, float))
        smallest, largest = all_active_sets(A, flags)
        assert base.lambda_min == pytest.approx(smallest, rel=zoo.EXACT)
        assert base.L_A == pytest.approx(largest, rel=zoo.EXACT)


def test_rows_that_are_never_active_do_not_count():
    A = np.array([[1.0, 0, 0], [1.0, 1e-6, 0]])
    base = measured_rows(bx.Polyhedron(A=A, b=np.array([1.0, np.inf])), 3)
    assert (base.L_A, base.lambda_min) == (1, 1)
    free = measured_rows(bx.Box(-np.inf * np.ones(3), np.inf), 3)
    assert (free.L_A, free.lambda_min) == (0, math.inf)
    assert theory.derived(free).Lbar_lambda == 0
    assert any(text.startswith("ass:sets") for text in free.broken)


def test_too_many_active_sets_are_sampled_and_labelled():
    # The rows of a box in 12 dimensions have C(24, 12) candidates, all of norm one.
    eye = np.eye(12)
    rows = bx.Polyhedron(A=np.concatenate([eye, -eye]), b=np.ones(24))
    base = measured_rows(rows, 12)
    assert base.label("lambda_min") == "estimate"
    assert base.label("L_A") == "bound"
    assert base.lambda_min == pytest.approx(1)
    assert base.L_A == pytest.approx(math.sqrt(2))


def test_a_repeated_row_breaks_an_assumption():
    base = theory.measure(zoo.clipped(2), box((-1, 1)), box((-1, 0)))
    assert any(text.startswith("ass:rank") for text in base.broken)
    assert base.lambda_min == 1


def test_the_largest_gradient_in_many_dimensions_is_a_bound():
    n = 10
    problem = zoo.t2(n)
    region = box(*[(-1, 1)] * n)
    base = theory.measure(problem, region, region)
    assert base.label("Lbar_f") == "bound"
    rng = np.random.default_rng(0)
    xs, ys = np.sign(rng.normal(size=(2, 500, n)))
    Q = np.asarray(problem.upper.Q)
    f_x, f_y = 2 * xs + 0.1 * ys @ Q.T + 1, 2 * ys + 0.1 * xs @ Q + 1
    norms = np.linalg.norm(np.hstack([f_x, f_y]), axis=1)
    assert norms.max() <= base.Lbar_f
    # Five rows in ten dimensions cannot bound the set: the paper's own example.
    assert any(text.startswith("ass:sets") for text in base.broken)


# Identification of the active set.


def projected_gradient(H, c, low, start, steps):
    L, y = np.linalg.eigvalsh(H).max(), start
    yield y
    for _ in range(steps):
        y = np.maximum(y - (H @ y + c) / L, low)
        yield y


@pytest.mark.parametrize("seed", range(30))
def test_the_active_set_is_identified_in_time(seed):
    rng = np.random.default_rng(seed)
    basis, _ = np.linalg.qr(rng.normal(size=(5, 5)))
    H = (basis * rng.uniform(0.2, 3, size=5)) @ basis.T
    c, start = rng.normal(size=5), rng.exponential(size=5) * (rng.uniform(size=5) < 0.6)
    *_, y = projected_gradient(H, c, 0, start, 3000)
    active = y == 0
    eigenvalues = np.linalg.eigvalsh(H)
    steps = theory.identification_steps(
        mu_g=eigenvalues.min(),
        Lbar_gyy=eigenvalues.max(),
        distance=norm(start - y),
        multiplier=(H @ y + c)[active].min(initial=np.inf),
        slack=y[~active].min(initial=np.inf),
    )
    path = list(projected_gradient(H, c, 0, start, steps + 50))
    assert all(np.array_equal(point == 0, active) for point in path[steps:])


def test_identification_needs_the_slack_that_the_remark_leaves_out():
    # y* = (0.1, 0) with multiplier 10, from 0: the remark grants the first step, but
    # at the start the first bound is held although it is not active at y*.
    common = dict(mu_g=1, Lbar_gyy=1, distance=0.1)
    assert theory.identification_steps(**common, multiplier=10) == 1
    assert theory.identification_steps(**common, slack=0.1) == 1
    assert theory.identification_steps(**common, slack=0.01) == 3
    assert theory.identification_steps(mu_g=1, Lbar_gyy=1, distance=0, slack=1) == 0


def test_the_norm_of_a_tilt():
    draws = np.random.default_rng(0).normal(size=(200_000, 5))
    norm = theory.tilt_norm(bx.Gaussian(0.3), 5)
    assert norm.kind == "mean"
    assert norm.value == pytest.approx(
        0.3 * np.linalg.norm(draws, axis=1).mean(), rel=3e-3
    )
    ball = theory.tilt_norm(bx.UniformBall(0.3), 5)
    assert (ball.kind, ball.value) == ("largest", 0.3)
    cut = theory.tilt_norm(bx.TruncatedGaussian(0.1, width=2.0), 4)
    assert cut.value == pytest.approx(0.4)


# Mistakes.


def any_(value) -> Any:
    """A value of the wrong type, past the type checker."""
    return value


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: theory.measure(any_("p"), box((0, 1)), box((0, 1))), "`problem`"),
        (lambda: theory.measure(zoo.t1(), any_(3), box((0, 1))), "`region_x`"),
        (
            lambda: theory.measure(zoo.t1(), box((0, np.inf)), box((0, 1))),
            "`region_x` must be bounded",
        ),
        (
            lambda: theory.measure(zoo.t1(), box((0, 1)), box((1, 0))),
            "`region_y` must have lower <= upper",
        ),
        (
            lambda: theory.measure(zoo.t1(), box((0, 1)), box((0, 1), (0, 1))),
            "`region_y` must have the structure",
        ),
        (
            lambda: theory.measure(zoo.t1(), box((0, 1)), box((0, 1)), num_samples=0),
            "`num_samples`",
        ),
        (lambda: theory.Lbar_A(Lbar_gyy=1, lambda_min=0), "`lambda_min`"),
        (lambda: theory.Lbar_y(mu_g=0, Lbar_gxy=1, L_A=1, Lbar_lambda=1), "`mu_g`"),
        (lambda: theory.perturbation_gap(Lbar_f=1, mu_g=1, norm=np.inf), "`norm`"),
        (lambda: theory.tilt_norm(bx.Gaussian(1.0), 0), "`size`"),
        (
            lambda: theory.algorithm_inputs(
                _constants(delta_v=2), eps=5, delta_bar=1, Delta=1
            ),
            "`eps` must be at most .* = 4; got 5",
        ),
        (
            lambda: theory.algorithm_inputs(_constants(), eps=1, delta_bar=0, Delta=1),
            "`delta_bar`",
        ),
        (lambda: theory.transfer(_constants(), eps=-1, delta_bar=1), "`eps`"),
        (
            lambda: theory.identification_steps(mu_g=2, Lbar_gyy=1, distance=1),
            "`Lbar_gyy` must be at least",
        ),
        (
            lambda: theory.measure(zoo.t1(), box((0, 1)), box((0, 1))).label("mu"),
            "`name` must be one of",
        ),
    ],
)
def test_mistakes_are_named(call, words):
    with pytest.raises(ValueError, match=words):
        call()


def test_a_flat_lower_level_and_a_pole_are_named():
    flat = bx.Problem(
        lambda x, y: jnp.sum(y), lambda x, y: jnp.sum(y * x), y0=np.ones(1)
    )
    with pytest.raises(ValueError, match="strongly convex"):
        theory.measure(flat, box((0, 1)), box((0, 1)))
    pole = bx.Problem(
        lambda x, y: jnp.sum(y), lambda x, y: -jnp.sum(jnp.log(y)), y0=np.ones(1)
    )
    with pytest.raises(ValueError, match="must be finite on the region"):
        theory.measure(pole, box((0, 1)), box((-1, 1)))


def test_dependent_equalities_are_refused():
    rows = bx.Polyhedron(A_eq=np.ones((2, 3)), b_eq=np.ones(2))
    with pytest.raises(ValueError, match="`A_eq` must have independent rows"):
        measured_rows(rows, 3)
