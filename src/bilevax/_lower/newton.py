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
    kkt_solve,
    largest,
    schur_root,
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
    `stiffness`, the largest diagonal entry of `H`, takes their place. A NaN anywhere
    makes `kkt` NaN.
    """
    gradient, curvature = jax.jvp(lower.gradient, (y,), (y,))
    pull = multipliers @ rows.A
    stationarity = gradient + pull
    violation = jnp.where(rows.usable, rows.A @ y - rows.rhs, 0)
    *parts, rest = largest(curvature, gradient - curvature, pull, stationarity)
    force = parts[0] + parts[1] + parts[2]
    shift = jnp.sqrt(tolerances(y.dtype).eps) * force / stiffness
    length = jnp.linalg.norm(y) + rows.scale + shift
    excess = jnp.where(rows.equality | (multipliers > 0), jnp.abs(violation), violation)
    negative = jnp.where(rows.equality, 0, -multipliers)
    # One reduction over rows: both kinds of trouble in units of their own scale.
    trouble = jnp.maximum(_ratio(excess, length), _ratio(negative, force))
    kkt = jnp.maximum(_ratio(rest, force), jnp.max(trouble, initial=0))
    return Point(
        y, multipliers, active, gradient, stationarity, violation, force, length, kkt
    )


class Sweep(eqx.Module):
    """State of the Newton iteration; `root` factors the rows active in `point`."""

    point: Point
    next_active: Bool[Array, " k"]
    root: Float[Array, "k k"]
    stale: Bool[Array, ""]
    done: Bool[Array, ""]
    passes: Int[Array, ""]


def begin(lower: FlatLower, rows: Rows, y, multipliers, active) -> Sweep:
    """The state before the first pass."""
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
        root=jnp.eye(rows.rhs.size, dtype=y.dtype),
        stale=jnp.asarray(False),
        done=jnp.asarray(False),
        passes=jnp.asarray(0),
    )


def newton_pass(
    lower: FlatLower, rows: Rows, factor: Factor, s: Sweep, hold: BoolLike = False
) -> Sweep:
    """One step on the rows `s.next_active`; with `hold` they stay the active set."""
    tol = tolerances(s.point.y.dtype)
    old, active = s.point, s.next_active
    multipliers = jnp.where(active, old.multipliers, 0)
    dropped = old.multipliers - multipliers
    stationarity = old.stationarity - dropped @ rows.A
    root = schur_root(factor.gram, active, tol.regularise)
    d, mu = kkt_solve(factor, root, active, -stationarity, -old.violation)
    new = measure(lower, rows, old.y + d, multipliers + mu, active, factor.stiffness)
    next_active = jnp.where(hold, active, _next_active(rows, new, tol.rounding))
    # Progress is judged in the metric of the inverse Hessian, or soft directions of an
    # ill-conditioned `g` would hide behind the stiff ones.
    before = jnp.linalg.norm(stationarity @ factor.whitener)
    after = jnp.linalg.norm(new.stationarity @ factor.whitener)
    exact = (new.kkt <= tol.rounding) & (after <= tol.accept * before)
    gap, gap_after = largest(
        jnp.where(active, old.violation, 0) / factor.sigma,
        jnp.where(active, new.violation, 0) / factor.sigma,
    )
    return Sweep(
        point=new,
        next_active=next_active,
        root=root,
        stale=~exact & ~(after + gap_after <= tol.stale * (before + gap)),
        done=exact | ~jnp.isfinite(new.kkt),
        passes=s.passes + 1,
    )


def without_decline(old: Sweep, new: Sweep) -> Sweep:
    """End where passes no longer improve an accepted point; keep the better one."""
    tol = tolerances(old.point.y.dtype)
    still = jnp.all(new.next_active == new.point.active) | (old.passes > 3)
    stalled = still & (new.point.kkt > 0.5 * old.point.kkt)
    best = jnp.minimum(old.point.kkt, new.point.kkt)
    stalled = stalled & (best <= tol.accept)
    same = jnp.all(old.point.active == new.point.active)
    keep = stalled & same & (old.point.kkt < new.point.kkt)
    point = jax.tree.map(lambda a, b: jnp.where(keep, a, b), old.point, new.point)
    return eqx.tree_at(lambda s: (s.point, s.done), new, (point, new.done | stalled))


def _next_active(rows: Rows, point: Point, rounding) -> Bool[Array, " k"]:
    """Rows that push back, and rows that are violated (primal–dual active set)."""
    stays = point.active & (point.multipliers > -rounding * point.force)
    enters = ~point.active & (point.violation > rounding * point.length)
    return rows.usable & (rows.equality | stays | enters)


def _ratio(part, whole):
    return part / jnp.where(whole > 0, whole, 1)
