"""Dense linear algebra of the lower level: unit rows, whitened Hessian, KKT solves.

With `H = L L^T` the Hessian of `g` in `y` and unit rows `a_i`, put

    W_i = L^{-1} a_i / sigma_i,   sigma_i = |L^{-1} a_i|,   G = W W^T  (unit diagonal).

Methods that change `S` row by row work with `G`; a KKT system with one active set is
products alone, with `H^{-1}`, `A H^{-1}` and the inverse of `A_S H^{-1} A_S^T`, which
are kept until the Hessian or the set changes. Nothing here knows where `g` came from.

Two LAPACK calls on batches must never be independent of each other: each of them waits
inside a thread of XLA's pool for the other threads, and with few threads they wait for
ever. So every factorisation here and in its callers feeds the next.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Bool, Float, PyTree

from .._problem.checks import scalar
from .._programs.arrays import (
    cholesky,
    eigh,
    placed,
    ravel,
    rows_of,
    solve_lower,
    svd,
    which,
    xp,
)
from .._programs.control import in_stages, once, stage, unless_rarely
from .._tolerances import tolerances

# A truth value known now, or on the device.
BoolLike = bool | Bool[Array, ""]


class Rows(NamedTuple):
    """Constraint rows at one `x`, scaled to unit norm: `A y <= rhs`.

    Zero rows and infinite bounds are kept but not `usable`; they never become active.
    `A` and `norm` do not depend on `x`, so a loop over `x` computes them once.
    `plain_norm` are the norms before columns were scaled.
    """

    A: Float[Array, "k n"]
    rhs: Float[Array, " k"]
    scale: Float[Array, " k"]
    norm: Float[Array, " k"]
    plain_norm: Float[Array, " k"]
    usable: Bool[Array, " k"]
    equality: Bool[Array, " k"]
    empty: Bool[Array, ""]


def unit_rows(constraints, x, size: int, dtype, columns=None) -> Rows:
    """The rows of `constraints` at `x`, with what is wrong with them noted.

    With units of `columns`, the rows of `y / columns`.
    """
    fixed = once(_directions, constraints, size, dtype, columns)
    norm, zero_row, equality = fixed.norm, fixed.zero, fixed.equality
    rhs = constraints.rhs(x).astype(dtype)
    scale = constraints.rhs_scale(x).astype(dtype)
    noise = tolerances(dtype).rounding * scale
    impossible = xp.where(equality, xp.isinf(rhs), rhs == -xp.inf)
    violated = xp.where(equality, xp.abs(rhs) > noise, rhs < -noise)
    # A NaN stays in play, so that it is found.
    usable = (~zero_row & ~xp.isinf(rhs)) | xp.isnan(rhs)
    return Rows(
        A=fixed.A,
        rhs=xp.where(usable, rhs / norm, 0),
        scale=xp.where(usable, scale / norm, 0),
        norm=norm,
        plain_norm=fixed.plain_norm,
        usable=usable,
        equality=equality,
        empty=xp.any(impossible) | xp.any(zero_row & violated),
    )


class _Directions(NamedTuple):
    """What does not depend on `x`; `zero` marks rows of zeros."""

    A: Float[Array, "k n"]
    norm: Float[Array, " k"]
    plain_norm: Float[Array, " k"]
    zero: Bool[Array, " k"]
    equality: Bool[Array, " k"]


def _directions(constraints, size: int, dtype, columns) -> _Directions:
    plain = A = constraints.matrix(size, dtype)
    A = A if columns is None else A * columns
    largest, norm = _norms(A)
    return _Directions(
        A=A / norm[:, None],
        norm=norm,
        plain_norm=norm if columns is None else _norms(plain)[1],
        zero=largest == 0,
        equality=xp.arange(A.shape[0]) >= constraints.num_inequalities,
    )


def _norms(A):
    """The largest entry and the norm of each row (one for rows of zeros)."""
    # Two steps, so that rows near the limits of the exponent neither over- nor
    # underflow.
    largest = xp.max(sizes(A), axis=1, initial=0)
    safe = xp.where(largest > 0, largest, 1)
    norm = safe * xp.sqrt(xp.sum((A / safe[:, None]) ** 2, axis=1))
    return largest, xp.where(largest > 0, norm, 1)


def single(rows: Rows) -> Bool[Array, "k n"]:
    """Where rows have their only entry; false in rows with several."""
    entries = rows.A != 0
    return entries & (xp.sum(entries, axis=1) == 1)[:, None]


class FlatLower(NamedTuple):
    """The lower level at one `x` as functions of a flat `y`, in units of `columns`."""

    function: Callable
    x: PyTree[Array]
    unravel: "Unravel"
    columns: Float[Array, " n"] | None = None

    def natural(self, y):
        """`y` as the problem knows it."""
        return self.unravel(y if self.columns is None else y * self.columns)

    def value(self, y):
        return scalar(self.function(self.x, self.natural(y)), "lower")

    def gradient(self, y):
        return jax.grad(self.value)(y)

    def hessian_product(self, y, d):
        return jax.jvp(self.gradient, (y,), (d,))[1]

    def hessian(self, y):
        columns = jax.vmap(lambda d: self.hessian_product(y, d))(
            xp.eye(y.size, dtype=y.dtype)
        )
        return 0.5 * (columns + columns.T)


@dataclass(frozen=True)
class Unravel:
    """From a flat array to a pytree; the same for the same shapes, as stages need."""

    structure: Any
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple

    @classmethod
    def like(cls, tree: PyTree[Array]) -> "Unravel":
        leaves, structure = jax.tree.flatten(tree)
        shapes = tuple(np.shape(leaf) for leaf in leaves)
        return cls(structure, shapes, tuple(leaf.dtype for leaf in leaves))

    @property
    def size(self) -> int:
        return sum(math.prod(shape) for shape in self.shapes)

    def __call__(self, flat: Float[Array, " n"]) -> PyTree[Array]:
        if len(self.shapes) == 1:
            return self.structure.unflatten(
                [flat.reshape(self.shapes[0]).astype(self.dtypes[0])]
            )
        ends = np.cumsum([math.prod(shape) for shape in self.shapes])[:-1]
        parts = xp.split(flat, ends)
        leaves = [
            part.reshape(shape).astype(dtype)
            for part, shape, dtype in zip(parts, self.shapes, self.dtypes, strict=True)
        ]
        return self.structure.unflatten(leaves)


def flatten(problem, x) -> tuple[FlatLower, Float[Array, " n"]]:
    """The flat lower level and the flat start point."""
    unravel = Unravel.like(problem.y0)
    return FlatLower(problem.lower, x, unravel), ravel(problem.y0)


@stage
def along(lower: FlatLower, y, d):
    """The gradient of `g` and the product of its Hessian with `d`."""
    return jax.jvp(lower.gradient, (y,), (d,))


def curvature(lower: Any, y, d) -> Float[Array, " n"]:
    """`H d`; in stages by the program of `along`, which exists already."""
    if in_stages():
        return along(lower, y, d)[1]
    return lower.hessian_product(y, d)


@stage
def value_of(lower: FlatLower, y) -> Float[Array, ""]:
    return lower.value(y)


@stage
def hessian_of(lower: FlatLower, y) -> Float[Array, "n n"]:
    return lower.hessian(y)


class Lifted(NamedTuple):
    """A factored Hessian and what was added to it; the identity if not `definite`.

    `lifted` coordinates had no curvature of their own; `softened` tells that other
    directions had none: `A^T diag(props) A` was added for them.
    """

    hessian: Float[Array, "n n"]
    whitener: Float[Array, "n n"]
    definite: Bool[Array, ""]
    lifted: Bool[Array, " n"]
    props: Float[Array, " k"]
    softened: Bool[Array, ""]


def whitened(hessian, lifted, props, softened) -> Lifted:
    """Factor a Hessian to which something was added."""
    n, diagonal = hessian.shape[0], xp.diagonal(hessian)
    noise = n * tolerances(hessian.dtype).definite
    eye = xp.eye(n, dtype=hessian.dtype)
    root = cholesky(hessian)
    # A failed factor is NaN, and NaN compares false.
    definite = xp.all(xp.diagonal(root) ** 2 > noise * diagonal)
    root = xp.where(definite, root, eye)
    whitener = solve_lower(root, eye).T
    # The last pivot can look sound by rounding; the inverse tells for every direction.
    inflation = diagonal * xp.sum(whitener**2, axis=1)
    definite = definite & xp.all(noise * inflation < 1)
    whitener = xp.where(definite, whitener, eye)
    return Lifted(hessian, whitener, definite, lifted, props, xp.asarray(softened))


class Factor(NamedTuple):
    """`R = L^{-T}`, and the rows in the metric of the inverse Hessian `R R^T`.

    `holds` are the rows in one `lifted` coordinate alone; see `Lifted`. Matrices that
    came out of a solve are kept flat: XLA would store them by columns like the solve
    does, and copy them into rows for every product.
    """

    flat_whitener: Float[Array, " nn"]
    flat_inverse: Float[Array, " nm"]
    lift: Float[Array, "k n"]
    diagonal: Float[Array, " n"]
    coupled: Float[Array, " n"]
    W: Float[Array, "k n"]
    sigma: Float[Array, " k"]
    gram: Float[Array, "k k"]
    definite: Bool[Array, ""]
    lifted: Bool[Array, " n"]
    holds: Bool[Array, " k"]
    props: Float[Array, " k"]
    softened: Bool[Array, ""]

    @property
    def damped(self) -> Bool[Array, ""]:
        """Whether something was added to the Hessian."""
        return xp.any(self.lifted) | self.softened

    @property
    def stiffness(self) -> Float[Array, ""]:
        return xp.max(self.diagonal)

    @property
    def whitener(self) -> Float[Array, "n n"]:
        n = self.diagonal.size
        return self.flat_whitener.reshape(n, n)

    @property
    def inverse(self) -> Float[Array, "n m"]:
        """`H^{-1}`, and beside it the transpose of `lift`, which is `A H^{-1}`."""
        return self.flat_inverse.reshape(self.diagonal.size, -1)


def factorise(rows: Rows, prepared: Lifted) -> Factor:
    """The rows in the metric of a Hessian."""
    definite, whitener = prepared.definite, prepared.whitener
    diagonal = xp.diagonal(prepared.hessian)
    W = rows.A @ whitener
    inverse = whitener @ xp.concatenate([whitener, W]).T
    lift = W @ whitener.T
    sigma = xp.sqrt(xp.sum(W**2, axis=1))
    sigma = xp.where(sigma > 0, sigma, 1)
    W = W / sigma[:, None]
    return Factor(
        flat_whitener=whitener.reshape(-1),
        flat_inverse=inverse.reshape(-1),
        lift=lift,
        diagonal=xp.where(definite, diagonal, 1),
        coupled=_coupled(prepared.hessian),
        W=W,
        sigma=sigma,
        gram=W @ W.T,
        definite=definite,
        lifted=prepared.lifted,
        holds=xp.any(single(rows) & prepared.lifted, axis=1),
        props=prepared.props,
        softened=prepared.softened,
    )


def _coupled(hessian) -> Float[Array, " n"]:
    """The largest `|H_ij| / sqrt(H_ii H_jj)` of each row, the diagonal left out."""
    diagonal = xp.diagonal(hessian)
    spread = xp.sqrt(xp.where(diagonal > 0, diagonal, 1))
    share = xp.abs(hessian) / (spread[:, None] * spread)
    other = ~xp.eye(diagonal.size, dtype=bool)
    return xp.max(xp.where(other, share, 0), axis=1, initial=0)


def blank_factor(k, n, dtype) -> Factor:
    """The factor of the identity, a placeholder until something is factored."""
    return Factor(
        flat_whitener=xp.eye(n, dtype=dtype).reshape(-1),
        flat_inverse=xp.eye(n, n + k, dtype=dtype).reshape(-1),
        lift=xp.zeros((k, n), dtype),
        diagonal=xp.ones(n, dtype),
        coupled=xp.zeros(n, dtype),
        W=xp.zeros((k, n), dtype),
        sigma=xp.ones(k, dtype),
        gram=xp.eye(k, dtype=dtype),
        definite=xp.asarray(True),
        lifted=xp.zeros(n, bool),
        holds=xp.zeros(k, bool),
        props=xp.zeros(k, dtype),
        softened=xp.asarray(False),
    )


def random_signs(like: Float[Array, " n"]) -> Float[Array, " n"]:
    """Signs without a pattern that data could share, the same in every run."""
    waves = xp.sin(1.0 + 2.4 * xp.arange(like.size))
    return xp.where(waves > 0, 1.0, -1.0).astype(like.dtype)


def schur_root(gram, active, regularise) -> Float[Array, "k k"]:
    """Cholesky root of `G_SS + regularise I`, identity on rows outside `S`."""
    both = active[:, None] & active[None, :]
    shift = xp.where(active, regularise, 1).astype(gram.dtype)
    return cholesky(xp.where(both, gram, 0) + xp.diag(shift))


def root_solve(root, rhs):
    """`(root root^T)^{-1} rhs` for a vector."""
    half = solve_lower(root, rhs[:, None])
    return solve_lower(root, half, transpose=True)[:, 0]


class Schur(NamedTuple):
    """The inverse of `A_S H^{-1} A_S^T` for one active set `S`, zero off `S`.

    `independent` tells whether the rows of `S` are so, as far as a factor can see;
    where `exact` is false, `inverse` is a pseudo-inverse and solves need refinement.
    """

    inverse: Float[Array, "k k"]
    active: Bool[Array, " k"]
    independent: Bool[Array, ""]
    exact: Bool[Array, ""]


def schur(factor: Factor, active) -> Schur:
    """Invert the active block of the row Gram matrix."""
    inverted = _schur(factor, active)
    # Of dependent rows an explicit inverse would have no correct digit.
    return unless_rarely(inverted.exact, lambda s: _dependent(factor, s), inverted)


def _dependent(factor: Factor, inverted: Schur) -> Schur:
    pseudo = _pseudo_inverse(factor, inverted.active)
    return inverted._replace(inverse=pseudo / (factor.sigma[:, None] * factor.sigma))


def _schur(factor: Factor, active) -> Schur:
    tol = tolerances(factor.gram.dtype)
    k, n = factor.W.shape
    rows, gram, part, sigma = xp.arange(k), factor.gram, active, factor.sigma
    if k > n:
        # More rows than `n` depend on each other: their inverse is not asked for.
        rows = which(active, n)
        gram, part = rows_of(rows_of(gram, rows).T, rows), rows < k
        sigma = rows_of(sigma, rows)
    root = schur_root(gram, part, tol.regularise)
    pivots = xp.where(part, xp.diagonal(root) ** 2, 1)
    half = solve_lower(root, xp.diag(part / sigma))
    plain = half.T @ half
    if k > n:
        pivots = xp.where(xp.sum(active) > n, 0, pivots)
        plain = placed(factor.gram, (rows[:, None], rows), plain)
    # Compared one by one: a failed factor is NaN, and NaN compares false.
    exact = xp.all(pivots > tol.dependent)
    independent = xp.all(pivots > xp.sqrt(tol.eps))
    return Schur(plain, active, independent, exact)


def _pseudo_inverse(factor: Factor, active):
    """The pseudo-inverse of `G_SS`, zero off `S`."""
    both = active[:, None] & active[None, :]
    k, n = factor.W.shape
    if k > n:
        part = xp.where(active[:, None], factor.W, 0)
        vectors, roots, _ = svd(part)
        values = roots**2
    else:
        free = xp.diag(xp.where(active, 0, xp.ones_like(factor.sigma)))
        values, vectors = eigh(xp.where(both, factor.gram, 0) + free)
    zero = values <= active.size * tolerances(factor.gram.dtype).regularise
    weights = xp.where(zero, 0, 1 / xp.where(zero, 1, values))
    return xp.where(both, (vectors * weights) @ vectors.T, 0)


def blank_schur(k, dtype) -> Schur:
    """The inverse for no rows at all, a placeholder until some are active."""
    yes = xp.asarray(True)
    return Schur(xp.zeros((k, k), dtype), xp.zeros(k, bool), yes, yes)


def kkt_solve(factor: Factor, rows_inverse: Schur, top, bottom):
    """`d, mu` with `H d + A_S^T mu = top` and `A_S d = bottom_S`, `mu = 0` off `S`."""
    n = factor.diagonal.size
    both = top @ factor.inverse
    mu = (both[n:] - bottom) @ rows_inverse.inverse
    d = both[:n] - mu @ factor.lift
    # What products of rows in `S` add to the left side is known: `A_S d` is.
    return d, mu + xp.where(rows_inverse.active, factor.props * bottom, 0)


def sizes(array: Float[Array, "..."]) -> Float[Array, "..."]:
    """Absolute values, and infinity for NaN.

    Large reductions of XLA on CPUs lose NaNs in `min` and `max`, so that one would go
    unnoticed in a long vector or a large batch.
    """
    return xp.where(xp.isnan(array), xp.inf, xp.abs(array))


def largest(*arrays) -> list[Float[Array, ""]]:
    """The largest of the `sizes` of each array, in one reduction where shapes allow.

    Small problems are bound by the number of kernels, not by arithmetic.
    """
    if arrays[0].size == 0:
        return [xp.zeros((), array.dtype) for array in arrays]
    if arrays[0].ndim == 1 and len({array.shape for array in arrays}) == 1:
        return list(xp.max(sizes(xp.stack(arrays)), axis=1))
    return [xp.max(sizes(array)) for array in arrays]


def ratio(part, whole):
    """`part / whole`, and `part` where there is nothing to compare with."""
    return part / xp.where(whole > 0, whole, 1)
