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

from typing import NamedTuple

import jax
from jaxtyping import Array, Bool, Float

from .._programs.arrays import eigh, xp
from .._programs.control import unless_rarely
from .._tolerances import tolerances
from .base import all_finite
from .dense import (
    Factor,
    FlatLower,
    Lifted,
    Rows,
    hessian_of,
    largest,
    single,
    whitened,
)
from .newton import Point

# Where a bound holds a coordinate, curvature below one share of the largest is lifted
# to another.
_FAINT, _LIFT = 1e-8, 1e-4
# Lengths of the problem that a step may be long to count as one of it.
_NEAR = 100.0
# Share of the length of the problem at which a flat coordinate must bend.
_FAR = 1e-2


class _Prepared(NamedTuple):
    """The Hessian lifted by coordinates, and what `_softened` needs to go on."""

    simple: Lifted
    kept: Float[Array, "n n"]
    size: Float[Array, ""]
    unit: Float[Array, ""]
    decided: Bool[Array, ""]


def prepared_hessian(
    hessian, rows: Rows, point: Point, active: Bool[Array, " k"], guarded, damping
) -> Lifted:
    """The Hessian at a point, lifted where `active` rows make that exact.

    Passes ask whether a factor describes the Hessian, so what they get is lifted by
    little. The `guarded` safeguard chooses its rows itself and has no refinement: it
    gets a Hessian that is well-conditioned whatever they are. `damping` scales what is
    added along directions that nothing decides.
    """
    lifted = _prepared(hessian, rows, point, active, guarded, damping)
    soften = lambda _: _softened(rows, active, guarded, lifted)
    return unless_rarely(lifted.decided, soften, lifted.simple)


def _prepared(hessian, rows: Rows, point: Point, active, guarded, damping) -> _Prepared:
    top = xp.max(xp.diagonal(hessian), initial=0)
    # What moves `y` by a length of the problem.
    force, far = largest(point.gradient)[0], largest(point.y)[0]
    longest = xp.max(rows.scale, initial=0)
    length = far + longest
    unit = force / xp.where(length > 0, length, 1)
    unit = xp.where(unit > 0, unit, xp.where(top > 0, top, 1))
    size = xp.maximum(top, unit)
    unit = damping * unit
    # Where no row has a length, forces cannot tell what curvature is faint.
    share = hessian / xp.where((longest > 0) | (top == 0), size, top)
    diagonal = xp.diagonal(share)
    # A positive semidefinite matrix with a zero on its diagonal has a row of zeros.
    largest_entry = 1.001 * xp.abs(diagonal[:, None] * diagonal)
    eps = tolerances(share.dtype).eps
    sound = xp.all(share**2 <= largest_entry + eps**2, axis=1)
    held = xp.any(single(rows) & active[:, None], axis=0)
    # Almost none, where nothing holds `y`: of its inverse no digit would be right,
    # unless forces are as small and the step is one of the problem's own length.
    slope = xp.minimum(xp.abs(point.gradient), xp.abs(point.stationarity))
    near = slope <= _NEAR * length * xp.abs(xp.diagonal(hessian))
    almost_none = xp.where(xp.asarray(guarded) & ~near, eps**0.5, eps**2)
    # By size: rounding takes a flow below zero, where odd powers bend the other way.
    flat = sound & (xp.abs(diagonal) <= xp.where(held, _FAINT, almost_none))
    little = xp.where(guarded, 1, _LIFT) * size
    kept = hessian + xp.diag(xp.where(flat & held, little, 0))
    open_ended = flat & ~held
    simple = whitened(
        kept + xp.diag(xp.where(open_ended, unit, 0)),
        flat,
        props=xp.zeros_like(rows.rhs),
        softened=False,
    )

    undecided = ~simple.definite | (xp.any(open_ended) & ~xp.asarray(guarded))
    decided = ~(undecided & all_finite(hessian))
    return _Prepared(simple, kept, size, unit, decided)


def _softened(rows: Rows, active, guarded, prepared: _Prepared) -> Lifted:
    simple, size = prepared.simple, prepared.size
    base = xp.where(guarded, simple.hessian, prepared.kept)
    chosen = active & ~xp.asarray(guarded)
    products = _products(rows, chosen)
    least, _ = _semidefinite(base / size)
    # Always equal: the second factorisation must wait for the first (dense.py).
    seen = xp.where(least == least, base / size + products, 0)
    _, undecided = _semidefinite(seen)
    bent = base + size * products + prepared.unit * undecided
    flat, props = simple.lifted, xp.where(chosen, size, 0)
    soft = whitened(bent, flat, props, softened=True)
    convex = least >= -_noise(base)
    return jax.tree.map(lambda a, b: xp.where(convex, a, b), soft, simple)


def is_loose(
    lower: FlatLower, rows: Rows, factor: Factor, y, active, weak
) -> Bool[Array, ""]:
    """Whether `y` can move without a force against it.

    Either on the active rows, or along a lifted coordinate away from a `weak` row that
    holds it with no force, unless `g` bends farther out: then `y*` is unique, though
    its derivative is not.
    """
    here = hessian_of(lower, y)
    there = hessian_of(lower, _away(rows, factor, y, weak).y)
    return _loose(rows, factor, y, active, weak, here, there)


class _Away(NamedTuple):
    y: Float[Array, " n"]
    leaves: Bool[Array, " n"]


def _away(rows: Rows, factor: Factor, y, weak) -> _Away:
    inwards = xp.where(single(rows) & weak[:, None], -rows.A, 0)
    leaves = factor.lifted & xp.any(inwards != 0, axis=0)
    length = largest(y)[0] + xp.max(rows.scale, initial=0)
    length = _FAR * xp.where(length > 0, length, 1)
    away = y + length * xp.where(leaves, xp.sum(inwards, axis=0), 0)
    return _Away(away, leaves)


def _loose(rows: Rows, factor: Factor, y, active, weak, here, there):
    firm = active & ~(weak & ~factor.holds)
    bent = xp.diagonal(there) > 0
    leaves = _away(rows, factor, y, weak).leaves
    return ~is_decided(here, rows, firm) | xp.any(leaves & ~bent)


def is_decided(hessian, rows: Rows, active) -> Bool[Array, ""]:
    """Whether `g` bends along every direction that the active rows leave open."""
    top = xp.max(xp.diagonal(hessian), initial=0)
    seen = hessian / xp.where(top > 0, top, 1) + _products(rows, active)
    return _semidefinite(seen)[0] > _noise(seen)


def _products(rows: Rows, chosen):
    """`A_S^T A_S` of the chosen rows."""
    A = xp.where(chosen[:, None], rows.A, 0)
    return A.T @ A


def _semidefinite(matrix):
    """The least eigenvalue, and the projector on the directions without curvature."""
    values, vectors = eigh(matrix)
    return values[0], (vectors * (values <= _noise(matrix))) @ vectors.T


def _noise(matrix):
    """What rounding leaves of an eigenvalue that is zero; the largest are near one."""
    return matrix.shape[0] * tolerances(matrix.dtype).definite
