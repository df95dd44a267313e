"""Directions along which `g` has no curvature, decided by rows.

Flows on unused roads, generators at a limit, slack variables of a hinge, totals of
other variables: `g` is then strongly convex only along the directions that active rows
leave open, and the KKT system needs no more. Curvature along what these rows fix is
never felt, so it may be anything, and steps, multipliers and adjoints stay exact:

- a coordinate that a bound holds is lifted to a size that keeps the factor
  well-conditioned;
- where other directions are flat, `A_S^T A_S` is added, with `S` the active rows.

What neither `g` nor the rows of the moment decide is lifted as well, to have a
direction to go; that is a damped step, which the passes and the safeguard treat like
any wrong Hessian. Where it stays so to the end there is no answer: `y*` is not unique,
or has no derivative.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from .._tolerances import tolerances
from .base import all_finite, run_if
from .dense import BoolLike, Factor, FlatLower, Lifted, Rows, largest, single, whitened
from .newton import Point

# Where a bound holds a coordinate, curvature below one share of the largest is lifted
# to another.
_FAINT, _LIFT = 1e-8, 1e-4
# Share of the length of the problem at which a flat coordinate must bend.
_FAR = 1e-2


def prepared_hessian(
    lower: FlatLower,
    rows: Rows,
    point: Point,
    active: Bool[Array, " k"],
    guarded: BoolLike,
    damping: float | Float[Array, ""] = 1.0,
) -> Lifted:
    """The Hessian at a point, lifted where `active` rows make that exact.

    Passes ask whether a factor describes the Hessian, so what they get is lifted by
    little. The `guarded` safeguard chooses its rows itself and has no refinement: it
    gets a Hessian that is well-conditioned whatever they are. `damping` scales what is
    added along directions that nothing decides.
    """
    hessian = lower.hessian(point.y)
    top = jnp.max(jnp.diagonal(hessian), initial=0)
    # What moves `y` by a length of the problem.
    force, far = largest(point.gradient)[0], largest(point.y)[0]
    longest = jnp.max(rows.scale, initial=0)
    length = far + longest
    unit = force / jnp.where(length > 0, length, 1)
    unit = jnp.where(unit > 0, unit, jnp.where(top > 0, top, 1))
    size = jnp.maximum(top, unit)
    unit = damping * unit
    # Where no row has a length, forces cannot tell what curvature is faint.
    share = hessian / jnp.where((longest > 0) | (top == 0), size, top)
    diagonal = jnp.diagonal(share)
    # A positive semidefinite matrix with a zero on its diagonal has a row of zeros.
    largest_entry = 1.001 * jnp.abs(diagonal[:, None] * diagonal)
    eps = tolerances(share.dtype).eps
    sound = jnp.all(share**2 <= largest_entry + eps**2, axis=1)
    held = jnp.any(single(rows) & active[:, None], axis=0)
    # Almost none, where nothing holds `y`: of its inverse no digit would be right.
    almost_none = jnp.where(guarded, eps**0.5, eps**2)
    # By size: rounding takes a flow below zero, where odd powers bend the other way.
    flat = sound & (jnp.abs(diagonal) <= jnp.where(held, _FAINT, almost_none))
    little = jnp.where(guarded, 1, _LIFT) * size
    kept = hessian + jnp.diag(jnp.where(flat & held, little, 0))
    open_ended = flat & ~held
    simple = whitened(
        kept + jnp.diag(jnp.where(open_ended, unit, 0)),
        flat,
        props=jnp.zeros_like(rows.rhs),
        softened=False,
    )

    def soften(simple: Lifted) -> Lifted:
        base = jnp.where(guarded, simple.hessian, kept)
        chosen = active & ~jnp.asarray(guarded)
        products = _products(rows, chosen)
        least, _ = _semidefinite(base / size)
        # Always equal: the second factorisation must wait for the first (dense.py).
        seen = jnp.where(least == least, base / size + products, 0)
        _, undecided = _semidefinite(seen)
        bent = base + size * products + unit * undecided
        soft = whitened(bent, flat, jnp.where(chosen, size, 0), softened=True)
        convex = least >= -_noise(base)
        return jax.tree.map(lambda a, b: jnp.where(convex, a, b), soft, simple)

    undecided = ~simple.definite | (jnp.any(open_ended) & ~jnp.asarray(guarded))
    return run_if(undecided & all_finite(hessian), soften, simple)


def is_loose(
    lower: FlatLower, rows: Rows, factor: Factor, y, active, weak
) -> Bool[Array, ""]:
    """Whether `y` can move without a force against it.

    Either on the active rows, or along a lifted coordinate away from a `weak` row that
    holds it with no force, unless `g` bends farther out: then `y*` is unique, though
    its derivative is not.
    """
    firm = active & ~(weak & ~factor.holds)
    inwards = jnp.where(single(rows) & weak[:, None], -rows.A, 0)
    leaves = factor.lifted & jnp.any(inwards != 0, axis=0)
    length = largest(y)[0] + jnp.max(rows.scale, initial=0)
    length = _FAR * jnp.where(length > 0, length, 1)
    away = y + length * jnp.where(leaves, jnp.sum(inwards, axis=0), 0)
    bent = jnp.diagonal(lower.hessian(away)) > 0
    return ~is_decided(lower, rows, y, firm) | jnp.any(leaves & ~bent)


def is_decided(lower: FlatLower, rows: Rows, y, active) -> Bool[Array, ""]:
    """Whether `g` bends along every direction that the active rows leave open."""
    hessian = lower.hessian(y)
    top = jnp.max(jnp.diagonal(hessian), initial=0)
    seen = hessian / jnp.where(top > 0, top, 1) + _products(rows, active)
    return _semidefinite(seen)[0] > _noise(seen)


def _products(rows: Rows, chosen):
    """`A_S^T A_S` of the chosen rows."""
    A = jnp.where(chosen[:, None], rows.A, 0)
    return A.T @ A


def _semidefinite(matrix):
    """The least eigenvalue, and the projector on the directions without curvature."""
    values, vectors = jnp.linalg.eigh(matrix, symmetrize_input=False)
    return values[0], (vectors * (values <= _noise(matrix))) @ vectors.T


def _noise(matrix):
    """What rounding leaves of an eigenvalue that is zero; the largest are near one."""
    return matrix.shape[0] * tolerances(matrix.dtype).definite
