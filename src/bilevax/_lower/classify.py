"""Which rows are active, how sure that is, and what to do where rows depend.

Generic points cost one probing solve. Only where some row is neither clearly active nor
clearly inactive, or active rows look dependent, does the degenerate analysis run: it
finds the multipliers (they are not unique) whose smallest entry is largest, and checks
whether the rows of `B` share the dependence of the rows of `A`. If they do, the local
solution still meets all these rows with equality and the derivative is unique; if not,
`x` sits at a kink or at the edge of the set of `x` with a non-empty lower level.
"""

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from .._tolerances import tolerances
from .base import run_if
from .dense import Factor, Rows, kkt_solve, largest, random_signs, schur_root
from .dual_active_set import dual_active_set
from .newton import Point

_LP_WEIGHT = 1e-4


class Split(eqx.Module):
    """Rows split three ways, with the multipliers that justify it."""

    multipliers: Float[Array, " k"]
    active: Bool[Array, " k"]
    weak: Bool[Array, " k"]
    shared: Bool[Array, ""]
    root: Float[Array, "k k"]


def classify(rows: Rows, coupling, point: Point, factor: Factor, root):
    """The split, its margin, and an estimate of `|y - y*|`.

    `coupling` is `B` in unit rows, or None; `root` factors the rows in `point.active`.
    """
    tol = tolerances(point.y.dtype)
    dy, dmu = rounding_effect(rows, point, factor, root)
    slack = -point.violation
    error = jnp.linalg.norm(dy)
    slack_noise = tol.safety * (error + tol.eps * point.length)
    force_noise = tol.safety * (largest(dmu)[0] + tol.eps * point.force)

    inequality = rows.usable & ~rows.equality
    strong = point.active & (point.multipliers > force_noise) & inequality
    tight = inequality & ~(slack > slack_noise)
    weak = inequality & ~strong & tight
    fixed = rows.equality & rows.usable
    pivots = jnp.where(point.active, jnp.diagonal(root) ** 2, 1)
    suspicious = jnp.min(pivots, initial=1) < jnp.sqrt(tol.eps)

    split = Split(
        multipliers=jnp.where(
            rows.equality, point.multipliers, jnp.maximum(point.multipliers, 0)
        ),
        active=strong | fixed,
        weak=weak,
        shared=jnp.asarray(True),
        root=root,
    )
    changed = jnp.any(split.active != point.active)
    split = run_if(
        jnp.any(weak) | suspicious | changed,
        lambda s: _degenerate(rows, coupling, point, factor, tight | strong, s),
        split,
    )
    trust = jnp.where(inequality, jnp.maximum(split.multipliers, slack), jnp.inf)
    margin = jnp.maximum(jnp.min(trust, initial=jnp.inf), 0)
    return split, margin, error


def rounding_effect(rows: Rows, point: Point, factor: Factor, root):
    """What rounding and the remaining residual do to `(y, multipliers)`.

    One solve with the residual plus a rounding error of fixed random signs in each
    component; the entries of `|H||y|` are bounded through the diagonal of `H`, those
    of `|A|^T lambda` through the unit rows.
    """
    eps = tolerances(point.y.dtype).eps
    spread = jnp.sqrt(jnp.abs(factor.diagonal))
    terms = spread * (spread @ jnp.abs(point.y)) + jnp.abs(point.gradient)
    terms = terms + jnp.sum(jnp.abs(point.multipliers))
    top = random_signs(terms) * eps * terms + point.stationarity
    bottom = random_signs(point.length) * eps * point.length + point.violation
    bottom = jnp.where(point.active, bottom, 0)
    return kkt_solve(factor, root, point.active, top, bottom)


def _degenerate(rows: Rows, coupling, point: Point, factor: Factor, tight, split):
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
    noise = noise + tol.rounding * _largest(best) / _LP_WEIGHT
    multipliers = jnp.where(dependent, best, split.multipliers)
    multipliers = jnp.where(rows.equality, multipliers, jnp.maximum(multipliers, 0))
    strong = jnp.where(
        dependent,
        tight & ~rows.equality & (best > noise),
        split.active & ~rows.equality,
    )
    active = strong | (rows.equality & rows.usable)
    shared = jnp.asarray(True)
    if coupling is not None:
        null, _, _ = _row_spaces(rows.A, active)
        conflict = null @ jnp.where(active[:, None], coupling, 0)
        scale = _largest(jnp.where(active[:, None], coupling, 0))
        shared = _largest(conflict) <= jnp.sqrt(tol.eps) * scale
    return Split(
        multipliers=multipliers,
        active=active,
        weak=tight & ~active,
        shared=shared,
        root=schur_root(factor.gram, active, tol.regularise),
    )


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


def _largest(array):
    return jnp.max(jnp.abs(array), initial=0)
