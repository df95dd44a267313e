"""Which sparse rows are active, and what is said where rows depend; see `classify.py`.

Generic points cost nothing. Where a row is tight without a multiplier, or rows depend,
the multipliers whose smallest entry is largest come from a linear program (HiGHS, which
SciPy brings), and so does the proof that no point satisfies the rows.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from ..._programs.arrays import sp
from ..._tolerances import tolerances
from .kkt import SparseFactor
from .rows import SparseRows

# What a linear program leaves of a quantity that is zero, relative to its data.
_LINEAR = 1e-7
# The share of the forces that a multiplier needs not exceed to be one.
_ENOUGH = 1e-3


class Split(NamedTuple):
    """Rows split three ways, their multipliers, and the factor of the active ones."""

    multipliers: np.ndarray
    active: np.ndarray
    weak: np.ndarray
    shared: bool
    factor: SparseFactor


class Noise(NamedTuple):
    """By how much multipliers and the slack of each row may be wrong."""

    multiplier: float
    slack: np.ndarray


def split(
    rows: SparseRows,
    factor: SparseFactor,
    mu,
    gradient,
    slack,
    noise: Noise,
    depends: bool,
    coupled: Callable,
) -> Split:
    """The split at a point that solves the KKT conditions.

    `depends`: whether rows of the factor do; `coupled(random)` is `B` times a random
    vector in unit rows, or None where rows do not move.
    """
    active, bounded = factor.active, rows.bounded
    strong = bounded & active & (mu > noise.multiplier)
    tight = bounded & ~(slack > noise.slack)
    weak = tight & ~strong
    mu = np.where(bounded, np.maximum(mu, 0), mu)
    if not (weak.any() or depends):
        return Split(mu, active, weak, True, factor)
    if weak.any():
        bound = rows.held | strong | weak
        every = SparseFactor(rows.fixed, factor.H, bound)
        if every.open_directions()[1]:
            best = _largest_smallest(rows, every, gradient, bound)
            if best is not None:
                depends = True
                mu, enough = best
                strong = bounded & bound & (mu > max(noise.multiplier, enough))
                weak = tight & ~strong
    chosen = rows.held | strong
    if not np.array_equal(chosen, factor.active):
        fewer = SparseFactor(rows.fixed, factor.H, chosen)
        # Rows that alone hold `y` stay.
        if fewer.open_directions()[0] or not fewer.definite:
            fewer = SparseFactor(rows.fixed, factor.H, chosen | weak)
        factor = fewer
    shared = not depends or _is_shared(factor, coupled)
    return Split(mu, factor.active, weak, shared, factor)


def _is_shared(factor: SparseFactor, coupled: Callable) -> bool:
    """Whether the active rows of `B` share the dependence of those of `A`."""
    random = np.random.default_rng(0)
    for _ in range(2):
        moved = coupled(random)
        if moved is None:
            return True
        moved = np.where(factor.active, moved, 0)
        d, _, _ = factor.solve(np.zeros(factor.n), moved)
        missed = np.where(factor.active, factor.fixed.A @ d - moved, 0)
        limit = tolerances(np.float64).eps ** 0.5 * np.abs(moved).max(initial=0)
        if np.abs(missed).max(initial=0) > limit:
            return False
    return True


def _largest_smallest(rows: SparseRows, every: SparseFactor, gradient, bound):
    """The multipliers whose smallest entry is largest, and what of them is noise.

    Where that is zero, those with as many others as can be.
    """
    force = np.abs(gradient).max(initial=0)
    index = np.flatnonzero(bound)
    sided = rows.bounded[index]
    if not (force > 0 and sided.any()):
        return None
    pulls, wanted = rows.fixed.A[index].T.tocsc(), -gradient / force
    # All inequalities have the smallest one, and some have more.
    least = sp.csr_array(pulls[:, np.flatnonzero(sided)].sum(axis=1)[:, None])
    more = [(0, None) if one else (None, None) for one in sided]
    mu = _linear(sp.hstack([pulls, least]), wanted, [*more, (0, 1)], 1)
    if mu is None:
        return None
    best, noise = _corrected(
        rows, every, gradient, index, force * (mu[:-1] + mu[-1] * sided)
    )
    if best[index][sided].min() <= noise:
        share = pulls[:, np.flatnonzero(sided)]
        some = [(0, _ENOUGH)] * int(sided.sum())
        mu = _linear(sp.hstack([pulls, share]), wanted, [*more, *some], len(some))
        if mu is not None:
            parts, mu = mu[len(index) :], mu[: len(index)]
            mu[sided] += parts
            best, noise = _corrected(rows, every, gradient, index, force * mu)
    return best, noise


def _corrected(rows: SparseRows, every: SparseFactor, gradient, index, found):
    """Multipliers without what a linear program leaves undone, and how much that is."""
    mu = np.zeros(len(rows.rhs))
    mu[index] = found
    left = gradient + rows.fixed.transposed @ mu
    change = every.solve(-left, np.zeros_like(mu))[1]
    mu = mu + change
    mu = np.where(rows.bounded, np.maximum(mu, 0), mu)
    return mu, 2 * float(np.abs(change).max(initial=0))


def _linear(matrix, wanted, bounds, last: int):
    """A vertex at which the sum of the `last` variables is largest."""
    from scipy.optimize import linprog

    cost = np.zeros(matrix.shape[1])
    cost[-last:] = -1
    found = linprog(
        cost, A_eq=matrix.tocsr(), b_eq=wanted, bounds=bounds, method="highs"
    )
    return found.x if found.status == 0 else None


def has_no_point(rows: SparseRows, size: int) -> bool:
    """Whether some combination of rows contradicts itself (Farkas)."""
    from scipy.optimize import linprog

    A, less, equal = rows.fixed.A, rows.usable, rows.usable & rows.fixed.equality
    both: Any = sp.vstack([A[less], -A[equal]], format="csr")
    rhs = np.concatenate([rows.rhs[less], -rows.rhs[equal]])
    scale = 1 + np.abs(rhs).max(initial=0)
    found = linprog(
        np.append(np.zeros(size), 1.0),
        A_ub=sp.hstack([both, -np.ones((len(rhs), 1))], format="csr"),
        b_ub=rhs / scale,
        bounds=[(None, None)] * size + [(0, None)],
        method="highs",
    )
    if found.status != 0 or not found.fun > _LINEAR:
        return False
    ray = -found.ineqlin.marginals
    pulled = np.abs(both.T @ ray).max(initial=0)
    return bool(-(ray @ rhs) > 0 and pulled <= _LINEAR * np.abs(ray).sum())
