"""Semismooth Newton on the KKT system of the lower level: the fast path.

One pass fixes the active set `S`, solves the KKT system of the quadratic model for a
step in `(y, lambda)`, and reads the next active set off the result. Passes on a set
that stands still are iterative refinement; on a quadratic `g` with the right set the
first pass is already exact. The Hessian is factored again only when a pass shows that
the one at hand is wrong, so nothing guesses whether `g` is quadratic.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from .._tolerances import tolerances
from .dense import (
    BoolLike,
    Factor,
    FlatLower,
    Rows,
    Schur,
    kkt_solve,
    largest,
    random_signs,
    ratio,
    schur,
)


class Point(eqx.Module):
    """A primal–dual point in unit rows, with what was measured there."""

    y: Float[Array, " n"]
    multipliers: Float[Array, " k"]
    active: Bool[Array, " k"]
    gradient: Float[Array, " n"]
    stationarity: Float[Array, " n"]
    violation: Float[Array, " k"]
    force: Float[Array, ""]
    length: Float[Array, " k"]
    kkt: Float[Array, ""]


def measure(lower: FlatLower, rows: Rows, y, multipliers, active, stiffness) -> Point:
    """Evaluate a point. `kkt` is the largest relative violation of a KKT condition.

    Stationarity is relative to `|Hy| + |grad g - Hy| + |A^T lambda|` (for a quadratic
    the middle term is its linear part), rows to `|y| + |b| + |B||x|`. Where these
    lengths are zero, a tiny part of the distance that the forces move `y` against
    `stiffness`, the largest diagonal entry of `H`, takes their place, but no more than
    the lengths of other rows: at a vertex, forces of any size move nothing. A NaN
    anywhere makes `kkt` infinite or NaN.
    """
    gradient, curvature = jax.jvp(lower.gradient, (y,), (y,))
    pull = multipliers @ rows.A
    stationarity = gradient + pull
    violation = jnp.where(rows.usable, rows.A @ y - rows.rhs, 0)
    *parts, rest = largest(curvature, gradient - curvature, pull, stationarity)
    force = parts[0] + parts[1] + parts[2]
    shift = jnp.sqrt(tolerances(y.dtype).eps) * force / stiffness
    longest = jnp.max(rows.scale, initial=0)
    shift = jnp.where(longest > 0, jnp.minimum(shift, longest), shift)
    length = jnp.linalg.norm(y) + rows.scale + shift
    excess = jnp.where(rows.equality | (multipliers > 0), jnp.abs(violation), violation)
    negative = jnp.where(rows.equality, 0, -multipliers)
    # One reduction over rows: both kinds of trouble in units of their own scale.
    trouble = jnp.maximum(ratio(excess, length), ratio(negative, force))
    trouble = jnp.where(jnp.isnan(trouble), jnp.inf, trouble)  # see `sizes`
    kkt = jnp.maximum(ratio(rest, force), jnp.max(trouble, initial=0))
    return Point(
        y, multipliers, active, gradient, stationarity, violation, force, length, kkt
    )


class Sweep(eqx.Module):
    """State of the Newton iteration; `rows_inverse` belongs to the rows in `point`.

    `y_noise` and `multiplier_noise` are what rounding and the remaining residual do to
    the point. `describes` tells whether the factor is one of the Hessian there.
    """

    point: Point
    next_active: Bool[Array, " k"]
    rows_inverse: Schur
    y_noise: Float[Array, " n"]
    multiplier_noise: Float[Array, " k"]
    describes: Bool[Array, ""]
    stale: Bool[Array, ""]
    done: Bool[Array, ""]
    passes: Int[Array, ""]


def begin(lower: FlatLower, rows: Rows, rows_inverse, y, multipliers, active) -> Sweep:
    """The state before the first pass; `rows_inverse` may be of any active set."""
    multipliers = jnp.where(active, multipliers, 0)
    # Only what a pass reads; the rest is not worth an evaluation.
    gradient = lower.gradient(y)
    point = Point(
        y=y,
        multipliers=multipliers,
        active=active,
        gradient=gradient,
        stationarity=gradient + multipliers @ rows.A,
        violation=jnp.where(rows.usable, rows.A @ y - rows.rhs, 0),
        force=jnp.zeros((), y.dtype),
        length=jnp.zeros_like(rows.rhs),
        kkt=jnp.asarray(jnp.inf, y.dtype),
    )
    return Sweep(
        point=point,
        next_active=active,
        rows_inverse=rows_inverse,
        y_noise=jnp.zeros_like(y),
        multiplier_noise=jnp.zeros_like(multipliers),
        describes=jnp.asarray(False),
        stale=jnp.asarray(False),
        done=jnp.asarray(False),
        passes=jnp.asarray(0),
    )


def newton_pass(
    lower: FlatLower, rows: Rows, factor: Factor, s: Sweep, hold: BoolLike = False
) -> Sweep:
    """One step on the rows `s.next_active`; with `hold` they stay the active set."""
    return pass_on(lower, rows, factor, schur(factor, s.next_active), s, hold)


def pass_on(
    lower: FlatLower,
    rows: Rows,
    factor: Factor,
    rows_inverse: Schur,
    s: Sweep,
    hold: BoolLike = False,
) -> Sweep:
    """One step on the rows of `rows_inverse`, and a probing solve at its end."""
    tol = tolerances(s.point.y.dtype)
    old, active = s.point, rows_inverse.active
    multipliers = jnp.where(active, old.multipliers, 0)
    dropped = old.multipliers - multipliers
    stationarity = old.stationarity - dropped @ rows.A
    d, mu = kkt_solve(factor, rows_inverse, -stationarity, -old.violation)
    new = measure(lower, rows, old.y + d, multipliers + mu, active, factor.stiffness)
    next_active = jnp.where(hold, active, _next_active(rows, new, tol.rounding))

    # Where the point would go next, and where rounding could take it.
    gap = jnp.where(active, new.violation, 0)
    move, shift = kkt_solve(factor, rows_inverse, new.stationarity, gap)
    top, bottom = rounding(factor, new)
    y_noise, multiplier_noise = kkt_solve(factor, rows_inverse, top, bottom)
    # Progress is judged by steps and not by residuals, or soft directions of an
    # ill-conditioned `g` would hide behind the stiff ones.
    stiff = jnp.sqrt(jnp.abs(factor.diagonal))
    before, after, noise = largest(stiff * d, stiff * move, stiff * y_noise)
    settled = after <= jnp.maximum(tol.accept * before, noise)
    exact = (new.kkt <= tol.rounding) & settled
    # A point that did not move proves nothing about the Hessian, but the probe does.
    push = lower.hessian_product(new.y, y_noise) + multiplier_noise @ rows.A
    wrong, size = largest(push - top, top)
    describes = wrong <= tol.stale * size
    return Sweep(
        point=new,
        next_active=next_active,
        rows_inverse=rows_inverse,
        y_noise=y_noise + move,
        multiplier_noise=multiplier_noise + shift,
        describes=describes,
        stale=~describes | (~exact & ~(after <= tol.stale * before)),
        done=(exact & describes) | ~jnp.isfinite(new.kkt),
        passes=s.passes + 1,
    )


def rounding(factor: Factor, point: Point):
    """A rounding error of fixed random signs in each component of the KKT system.

    The entries of `|H||y|` are bounded through the diagonal of `H`, those of
    `|A|^T lambda` through the unit rows.
    """
    eps = tolerances(point.y.dtype).eps
    spread = jnp.sqrt(jnp.abs(factor.diagonal))
    terms = spread * (spread @ jnp.abs(point.y)) + jnp.abs(point.gradient)
    # The last term keeps the probe alive where everything is zero.
    tiny = jnp.finfo(terms.dtype).tiny ** 0.5
    terms = terms + jnp.sum(jnp.abs(point.multipliers)) + tiny
    top = random_signs(terms) * eps * terms
    bottom = random_signs(point.length) * eps * point.length
    return top, jnp.where(point.active, bottom, 0)


def without_decline(old: Sweep, new: Sweep, damped: BoolLike = False) -> Sweep:
    """End where passes no longer improve an accepted point; keep the better one.

    Not where they are `damped`: small steps may be all that is left of a long way.
    """
    tol = tolerances(old.point.y.dtype)
    still = stands_still(new) | ((old.passes > 3) & ~jnp.asarray(damped))
    stalled = still & (new.point.kkt > 0.5 * old.point.kkt)
    best = jnp.minimum(old.point.kkt, new.point.kkt)
    stalled = stalled & (best <= tol.accept) & (new.describes | ~jnp.asarray(damped))
    same = jnp.all(old.point.active == new.point.active)
    keep = stalled & same & (old.point.kkt < new.point.kkt)
    point = jax.tree.map(lambda a, b: jnp.where(keep, a, b), old.point, new.point)
    return eqx.tree_at(lambda s: (s.point, s.done), new, (point, new.done | stalled))


def stands_still(s: Sweep) -> Bool[Array, ""]:
    """Whether the next pass would be on the same rows."""
    return jnp.all(s.next_active == s.point.active)


def _next_active(rows: Rows, point: Point, rounding) -> Bool[Array, " k"]:
    """Rows that push back, and rows that are violated (primal–dual active set)."""
    stays = point.active & (point.multipliers > -rounding * point.force)
    enters = ~point.active & (point.violation > rounding * point.length)
    return rows.usable & (rows.equality | stays | enters)
