"""SSIGD: stochastic gradient steps on `F` under one tilt of the lower level."""

import equinox as eqx
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float, PRNGKeyArray, PyTree

from .._feasible import onto_domain
from .._lower.base import LowerSolution
from .._perturbation import AbstractPerturbation, Gaussian
from .._problem import Problem
from .base import (
    AbstractMethod,
    Number,
    Scales,
    draws,
    falling,
    number,
    report,
    tree_step,
)
from .oracle import gradient_at
from .search import select


class SSIGDState(eqx.Module):
    """`x`, the tilt of the whole run and its size, and a warm start."""

    x: PyTree[Array]
    lower: LowerSolution
    q: PyTree[Array]
    deviation: Float[Array, ""]
    scales: Scales


class SSIGD(AbstractMethod):
    """Projected stochastic gradient steps with a tilt that is drawn once.

    With `q` drawn before the first step and a fresh sample at step `t`:

        x+ = P(x - eta_t grad F_q(x))

    The tilt makes the multipliers of active rows positive almost surely, so that the
    gradient exists at a given `x`. It moves the kinks and with them the answer, by an
    amount proportional to `|q|`.

    - `step_size`: a constant `eta_t`, as in the paper. By default steps fall
      geometrically from `first_step` to `first_step * decay`, in units of the length of
      the problem over the slope of `F`, both measured at the start.
    - `perturbation`: law of the tilt. By default Gaussian, its deviation `tilt` times
      the force scale of the problem.

    Khanduri, Tsaknakis, Zhang, Liu, Liu, Zhang and Hong, Linearly constrained bilevel
    optimization: a smoothed implicit gradient approach, ICML 2023.

    Deviations: the lower level is solved to rounding, not to a set accuracy; its rows
    may move with `x`, and where it is empty `x` first goes back to the nearest point
    where it is not; the sample may enter the lower level too; step sizes fall and the
    tilt has a scale by default; the last iterate is returned unless the run asks for a
    random one.
    """

    step_size: Number | None = number(None)
    perturbation: AbstractPerturbation | None = None
    first_step: Number = number(0.1)
    decay: Number = number(1e-2)
    tilt: Number = number(1e-4)

    def init(self, problem, x, lower, scales, *, key):
        q, deviation = one_tilt(self.perturbation, self.tilt, problem, scales, key)
        return SSIGDState(x, lower, q, deviation, scales)

    def step(self, problem, state, *, step, num_steps, key):
        now = problem.draw(draws(key).sample).perturbed(state.q)
        length = self.step_size
        if length is None:
            length = falling(self.first_step, self.decay, step, num_steps)
            length = length * state.scales.length / state.scales.slope
        oracle = gradient_at(now, state.x, state.x, state.lower)
        ahead = onto_domain(now, tree_step(oracle.ahead, -length, oracle.e.grad))
        x = select(oracle.usable, ahead, oracle.ahead)
        record = report(
            problem,
            oracle.e,
            state.lower,
            state.x,
            x,
            tilt=state.deviation,
            lower_solves=1 + oracle.recovered,
            recovered=oracle.recovered,
        )
        new = eqx.tree_at(lambda s: (s.x, s.lower), state, (x, oracle.e.lower))
        return new, record


def one_tilt(
    law: AbstractPerturbation | None,
    share: Number,
    problem: Problem,
    scales: Scales,
    key: PRNGKeyArray,
) -> tuple[PyTree[Array], Float[Array, ""]]:
    """The tilt of a whole run and its deviation, NaN where the law has none."""
    deviation = jnp.asarray(jnp.nan)
    if law is None:
        size = ravel_pytree(problem.y0)[0].size
        deviation = share * scales.force / jnp.sqrt(size)
        law = Gaussian(deviation)
    return law.sample(problem.y0, key=key), deviation
