"""Sparse rows at one `x`, of unit norm; rows with a single entry are bounds."""

from collections import OrderedDict
from typing import Any, NamedTuple

import numpy as np

from ..._programs.arrays import sp
from ..._tolerances import tolerances


class Directions(NamedTuple):
    """What of the rows does not depend on `x`.

    `column` is the only column of a row with a single entry, else -1; `sign` is that
    of the entry. `transposed` is `A^T`, and `absolute` `|A|`.
    """

    A: Any
    transposed: Any
    absolute: Any
    norm: np.ndarray
    equality: np.ndarray
    zero: np.ndarray
    column: np.ndarray
    sign: np.ndarray


class SparseRows(NamedTuple):
    """`A y <= rhs` at one `x`; see `dense.Rows`.

    `pinned`: bounds of a variable whose lower bound is its upper one. The first of the
    two stands for both.
    """

    fixed: Directions
    rhs: np.ndarray
    scale: np.ndarray
    usable: np.ndarray
    pinned: np.ndarray
    second: np.ndarray
    empty: bool

    @property
    def held(self):
        """Rows that hold with equality whatever `y` is."""
        return self.usable & (self.fixed.equality | self.pinned)

    @property
    def bounded(self):
        """Inequalities that may be active or not."""
        return self.usable & ~self.fixed.equality & ~self.pinned & ~self.second


def sparse_rows(constraints, x, size: int) -> SparseRows:
    fixed = _directions(constraints, size)
    tol = tolerances(np.float64)
    rhs = np.asarray(constraints.rhs(x), float)
    scale = np.asarray(constraints.rhs_scale(x), float)
    rhs = rhs if rhs.size else np.zeros(len(fixed.norm))
    scale = scale if scale.size else np.zeros(len(fixed.norm))
    noise = tol.rounding * scale
    impossible = np.where(fixed.equality, np.isinf(rhs), rhs == -np.inf)
    violated = np.where(fixed.equality, np.abs(rhs) > noise, rhs < -noise)
    usable = (~fixed.zero & ~np.isinf(rhs)) | np.isnan(rhs)
    empty = bool(np.any(impossible) | np.any(fixed.zero & violated))
    rhs = np.where(usable, rhs / fixed.norm, 0)
    scale = np.where(usable, scale / fixed.norm, 0)
    pinned, second = _pinned(fixed, rhs, scale, usable, size)
    return SparseRows(fixed, rhs, scale, usable, pinned, second, empty)


def _pinned(fixed: Directions, rhs, scale, usable, size: int):
    """Pairs of bounds without room between them: the lower one, the upper one."""
    bound = usable & ~fixed.equality & (fixed.column >= 0)
    pinned, second = np.zeros_like(usable), np.zeros_like(usable)
    low, high = np.full(size, -1), np.full(size, -1)
    # Of several bounds on the same side the tightest one.
    order = np.flatnonzero(bound)
    order = order[np.argsort(-rhs[order], kind="stable")]
    down, up = (order[fixed.sign[order] == sign] for sign in (-1, 1))
    low[fixed.column[down]], high[fixed.column[up]] = down, up
    both = np.flatnonzero((low >= 0) & (high >= 0))
    a, b = low[both], high[both]
    gap = rhs[a] + rhs[b]
    noise = tolerances(np.float64).rounding * (scale[a] + scale[b])
    same = np.abs(gap) <= noise
    pinned[a[same]], second[b[same]] = True, True
    return pinned, second


def _directions(constraints, size: int) -> Directions:
    """Found once for the same arrays, which are kept, so that nothing takes their place
    in memory; JAX's, and views of these, never change."""
    leaves = [np.asarray(leaf) for leaf in constraints.row_arrays()]
    places = ((leaf.ctypes.data, leaf.shape, leaf.dtype) for leaf in leaves)
    key = (type(constraints), constraints.layout, size, *places)
    if key not in _known:
        _known[key] = leaves, _found(constraints, size)
        if len(_known) > _MOST:
            _known.popitem(last=False)
    _known.move_to_end(key)
    return _known[key][1]


_known: OrderedDict = OrderedDict()
_MOST = 8


def _found(constraints, size: int) -> Directions:
    plain = constraints.sparse_matrix(size).tocsr()
    k = plain.shape[0]
    largest = abs(plain).max(axis=1).toarray().ravel() if plain.nnz else np.zeros(k)
    zero = largest == 0
    safe = np.where(zero, 1, largest)
    scaled = sp.diags_array(1 / safe) @ plain
    norm = safe * np.sqrt(scaled.multiply(scaled).sum(axis=1))
    norm = np.where(zero, 1, norm)
    A = (sp.diags_array(1 / norm) @ plain).tocsr()
    A.eliminate_zeros()
    counts = np.diff(A.indptr)
    single = counts == 1
    column, sign = np.full(k, -1), np.ones(k)
    column[single] = A.indices[A.indptr[:-1][single]]
    sign[single] = np.sign(A.data[A.indptr[:-1][single]])
    return Directions(
        A=A,
        transposed=A.T.tocsr(),
        absolute=abs(A),
        norm=norm,
        equality=np.arange(k) >= constraints.num_inequalities,
        zero=zero,
        column=column,
        sign=sign,
    )
