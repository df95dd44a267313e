"""A zeroth-order method: differences of `F` along random directions."""

import jax
import jax.numpy as jnp
import jax.random as jr
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, PyTree

from .._arguments import check_fields
from .._implicit.feasible import moves, onto_allowed, onto_domain
from .._implicit.hypergradient import Evaluation
from .._lower.base import LowerSolution
from .._problem.problem import Problem
from .._programs.control import run_if
from .._programs.modules import Plain
from .._status import Status, first_failure, gravest
from .base import (
    AbstractMethod,
    Number,
    Scales,
    draws,
    falling,
    number,
    report,
    tree_norm,
)
from .clipped import Drift, standing_still
from .pigd import check_clip, clipped_lengths
from .search import Work, evaluation, select, value_at


class ZeroOrderState(Plain):
    """`x`, the displacement of the next step, and the last lower-level solution."""

    x: PyTree[Array]
    lower: LowerSolution
    scales: Scales
    drift: Drift


class ZeroOrder(AbstractMethod):
    """The clipped online-to-nonconvex loop on two values of `F` per step.

    From `d = 0`, with `s` uniform in [0, 1] and `w` uniform on the unit sphere:

        z = x + s d,   x+ = P(x + d)
        v = n / (2 rho) (F(z + rho w) - F(z - rho w)) w,   n = dim x
        d+ = clip_D(d - eta v)

    `v` is an unbiased gradient of `F` averaged over the ball of radius `rho`. It needs
    no multipliers, no active set and no derivative of anything, and its variance grows
    with `n`: expect to need about `n` times the steps of a gradient method.

    - `clip`, `step_size`: constants `D` and `eta`, both or none.
    - `first_step`, `decay`: without them, `D` is `first_step` times the length scale of
      the problem at the start and `decay` times that at the end, and `eta` is three
      times `first_step` times length over `sqrt(n)` times slope.
    - `radius`: constant `rho`.
    - `first_radius`, `radius_decay`: without it, in units of the length.
    - `block`: steps over which the points `z` are averaged.

    G. Kornowski, S. Padmanabhan, K. Wang, Z. Zhang, S. Sra: First-order methods for
    linearly constrained bilevel optimization, NeurIPS 2024 (the dimension-dependent
    variant).

    Deviations: lengths and the radius fall by default; the two points are projected on
    the domain of `x`, and on where the lower level has a point, as is `x+` when one of
    them was: `v` is a gradient of `F` after the projection, too short near a boundary;
    the last iterate is returned unless a random one is asked for, where the theory
    returns the mean of a random block (`state.drift.mean` is the last one).

    Reconstruction: the loop around the difference, and the default constants.
    """

    step_size: Number | None = number(None)
    clip: Number | None = number(None)
    first_step: Number = number(0.05)
    decay: Number = number(1e-4)
    radius: Number | None = number(None)
    first_radius: Number = number(1e-2)
    radius_decay: Number = number(1e-4)
    block: int = 10

    def __check_init__(self):
        check_fields(self)
        check_clip(self, True)

    @property
    def takes_followers(self):
        return True

    def init(self, problem, x, lower, scales, *, key):
        return ZeroOrderState(x, lower, scales, standing_still(x))

    def step(self, problem, state, *, step, num_steps, key):
        keys = draws(key)
        now = problem.draw(keys.sample, step)
        scales = state.scales
        share = jr.uniform(keys.segment, (), scales.length.dtype)
        between, ahead = state.drift.propose(now, state.x, share)
        radius = self.radius
        if radius is None:
            radius = falling(self.first_radius, self.radius_decay, step, num_steps)
            radius = radius * scales.length

        e, work = difference(now, between, radius, keys.direction, state.lower)
        usable = jnp.isfinite(e.value) & jnp.isfinite(tree_norm(e.grad))
        grad = jax.tree.map(lambda g: jnp.where(usable, g, 0), e.grad)
        outside = work.recovered > 0
        if moves(now):
            ahead = run_if(outside, lambda x: onto_allowed(now, x), ahead)
        x = select(usable, ahead, state.x)
        reach = falling(self.first_step, self.decay, step, num_steps)
        size = ravel_pytree(state.x)[0].size
        bound = scales.slope * jnp.sqrt(size)
        clip, eta = clipped_lengths(self, scales, reach, bound)
        moved = jax.tree.map(jnp.subtract, x, state.x)
        at = select(outside, ahead, between)
        drift = state.drift.update(moved, at, grad, usable, eta, clip, self.block)
        record = report(
            problem,
            e,
            state.lower,
            state.x,
            x,
            **work.entries(),
        )
        return ZeroOrderState(x, e.lower, scales, drift), record


def difference(
    problem: Problem, x: PyTree[Array], radius, key, warm: LowerSolution
) -> tuple[Evaluation, Work]:
    """A central difference of `F` along a random unit vector, times `dim x`.

    The value is the mean of the two, and the lower-level solution the second one. A
    point with an empty lower level is replaced by the nearest allowed one.
    """
    flat, unravel = ravel_pytree(x)
    w = jr.normal(key, flat.shape, flat.dtype)
    w = w / jnp.linalg.norm(w)

    def side(warm, sign):
        point = onto_domain(problem, unravel(flat + sign * radius * w))
        point = value_at(problem, point, warm)
        return point.lower, (point.value, gravest(point.lower.status), point.work)

    # One site of the solver in the program; the second solve starts from the first.
    signs = jnp.asarray([1.0, -1.0], flat.dtype)
    lower, (values, statuses, work) = jax.lax.scan(side, warm, signs)
    work = jax.tree.map(jnp.sum, work)
    pair = [jax.tree.map(lambda leaf, i=i: leaf[i], statuses) for i in range(2)]
    value = jnp.mean(values)
    status = first_failure(
        *pair,
        Status.where(jnp.isfinite(value), Status.successful, Status.non_finite),
    )
    slope = flat.size * (values[0] - values[1]) / (2 * radius)
    return evaluation(value, unravel(slope * w), lower, status), work
