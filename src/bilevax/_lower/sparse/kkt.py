"""KKT systems with sparse entries: one factor, refined solves, directions left open.

The factor is of

    [H_FF + r I   A_RF^T]
    [A_RF          -r I ]

in units in which diagonals and rows are of size one. `F` are the variables that no
active bound fixes, `R` the other active rows. It exists whatever rows depend on each
other, and iterative refinement takes `r` out again. SuperLU comes with SciPy, which JAX
needs anyway, and on networks it takes no longer than assembling the matrix in Python.
"""

from typing import Any

import jax
import numpy as np

from ..._programs.arrays import sp
from ..._tolerances import tolerances
from .rows import Directions

# What is added to the diagonal, in its own unit.
_SHIFT = 1e-9
# Diagonals are units down to this share of the largest one.
_FAINT = 1e-10
_REFINEMENTS = 8
# What refinement may leave before another factor is made.
_LOST = 1e-6
# Sizes up to which two orderings are tried.
_TRY_BOTH, _ALIKE = 20_000, 100
# A direction is open where the matrix shrinks it below this share of itself.
_OPEN = 1e-3 * _SHIFT


def factored(K, safe: bool = False) -> Any:
    """The LU factor of a quasi-definite matrix, pivots on the diagonal.

    With `safe` rows are exchanged, which takes longer. Where there is none a
    `RuntimeError` says so, as that of SuperLU does.
    """
    if not np.all(np.isfinite(K.data)):
        raise RuntimeError("The matrix is not finite.")
    # Takes a while, and few need it.
    from scipy.sparse.linalg import splu

    K = K.tocsc()
    if safe:
        return splu(K)
    orders = ["MMD_AT_PLUS_A"] + ["COLAMD"] * (K.shape[0] <= _TRY_BOTH)
    # Matrices of about the same size are those of one problem.
    alike = K.shape[0] // _ALIKE
    known = _orders.get(alike)
    found = None
    for order in orders if known is None else [known]:
        new = splu(
            K, permc_spec=order, diag_pivot_thresh=0.0,
            options=dict(SymmetricMode=True),
        )  # fmt: skip
        if found is None or new.nnz < found.nnz:
            found = new
            if len(_orders) > 1000:
                _orders.clear()
            _orders[alike] = order
    return found


_orders: dict[int, str] = {}


class SparseFactor:
    """The factored KKT matrix of one active set; all in unit rows.

    A pytree without leaves, and equal to every other one: what it is worth is tested
    where it is used. So states that hold one keep their structure.
    """

    def __init__(self, fixed: Directions, H, active: np.ndarray):
        n, self.there = H.shape[0], True
        self.fixed, self.active, self.n = fixed, active, n
        self.H = H
        # One row for each variable that bounds fix; others of the same one are idle.
        bounds = np.flatnonzero(active & (fixed.column >= 0))
        columns, first = np.unique(fixed.column[bounds], return_index=True)
        self.bounds, self.columns = bounds[first], columns
        free = np.ones(n, bool)
        free[columns] = False
        self.free = np.flatnonzero(free)
        self.others = np.flatnonzero(active & (fixed.column < 0))
        self.H_free = H[:, self.free].tocsr()
        H_FF = self.H_free[self.free]
        self.A_R = fixed.A[self.others]
        A_RF = self.A_R[:, self.free]
        diagonal = H_FF.diagonal()
        top = np.abs(H.diagonal()).max(initial=0)
        self.size = top if top > 0 else 1.0
        floor = _FAINT * self.size
        unit = 1 / np.sqrt(np.maximum(np.abs(diagonal), floor))
        scaled = A_RF @ sp.diags_array(unit)
        length = np.sqrt(scaled.multiply(scaled).sum(axis=1))
        length = np.where(length > 0, length, 1)
        # Rows are multiplied by `side`, multipliers too.
        self.units = np.concatenate([unit, 1 / length])
        K = sp.block_array([[H_FF, A_RF.T], [A_RF, None]], format="csr")
        if not len(self.others):
            K = H_FF
        both = sp.diags_array(self.units)
        self.K = (both @ K @ both).tocsr()
        self.m, self.lu = len(self.others), None
        if self.K.shape[0]:
            shift = np.full(self.K.shape[0], _SHIFT)
            shift[len(self.free) :] = -_SHIFT
            self.shifted = self.K + sp.diags_array(shift)
            self.lu = factored(self.shifted)
        self.safe = False

    @classmethod
    def none(cls) -> "SparseFactor":
        """What a failed solve leaves behind: it fits no active set."""
        factor = object.__new__(cls)
        factor.active, factor.there = np.zeros(0), False
        return factor

    def at(self, H) -> "SparseFactor":
        """The same rows with another Hessian; None has no factor."""
        if H is None:
            return SparseFactor.none()
        return SparseFactor(self.fixed, H, self.active)

    @property
    def definite(self) -> bool:
        """Whether `H` has no negative curvature on the active rows.

        Then as many pivots are negative as there are rows (Vanderbei 1995).
        """
        if self.lu is None:
            return True
        pivots = self.lu.U.diagonal()
        # Rows were exchanged: nobody can tell.
        if np.any(self.lu.perm_r != self.lu.perm_c):
            return True
        return int(np.sum(pivots < 0)) <= self.m

    def inner(self, top, bottom):
        """`d` on `F` and `mu` on `R`, with what refinement leaves."""
        rhs = np.concatenate([top, bottom]) * self.units
        n = len(self.free)
        if self.lu is None:
            return rhs, rhs, 0.0
        z, wrong = self._refined(rhs)
        if not (wrong <= _LOST or self.safe):
            # Pivots on the diagonal alone may lose all digits.
            self.lu, self.safe = factored(self.shifted, safe=True), True
            z, wrong = self._refined(rhs)
        z = z * self.units
        return z[:n], z[n:], wrong

    def _refined(self, rhs):
        size = np.abs(rhs).max(initial=0)
        assert self.lu is not None
        z = self.lu.solve(rhs)
        left = rhs - self.K @ z
        wrong = np.abs(left).max(initial=0)
        for _ in range(_REFINEMENTS):
            if not wrong > tolerances(np.float64).eps * size:
                break
            better = z + self.lu.solve(left)
            rest = rhs - self.K @ better
            now = np.abs(rest).max(initial=0)
            if not now < wrong:
                break
            far = now > 0.5 * wrong
            z, left, wrong = better, rest, now
            if far:
                break
        return z, wrong / (size if size > 0 else 1)

    def solve(self, top, bottom):
        """`d, mu` with `H d + A_S^T mu = top` and `A_S d = bottom_S`; and the error.

        Rows that say the same as others get no multiplier.
        """
        d, mu = np.zeros(self.n), np.zeros(len(self.active))
        sign = self.fixed.sign[self.bounds]
        d[self.columns] = sign * bottom[self.bounds]
        pull = top - self.H @ d
        d_free, mu_rows, wrong = self.inner(
            pull[self.free], bottom[self.others] - self.A_R @ d
        )
        d[self.free], mu[self.others] = d_free, mu_rows
        left = top - self.H @ d - self.fixed.transposed @ mu
        mu[self.bounds] = sign * left[self.columns]
        return d, mu, wrong

    def open_directions(self) -> tuple[bool, bool]:
        """Whether `y` can move without force, and whether active rows depend.

        By inverse iteration: what the matrix shrinks to nothing is what remains.
        """
        if self.lu is None:
            return False, self._idle()
        z = np.random.default_rng(0).normal(size=self.K.shape[0])
        for _ in range(3):
            z = self.lu.solve(z)
            z /= np.linalg.norm(z)
        n, found = len(self.free), []
        for part in (slice(0, n), slice(n, None)):
            v = np.zeros_like(z)
            v[part] = z[part]
            size = np.linalg.norm(v)
            shrunk = np.linalg.norm(self.K @ v)
            found.append(bool(size > 1e-4 and shrunk <= _OPEN * size))
        return found[0], found[1] or self._idle()

    def _idle(self) -> bool:
        return int(np.sum(self.active & (self.fixed.column >= 0))) > len(self.bounds)

    def __eq__(self, other):
        return isinstance(other, SparseFactor)

    def __hash__(self):
        return hash(SparseFactor)


jax.tree_util.register_pytree_node(
    SparseFactor, lambda factor: ((), factor), lambda factor, _: factor
)
