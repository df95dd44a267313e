"""Perturbed stochastic INGD: segments that end near the next iterate."""

from .._arguments import check_fields
from .asking import AbstractAskingMethod
from .base import Number, number
from .stochastic_ingd import (
    after_momentum,
    check_constants,
    first_momentum,
    segment_query,
)


class PerturbedStochasticINGD(AbstractAskingMethod):
    """Like `StochasticINGD`, with segments perturbed so that gradients exist.

    With `m` at first the gradient at the start, a fresh sample at every step and `u`
    uniform in the unit ball:

        x+   = P(x - m / (p |m| + q))
        xbar ~ uniform on the segment [x, x+ + nu u]
        m+   = beta m + (1 - beta) grad F(xbar)

    - `p`, `q`: constants of the step, both or none. By default step lengths fall
      geometrically from `first_step` to `first_step * decay` (over 300 steps at least),
      in units of the length of the problem, measured at the start. `decay` is 1e-5;
      where steps see samples they fall as those of `DSBLO`.
    - `beta`: weight of the old momentum.
    - `blur`: `nu` in units of the longest step, which is `1 / p`.
    - `window`: how many steps before a random one the returned iterate lies
      (`output="random"`); the `K = p delta` of the paper on stochastic INGD.

    Tian, Zhou and So, On the finite-time complexity and practical computation of
    approximate stationarity concepts of Lipschitz functions, ICML 2022.

    Reconstruction: rebuilt from its purpose, an ordinary gradient in place of the
    directional oracle; where its paper perturbs, and how much, may differ.

    Deviations: those of `StochasticINGD`; with a domain, `xbar` is projected on it.
    """

    p: Number | None = number(None)
    q: Number | None = number(None)
    beta: Number = number(0.9)
    first_step: Number = number(0.05)
    decay: Number | None = number(None)
    blur: Number = number(1e-3)
    window: int = 0

    def __check_init__(self):
        check_fields(self)
        check_constants(self)

    @property
    def lag(self):
        return self.window

    def init(self, problem, x, lower, scales, *, key):
        return first_momentum(x, lower, scales)

    def ask(self, problem, state, *, step, num_steps, key):
        blur = self.blur
        return segment_query(self, problem, state, step, num_steps, key, blur=blur)

    def tell(self, problem, state, query, oracle):
        return after_momentum(self, state, query, oracle)
