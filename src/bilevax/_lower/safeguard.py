"""The slow path that always converges: damped Newton over exact quadratic programs.

Each step minimises the quadratic model over the whole constraint set with the finite
dual active-set method and backtracks on the exact penalty `g + nu |violation|_1`, for
which the step is a descent direction once `nu` exceeds the multipliers. Where `g` is
defined on part of space only, a step that aims at all violated rows at once may have to
be cut at the border again and again; after a cut the next one aims at a smaller `reach`
of the violation, so that `g` has its say.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from .._tolerances import tolerances
from .dense import Factor, FlatLower, Rows
from .dual_active_set import dual_active_set
from .newton import Point


class Guarded(eqx.Module):
    """One step of the safeguard; `full` says that it was not cut."""

    y: Float[Array, " n"]
    multipliers: Float[Array, " k"]
    active: Bool[Array, " k"]
    penalty: Float[Array, ""]
    reach: Float[Array, ""]
    full: Bool[Array, ""]
    infeasible: Bool[Array, ""]
    steps: Int[Array, ""]


def guarded_step(
    lower: FlatLower, rows: Rows, factor: Factor, point: Point, penalty, reach
) -> Guarded:
    """From `point`, whose Hessian `factor` holds, one damped step."""
    k = rows.rhs.size
    u = -(point.gradient @ factor.whitener)
    open_gap = rows.equality | (point.violation > 0)
    gap = jnp.where(open_gap, reach * point.violation, point.violation)
    dual = dual_active_set(
        factor.gram,
        factor.W @ u + gap / factor.sigma,
        rows.usable,
        rows.equality,
        max_steps=20 * k + 100,
        enabled=factor.definite,
        guess=point.multipliers * factor.sigma,
        rank=factor.W.shape[1],
    )
    multipliers = dual.mu / factor.sigma
    ahead, back = factor.whitener @ u, factor.whitener @ (dual.mu @ factor.W)
    d = ahead - back
    penalty = jnp.maximum(penalty, 2 * jnp.max(jnp.abs(multipliers), initial=0))
    slope = point.gradient @ d - penalty * reach * jnp.sum(_violation(rows, point.y))
    # Of what numbers `y + d` is the sum: its rounding is theirs.
    parts = jnp.abs(point.y) + jnp.abs(ahead) + jnp.abs(back)
    step = _backtrack(lower, rows, point, d, slope, penalty, parts)
    return Guarded(
        y=point.y + step * d,
        multipliers=multipliers,
        active=dual.working,
        penalty=penalty,
        reach=jnp.where(step == 1, jnp.minimum(2 * reach, 1), 0.25 * reach),
        full=(step == 1) & (reach == 1),
        infeasible=dual.infeasible & _is_farkas(rows, point.y, dual.ray / factor.sigma),
        steps=dual.steps,
    )


def _violation(rows: Rows, y):
    excess = rows.A @ y - rows.rhs
    excess = jnp.where(rows.equality, jnp.abs(excess), jnp.maximum(excess, 0))
    return jnp.where(rows.usable, excess, 0)


def _backtrack(lower: FlatLower, rows: Rows, point: Point, d, slope, penalty, parts):
    """The first of 1, 1/2, 1/4, ... with a sufficient decrease of the penalty."""
    y, eps = point.y, tolerances(point.y.dtype).eps

    def merit(step):
        at = y + step * d
        return lower.value(at) + penalty * jnp.sum(_violation(rows, at))

    start = merit(jnp.zeros((), y.dtype))
    # Terms of `g` can cancel, and rows that are met exactly still round.
    terms = jnp.abs(start) + jnp.abs(point.gradient) @ parts
    sides = jnp.where(rows.usable, jnp.linalg.norm(parts) + rows.scale, 0)
    noise = 16 * eps * (terms + penalty * jnp.sum(sides))

    def too_long(step):
        # A NaN compares false: steps that leave the domain of `g` are cut too.
        return ~(merit(step) <= start + 1e-4 * step * slope + noise)

    return jax.lax.while_loop(
        lambda step: too_long(step) & (step > 1e-12),
        lambda step: 0.5 * step,
        jnp.ones((), y.dtype),
    )


def _is_farkas(rows: Rows, y, ray):
    """Whether `ray` proves that no `y` of any reasonable size is feasible.

    Exactly, `A^T ray = 0` and `<ray, rhs> < 0`; with rounding, the gap must exceed what
    `A^T ray` can contribute for points ten thousand times as far out as the data.
    """
    tol = tolerances(ray.dtype)
    gap = -ray @ rows.rhs
    noise = tol.rounding * (jnp.abs(ray) @ rows.scale)
    far = 1e4 * (jnp.linalg.norm(y) + jnp.max(rows.scale, initial=0))
    return gap > noise + jnp.linalg.norm(ray @ rows.A) * far
