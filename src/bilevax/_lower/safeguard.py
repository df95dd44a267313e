"""The slow path that always converges: damped Newton over exact quadratic programs.

Sequential quadratic programming (Wilson, Han and Powell): each step minimises the
quadratic model over the whole constraint set with the finite dual active-set method and
backtracks on the exact penalty function `g + nu |violation|_1`, for which the step is a
descent direction once `nu` exceeds the multipliers (Han 1977). Where `g` is defined on
part of space only, a step that aims at all violated rows at once may have to be cut at
the border again and again; after a cut the next one aims at a smaller `reach` of the
violation, so that `g` has its say.
"""

from typing import NamedTuple

from jaxtyping import Array, Bool, Float, Int

from .._programs.arrays import xp
from .._programs.control import loop
from .._tolerances import ARMIJO, FARKAS_REACH, MERIT_ROUNDINGS, REACH_CUT, tolerances
from .dense import FlatLower, Rows, value_of
from .dual_active_set import dual_active_set
from .kkt import Factor
from .newton import Point, rounding


class Guarded(NamedTuple):
    """The last step of the safeguard; `full` says that it was not cut.

    In the metric of the Hessian, `decrement` is the length of the uncut step, `noise`
    what rounding alone would leave of it, and `force` that of the gradient. `steps` are
    those of the dual method, in all.
    """

    y: Float[Array, " n"]
    multipliers: Float[Array, " k"]
    active: Bool[Array, " k"]
    penalty: Float[Array, ""]
    reach: Float[Array, ""]
    full: Bool[Array, ""]
    infeasible: Bool[Array, ""]
    decrement: Float[Array, ""]
    noise: Float[Array, ""]
    force: Float[Array, ""]
    steps: Int[Array, ""]


def no_step(rows: Rows, y) -> Guarded:
    """Before the first step, at the start `y`."""
    no, zero, one = xp.asarray(False), xp.zeros((), y.dtype), xp.ones((), y.dtype)
    return Guarded(
        y=y,
        multipliers=xp.zeros_like(rows.rhs),
        active=rows.equality & rows.usable,
        penalty=zero,
        reach=one,
        full=no,
        infeasible=no,
        decrement=xp.inf * one,
        noise=zero,
        force=zero,
        steps=xp.asarray(0),
    )


def guarded_step(
    lower: FlatLower, rows: Rows, factor: Factor, point: Point, last: Guarded
) -> Guarded:
    """From `point`, whose Hessian `factor` holds, one damped step."""
    reach = last.reach
    u = -(point.gradient @ factor.whitener)
    open_gap = rows.equality | (point.violation > 0)
    gap = xp.where(open_gap, reach * point.violation, point.violation)
    dual = dual_active_set(
        factor.gram,
        factor.W @ u + gap / factor.sigma,
        rows.usable,
        rows.equality,
        enabled=factor.definite,
        guess=point.multipliers * factor.sigma,
        rank=factor.W.shape[1],
    )
    multipliers, held = dual.mu / factor.sigma, dual.mu @ factor.W
    ahead, back = factor.whitener @ u, factor.whitener @ held
    d = ahead - back
    penalty = xp.maximum(last.penalty, 2 * xp.max(xp.abs(multipliers), initial=0))
    slope = point.gradient @ d - penalty * reach * xp.sum(_violation(rows, point.y))
    # The sizes of the numbers whose sum `y + d` is: its rounding is theirs.
    parts = xp.abs(point.y) + xp.abs(ahead) + xp.abs(back)
    share = _backtrack(lower, rows, point, d, slope, penalty, parts)
    tol, (unsure, _) = tolerances(u.dtype), rounding(rows, factor, point)
    noise = tol.rounding * (xp.linalg.norm(u) + xp.linalg.norm(held))
    return Guarded(
        y=point.y + share * d,
        multipliers=multipliers,
        active=dual.working,
        penalty=penalty,
        reach=xp.where(share == 1, xp.minimum(2 * reach, 1), REACH_CUT * reach),
        full=(share == 1) & (reach == 1),
        infeasible=dual.infeasible & _is_farkas(rows, point.y, dual.ray / factor.sigma),
        decrement=xp.linalg.norm(u - held),
        noise=noise + tol.safety * xp.linalg.norm(unsure @ factor.whitener),
        force=xp.linalg.norm(u),
        steps=last.steps + dual.steps,
    )


def _violation(rows: Rows, y):
    excess = rows.A @ y - rows.rhs
    excess = xp.where(rows.equality, xp.abs(excess), xp.maximum(excess, 0))
    return xp.where(rows.usable, excess, 0)


def _backtrack(lower: FlatLower, rows: Rows, point: Point, d, slope, penalty, parts):
    """The first of 1, 1/2, 1/4, ... with a sufficient decrease of the penalty."""
    y, eps = point.y, tolerances(point.y.dtype).eps

    def merit(step):
        at = y + step * d
        return value_of(lower, at) + penalty * xp.sum(_violation(rows, at))

    start = merit(xp.zeros((), y.dtype))
    # Terms of `g` can cancel, and rows that are met exactly still round.
    terms = xp.abs(start) + xp.abs(point.gradient) @ parts
    sides = xp.where(rows.usable, xp.linalg.norm(parts) + rows.scale, 0)
    noise = MERIT_ROUNDINGS * eps * (terms + penalty * xp.sum(sides))

    def too_long(step):
        # A NaN compares false: steps that leave the domain of `g` are cut too.
        return ~(merit(step) <= start + ARMIJO * step * slope + noise)

    return loop(too_long, lambda step: 0.5 * step, xp.ones((), y.dtype), limit=40)


def _is_farkas(rows: Rows, y, ray):
    """Whether `ray` proves that no `y` of any reasonable size is feasible.

    Exactly, `A^T ray = 0` and `<ray, rhs> < 0`; with rounding, the gap must exceed what
    `A^T ray` can contribute for points far beyond the data.
    """
    tol = tolerances(ray.dtype)
    gap = -ray @ rows.rhs
    noise = tol.rounding * (xp.abs(ray) @ rows.scale)
    far = FARKAS_REACH * (xp.linalg.norm(y) + xp.max(rows.scale, initial=0))
    return gap > noise + xp.linalg.norm(ray @ rows.A) * far
