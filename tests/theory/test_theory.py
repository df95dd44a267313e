"""The constants of the analysis, against hand computation."""

import math

import numpy as np
import pytest

import bilevax as bx
from bilevax import theory

from .. import zoo
from ..theory_tools import ROUNDING, box, constants, norm


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
    values = constants(L_F=3, Lbar_F=1, delta_v=2)
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
    values = constants(L_F=3, Lbar_F=1, delta_v=noise)
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
    values = constants(C_q=4, Ltilde_F=10)
    moved = theory.transfer(values, eps=0.2, delta_bar=0.1)
    assert moved.radius == 0.05
    assert (moved.eps, moved.delta_bar) == pytest.approx((0.6, 0.12))


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
