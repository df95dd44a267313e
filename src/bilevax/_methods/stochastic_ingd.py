"""Stochastic INGD: normalised momentum along gradients at random segment points."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, PyTree

from .._arguments import check_fields
from .._implicit.feasible import onto_domain
from .._lower.base import LowerSolution
from .._programs.arrays import xp
from .._programs.modules import Plain, with_fields
from .asking import AbstractAskingMethod, Query, share_and_direction
from .base import Number, Scales, number, tree_norm, tree_step
from .normalised_step import NormalisedStep
from .oracle import Oracle
from .search import between, select


class StochasticINGDState(Plain):
    """`x`, the momentum, and a warm start; `started` once there is a gradient."""

    x: PyTree[Array]
    momentum: PyTree[Array]
    lower: LowerSolution
    scales: Scales
    started: Bool[Array, ""]


class StochasticINGD(AbstractAskingMethod):
    """DS-BLO without a tilt: normalised momentum, gradients at segment points.

    With `m` at first the gradient at the start, and a fresh sample at every step:

        x+   = P(x - m / (p |m| + q))
        xbar ~ uniform on the segment [x, x+]
        m+   = beta m + (1 - beta) grad F(xbar)

    - `p`, `q`: constants of the step, both or none. By default step lengths fall
      geometrically from `first_step` to `first_step * decay` (over 300 steps at least),
      in units of the length of the problem, measured at the start. `decay` is 1e-5;
      where steps see samples they fall as those of `DSBLO`.
    - `beta`: weight of the old momentum.
    - `window`: how many steps before a random one the returned iterate lies
      (`output="random"`); the `K = p delta` of the paper.

    Zhang, Lin, Jegelka, Sra and Jadbabaie, Complexity of finding stationary points of
    nonconvex nonsmooth functions, ICML 2020.

    Deviations: gradients at the random point stand for a stochastic generalised
    gradient, and exist unless the segment runs inside a kink. The first step stands
    still, for it only finds the first gradient. Without `p` and `q` step lengths fall,
    and a step that the projection shortens is stretched. Where the lower level is empty
    `x` goes back to the nearest point where it is not.
    """

    p: Number | None = number(None)
    q: Number | None = number(None)
    beta: Number = number(0.9)
    first_step: Number = number(0.05)
    decay: Number | None = number(None)
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
        return segment_query(self, problem, state, step, num_steps, key, blur=None)

    def tell(self, problem, state, query, oracle):
        return after_momentum(self, state, query, oracle)


def check_constants(method) -> None:
    """Raise a `ValueError` if one of `p` and `q` is given alone."""
    if (method.p is None) != (method.q is None):
        raise ValueError(
            "`p` and `q` belong together: give both (the paper's constants) or none "
            "(steps that fall with the run)."
        )


def first_momentum(x, lower, scales: Scales) -> StochasticINGDState:
    """Before the first gradient."""
    zeros = jax.tree.map(jnp.zeros_like, x)
    return StochasticINGDState(x, zeros, lower, scales, jnp.asarray(False))


def segment_query(method, problem, state, step, num_steps, key, *, blur) -> Query:
    """The query of a step; with `blur` the segment ends near `x+`, that many step
    lengths off."""
    rule = NormalisedStep(method.p, method.q, method.first_step, method.decay)
    m, m_norm = state.momentum, tree_norm(state.momentum)
    length = rule.length(m_norm, state.scales, step, num_steps)
    length = xp.where(state.started, length, 0)
    end = ahead = rule.ahead(problem, state.x, m, length)
    share, direction = share_and_direction(state.x, m_norm, key)
    if blur is not None:
        if method.p is None:
            longest = rule.reach(state.scales, step, num_steps)
        else:
            longest = 1 / method.p
        reach = xp.where(state.started, blur * longest, 0)
        end = tree_step(ahead, reach, direction)
    at = between(state.x, end, share)
    if blur is not None:
        at = onto_domain(problem, at)
    return Query(at, ahead, more=m_norm)


def after_momentum(method, state, query: Query, oracle: Oracle):
    """The state after a step, and what its record says of the momentum."""
    beta = xp.where(state.started, method.beta, 0)
    averaged = between(oracle.e.grad, state.momentum, beta)
    momentum = select(oracle.usable, averaged, state.momentum)
    started = state.started | oracle.usable
    new = with_fields(state, x=oracle.ahead, momentum=momentum, started=started)
    return new, dict(momentum_norm=query.more)
