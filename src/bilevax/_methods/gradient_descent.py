"""Gradient descent on `F` with any optimiser of optax."""

from typing import TYPE_CHECKING, Any

from jaxtyping import Array, PyTree

from .._arguments import check_fields
from .._lower.base import LowerSolution
from .._programs.modules import Plain, with_fields
from .asking import AbstractAskingMethod, Query
from .optimiser import check_optimiser, optimiser_step

if TYPE_CHECKING:
    import optax


class GradientDescentState(Plain):
    """`x`, the last lower-level solution, and the memory of the optimiser."""

    x: PyTree[Array]
    lower: LowerSolution
    memory: Any


class GradientDescent(AbstractAskingMethod):
    """Steps of an optax optimiser along hypergradients, without any tilt.

        x+ = P(x + optimiser(grad F(x)))

    The plain way to train with a bilevel gradient: no smoothing, no guarantee at kinks.

    - `optimiser`: an `optax.GradientTransformation`, such as `optax.adam(1e-2)`.
    """

    optimiser: "optax.GradientTransformation"

    def __check_init__(self):
        check_fields(self)
        check_optimiser(self.optimiser)

    @property
    def uses_scales(self):
        return False

    def init(self, problem, x, lower, scales, *, key):
        return GradientDescentState(x, lower, self.optimiser.init(x))

    def ask(self, problem, state, *, step, num_steps, key):
        return Query(state.x, state.x)

    def tell(self, problem, state, query, oracle):
        grad, usable = oracle.e.grad, oracle.usable
        x, memory = optimiser_step(
            self.optimiser, problem, state.memory, oracle.ahead, grad, usable
        )
        return with_fields(state, x=x, memory=memory), {}
