"""Stochastic INGD: normalised momentum along gradients at random segment points."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array, Bool, PyTree

from .._implicit.feasible import onto_domain
from .._lower.base import LowerSolution
from .._problem.perturbation import UniformBall
from .base import (
    AbstractMethod,
    Number,
    Scales,
    draws,
    falling,
    number,
    report,
    tree_norm,
    tree_step,
)
from .normalised_step import NormalisedStep
from .oracle import gradient_at
from .search import between, select


class StochasticINGDState(eqx.Module):
    """`x`, the momentum, and a warm start; `started` once there is a gradient."""

    x: PyTree[Array]
    momentum: PyTree[Array]
    lower: LowerSolution
    scales: Scales
    started: Bool[Array, ""]


class StochasticINGD(AbstractMethod):
    """DS-BLO without a tilt: normalised momentum, gradients at segment points.

    With `m` at first the gradient at the start, and a fresh sample at every step:

        x+   = P(x - m / (p |m| + q))
        xbar ~ uniform on the segment [x, x+]
        m+   = beta m + (1 - beta) grad F(xbar)

    - `p`, `q`: constants of the step, both or none. By default step lengths fall
      geometrically from `first_step` to `first_step * decay` (over 300 steps at least),
      in units of the length of the problem, measured at the start.
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
    decay: Number = number(1e-5)
    window: int = 0

    def __check_init__(self):
        check_constants(self)

    @property
    def lag(self):
        return self.window

    def init(self, problem, x, lower, scales, *, key):
        return first_momentum(x, lower, scales)

    def step(self, problem, state, *, step, num_steps, key):
        return momentum_step(self, problem, state, step, num_steps, key, blur=None)


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


def momentum_step(method, problem, state, step, num_steps, key, *, blur):
    """One step; with `blur` the segment ends near `x+`, that many step lengths off."""
    keys = draws(key)
    now = problem.draw(keys.sample)
    rule = NormalisedStep(method.p, method.q, method.first_step, method.decay)
    m, m_norm = state.momentum, tree_norm(state.momentum)
    length = rule.length(m_norm, state.scales, step, num_steps)
    length = jnp.where(state.started, length, 0)
    ahead = rule.ahead(now, state.x, m, length)
    end = ahead
    if blur is not None:
        longest = falling(method.first_step, method.decay, step, num_steps)
        longest = longest * state.scales.length if method.p is None else 1 / method.p
        noise = UniformBall(blur * longest).sample(ahead, key=keys.direction)
        end = tree_step(ahead, jnp.where(state.started, 1, 0), noise)
    share = jr.uniform(keys.segment, (), m_norm.dtype)
    at = between(state.x, end, share)
    if blur is not None:
        at = onto_domain(now, at)
    oracle = gradient_at(now, at, ahead, state.lower)
    beta = jnp.where(state.started, method.beta, 0)
    momentum = select(oracle.usable, between(oracle.e.grad, m, beta), m)
    record = report(
        problem,
        oracle.e,
        state.lower,
        state.x,
        oracle.ahead,
        momentum_norm=m_norm,
        recovered=oracle.recovered,
    )
    new = eqx.tree_at(
        lambda s: (s.x, s.momentum, s.lower, s.started),
        state,
        (oracle.ahead, momentum, oracle.e.lower, state.started | oracle.usable),
    )
    return new, record
