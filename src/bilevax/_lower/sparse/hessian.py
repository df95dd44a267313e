"""Sparse Hessians from products: where entries are, and what they are.

Columns that share no row have one product in common (Curtis, Powell and Reid 1974).
Where entries are is found by bisection: which rows a block of columns touches, then
which of them the parts of that block do, again with one product for all blocks that
share no row. So the products needed grow with the entries of a row and with the
logarithm of the number of columns. Entries may be zero by accident at one point: what
comes out is compared with one more product each time, and looked for again if need be.
"""

from typing import Any, NamedTuple

import jax
import numpy as np

from ..._programs.arrays import sp
from ..._programs.control import stage
from ..dense import FlatLower

# Products that are computed by one call.
_AT_ONCE = 32
# Parts into which a block is divided.
_PARTS = 4
# Entries beyond which a Hessian is not sparse.
_MOST_ENTRIES = 20_000_000
# The share of the largest product by which a Hessian may miss another one.
_MISS = 1e-9
# Points at which entries are looked for.
_POINTS = 2


class Pattern(NamedTuple):
    """Where the entries of a Hessian are, and the colours of its columns."""

    rows: np.ndarray
    cols: np.ndarray
    colours: np.ndarray
    size: int


class Bent(NamedTuple):
    """The gradient and the Hessian at a point."""

    gradient: np.ndarray
    hessian: Any


@stage
def _products(lower: FlatLower, y, directions):
    return jax.vmap(lambda d: lower.hessian_product(y, d))(directions)


def products(lower, y, directions) -> np.ndarray:
    """Hessian products with the rows of `directions`, in calls of one shape."""
    count = len(directions)
    width = -(-count // _AT_ONCE) * _AT_ONCE
    full = np.zeros((width, y.size), y.dtype)
    full[:count] = directions
    found = [
        np.asarray(_products(lower, y, full[i : i + _AT_ONCE]), float)
        for i in range(0, width, _AT_ONCE)
    ]
    return np.concatenate(found)[:count]


class SparseHessian:
    """The Hessian of one lower level at any point."""

    def __init__(self, lower):
        # One for all calls with the same functions and shapes.
        self.lower = lower
        self.known = getattr(lower, "form", _Nothing()).met
        self.random = np.random.default_rng(0)

    def at(self, y) -> Any:
        """The Hessian, or None where it is not finite."""
        pattern = self.known.get(_KEY)
        if pattern is None or pattern.size != y.size:
            pattern = self._looked_for(y, None)
        found, fine = self._recovered(pattern, y)
        for _ in range(_POINTS):
            if fine or found is None:
                break
            pattern = self._looked_for(y, pattern)
            found, fine = self._recovered(pattern, y)
        return found

    def _recovered(self, pattern: Pattern, y):
        n, count = y.size, int(pattern.colours.max(initial=-1)) + 1
        seeds = np.zeros((count + 1, n))
        seeds[pattern.colours, np.arange(n)] = 1
        seeds[count] = probe = self.random.uniform(0.5, 1.5, n)
        bent = products(self.lower, y, seeds)
        if not np.all(np.isfinite(bent)):
            return None, False
        values = bent[pattern.colours[pattern.cols], pattern.rows]
        places = (pattern.rows, pattern.cols)
        H = sp.csr_array((values, places), shape=(n, n))
        H = (0.5 * (H + H.T)).tocsr()
        wrong = np.abs(H @ probe - bent[count])
        size = np.abs(H) @ probe
        return H, bool(np.all(wrong <= _MISS * (size + size.max(initial=0))))

    def _looked_for(self, y, old: Pattern | None) -> Pattern:
        n = y.size
        places = sp.csr_array((n, n), dtype=bool)
        if old is not None:
            ones = np.ones(len(old.rows), bool)
            places = sp.csr_array((ones, (old.rows, old.cols)), shape=(n, n))
        # A little away from where entries may vanish together.
        reach = np.abs(y) + max(np.abs(y).max(initial=0), 1)
        away = y + 1e-2 * reach * self.random.uniform(0.5, 1, n)
        for point in (y, away):
            found = _bisected(self.lower, point.astype(y.dtype), self.random)
            if found is not None:
                places = places + found
        places = (places + places.T).tocoo()
        pattern = Pattern(places.row, places.col, coloured(places.tocsr()), n)
        self.known[_KEY] = pattern
        return pattern


_KEY = "where the entries of the Hessian are"


class _Nothing:
    """Of a lower level that is not packed nothing is remembered."""

    def __init__(self):
        self.met: dict = {}


def _bisected(lower, y, random):
    """The places of entries at one point, or None where products are not finite."""
    n, width = y.size, 1
    weights = random.uniform(0.5, 1.5, n)
    while width * _AT_ONCE < n:
        width *= _PARTS
    # Which rows a block may touch: at first every one.
    maybe = None
    while True:
        member = np.arange(n) // width
        blocks = member[-1] + 1
        colours = np.arange(blocks) if maybe is None else coloured(maybe)
        seeds = np.zeros((colours.max(initial=-1) + 1, n))
        seeds[colours[member], np.arange(n)] = weights
        bent = products(lower, y, seeds)
        if not np.all(np.isfinite(bent)):
            return None
        if maybe is None:
            touched = sp.csr_array(bent.T != 0)
        else:
            places = maybe.tocoo()
            hit = bent[colours[places.col], places.row] != 0
            at = (places.row[hit], places.col[hit])
            touched = sp.csr_array((hit[hit], at), shape=maybe.shape)
        if touched.nnz > _MOST_ENTRIES:
            raise ValueError(
                f"`lower` has a Hessian of {n} columns with more than {_MOST_ENTRIES} "
                "entries that are not zero, too many for a sparse factorisation. Use "
                "ProjectedGradient() where the constraints are a Box or a Simplex, or "
                "write sums of many entries of `y` as further variables with an "
                "equality row each."
            )
        if width == 1:
            return touched
        # Each block in parts: whatever it touches, each of its parts may touch.
        width //= _PARTS
        first = np.arange(0, n, width)
        places = (member[first], np.arange(len(first)))
        parts = sp.csr_array((np.ones(len(first), bool), places))
        maybe = (touched @ parts).tocsr()


def coloured(places) -> np.ndarray:
    """A colour for each column; columns of one colour have no row in common."""
    places = places.tocsr().astype(np.int32)
    both = (places.T @ places).tocsr()
    begins, others = both.indptr, both.indices
    colours = np.full(places.shape[1], -1)
    for j in range(len(colours)):
        taken = colours[others[begins[j] : begins[j + 1]]]
        taken = taken[taken >= 0]
        if not taken.size:
            colours[j] = 0
            continue
        free = np.ones(taken.max() + 2, bool)
        free[taken] = False
        colours[j] = np.argmax(free)
    return colours
