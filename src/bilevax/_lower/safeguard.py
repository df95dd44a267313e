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
from .dense import Factor, FlatLower, Rows, blank_factor, factorise, largest
from .dual_active_set import dual_active_set


class Guarded(eqx.Module):
    """A point of the safeguarded iteration and how it ended."""

    factor: Factor
    y: Float[Array, " n"]
    multipliers: Float[Array, " k"]
    active: Bool[Array, " k"]
    penalty: Float[Array, ""]
    infeasible: Bool[Array, ""]
    done: Bool[Array, ""]
    steps: Int[Array, ""]
    factorisations: Int[Array, ""]


def guarded_newton(
    lower: FlatLower, rows: Rows, y, max_steps: int, enabled=True
) -> Guarded:
    """Damped Newton steps from `y` until the quadratic model holds."""
    k = rows.A.shape[0]
    tol = tolerances(y.dtype)

    def body(s: Guarded) -> Guarded:
        gradient = lower.gradient(s.y)
        factor = factorise(lower.hessian(s.y), rows)
        room = rows.rhs - rows.A @ s.y
        u = -(gradient @ factor.whitener)
        dual = dual_active_set(
            factor.gram,
            factor.W @ u - room / factor.sigma,
            rows.usable,
            rows.equality,
            max_steps=20 * k + 100,
            enabled=factor.definite,
        )
        multipliers = dual.mu / factor.sigma
        d = factor.whitener @ (u - dual.mu @ factor.W)
        infeasible = dual.infeasible & _is_farkas(rows, dual.ray / factor.sigma)

        penalty = jnp.maximum(s.penalty, 2 * jnp.max(jnp.abs(multipliers), initial=0))
        slope = gradient @ d - penalty * jnp.sum(_violation(rows, s.y))
        step = _backtrack(lower, rows, s.y, d, slope, penalty)
        moved = s.y + step * d
        # Once the quadratic model predicts the gradient, `g` is quadratic as far as
        # it matters, and the Newton passes that follow do the rest.
        residual, before = largest(
            lower.gradient(moved) + multipliers @ rows.A, gradient
        )
        trusted = residual <= tol.stale * before
        done = infeasible | ~factor.definite | (trusted & (step == 1))
        done = done | ~jnp.all(jnp.isfinite(moved))
        return Guarded(
            factor=factor,
            y=moved,
            multipliers=multipliers,
            active=dual.working,
            penalty=penalty,
            infeasible=infeasible,
            done=done,
            steps=s.steps + dual.steps,
            factorisations=s.factorisations + 1,
        )

    start = Guarded(
        factor=blank_factor(k, y.size, y.dtype),
        y=y,
        multipliers=jnp.zeros(k, y.dtype),
        active=rows.equality & rows.usable,
        penalty=jnp.zeros((), y.dtype),
        infeasible=jnp.asarray(False),
        done=jnp.asarray(False),
        steps=jnp.asarray(0),
        factorisations=jnp.asarray(0),
    )
    return jax.lax.while_loop(
        lambda s: enabled & ~s.done & (s.factorisations < max_steps), body, start
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
