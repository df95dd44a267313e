"""Which rows are active, how sure that is, and what to do where rows depend.

Generic points cost nothing but the probing solve of the last pass. Only where some row
is neither clearly active nor clearly inactive, or active rows look dependent, does the
degenerate analysis run: it finds the multipliers (they are not unique) whose smallest
entry is largest, and checks whether the rows of `B` share the dependence of the rows of
`A`. If they do, the local solution still meets all these rows with equality and the
derivative is unique; if not, `x` sits at a kink or at the edge of the set of `x` with a
non-empty lower level.
"""

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from .._tolerances import tolerances
from .base import run_if
from .dense import Factor, Rows, Schur, largest, schur
from .dual_active_set import dual_active_set
from .newton import Point, Sweep

_LP_WEIGHT = 1e-4


class Split(eqx.Module):
    """Rows split three ways, with the multipliers that justify it."""

    multipliers: Float[Array, " k"]
    active: Bool[Array, " k"]
    weak: Bool[Array, " k"]
    shared: Bool[Array, ""]
    empty: Bool[Array, ""]
    rows_inverse: Schur


def classify(
    rows: Rows, coupling, sweep: Sweep, factor: Factor, infeasible, diagnose: bool
):
    """The split, its margin, and an estimate of `|y - y*|`.

    `coupling` is `B` in unit rows, or None. Without `diagnose`, rows that are tight
    with a multiplier of zero stay as the last pass left them, and so do all where the
    rows were proven `infeasible`.
    """
    point = sweep.point
    tol = tolerances(point.y.dtype)
    slack = -point.violation
    error = jnp.linalg.norm(sweep.y_noise)
    slack_noise = tol.safety * (error + tol.eps * point.length)
    force_noise = largest(sweep.multiplier_noise)[0] + tol.eps * point.force
    force_noise = tol.safety * force_noise

    inequality = rows.usable & ~rows.equality
    strong = point.active & (point.multipliers > force_noise) & inequality
    tight = inequality & ~(slack > slack_noise)
    weak = inequality & ~strong & tight
    # Rows that alone hold a flat coordinate: where they let go, `y*` has no derivative.
    # Rows that were added to the Hessian: the factor is right only where they stay.
    holds = tight & (factor.holds | (factor.props > 0))
    fixed = rows.equality & rows.usable | holds

    split = Split(
        multipliers=jnp.where(
            rows.equality, point.multipliers, jnp.maximum(point.multipliers, 0)
        ),
        active=strong | fixed if diagnose else point.active,
        weak=weak,
        shared=jnp.asarray(True),
        empty=jnp.asarray(False),
        rows_inverse=sweep.rows_inverse,
    )
    if diagnose:
        changed = jnp.any(split.active != point.active)
        degenerate = jnp.any(weak) | ~sweep.rows_inverse.independent | changed
        split = run_if(
            degenerate & ~infeasible,
            lambda s: _degenerate(
                rows, coupling, point, factor, tight | strong, holds, s
            ),
            split,
        )
    trust = jnp.where(inequality, jnp.maximum(split.multipliers, slack), jnp.inf)
    margin = jnp.maximum(jnp.min(trust, initial=jnp.inf), 0)
    return split, margin, error


def _degenerate(
    rows: Rows, coupling, point: Point, factor: Factor, tight, holds, split
):
    tol = tolerances(point.y.dtype)
    tight = tight & rows.usable | (rows.equality & rows.usable)
    null, pseudo, smallest = _row_spaces(rows.A, tight)
    dependent = jnp.any(null != 0)

    # The shortest multipliers, then those whose smallest entry is largest.
    shortest = -(pseudo @ jnp.where(tight, rows.A @ point.gradient, 0))
    best = _max_min_multipliers(
        null, shortest, tight & ~rows.equality, point.force, dependent
    )
    best = jnp.where(tight, best, 0)
    missing = jnp.linalg.norm(point.gradient + best @ rows.A)
    noise = tol.safety * (missing + tol.eps * point.force) / jnp.sqrt(smallest)
    noise = noise + tol.rounding * largest(best)[0] / _LP_WEIGHT
    multipliers = jnp.where(dependent, best, split.multipliers)
    multipliers = jnp.where(rows.equality, multipliers, jnp.maximum(multipliers, 0))
    strong = jnp.where(
        dependent,
        tight & ~rows.equality & (best > noise),
        split.active & ~split.weak & ~rows.equality,
    )
    active = strong | (rows.equality & rows.usable) | holds
    shared = jnp.asarray(True)
    if coupling is not None:
        kernel, _, least = _row_spaces(rows.A, active)
        conflict = kernel @ jnp.where(active[:, None], coupling, 0)
        miss, scale = largest(conflict, jnp.where(active[:, None], coupling, 0))
        shared = miss <= jnp.sqrt(tol.eps) * scale
        # Always true: it makes the next factorisation wait for this one.
        active = active & (least > 0)
    return Split(
        multipliers=multipliers,
        active=active,
        weak=tight & ~(strong | rows.equality),
        shared=shared,
        empty=_conflict(rows, point, tight, null, pseudo),
        rows_inverse=schur(factor, active),
    )


def _conflict(rows: Rows, point: Point, tight, null, pseudo):
    """Whether tight rows contradict each other by more than rounding (Farkas).

    Far from the origin a small conflict drowns in the length of `y`; the combination of
    rows that cancels `A` does not see `y`.
    """
    tol = tolerances(point.y.dtype)
    ray = -(null @ jnp.where(tight, rows.rhs, 0))
    # The null space is known to rounding only; one correction squares that error.
    ray = ray - pseudo @ jnp.where(tight, rows.A @ (ray @ rows.A), 0)
    size = jnp.linalg.norm(ray)
    one_sided = jnp.all(rows.equality | (ray >= -jnp.sqrt(tol.eps) * size))
    cancels = jnp.linalg.norm(ray @ rows.A) * jnp.linalg.norm(point.y)
    data = jnp.max(jnp.where(tight, rows.scale, 0), initial=0)
    gap = -ray @ rows.rhs
    return one_sided & (gap > tol.safety * (cancels + tol.rounding * size * data))


def _row_spaces(A, chosen):
    """Projector on `{v : A^T v = 0}`, pseudo-inverse of `A A^T`, its least eigenvalue.

    All restricted to the chosen (unit) rows.
    """
    tol = tolerances(A.dtype)
    A = jnp.where(chosen[:, None], A, 0)
    # A unit diagonal for the others keeps them out of the eigenspace of zero.
    values, vectors = jnp.linalg.eigh(A @ A.T + jnp.diag(jnp.where(chosen, 0.0, 1.0)))
    zero = values <= tol.dependent * A.shape[0]
    null = (vectors * zero) @ vectors.T
    null = jnp.where(jnp.abs(null) > tol.dependent, null, 0)
    inverse = jnp.where(zero, 0, 1 / jnp.where(zero, 1, values))
    smallest = jnp.min(jnp.where(zero, 1, values), initial=1)
    return null, (vectors * inverse) @ vectors.T, smallest


def _max_min_multipliers(null, shortest, bounded, force, enabled):
    """Maximise `t` over `lambda = shortest + null z` with `lambda >= t` where bounded.

    A linear program; with a small quadratic term in `(z, t)` its solution stays the
    same and the dual active-set method applies, with rows `t - lambda_i <= 0`. Where
    `t` could grow for ever (rows that pin `y` from both sides) it stops at the size of
    the shortest multipliers, or at that of the forces where these are zero.
    """
    scale = jnp.max(jnp.abs(shortest), initial=0)
    scale = jnp.where(scale > tolerances(shortest.dtype).rounding * force, scale, force)
    unit = shortest / jnp.where(scale > 0, scale, 1)
    length = jnp.sqrt((jnp.diagonal(null) + 1) / _LP_WEIGHT)
    dual = dual_active_set(
        (null + 1) / _LP_WEIGHT / (length[:, None] * length),
        (1 / _LP_WEIGHT - unit) / length,
        bounded,
        jnp.zeros_like(bounded),
        max_steps=20 * shortest.size + 100,
        enabled=enabled,
    )
    move = null @ (dual.mu / length) / _LP_WEIGHT
    target = jnp.min(jnp.where(bounded, unit + move, 1), initial=1)
    share = jnp.where(bounded & (unit < target), (target - unit) / move, 0)
    share = jnp.clip(jnp.max(share, initial=0), 0, 1)
    return scale * (unit + share * move)
