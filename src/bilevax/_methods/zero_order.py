"""A zeroth-order method: differences of `F` along random directions."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, PyTree

from .._feasible import onto_domain
from .._implicit import Evaluation
from .._lower.base import LowerSolution
from .._lower.choose import checked_solver
from .._problem import Problem
from .._status import Status, first_failure
from .base import (
    AbstractMethod,
    Number,
    Scales,
    draws,
    falling,
    number,
    report,
)
from .clipped import Drift, standing_still
from .oracle import gradient_at
from .pigd import check_clip, clipped_lengths
from .search import select


class ZeroOrderState(eqx.Module):
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
    the domain of `x`, so that near its boundary `v` is too short; the last iterate is
    returned unless a random one is asked for, where the theory returns the mean of a
    random block (`state.drift.mean` is the last one).

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
        check_clip(self, True)

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

        evaluate = lambda x, warm: difference(now, x, radius, keys.direction, warm)
        oracle = gradient_at(now, between, ahead, state.lower, evaluate)
        e, usable = oracle.e, oracle.usable
        grad = jax.tree.map(lambda g: jnp.where(usable, g, 0), e.grad)
        x = select(usable | oracle.recovered, oracle.ahead, state.x)
        reach = falling(self.first_step, self.decay, step, num_steps)
        size = ravel_pytree(state.x)[0].size
        bound = scales.slope * jnp.sqrt(size)
        clip, eta = clipped_lengths(self, scales, reach, bound)
        moved = jax.tree.map(jnp.subtract, x, state.x)
        drift = state.drift.update(
            moved, oracle.at, grad, usable, eta, clip, self.block
        )
        record = report(
            problem,
            e,
            state.lower,
            state.x,
            x,
            lower_solves=2 + 2 * oracle.recovered,
            recovered=oracle.recovered,
            upper_gradients=0,
            hessian_products=0,
            linear_solves=0,
        )
        return ZeroOrderState(x, e.lower, scales, drift), record


def difference(
    problem: Problem, x: PyTree[Array], radius, key, warm: LowerSolution
) -> Evaluation:
    """A central difference of `F` along a random unit vector, times `dim x`.

    The value is the mean of the two, and the lower-level solution the second one.
    """
    flat, unravel = ravel_pytree(x)
    w = jr.normal(key, flat.shape, flat.dtype)
    w = w / jnp.linalg.norm(w)
    solver = checked_solver(problem, None, False)

    def value_at(warm, sign):
        point = onto_domain(problem, unravel(flat + sign * radius * w))
        lower = solver(problem, point, warm)
        value = problem.upper_value(point, lower.y)[0]
        value = jnp.where(lower.success, value, jnp.nan)
        return lower, (value, lower.status, lower.iterations)

    # One site of the solver in the program; the second solve starts from the first.
    signs = jnp.asarray([1.0, -1.0], flat.dtype)
    lower, (values, statuses, work) = jax.lax.scan(value_at, warm, signs)
    lower = eqx.tree_at(
        lambda s: s.iterations, lower, jax.tree.map(lambda n: jnp.sum(n), work)
    )
    pair = [jax.tree.map(lambda leaf, i=i: leaf[i], statuses) for i in range(2)]
    value = jnp.mean(values)
    status = first_failure(
        *pair,
        Status.where(jnp.isfinite(value), Status.successful, Status.non_finite),
    )
    slope = flat.size * (values[0] - values[1]) / (2 * radius)
    return Evaluation(value, None, unravel(slope * w), lower, status, None)
