"""Coordinates along which `g` has no curvature, held by bounds.

Flows on unused roads, generators at a limit: powers above two are flat at zero, and `g`
is strongly convex only where rows leave `y` room. The KKT system needs no more. On the
rows of an active set, curvature along a coordinate that they fix is never felt, so it
may be anything: it is lifted to a size that keeps the factor well-conditioned, and
steps, multipliers and adjoints stay exact. A flat coordinate that nothing holds yet is
lifted as well, to have a direction to go; that is a damped step, which the passes and
the safeguard treat like any wrong Hessian. One that nothing holds in the end is a
failure: there `y*` is not unique, or has no derivative.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool

from .._tolerances import tolerances
from .dense import BoolLike, Factor, FlatLower, Rows, Schur, largest, single
from .newton import Sweep

# Where a bound holds a coordinate, curvature below one share of the largest is lifted
# to another.
_FAINT, _LIFT = 1e-8, 1e-4
# Share of the length of the problem at which a flat coordinate must bend.
_FAR = 1e-2
# Share of its variance that rows leave to a coordinate they do not fix: along a free
# direction one of its `n` coordinates has at least `1 / n`.
_ROOM = 1e-4


def lifted_hessian(lower: FlatLower, rows: Rows, sweep: Sweep, guarded: BoolLike):
    """The Hessian at a point, `rows`, and which coordinates were lifted.

    Passes ask whether a factor describes the Hessian, so what they get is lifted by
    little; the safeguard has no refinement and gets one that is well-conditioned.
    """
    point = sweep.point
    hessian = lower.hessian(point.y)
    top = jnp.max(jnp.diagonal(hessian), initial=0)
    share = hessian / jnp.where(top > 0, top, 1)
    diagonal = jnp.diagonal(share)
    # A positive semidefinite matrix with a zero on its diagonal has a row of zeros.
    largest_entry = 1.001 * jnp.abs(diagonal[:, None] * diagonal)
    eps = tolerances(share.dtype).eps
    sound = jnp.all(share**2 <= largest_entry + eps**2, axis=1)
    held = jnp.any(single(rows) & sweep.next_active[:, None], axis=0)
    # Almost none, where nothing holds `y`: of its inverse no digit would be right.
    almost_none = jnp.where(guarded, eps, eps**2)
    # By size: rounding takes a flow below zero, where odd powers bend the other way.
    flat = sound & (jnp.abs(diagonal) <= jnp.where(held, _FAINT, almost_none))
    # What moves `y` by a length of the problem.
    force, far = largest(point.gradient)[0], largest(point.y)[0]
    length = far + jnp.max(rows.scale, initial=0)
    unit = force / jnp.where(length > 0, length, 1)
    unit = jnp.where(unit > 0, unit, jnp.where(top > 0, top, 1))
    little = jnp.where(guarded, 1, _LIFT) * jnp.maximum(top, unit)
    size = jnp.where(held, little, unit)
    return hessian + jnp.diag(jnp.where(flat, size, 0)), rows, flat


def is_loose(
    lower: FlatLower, rows: Rows, factor: Factor, rows_inverse: Schur, y, weak
) -> Bool[Array, ""]:
    """Whether a lifted coordinate can move without a force against it.

    Either on the active rows, or away from a `weak` row that holds it with no force,
    unless `g` bends farther out: then `y*` is unique, though its derivative is not.
    """
    n = factor.diagonal.size
    alone = jnp.diagonal(factor.inverse[:, :n])
    fixed = jnp.sum(factor.lift * (rows_inverse.inverse @ factor.lift), axis=0)
    free = factor.lifted & ~((alone - fixed) / alone <= _ROOM)
    inwards = jnp.where(single(rows) & weak[:, None], -rows.A, 0)
    leaves = factor.lifted & jnp.any(inwards != 0, axis=0)
    length = largest(y)[0] + jnp.max(rows.scale, initial=0)
    length = _FAR * jnp.where(length > 0, length, 1)
    away = y + length * jnp.where(leaves, jnp.sum(inwards, axis=0), 0)
    bent = jnp.diagonal(lower.hessian(away)) > 0
    return jnp.any(free | (leaves & ~bent))
