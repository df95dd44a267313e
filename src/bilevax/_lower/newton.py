"""Semismooth Newton on the KKT system of the lower level: the fast path.

The primal–dual active set method (Hintermüller, Ito and Kunisch 2002). One pass fixes
the active set `S`, solves the KKT system of the quadratic model for a step in
`(y, lambda)`, and reads the next active set off the result. Passes on a set that stands
still are iterative refinement; on a quadratic `g` with the right set the first pass is
already exact. The Hessian is factored again only when a pass shows that the one at hand
is wrong, so nothing guesses whether `g` is quadratic.
"""

from typing import NamedTuple

import jax
from jaxtyping import Array, Bool, Float, Int

from .._programs.arrays import xp
from .._tolerances import (
    DECLINE,
    NEAR_ZERO,
    PATIENCE,
    SAMPLES,
    STEP_ROUNDINGS,
    tolerances,
)
from .dense import (
    BoolLike,
    FlatLower,
    Rows,
    along,
    gradient_errors,
    largest,
    random_signs,
    ratio,
)
from .kkt import KKT, Factor, Schur


class Point(NamedTuple):
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


def measure(rows: Rows, y, multipliers, active, gradient, curvature, stiffness):
    """The point with its gradient and `H y`.

    `kkt` is the largest relative violation of a KKT condition. Stationarity is relative
    to `|Hy| + |grad g - Hy| + |A^T lambda|` (for a quadratic the middle term is its
    linear part), rows to `|y| + |b| + |B||x|`. Where these lengths are zero, a tiny
    part of the distance that the forces move `y` against `stiffness`, the largest
    diagonal entry of `H`, takes their place, but no more than the lengths of other
    rows: at a vertex, forces of any size move nothing. A NaN anywhere makes `kkt`
    infinite or NaN.
    """
    pull = multipliers @ rows.A
    stationarity = gradient + pull
    violation = xp.where(rows.usable, rows.A @ y - rows.rhs, 0)
    *parts, rest = largest(curvature, gradient - curvature, pull, stationarity)
    force = parts[0] + parts[1] + parts[2]
    shift = tolerances(y.dtype).eps ** 0.5 * force / stiffness
    longest = xp.max(rows.scale, initial=0)
    shift = xp.where(longest > 0, xp.minimum(shift, longest), shift)
    length = xp.linalg.norm(y) + rows.scale + shift
    excess = xp.where(rows.equality | (multipliers > 0), xp.abs(violation), violation)
    negative = xp.where(rows.equality, 0, -multipliers)
    # One reduction over rows: both kinds of trouble in units of their own scale.
    trouble = xp.maximum(ratio(excess, length), ratio(negative, force))
    trouble = xp.where(xp.isnan(trouble), xp.inf, trouble)  # see `sizes`
    kkt = xp.maximum(ratio(rest, force), xp.max(trouble, initial=0))
    return Point(
        y, multipliers, active, gradient, stationarity, violation, force, length, kkt
    )


class Sweep(NamedTuple):
    """State of the Newton iteration; `rows_inverse` belongs to the rows in `point`.

    `y_noise` and `multiplier_noise` are what rounding and the remaining residual do to
    the point, `shift` what the residual does to multipliers while `y` stays. `pulls`
    tells whether some multiplier has the wrong sign by more than rounding, `describes`
    whether the factor is one of the Hessian there, `arrived` whether the next step
    moves no entry by more than rounding or a small share of it.
    """

    point: Point
    next_active: Bool[Array, " k"]
    rows_inverse: Schur
    y_noise: Float[Array, " n"]
    multiplier_noise: Float[Array, " k"]
    shift: Float[Array, " k"]
    pulls: Bool[Array, ""]
    describes: Bool[Array, ""]
    arrived: Bool[Array, ""]
    stale: Bool[Array, ""]
    done: Bool[Array, ""]
    passes: Int[Array, ""]


def begin(lower: FlatLower, rows: Rows, rows_inverse, y, multipliers, active) -> Sweep:
    """The state before the first pass; `rows_inverse` may be of any active set."""
    gradient, _ = along(lower, y, y)
    multipliers = xp.where(active, multipliers, 0)
    # Only what a pass reads; the rest is not worth an evaluation.
    point = Point(
        y=y,
        multipliers=multipliers,
        active=active,
        gradient=gradient,
        stationarity=gradient + multipliers @ rows.A,
        violation=xp.where(rows.usable, rows.A @ y - rows.rhs, 0),
        force=xp.zeros((), y.dtype),
        length=xp.zeros_like(rows.rhs),
        kkt=xp.asarray(xp.inf, y.dtype),
    )
    no = xp.asarray(False)
    return Sweep(
        point=point,
        next_active=active,
        rows_inverse=rows_inverse,
        y_noise=xp.zeros_like(y),
        multiplier_noise=xp.zeros_like(multipliers),
        shift=xp.zeros_like(multipliers),
        pulls=no,
        describes=no,
        arrived=no,
        stale=no,
        done=no,
        passes=xp.asarray(0),
    )


def newton_pass(lower: FlatLower, rows: Rows, kkt: KKT, s: Sweep, hold) -> Sweep:
    """One step on the rows of `kkt`, and a probing solve at its end.

    With `hold` they stay the active set.
    """
    old, active, factor = s.point, kkt.rows.active, kkt.hessian
    tol = tolerances(old.y.dtype)
    multipliers = xp.where(active, old.multipliers, 0)
    dropped = old.multipliers - multipliers
    stationarity = old.stationarity - dropped @ rows.A
    d, mu = kkt.solve(-stationarity, -old.violation)
    y, multipliers = old.y + d, multipliers + mu
    gradient, curvature = along(lower, y, y)
    new = measure(rows, y, multipliers, active, gradient, curvature, factor.stiffness)
    # Where the point would go next, and where rounding could take it.
    open_rows = xp.where(active, new.violation, 0)
    top, bottom = rounding(rows, factor, new)
    # And both without what rows are open: it balances the forces where `y` stays, while
    # earlier passes left rounding of their own in the multipliers.
    still = xp.zeros_like(open_rows)
    steps, pushes = kkt.solve(
        xp.stack([new.stationarity, top, new.stationarity, top]),
        xp.stack([open_rows, bottom, still, still]),
    )
    move, y_noise, *_ = steps
    shift, multiplier_noise, balance, force_noise = pushes
    forces = new.multipliers - balance
    pulls = _pulls(rows, factor, new, forces, force_noise)
    next_active = _next_active(rows, new, tol.rounding) & ~pulls
    next_active = xp.where(hold, active, next_active)
    # Progress is judged by steps and not by residuals, or soft directions of an
    # ill-conditioned `g` would hide behind the stiff ones.
    stiff = xp.sqrt(xp.abs(factor.diagonal))
    before, after, noise, far, step, unsure = largest(
        stiff * d, stiff * move, stiff * y_noise, new.y, move, y_noise
    )
    settled = after <= xp.maximum(tol.accept * before, noise)
    # A stiff direction that has moved far makes any soft one look settled.
    near = xp.maximum(tol.accept * far, STEP_ROUNDINGS * unsure)
    exact = (new.kkt <= tol.rounding) & settled & (step <= near) & ~xp.any(pulls)
    # A point that did not move proves nothing about the Hessian, but the probe does.
    # Entry by entry: stiff ones would hide what was lent to soft ones.
    _, push = along(lower, y, y_noise)
    pull = multiplier_noise @ rows.A
    size = xp.abs(push) + xp.abs(pull) + xp.abs(top)
    describes = xp.all(xp.abs(push + pull - top) <= tol.stale * size)
    arrived = xp.all(xp.abs(move) <= _reach(y_noise, y))
    at_rest = factor.damped & (s.passes > 0) & (new.kkt == 0)
    # What rows permitted to add to the Hessian, others may not.
    lost = factor.damped & xp.any(next_active != active)
    return Sweep(
        point=new,
        next_active=next_active,
        rows_inverse=kkt.rows,
        y_noise=y_noise + move,
        multiplier_noise=multiplier_noise + shift,
        shift=balance,
        pulls=xp.any(pulls),
        describes=describes,
        arrived=arrived,
        stale=~describes | (~exact & ~(after <= tol.stale * before)) | lost,
        # Where no force is left at all, what was lent to a flat Hessian shows in none.
        done=(exact & (describes | at_rest)) | ~xp.isfinite(new.kkt),
        # With no factor yet there was no pass either.
        passes=s.passes + factor.definite,
    )


def rounding(rows: Rows, factor: Factor, point: Point):
    """A rounding error of fixed random signs in each component of the KKT system.

    The entries of `|H||y|` are bounded through the diagonal of `H` and how far each
    coordinate is coupled with others: stiff ones leave soft ones alone that they do not
    meet.
    """
    eps, size = tolerances(point.y.dtype).eps, xp.abs(point.y)
    spread = xp.sqrt(xp.abs(factor.diagonal))
    terms = spread * (spread * size + factor.coupled * (spread @ size))
    terms = terms + xp.abs(point.gradient)
    # The last term keeps the probe alive where everything is zero.
    tiny = xp.finfo(terms.dtype).tiny ** 0.5
    terms = terms + xp.abs(point.multipliers) @ xp.abs(rows.A) + tiny
    top = random_signs(terms) * eps * terms
    bottom = random_signs(point.length) * eps * point.length
    return top, xp.where(point.active, bottom, 0)


def measured(lower: FlatLower, rows: Rows, factor: Factor, s: Sweep) -> Sweep:
    """With the rounding of the gradient as it shows beside the point, not bounded.

    A spring at rest, however stiff, rounds along its own direction alone, which no
    bound by sizes can know. A few units in the last place away the gradient must be
    what the Hessian says; what is missing is rounding. What never changes there does
    not show, so the rounding of the forces that are left counts as before.
    """
    point, kkt = s.point, KKT(factor, s.rows_inverse)
    eps, n = tolerances(point.y.dtype).eps, point.y.size
    waves = xp.cos(1.0 + 2.4 * xp.arange(SAMPLES * n).reshape(SAMPLES, n))
    near = point.y + (8 * eps * xp.abs(point.y) * waves).astype(point.y.dtype)
    errors = gradient_errors(lower, point.y, near)
    still = xp.zeros((SAMPLES, point.violation.size), point.y.dtype)
    seen, seen_pushes = kkt.solve(errors, still)
    open_rows = xp.where(point.active, point.violation, 0)
    forces = xp.abs(point.gradient) + xp.abs(point.multipliers) @ xp.abs(rows.A)
    top = random_signs(forces) * eps * forces
    bottom = random_signs(point.length) * eps * point.length
    bottom = xp.where(point.active, bottom, 0)
    steps, pushes = kkt.solve(
        xp.stack([point.stationarity, top]), xp.stack([open_rows, bottom])
    )
    total = lambda seen, known: 2 * xp.max(xp.abs(seen), axis=0) + xp.abs(known)
    y_noise, multiplier_noise = total(seen, steps[1]), total(seen_pushes, pushes[1])
    arrived = xp.all(xp.abs(steps[0]) <= _reach(y_noise, point.y))
    return s._replace(
        y_noise=y_noise + xp.abs(steps[0]),
        multiplier_noise=multiplier_noise + xp.abs(pushes[0]),
        arrived=arrived,
    )


def _reach(y_noise, y):
    """How far the next step may go, entry by entry.

    A coordinate far away makes any way of the others look short.
    """
    tol = tolerances(y.dtype)
    return tol.safety * xp.abs(y_noise) + tol.sure * xp.abs(y)


def without_decline(old: Sweep, new: Sweep, damped: BoolLike = False) -> Sweep:
    """End where passes no longer improve an accepted point; keep the better one.

    Not where they are `damped`: small steps may be all that is left of a long way.
    """
    tol = tolerances(old.point.y.dtype)
    free = ~xp.asarray(damped)
    still = stands_still(new) | ((old.passes > PATIENCE) & free)
    best = xp.minimum(old.point.kkt, new.point.kkt)
    stalled = still & (new.point.kkt > DECLINE * old.point.kkt)
    stalled = stalled & (best <= tol.accept) & (new.describes | free) & new.arrived
    # A Newton step that went far knew better than a residual that stiff forces hide.
    moved, far = largest(new.point.y - old.point.y, new.point.y)
    stalled = stalled & ((moved <= tol.sure * far) | ~free)
    same = xp.all(old.point.active == new.point.active)
    keep = stalled & same & (old.point.kkt < new.point.kkt)
    names = ("point", "y_noise", "multiplier_noise", "shift", "pulls", "describes")
    known = lambda s: {name: getattr(s, name) for name in (*names, "arrived")}
    pick = lambda a, b: xp.where(keep, a, b)
    chosen = jax.tree.map(pick, known(old), known(new))
    return new._replace(**chosen, done=new.done | stalled)


def refined(s: Sweep, rows: Rows) -> Sweep:
    """With the multipliers of the next pass, at no cost.

    Passes end when `y` stands still; beside stiff forces the multipliers of soft rows
    have digits to gain then.
    """
    point = s.point
    better = point._replace(
        multipliers=point.multipliers - s.shift,
        stationarity=point.stationarity - s.shift @ rows.A,
    )
    return s._replace(point=better)


def is_solved(sweep: Sweep, factor: Factor, share=1.0):
    """Whether the residual is small, and hides nothing.

    Next to stiff directions any force along a soft one looks small. So the step that is
    left, and what rounding makes of it, must be small beside the lengths there are, in
    `y` and in the metric of the Hessian, where units do not matter; by a factor that
    describes the Hessian. Where directions are flat the pass must have been a Newton
    step as well, on rows that are right to rounding. A `share` of what is allowed
    leaves no doubt.
    """
    point, tol = sweep.point, tolerances(sweep.point.y.dtype)
    stiff = xp.sqrt(xp.abs(factor.diagonal))
    error, far, bent, reach, push, stiffest = largest(
        sweep.y_noise, point.y, stiff * sweep.y_noise, stiff * point.y,
        point.gradient / xp.where(stiff > 0, stiff, 1), stiff,
    )  # fmt: skip
    # Far bounds are no length of an answer.
    length = xp.maximum(far, NEAR_ZERO * xp.max(point.length, initial=0))
    longest = xp.maximum(reach, push) + tol.eps * stiffest * length
    # A length where nothing has one.
    none = xp.finfo(far.dtype).tiny ** 0.25
    sure = share * tol.sure
    known = (error <= sure * length + none) & (bent <= sure * longest + none)
    # A factor of another Hessian tells nothing; where no force is left it need not.
    newton = sweep.describes & (stands_still(sweep) | ~factor.damped)
    sure = known & ~sweep.pulls & sweep.arrived & (newton | (point.kkt == 0))
    return (point.kkt <= tol.accept) & sure


def stands_still(s: Sweep) -> Bool[Array, ""]:
    """Whether the next pass would be on the same rows."""
    return xp.all(s.next_active == s.point.active)


def _pulls(
    rows: Rows, factor: Factor, point: Point, forces, noise
) -> Bool[Array, " k"]:
    """Rows that pull, although they may only push.

    Beside stiff directions a force along a soft one is small, and may hold `y` far away
    from where it belongs: so not only the multiplier counts, but how far `y` goes
    without its row. `forces` are the multipliers that fit `y`, `noise` is theirs.
    """
    tol = tolerances(point.y.dtype)
    doubt = tol.safety * (xp.abs(noise) + tol.eps * xp.abs(forces))
    away = -forces * factor.sigma**2 > tol.sure * point.length
    # What was added to the Hessian would hold `y` as well.
    away = away | factor.damped
    inequality = point.active & ~rows.equality
    return inequality & (forces < -doubt) & away


def _next_active(rows: Rows, point: Point, rounding) -> Bool[Array, " k"]:
    """Rows that push back, and rows that are violated (primal–dual active set)."""
    stays = point.active & (point.multipliers > -rounding * point.force)
    enters = ~point.active & (point.violation > rounding * point.length)
    return rows.usable & (rows.equality | stays | enters)
