"""DS-BLO: doubly stochastically perturbed, normalised momentum (`Algo: DS-BLO`)."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array, Bool, PRNGKeyArray, PyTree

from .._arguments import check_fields
from .._lower.base import LowerSolution
from .._problem.perturbation import AbstractPerturbation, Gaussian
from .._problem.problem import Problem
from .._programs.arrays import xp
from .._programs.control import brief_stage, packed
from .._programs.modules import Plain, made, with_fields
from ..theory.inputs import AlgorithmInputs
from .asking import AbstractAskingMethod, Query
from .base import Number, Scales, draws, falling, number, tree_norm
from .normalised_step import NormalisedStep


class DSBLOState(Plain):
    """`x`, the momentum, and the last lower-level solution as a warm start.

    The momentum is the weighted mean of gradients whose norm the paper follows along a
    run; as long as no more than `K` steps are taken it is that very quantity.
    """

    x: PyTree[Array]
    momentum: PyTree[Array]
    lower: LowerSolution
    scales: Scales
    started: Bool[Array, ""]
    fixed: PRNGKeyArray


class DSBLO(AbstractAskingMethod):
    """Normalised momentum along gradients of randomly tilted lower levels.

    Step `t`, with a fresh tilt `q` and (for sampled problems) a fresh sample:

        x+   = P(x - m / (gamma1 |m| + gamma2))
        xbar ~ uniform on the segment [x, x+]
        m+   = beta m + (1 - beta) grad F_q(xbar)

    Called without arguments it needs no tuning: step lengths fall geometrically from
    `first_step` to `first_step * decay` times the length scale of the problem (over 300
    steps at least), tilts from `first_tilt` of its force scale, both measured at the
    start. `decay` is 1e-5; where steps see samples they fall to three over their number
    instead, and on top of that linearly to zero, unless `decay` is given. With `gamma1`
    and `gamma2` given, steps are exactly those of the paper and `perturbation` is the
    law of `q`.

    - `gamma1`, `gamma2`: constants of the step, both or none. `gamma2` may be a
      function of the number of the step: one over a step-size schedule.
    - `beta`: weight of the old momentum.
    - `perturbation`: law of the tilt; by default Gaussian with a falling deviation.
    - `window`: how many steps before a random one the returned iterate lies
      (`output="random"`); the `K` of `Thm:Main_I`.
    - `fresh_tilt`, `segment`: switches for ablations. False keeps the first tilt for
      the whole run, or takes gradients at the iterate itself.
    """

    gamma1: Number | None = number(None)
    gamma2: Number | Callable | None = number(None)
    beta: Number = number(0.9)
    perturbation: AbstractPerturbation | None = None
    first_step: Number = number(0.05)
    decay: Number | None = number(None)
    first_tilt: Number = number(1e-3)
    tilt_decay: Number = number(1e-4)
    window: int = 0
    fresh_tilt: bool = True
    segment: bool = True

    def __check_init__(self):
        check_fields(self)
        if (self.gamma1 is None) != (self.gamma2 is None):
            raise ValueError(
                "`gamma1` and `gamma2` belong together: give both (the paper's "
                "constants) or none (steps that fall with the run)."
            )

    @classmethod
    def from_theory(
        cls, inputs: AlgorithmInputs, perturbation: AbstractPerturbation
    ) -> "DSBLO":
        """With the constants of `Thm:Main_I`, see `bilevax.theory.algorithm_inputs`.

        They come with a number of steps, `inputs.T`, and are far too careful for
        practice.
        """
        return cls(
            inputs.gamma1,
            inputs.gamma2,
            inputs.beta,
            perturbation=perturbation,
            window=int(inputs.K),
        )

    @property
    def lag(self):
        return self.window

    @property
    def uses_scales(self):
        return self.gamma1 is None or self.perturbation is None

    def init(self, problem, x, lower, scales, *, key):
        zeros = jax.tree.map(jnp.zeros_like, x)
        return DSBLOState(x, zeros, lower, scales, jnp.asarray(False), key)

    def ask(self, problem, state, *, step, num_steps, key):
        m, m_norm = state.momentum, tree_norm(state.momentum)
        rule = NormalisedStep(self.gamma1, self.gamma2, self.first_step, self.decay)
        length = rule.length(m_norm, state.scales, step, num_steps)
        # The first step stands still: it only finds the first gradient.
        length = xp.where(state.started, length, 0)
        ahead = rule.ahead(problem, state.x, m, length)
        law, deviation = self._law(problem, state.scales, step, num_steps)
        fixed = None if self.fresh_tilt else state.fixed
        where, q = _drawn(packed(law), problem.y0, m_norm, key, fixed)
        where = where if self.segment else 1
        between = jax.tree.map(lambda a, b: a + where * (b - a), state.x, ahead)
        return Query(between, ahead, q, (m_norm, deviation))

    def tell(self, problem, state, query, oracle):
        e, usable = oracle.e, oracle.usable
        m, (m_norm, deviation) = state.momentum, query.more
        beta = xp.where(state.started, self.beta, 0)
        momentum = jax.tree.map(
            lambda old, new: xp.where(usable, beta * old + (1 - beta) * new, old),
            m,
            e.grad,
        )
        started = state.started | usable
        new = with_fields(state, x=oracle.ahead, momentum=momentum, started=started)
        return new, dict(momentum_norm=m_norm, tilt=deviation)

    def _law(self, problem: Problem, scales: Scales, step, num_steps):
        if self.perturbation is not None:
            return self.perturbation, xp.asarray(xp.nan)
        size = sum(leaf.size for leaf in jax.tree.leaves(problem.y0))
        step = step if self.fresh_tilt else 0
        deviation = falling(self.first_tilt, self.tilt_decay, step, num_steps)
        deviation = deviation * scales.force / size**0.5
        return made(Gaussian, std=deviation), deviation


@brief_stage
def _drawn(law: AbstractPerturbation, y0, like, key, fixed):
    """A number in [0, 1] and a tilt; that of the key `fixed`, where there is one."""
    keys = draws(key)
    where = jr.uniform(keys.segment, (), like.dtype)
    return where, law.sample(y0, key=keys.tilt if fixed is None else fixed)
