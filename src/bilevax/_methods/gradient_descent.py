"""Gradient descent on `F` with any optimiser of optax."""

from typing import TYPE_CHECKING, Any

import equinox as eqx
from jaxtyping import Array, PyTree

from .._lower.base import LowerSolution
from .base import AbstractMethod, draws, report
from .optimiser import check_optimiser, optimiser_step
from .oracle import gradient_at

if TYPE_CHECKING:
    import optax


class GradientDescentState(eqx.Module):
    """`x`, the last lower-level solution, and the memory of the optimiser."""

    x: PyTree[Array]
    lower: LowerSolution
    memory: Any


class GradientDescent(AbstractMethod):
    """Steps of an optax optimiser along hypergradients, without any tilt.

        x+ = P(x + optimiser(grad F(x)))

    The plain way to train with a bilevel gradient: no smoothing, no guarantee at kinks.

    - `optimiser`: an `optax.GradientTransformation`, such as `optax.adam(1e-2)`.
    """

    optimiser: "optax.GradientTransformation"

    def __check_init__(self):
        check_optimiser(self.optimiser)

    @property
    def uses_scales(self):
        return False

    def init(self, problem, x, lower, scales, *, key):
        return GradientDescentState(x, lower, self.optimiser.init(x))

    def step(self, problem, state, *, step, num_steps, key):
        now = problem.draw(draws(key).sample, step)
        oracle = gradient_at(now, state.x, state.x, state.lower)
        x, memory = optimiser_step(
            self.optimiser,
            now,
            state.memory,
            oracle.ahead,
            oracle.e.grad,
            oracle.usable,
        )
        record = report(
            problem,
            oracle.e,
            state.lower,
            state.x,
            x,
            recovered=oracle.recovered,
        )
        return GradientDescentState(x, oracle.e.lower, memory), record
