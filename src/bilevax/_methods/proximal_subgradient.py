"""The proximal stochastic subgradient method on `F`."""

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from .._implicit.feasible import onto_domain
from .._lower.base import LowerSolution
from .base import AbstractMethod, Number, Scales, draws, number, report, tree_step
from .oracle import gradient_at
from .search import select


class ProximalSubgradientState(eqx.Module):
    """`x` and a warm start."""

    x: PyTree[Array]
    lower: LowerSolution
    scales: Scales


class ProximalSubgradient(AbstractMethod):
    """Projected stochastic subgradient steps, for weakly convex `F`.

    With a fresh sample at step `t` and `P` the projection on the domain, which is the
    proximal map of its indicator:

        x+ = P(x - alpha_t grad F(x))

    - `step_size`: a constant `alpha_t`. The bound of the paper for `T` steps wants it
      proportional to `1 / sqrt(T + 1)`. By default `alpha_t` is `first_step /
      sqrt(t + 1)`, in units of the length of the problem over the slope of `F`, both
      measured at the start.

    Davis and Drusvyatskiy, Stochastic model-based minimization of weakly convex
    functions, SIAM Journal on Optimization, 2019.

    Deviations: the regulariser is the indicator of the domain; at a kink the gradient
    of one side stands for a subgradient; where the lower level is empty `x` first goes
    back to the nearest point where it is not; the last iterate is returned (with
    `output="random"` a uniform one, which is the paper's choice for constant steps
    only, since the paper draws with the weights `alpha_t`).
    """

    step_size: Number | None = number(None)
    first_step: Number = number(0.1)

    def init(self, problem, x, lower, scales, *, key):
        return ProximalSubgradientState(x, lower, scales)

    def step(self, problem, state, *, step, num_steps, key):
        now = problem.draw(draws(key).sample, step)
        alpha = self.step_size
        if alpha is None:
            alpha = self.first_step * state.scales.length / state.scales.slope
            alpha = alpha / jnp.sqrt(step + 1.0)
        oracle = gradient_at(now, state.x, state.x, state.lower)
        ahead = onto_domain(now, tree_step(oracle.ahead, -alpha, oracle.e.grad))
        x = select(oracle.usable, ahead, oracle.ahead)
        record = report(
            problem,
            oracle.e,
            state.lower,
            state.x,
            x,
            recovered=oracle.recovered,
        )
        new = eqx.tree_at(lambda s: (s.x, s.lower), state, (x, oracle.e.lower))
        return new, record
