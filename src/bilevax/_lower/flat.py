"""Directions along which `g` has no curvature, decided by rows.

Flows on unused roads, generators at a limit, slack variables of a hinge, totals of
other variables: `g` is then strongly convex only along the directions that active rows
leave open, and the KKT system needs no more. Curvature along what these rows fix is
never felt, so it may be anything, and steps, multipliers and adjoints stay exact. What
is added is the Hessian of an augmented Lagrangian (Hestenes 1969, Powell 1969),
`A_S^T diag(weights) A_S` with `S` the active rows: coordinate by coordinate where
bounds hold flat coordinates, and for all of `S` where other directions are flat.

What neither `g` nor the rows of the moment decide gets a proximal term (Rockafellar
1976), to have a direction to go; that is a damped step, which the passes and the
safeguard treat like any wrong Hessian. Where it stays so to the end there is no answer:
`y*` is not unique, or has no derivative.
"""

import jax
from jaxtyping import Array, Bool

from .._programs.arrays import eigh, xp
from .._programs.control import unless_rarely
from .._tolerances import AUGMENTED, FAINT, FAR, LONG_STEP, MINORS, tolerances
from .base import all_finite
from .dense import FlatLower, Rows, hessian_of, largest, single
from .kkt import Convex, Factor, whitened
from .newton import Point


def convexified(
    hessian, rows: Rows, point: Point, active: Bool[Array, " k"], guarded, proximal
) -> Convex:
    """The Hessian at a point, with what `active` rows permit to add.

    Passes ask whether a factor describes the Hessian, so what they get is changed by
    little. The `guarded` safeguard chooses its rows itself and has no refinement: it
    gets a Hessian that is well-conditioned whatever they are. `proximal` scales what is
    added along directions that nothing decides.
    """
    guarded, diagonal = xp.asarray(guarded), xp.diagonal(hessian)
    top = xp.max(diagonal, initial=0)
    # What moves `y` by a length of the problem.
    force, far = largest(point.gradient)[0], largest(point.y)[0]
    longest = xp.max(rows.scale, initial=0)
    length = far + longest
    unit = force / xp.where(length > 0, length, 1)
    unit = xp.where(unit > 0, unit, xp.where(top > 0, top, 1))
    size = xp.maximum(top, unit)
    unit = proximal * unit
    # Where no row has a length, forces cannot tell what curvature is faint.
    share = hessian / xp.where((longest > 0) | (top == 0), size, top)
    entries = xp.diagonal(share)
    # A positive semidefinite matrix with a zero on its diagonal has a row of zeros.
    largest_entry = MINORS * xp.abs(entries[:, None] * entries)
    eps = tolerances(share.dtype).eps
    sound = xp.all(share**2 <= largest_entry + eps**2, axis=1)
    holds = single(rows) & active[:, None]
    held = xp.any(holds, axis=0)
    # Almost none, where nothing holds `y`: of its inverse no digit would be right,
    # unless forces are as small and the step is one of the problem's own length. Where
    # a bound holds it: so little that no move of that length is felt beside the force.
    gradient = xp.abs(point.gradient)
    slope = xp.minimum(gradient, xp.abs(point.stationarity))
    near = slope <= LONG_STEP * length * xp.abs(diagonal)
    unfelt = diagonal * length <= FAINT * gradient
    # By size: rounding takes a flow below zero, where odd powers bend the other way.
    bend = xp.abs(entries)
    flat = (bend <= eps**2) | (held & unfelt & (bend <= FAINT))
    flat = sound & (flat | (guarded & ~held & ~near & (bend <= eps**0.5)))
    open_ended = flat & ~held
    # What is lent to a coordinate is measured by its own force, which it must not blur.
    own = xp.maximum(gradient / xp.where(length > 0, length, 1), eps * size)
    little = xp.where(guarded, size, AUGMENTED * own)
    kept = hessian + xp.diag(xp.where(flat & held, little, 0))
    coordinates = kept + xp.diag(xp.where(open_ended, unit, 0))
    # The same by rows: bounds that hold a coordinate share what it was lent.
    count = xp.maximum(xp.sum(holds, axis=0), 1).astype(hessian.dtype)
    shares = xp.where(holds & flat, little / count, 0)
    lent = xp.sum(shares, axis=1)
    simple = whitened(coordinates, flat, lent, regularised=False)

    def augment(simple: Convex) -> Convex:
        chosen = active & ~guarded
        base = xp.where(guarded, coordinates, kept)
        least, _ = _semidefinite(base / size)
        # Always equal: the second factorisation must wait for the first (`kkt.py`).
        A = xp.where(least == least, _products(rows, chosen), 0)
        _, undecided = _semidefinite(base / size + A)
        weights = lent + xp.where(chosen, size, 0)
        bent = base + size * A + unit * undecided
        augmented = whitened(bent, flat, weights, regularised=True)
        convex = least >= -_noise(base)
        return jax.tree.map(lambda a, b: xp.where(convex, a, b), augmented, simple)

    undecided = ~simple.definite | (xp.any(open_ended) & ~guarded)
    return unless_rarely(~(undecided & all_finite(hessian)), augment, simple)


def is_loose(
    lower: FlatLower, rows: Rows, factor: Factor, y, active, weak
) -> Bool[Array, ""]:
    """Whether `y` can move without a force against it.

    Either on the active rows, or along a flat coordinate away from a `weak` row that
    holds it with no force, unless `g` bends farther out: then `y*` is unique, though
    its derivative is not.
    """
    inwards = xp.where(single(rows) & weak[:, None], -rows.A, 0)
    leaves = factor.flat & xp.any(inwards != 0, axis=0)
    length = largest(y)[0] + xp.max(rows.scale, initial=0)
    length = FAR * xp.where(length > 0, length, 1)
    away = y + length * xp.where(leaves, xp.sum(inwards, axis=0), 0)
    bent = xp.diagonal(hessian_of(lower, away)) > 0
    firm = active & ~(weak & ~holds_flat(rows, factor))
    decided = is_decided(hessian_of(lower, y), rows, firm)
    return ~decided | xp.any(leaves & ~bent)


def holds_flat(rows: Rows, factor: Factor) -> Bool[Array, " k"]:
    """The rows that alone hold a flat coordinate."""
    return xp.any(single(rows) & factor.flat, axis=1)


def is_decided(hessian, rows: Rows, active) -> Bool[Array, ""]:
    """Whether `g` bends along every direction that the active rows leave open.

    In units of columns that give every coordinate a curvature of one, and where there
    is none in those of the softest: rows have to decide these. So much of them is added
    that what rounding bends the other way does not matter where a row holds it.
    """
    eps, bend = tolerances(hessian.dtype).eps, xp.abs(xp.diagonal(hessian))
    bends = bend > eps**2 * xp.max(bend, initial=0)
    softest = xp.min(xp.where(bends, bend, xp.inf), initial=xp.inf)
    softest = xp.where(xp.isfinite(softest), softest, 1)
    units = 1 / xp.sqrt(xp.where(bends, bend, softest))
    scaled = rows.A * units
    norm = xp.linalg.norm(scaled, axis=1, keepdims=True)
    in_units = rows._replace(A=2 * scaled / xp.where(norm > 0, norm, 1))
    seen = hessian * units[:, None] * units + _products(in_units, active)
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
