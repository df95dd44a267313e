"""The slow path that always converges: damped Newton over exact quadratic programs.

Each step minimises the quadratic model over the whole constraint set with the finite
dual active-set method and backtracks on the exact penalty `g + nu |violation|_1`, for
which the step is a descent direction once `nu` exceeds the multipliers. Where `g` is
defined on part of space only, a step that aims at all violated rows at once may have to
be cut at the border again and again; after a cut the next one aims at a smaller `reach`
of the violation, so that `g` has its say.
"""

from typing import NamedTuple

from jaxtyping import Array, Bool, Float, Int

from .._programs.arrays import xp
from .._programs.control import loop
from .._tolerances import tolerances
from .dense import Factor, FlatLower, Rows, value_of
from .dual_active_set import dual_active_set
from .newton import Point, rounding


class Guarded(NamedTuple):
    """One step of the safeguard; `full` says that it was not cut.

    In the metric of the Hessian, `decrement` is the length of the uncut step, `noise`
    what rounding alone would leave of it, and `force` that of the gradient.
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


class _Direction(NamedTuple):
    """The uncut step `d`, with what the line search along it needs.

    `parts` are the sizes of the numbers whose sum `y + d` is: its rounding is theirs.
    """

    step: Guarded
    d: Float[Array, " n"]
    slope: Float[Array, ""]
    parts: Float[Array, " n"]


def guarded_step(
    lower: FlatLower, rows: Rows, factor: Factor, point: Point, penalty, reach
) -> Guarded:
    """From `point`, whose Hessian `factor` holds, one damped step."""
    direction = _direction(rows, factor, point, penalty, reach)
    return _cut(lower, rows, point, direction)


def _direction(rows: Rows, factor: Factor, point: Point, penalty, reach) -> _Direction:
    k = rows.rhs.size
    u = -(point.gradient @ factor.whitener)
    open_gap = rows.equality | (point.violation > 0)
    gap = xp.where(open_gap, reach * point.violation, point.violation)
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
    held = dual.mu @ factor.W
    ahead, back = factor.whitener @ u, factor.whitener @ held
    d = ahead - back
    penalty = xp.maximum(penalty, 2 * xp.max(xp.abs(multipliers), initial=0))
    slope = point.gradient @ d - penalty * reach * xp.sum(_violation(rows, point.y))
    tol, (unsure, _) = tolerances(u.dtype), rounding(rows, factor, point)
    noise = tol.rounding * (xp.linalg.norm(u) + xp.linalg.norm(held))
    noise = noise + tol.safety * xp.linalg.norm(unsure @ factor.whitener)
    step = Guarded(
        y=point.y,
        multipliers=multipliers,
        active=dual.working,
        penalty=penalty,
        reach=xp.asarray(reach, point.y.dtype),
        full=xp.asarray(False),
        infeasible=dual.infeasible & _is_farkas(rows, point.y, dual.ray / factor.sigma),
        decrement=xp.linalg.norm(u - held),
        noise=noise,
        force=xp.linalg.norm(u),
        steps=dual.steps,
    )
    parts = xp.abs(point.y) + xp.abs(ahead) + xp.abs(back)
    return _Direction(step, d, slope, parts)


def _cut(lower: FlatLower, rows: Rows, point: Point, direction: _Direction) -> Guarded:
    """The step as long as the penalty falls along it."""
    step, d = direction.step, direction.d
    share = _backtrack(
        lower, rows, point, d, direction.slope, step.penalty, direction.parts
    )
    reach = step.reach
    return step._replace(
        y=point.y + share * d,
        reach=xp.where(share == 1, xp.minimum(2 * reach, 1), 0.25 * reach),
        full=(share == 1) & (reach == 1),
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
    noise = 16 * eps * (terms + penalty * xp.sum(sides))

    def too_long(step):
        # A NaN compares false: steps that leave the domain of `g` are cut too.
        return ~(merit(step) <= start + 1e-4 * step * slope + noise)

    return loop(too_long, lambda step: 0.5 * step, xp.ones((), y.dtype), limit=40)


def _is_farkas(rows: Rows, y, ray):
    """Whether `ray` proves that no `y` of any reasonable size is feasible.

    Exactly, `A^T ray = 0` and `<ray, rhs> < 0`; with rounding, the gap must exceed what
    `A^T ray` can contribute for points ten thousand times as far out as the data.
    """
    tol = tolerances(ray.dtype)
    gap = -ray @ rows.rhs
    noise = tol.rounding * (xp.abs(ray) @ rows.scale)
    far = 1e4 * (xp.linalg.norm(y) + xp.max(rows.scale, initial=0))
    return gap > noise + xp.linalg.norm(ray @ rows.A) * far
