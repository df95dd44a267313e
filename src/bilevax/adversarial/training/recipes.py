"""From settings to a problem and a method of the library."""

from typing import Any

import equinox as eqx
import jax
import optax

from ..._methods.base import AbstractMethod, Number, number, tree_norm
from ..._methods.ds_blo import DSBLO
from ..._methods.gradient_descent import GradientDescent
from ..._methods.pigd import PIGD
from ..._methods.ssigd import SSIGD
from ..._problem.perturbation import Gaussian
from ..networks.network import statistics_mask
from .problem import AbstractInstance, Bilevel, Madry, Trades
from .schedules import Rate
from .settings import BILEVEL, Settings


def instance_of(settings: Settings) -> AbstractInstance:
    """How a batch becomes a bilevel problem."""
    s, attack = settings, settings.attack
    common: Any = dict(weight_decay=s.weight_decay, label_smoothing=s.label_smoothing)
    if s.method in BILEVEL:
        return Bilevel(
            epsilon=s.epsilon,
            attack_step=attack.attack_step,
            implicit_weight=None if s.tied else s.implicit_weight,
            steps=attack.steps,
            sign_step=attack.sign_step,
            implicit_every=s.implicit_every,
            **common,
        )
    if s.method == "clean":
        return Madry(epsilon=0.0, steps=0, step_size=1.0, **common)
    sizes: Any = dict(epsilon=s.epsilon, steps=attack.steps, step_size=attack.sign_step)
    if s.method == "trades":
        return Trades(beta=s.trades_beta, **sizes, **common)
    return Madry(**sizes, **common)


def method_of(settings: Settings, model, num_steps: int) -> AbstractMethod:
    """The method that moves the weights; all share one schedule."""
    s = settings
    rate = Rate(s.schedule, s.rate, num_steps, s.peak_at)
    law = Gaussian(s.tilt_deviation)
    if s.method in ("ds-blo", "tilted-momentum"):
        gamma2 = InverseRate(rate, s.momentum)
        segment = s.method == "ds-blo"
        return DSBLO(s.gamma1, gamma2, s.momentum, perturbation=law, segment=segment)
    optimiser: Any = SGD(rate, s.momentum)
    if s.method == "ssigd":
        return SSIGD(perturbation=law, optimiser=optimiser)
    if s.method == "pigd":
        weights = eqx.filter(model, statistics_mask(model), inverse=True)
        radius = s.radius * float(jax.jit(tree_norm)(weights))
        return PIGD(radius=radius, oracle="implicit", optimiser=optimiser)
    return GradientDescent(optimiser)


class InverseRate(eqx.Module):
    """`gamma2 = (1 - momentum) / rate`: the step of DS-BLO that matches one of SGD.

    SGD adds gradients up, DS-BLO averages them: `1 - momentum` times as much.
    """

    rate: Rate
    momentum: Number = number(0.9)

    def __call__(self, step):
        return (1 - self.momentum) / self.rate(step)


class SGD(eqx.Module):
    """`optax.sgd` whose numbers are arrays: other ones do not compile again."""

    rate: Rate
    momentum: Number = number(0.9)

    def init(self, params):
        return self._optimiser().init(params)

    def update(self, updates, state, params=None):
        return self._optimiser().update(updates, state, params)

    def _optimiser(self) -> optax.GradientTransformation:
        return optax.sgd(self.rate, momentum=self.momentum)
