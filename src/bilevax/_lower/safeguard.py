"""The slow path that always converges: damped Newton over exact quadratic programs.

Each step minimises the quadratic model over the whole constraint set with the finite
dual active-set method and backtracks on the exact penalty `g + nu |violation|_1`, for
which the step is a descent direction once `nu` exceeds the multipliers.
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
    full: Bool[Array, ""]
    infeasible: Bool[Array, ""]
    steps: Int[Array, ""]


def guarded_step(
    lower: FlatLower, rows: Rows, factor: Factor, point: Point, penalty
) -> Guarded:
    """From `point`, whose Hessian `factor` holds, one damped step."""
    k = rows.rhs.size
    u = -(point.gradient @ factor.whitener)
    dual = dual_active_set(
        factor.gram,
        factor.W @ u + point.violation / factor.sigma,
        rows.usable,
        rows.equality,
        max_steps=20 * k + 100,
        enabled=factor.definite,
    )
    multipliers = dual.mu / factor.sigma
    d = factor.whitener @ (u - dual.mu @ factor.W)
    penalty = jnp.maximum(penalty, 2 * jnp.max(jnp.abs(multipliers), initial=0))
    slope = point.gradient @ d - penalty * jnp.sum(_violation(rows, point.y))
    step = _backtrack(lower, rows, point.y, d, slope, penalty)
    return Guarded(
        y=point.y + step * d,
        multipliers=multipliers,
        active=dual.working,
        penalty=penalty,
        full=step == 1,
        infeasible=dual.infeasible & _is_farkas(rows, dual.ray / factor.sigma),
        steps=dual.steps,
    )


def _violation(rows: Rows, y):
    excess = rows.A @ y - rows.rhs
    excess = jnp.where(rows.equality, jnp.abs(excess), jnp.maximum(excess, 0))
    return jnp.where(rows.usable, excess, 0)


def _backtrack(lower: FlatLower, rows: Rows, y, d, slope, penalty):
    """The first of 1, 1/2, 1/4, ... with a sufficient decrease of the penalty."""
    eps = tolerances(y.dtype).eps

    def merit(step):
        at = y + step * d
        return lower.value(at) + penalty * jnp.sum(_violation(rows, at))

    start = merit(jnp.zeros((), y.dtype))
    noise = 16 * eps * jnp.abs(start)

    def too_long(step):
        # A NaN compares false: steps that leave the domain of `g` are cut too.
        return ~(merit(step) <= start + 1e-4 * step * slope + noise)

    return jax.lax.while_loop(
        lambda step: too_long(step) & (step > 1e-12),
        lambda step: 0.5 * step,
        jnp.ones((), y.dtype),
    )


def _is_farkas(rows: Rows, ray):
    """`A^T ray = 0` and `<ray, rhs> < 0` beyond rounding: the set is empty."""
    size = jnp.sum(jnp.abs(ray))
    gap = -ray @ rows.rhs
    scale = jnp.abs(ray) @ rows.scale
    tol = tolerances(ray.dtype)
    parallel = jnp.linalg.norm(ray @ rows.A) <= jnp.sqrt(tol.dependent) * size
    return parallel & (gap > tol.rounding * scale)
