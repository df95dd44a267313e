"""Which rows are active, how sure that is, and what to do where rows depend.

Generic points cost nothing but the probing solve of the last pass. Only where some row
is neither clearly active nor clearly inactive, or active rows look dependent, does the
degenerate analysis run: it finds the multipliers (they are not unique) whose smallest
entry is largest, and checks whether the rows of `B` share the dependence of the rows of
`A`. If they do, the local solution still meets all these rows with equality and the
derivative is unique; if not, `x` sits at a kink or at the edge of the set of `x` with a
non-empty lower level.
"""

from typing import NamedTuple

from jaxtyping import Array, Bool, Float

from .._programs.arrays import eigh, xp
from .._programs.control import run_unless, unless_rarely
from .._tolerances import tolerances
from .dense import Rows, largest
from .dual_active_set import dual_active_set
from .flat import holds_flat
from .kkt import Factor, Schur, schur
from .newton import Point, Sweep, is_solved


class Split(NamedTuple):
    """Rows split three ways, with the multipliers that justify it.

    `settled`: solved, and in need of no further words.
    """

    multipliers: Float[Array, " k"]
    active: Bool[Array, " k"]
    weak: Bool[Array, " k"]
    shared: Bool[Array, ""]
    empty: Bool[Array, ""]
    rows_inverse: Schur
    settled: Bool[Array, ""]


class _Tight(NamedTuple):
    """Rows without slack, and those among them that make up for curvature."""

    tight: Bool[Array, " k"]
    holds: Bool[Array, " k"]


def classify(
    rows: Rows, constraints, x, sweep: Sweep, factor: Factor, infeasible, diagnose: bool
) -> tuple[Split, Float[Array, ""]]:
    """The split, and the smallest multiplier or slack: the margin.

    Without `diagnose`, rows that are tight with a multiplier of zero stay as the last
    pass left them, and so do all where the rows were proven `infeasible`.
    """
    point = sweep.point
    tol = tolerances(point.y.dtype)
    slack = -point.violation
    force_noise = largest(sweep.multiplier_noise)[0] + tol.eps * point.force
    force_noise = tol.safety * force_noise
    inequality = rows.usable & ~rows.equality
    strong = point.active & (point.multipliers > force_noise) & inequality
    settled = ~rows.empty & is_solved(sweep, factor) & ~factor.damped

    def told_apart(noise) -> tuple[Split, _Tight]:
        """With `noise`, by how much the slack of each row may be wrong."""
        tight = inequality & ~(slack > tol.safety * (noise + tol.eps * point.length))
        weak = inequality & ~strong & tight
        # Rows that alone hold a flat coordinate: where they let go, `y*` has no
        # derivative. Rows that were added to the Hessian: the factor is right only
        # where they stay.
        holds = tight & (holds_flat(rows, factor) | (factor.weights > 0))
        fixed = rows.equality & rows.usable | holds
        split = Split(
            multipliers=_signed(rows, point.multipliers),
            active=strong | fixed if diagnose else point.active,
            weak=weak,
            shared=xp.asarray(True),
            empty=xp.asarray(False),
            rows_inverse=sweep.rows_inverse,
            settled=settled,
        )
        return split, _Tight(tight, holds)

    def clear(split: Split):
        fine = ~xp.any(split.weak) & sweep.rows_inverse.independent
        return fine & xp.all(split.active == point.active)

    def analyse(split: Split) -> Split:
        # Row by row: the longest error is not that of every row.
        split, (tight, holds) = told_apart(xp.abs(rows.A) @ xp.abs(sweep.y_noise))
        return run_unless(clear(split), lambda s: degenerate(s, tight, holds), split)

    def degenerate(split: Split, tight, holds) -> Split:
        bound = (tight | strong) & rows.usable | rows.equality & rows.usable
        # Of independent rows the multipliers are unique, and no row has a say in
        # whether others are active.
        split = unless_rarely(
            schur(factor, bound).independent,
            lambda s: _degenerate(rows, constraints, x, point, s, bound, holds),
            split,
        )
        return split._replace(rows_inverse=schur(factor, split.active))

    split, _ = told_apart(xp.linalg.norm(sweep.y_noise))
    if diagnose:
        split = run_unless(clear(split) | infeasible, analyse, split)
    # In the units of `y` and of its unit rows.
    unit = rows.norm / rows.plain_norm
    trust = xp.maximum(split.multipliers / unit, slack * unit)
    trust = xp.where(inequality, trust, xp.inf)
    return split, xp.maximum(xp.min(trust, initial=xp.inf), 0)


def _signed(rows: Rows, multipliers):
    return xp.where(rows.equality, multipliers, xp.maximum(multipliers, 0))


def _degenerate(
    rows: Rows, constraints, x, point: Point, split: Split, tight, holds
) -> Split:
    tol = tolerances(point.y.dtype)
    null, pseudo, smallest = _row_spaces(rows.A, tight)
    dependent = xp.any(null != 0)

    # The shortest multipliers, then those whose smallest entry is largest.
    shortest = -(pseudo @ xp.where(tight, rows.A @ point.gradient, 0))
    best = _max_min_multipliers(
        null, shortest, tight & ~rows.equality, point.force, dependent
    )
    # What is returned is checked; those of the last pass are accepted already.
    left = lambda mu: point.gradient + mu @ rows.A
    best, last = _signed(rows, xp.where(tight, best, 0)), split.multipliers
    # Entry by entry: in other units a small one counts as much.
    size = xp.abs(point.gradient) + xp.abs(best) @ xp.abs(rows.A)
    allowed = tol.accept * size + tol.safety * tol.eps * point.force
    sound = xp.all(xp.abs(left(best)) <= allowed)
    best = xp.where(sound, best, last)
    rest = xp.linalg.norm(left(best))
    noise = tol.safety * (rest + tol.eps * point.force) / xp.sqrt(smallest)
    noise = noise + tol.rounding * largest(best)[0] / tol.weight
    multipliers = xp.where(dependent, best, split.multipliers)
    strong = xp.where(
        dependent,
        tight & ~rows.equality & (best > noise),
        split.active & ~split.weak & ~rows.equality,
    )
    active = strong | (rows.equality & rows.usable) | holds
    shared = xp.asarray(True)
    coupling = None
    if constraints.turns:
        # Rows that turn share no dependence.
        shared = ~dependent
    else:
        coupling = constraints.coupling_matrix(x, rows.A.dtype)
    if coupling is not None:
        coupling = coupling / rows.norm[:, None]
        kernel, _, least = _row_spaces(rows.A, active)
        conflict = kernel @ xp.where(active[:, None], coupling, 0)
        miss, scale = largest(conflict, xp.where(active[:, None], coupling, 0))
        shared = miss <= tol.eps**0.5 * scale
        # Always true: it makes the next factorisation wait for this one.
        active = active & (least > 0)
    empty = _conflict(rows, point, tight, null, pseudo)
    return split._replace(
        multipliers=multipliers,
        active=active,
        weak=tight & ~(strong | rows.equality),
        shared=shared,
        empty=empty,
        settled=split.settled & ~empty,
    )


def _conflict(rows: Rows, point: Point, tight, null, pseudo):
    """Whether tight rows contradict each other by more than rounding (Farkas).

    Far from the origin a small conflict drowns in the length of `y`; the combination of
    rows that cancels `A` does not see `y`.
    """
    tol = tolerances(point.y.dtype)
    ray = -(null @ xp.where(tight, rows.rhs, 0))
    # The null space is known to rounding only; one correction squares that error.
    ray = ray - pseudo @ xp.where(tight, rows.A @ (ray @ rows.A), 0)
    size = xp.linalg.norm(ray)
    one_sided = xp.all(rows.equality | (ray >= -(tol.eps**0.5) * size))
    cancels = xp.linalg.norm(ray @ rows.A) * xp.linalg.norm(point.y)
    data = xp.max(xp.where(tight, rows.scale, 0), initial=0)
    gap = -ray @ rows.rhs
    return one_sided & (gap > tol.safety * (cancels + tol.rounding * size * data))


def _row_spaces(A, chosen):
    """Projector on `{v : A^T v = 0}`, pseudo-inverse of `A A^T`, its least eigenvalue.

    All restricted to the chosen (unit) rows.
    """
    tol = tolerances(A.dtype)
    A = xp.where(chosen[:, None], A, 0)
    # A unit diagonal for the others keeps them out of the eigenspace of zero.
    others = xp.diag(xp.where(chosen, 0, xp.ones_like(A[:, 0])))
    values, vectors = eigh(A @ A.T + others)
    zero = values <= tol.dependent * A.shape[0]
    null = (vectors * zero) @ vectors.T
    null = xp.where(xp.abs(null) > tol.dependent, null, 0)
    inverse = xp.where(zero, 0, 1 / xp.where(zero, 1, values))
    smallest = xp.min(xp.where(zero, 1, values), initial=1)
    return null, (vectors * inverse) @ vectors.T, smallest


def _max_min_multipliers(null, shortest, bounded, force, enabled):
    """Maximise `t` over `lambda = shortest + null z` with `lambda >= t` where bounded.

    A linear program; with a small quadratic term in `(z, t)` its solution stays the
    same and the dual active-set method applies, with rows `t - lambda_i <= 0`. Where
    `t` could grow for ever (rows that pin `y` from both sides) it stops at the size of
    the shortest multipliers, or at that of the forces where these are zero.
    """
    scale = xp.max(xp.abs(shortest), initial=0)
    scale = xp.where(scale > tolerances(shortest.dtype).rounding * force, scale, force)
    unit = shortest / xp.where(scale > 0, scale, 1)
    weight = tolerances(shortest.dtype).weight
    length = xp.sqrt((xp.diagonal(null) + 1) / weight)
    dual = dual_active_set(
        (null + 1) / weight / (length[:, None] * length),
        (1 / weight - unit) / length,
        bounded,
        xp.zeros_like(bounded),
        enabled=enabled,
    )
    move = null @ (dual.mu / length) / weight
    target = xp.min(xp.where(bounded, unit + move, 1), initial=1)
    share = xp.where(bounded & (unit < target), (target - unit) / move, 0)
    share = xp.clip(xp.max(share, initial=0), 0, 1)
    return scale * (unit + share * move)
