"""The proximal stochastic subgradient method on `F`."""

from jaxtyping import Array, PyTree

from .._implicit.feasible import onto_domain
from .._lower.base import LowerSolution
from .._programs.arrays import xp
from .._programs.modules import Plain, with_fields
from .asking import AbstractAskingMethod, Query
from .base import Number, Scales, number, tree_step
from .search import select


class ProximalSubgradientState(Plain):
    """`x` and a warm start."""

    x: PyTree[Array]
    lower: LowerSolution
    scales: Scales


class ProximalSubgradient(AbstractAskingMethod):
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

    def ask(self, problem, state, *, step, num_steps, key):
        alpha = self.step_size
        if alpha is None:
            alpha = self.first_step * state.scales.length / state.scales.slope
            alpha = alpha / xp.sqrt(step + 1.0)
        return Query(state.x, state.x, more=alpha)

    def tell(self, problem, state, query, oracle):
        ahead = tree_step(oracle.ahead, -query.more, oracle.e.grad)
        x = select(oracle.usable, onto_domain(problem, ahead), oracle.ahead)
        return with_fields(state, x=x), {}
