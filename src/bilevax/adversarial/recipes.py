"""From settings to a problem and a method of the library."""

import functools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import optax

from .._methods.base import AbstractMethod, Number, number, tree_norm
from .._methods.ds_blo import DSBLO
from .._methods.gradient_descent import GradientDescent
from .._methods.pigd import PIGD
from .._methods.ssigd import SSIGD
from .._perturbation import Gaussian
from .problem import AbstractInstance, Bilevel, Madry, Trades
from .schedules import learning_rate
from .settings import BILEVEL, Settings


def instance_of(settings: Settings) -> AbstractInstance:
    """How a batch becomes a bilevel problem."""
    s = settings
    common: Any = dict(weight_decay=s.weight_decay, label_smoothing=s.label_smoothing)
    if s.method in BILEVEL:
        return Bilevel(
            epsilon=s.epsilon,
            attack_step=s.step_of_attack,
            implicit_weight=None if s.tied else s.implicit_weight,
            steps=1 if s.attack_steps is None else s.attack_steps,
            sign_step=s.sign_step,
            **common,
        )
    steps = 10 if s.attack_steps is None else s.attack_steps
    size = 2 / 255 if s.sign_step is None else s.sign_step
    attack: Any = dict(epsilon=s.epsilon, steps=steps, step_size=size)
    if s.method == "at":
        return Madry(**attack, **common)
    if s.method == "trades":
        return Trades(beta=s.trades_beta, **attack, **common)
    if s.method == "fast-at":
        return Madry(epsilon=s.epsilon, steps=1, step_size=1.25 * s.epsilon, **common)
    return Madry(epsilon=0.0, steps=0, step_size=1.0, **common)


def method_of(settings: Settings, model, num_steps: int) -> AbstractMethod:
    """The method that moves the weights; all share one schedule."""
    s = settings
    shape = _shape(s.schedule, num_steps, s.peak_at)
    law = Gaussian(s.tilt_deviation)
    if s.method in ("ds-blo", "tilted-momentum"):
        gamma2 = InverseRate(shape, s.rate, s.momentum)
        segment = s.method == "ds-blo"
        return DSBLO(s.gamma1, gamma2, s.momentum, perturbation=law, segment=segment)
    optimiser = _sgd(shape, s.rate, s.momentum)
    if s.method == "ssigd":
        return SSIGD(perturbation=law, optimiser=optimiser)
    if s.method == "pigd":
        radius = s.radius * float(jax.jit(tree_norm)(model))
        return PIGD(radius=radius, oracle="implicit", optimiser=optimiser)
    return GradientDescent(optimiser)


class InverseRate(eqx.Module):
    """`gamma2 = (1 - momentum) / rate`: the step of DS-BLO that matches one of SGD.

    SGD adds gradients up, DS-BLO averages them: `1 - momentum` times as much.
    """

    shape: Callable = eqx.field(static=True)
    peak: Number = number(0.1)
    momentum: Number = number(0.9)

    def __call__(self, step):
        return (1 - self.momentum) / (self.peak * self.shape(step))


# Kept, so that a second run with the same schedule does not compile again.
@functools.cache
def _shape(kind: str, num_steps: int, peak_at: float) -> Callable:
    return learning_rate(kind, 1.0, num_steps, peak_at)


@functools.cache
def _sgd(shape: Callable, peak: float, momentum: float) -> optax.GradientTransformation:
    return optax.sgd(lambda step: peak * shape(step), momentum=momentum)
