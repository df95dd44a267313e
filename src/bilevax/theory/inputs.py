"""What the analysis tells a user to set: inputs of the method, and size of the tilt."""

import math

import equinox as eqx
import numpy as np

from .._problem.perturbation import AbstractPerturbation, Gaussian
from .constants import (
    BaseConstants,
    DerivedConstants,
    check_non_negative,
    check_positive,
)


class AlgorithmInputs(eqx.Module):
    """Inputs of `Algo: DS-BLO`.

    - `K`: window of the averaged gradients.
    - `gamma1`, `gamma2`: the step is `1 / (gamma1 |m| + gamma2)`.
    - `beta`: momentum.
    - `delta_y`: allowed bias of the gradient.
    - `lower_accuracy`: the error of `y` that keeps the bias within `delta_y`.
    - `T`: number of steps.
    """

    K: int
    gamma1: float
    gamma2: float
    beta: float
    delta_y: float
    lower_accuracy: float
    T: int


def algorithm_inputs(
    constants: DerivedConstants, *, eps: float, delta_bar: float, Delta: float
) -> AlgorithmInputs:
    """Inputs for an `(eps, delta_bar)`-Goldstein point of the perturbed problem.

    With `s = delta_v + 2 Lbar_F` and `S = delta_v^2 + 2 Lbar_F^2` (`Thm:Main`)

        beta = 1 - eps^2 / (960 S),      K = ceil(log(32 s / eps) / log(1 / beta)),
        gamma1 = K / delta_bar,          gamma2 = 4 gamma1 s,
        delta_y = min(eps^2 / (1280 s), 2 eps / 3, Lbar_F),
        T = max(320 gamma2 Delta / eps^2, 460800 S^2 / eps^4, K + 1).

    `Delta` bounds the gap of the start to the infimum of the perturbed objective. The
    first term of `T` keeps the factor in `K` that the paper's order notation drops.
    """
    for name, value in (("eps", eps), ("delta_bar", delta_bar)):
        check_positive(name, value)
    check_non_negative("Delta", Delta)
    scale = constants.delta_v + 2 * constants.Lbar_F
    square = constants.delta_v**2 + 2 * constants.Lbar_F**2
    limit = min(scale, math.sqrt(480 * square))
    if eps > limit:
        raise ValueError(
            "`eps` must be at most min(delta_v + 2 Lbar_F, sqrt(480 (delta_v^2 + "
            f"2 Lbar_F^2))) = {limit:.6g}; got {eps}. The gradient itself is bounded "
            f"by Lbar_F = {constants.Lbar_F:.6g}, so ask for a smaller `eps`."
        )
    shrink = eps**2 / (960 * square)
    # log1p: beta rounds to one long before its logarithm does to zero.
    K = math.ceil(math.log(32 * scale / eps) / -math.log1p(-shrink))
    gamma1 = K / delta_bar
    gamma2 = 4 * gamma1 * scale
    delta_y = min(eps**2 / (1280 * scale), 2 * eps / 3, constants.Lbar_F)
    T = max(320 * gamma2 * Delta / eps**2, 460800 * square**2 / eps**4)
    return AlgorithmInputs(
        K=K,
        gamma1=gamma1,
        gamma2=gamma2,
        beta=1 - shrink,
        delta_y=delta_y,
        lower_accuracy=delta_y / constants.L_F if constants.L_F > 0 else math.inf,
        T=max(math.ceil(T), K + 1),
    )


def perturbation_gap(*, Lbar_f: float, mu_g: float, norm: float) -> float:
    """Bound on what a tilt does to the objective: `Lbar_f |q| / mu_g`.

    `prop:perturbed_prob`. With the largest norm of a law it bounds `|F_q - F|` for
    every draw, with the mean norm only the difference of the mean `F_q` to `F`.
    """
    check_positive("mu_g", mu_g)
    check_non_negative("Lbar_f", Lbar_f)
    check_non_negative("norm", norm)
    return Lbar_f * norm / mu_g


class TiltNorm(eqx.Module):
    """A norm of the tilt; `kind` is "largest", or "mean" for an unbounded law."""

    value: float
    kind: str = eqx.field(static=True)


def tilt_norm(law: AbstractPerturbation, size: int) -> TiltNorm:
    """The norm of `law` in `size` dimensions to put into `perturbation_gap`.

    A Gaussian has no largest norm; its mean, `std sqrt(2) G((n + 1) / 2) / G(n / 2)`
    with `G` the gamma function, is returned instead and labelled so.
    """
    if size < 1:
        raise ValueError(f"`size` must be a positive integer; got {size}.")
    if isinstance(law, Gaussian):
        ratio = math.exp(math.lgamma((size + 1) / 2) - math.lgamma(size / 2))
        return TiltNorm(float(np.asarray(law.std)) * math.sqrt(2) * ratio, "mean")
    return TiltNorm(float(np.asarray(law.radius(size))), "largest")


class Transfer(eqx.Module):
    """What a stationary point of the perturbed problem is to the original one.

    - `radius`: the largest tilt that is allowed.
    - `eps`, `delta_bar`: the point is `(eps, delta_bar)`-Goldstein stationary for `F`.
    """

    radius: float
    eps: float
    delta_bar: float


def transfer(constants: DerivedConstants, *, eps: float, delta_bar: float) -> Transfer:
    """The size of the tilt for a target `eps`, and what it gives (`prop:equivalence`).

    With `|q| <= eps / C_q`, an `(eps, delta_bar)`-Goldstein point of the perturbed
    problem is a `(3 eps, delta_bar + eps / Ltilde_F)` one of the original. The tilt
    must besides leave the active set alone: see `active_set_radius`.
    """
    check_positive("eps", eps)
    check_positive("delta_bar", delta_bar)
    inverse = lambda value: eps / value if value > 0 else math.inf
    return Transfer(
        radius=inverse(constants.C_q),
        eps=3 * eps,
        delta_bar=delta_bar + inverse(constants.Ltilde_F),
    )


def active_set_radius(
    base: BaseConstants, *, multiplier: float = math.inf, slack: float = math.inf
) -> float:
    """A radius of tilts that leave the active set alone: inside `U_q`.

    `mu_g min(multiplier / (Lbar_A L_A), slack)`, with `multiplier` the smallest one of
    the active inequality rows and `slack` the smallest distance of `y*` to an inactive
    row. The paper shows (`app:equivalence`) that such a set exists: on one active set
    the multipliers move by at most `Lbar_A L_A / mu_g` and `y*` by `1 / mu_g` per unit
    of tilt, so neither can reach zero before.
    """
    for name, value in (("multiplier", multiplier), ("slack", slack)):
        check_positive(name, value, finite=False)
    pull = base.Lbar_gyy / base.lambda_min * base.L_A
    held = multiplier / pull if pull > 0 else math.inf
    return base.mu_g * min(held, slack)


def identification_steps(
    *,
    mu_g: float,
    Lbar_gyy: float,
    distance: float,
    multiplier: float = math.inf,
    slack: float = math.inf,
) -> int:
    """Steps of projected gradient on a box until its active set is that of `y*`.

    With steps of `1 / Lbar_gyy` from a start at `distance` of `y*`,

        k >= Lbar_gyy / mu_g log(2 Lbar_gyy distance / multiplier),

    with `multiplier` the smallest one of the active bounds, makes the iterates after
    the `k`-th hold every active bound (remark after `ass:Approx_y`); the count returned
    includes that further step. That they hold no other bound is not in the remark: it
    needs `distance` contracted below `slack`, the smallest distance of an inactive
    entry to its bounds. Leave `slack` out for the statement of the paper.
    """
    check_positive("mu_g", mu_g)
    check_positive("Lbar_gyy", Lbar_gyy)
    check_non_negative("distance", distance)
    for name, value in (("multiplier", multiplier), ("slack", slack)):
        check_positive(name, value, finite=False)
    if Lbar_gyy < mu_g:
        raise ValueError(
            f"`Lbar_gyy` must be at least `mu_g`; got {Lbar_gyy} and {mu_g}."
        )
    # Each step shrinks the distance to y* by 1 - mu_g / Lbar_gyy or more.
    condition = Lbar_gyy / mu_g
    steps = 0
    if math.isfinite(multiplier) and distance > 0:
        ratio = 2 * Lbar_gyy * distance / multiplier
        steps = 1 + max(0, math.ceil(condition * math.log(ratio)))
    if distance >= slack:
        steps = max(steps, 1 + math.floor(condition * math.log(distance / slack)))
    return steps
