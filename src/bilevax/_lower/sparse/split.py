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
    """The multipliers whose smallest entry is largest, and what of them is noise."""
    from scipy.optimize import linprog

    force = np.abs(gradient).max(initial=0)
    if not force > 0:
        return None
    index = np.flatnonzero(bound)
    sided = rows.bounded[index]
    A_T = rows.fixed.A[index].T
    count = int(sided.sum())
    least = sp.csr_array(
        (-np.ones(count), (np.arange(count), np.flatnonzero(sided))),
        shape=(count, len(index)),
    )
    found = linprog(
        np.append(np.zeros(len(index)), -1.0),
        A_ub=sp.hstack([least, np.ones((count, 1))], format="csr"),
        b_ub=np.zeros(count),
        A_eq=sp.hstack([A_T, np.zeros((A_T.shape[0], 1))], format="csr"),
        b_eq=-gradient / force,
        bounds=[(0, None) if one else (None, None) for one in sided] + [(None, 1.0)],
        method="highs",
    )
    if found.status != 0:
        return None
    mu = np.zeros(len(bound))
    mu[index] = force * found.x[:-1]
    # What the linear program leaves undone.
    left = gradient + rows.fixed.transposed @ mu
    mu = mu + every.solve(-left, np.zeros(len(bound)))[1]
    return np.where(rows.bounded, np.maximum(mu, 0), mu), _LINEAR * force


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
