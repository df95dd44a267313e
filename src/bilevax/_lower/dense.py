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
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from jax.lax.linalg import triangular_solve
from jaxtyping import Array, Bool, Float, PyTree

from .._control import in_stages, run_unless, stage
from .._problem import scalar
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
    plain = A = constraints.matrix(size, dtype)
    A = A if columns is None else A * columns
    rhs = constraints.rhs(x).astype(dtype)
    scale = constraints.rhs_scale(x).astype(dtype)
    k = A.shape[0]
    equality = jnp.arange(k) >= constraints.num_inequalities
    largest, norm = _norms(A)
    zero_row = largest == 0
    noise = tolerances(dtype).rounding * scale
    impossible = jnp.where(equality, jnp.isinf(rhs), rhs == -jnp.inf)
    violated = jnp.where(equality, jnp.abs(rhs) > noise, rhs < -noise)
    # A NaN stays in play, so that it is found.
    usable = (~zero_row & ~jnp.isinf(rhs)) | jnp.isnan(rhs)
    return Rows(
        A=A / norm[:, None],
        rhs=jnp.where(usable, rhs / norm, 0),
        scale=jnp.where(usable, scale / norm, 0),
        norm=norm,
        plain_norm=norm if columns is None else _norms(plain)[1],
        usable=usable,
        equality=equality,
        empty=jnp.any(impossible) | jnp.any(zero_row & violated),
    )


def _norms(A):
    """The largest entry and the norm of each row (one for rows of zeros)."""
    # Two steps, so that rows near the limits of the exponent neither over- nor
    # underflow.
    largest = jnp.max(sizes(A), axis=1, initial=0)
    safe = jnp.where(largest > 0, largest, 1)
    norm = safe * jnp.sqrt(jnp.sum((A / safe[:, None]) ** 2, axis=1))
    return largest, jnp.where(largest > 0, norm, 1)


def single(rows: Rows) -> Bool[Array, "k n"]:
    """Where rows have their only entry; false in rows with several."""
    entries = rows.A != 0
    return entries & (jnp.sum(entries, axis=1) == 1)[:, None]


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
            jnp.eye(y.size, dtype=y.dtype)
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
        shapes = tuple(jnp.shape(leaf) for leaf in leaves)
        return cls(structure, shapes, tuple(leaf.dtype for leaf in leaves))

    @property
    def size(self) -> int:
        return sum(math.prod(shape) for shape in self.shapes)

    def __call__(self, flat: Float[Array, " n"]) -> PyTree[Array]:
        ends = np.cumsum([math.prod(shape) for shape in self.shapes])[:-1]
        parts = jnp.split(flat, ends)
        leaves = [
            part.reshape(shape).astype(dtype)
            for part, shape, dtype in zip(parts, self.shapes, self.dtypes, strict=True)
        ]
        return self.structure.unflatten(leaves)


def flatten(problem, x) -> tuple[FlatLower, Float[Array, " n"]]:
    """The flat lower level and the flat start point."""
    unravel = Unravel.like(problem.y0)
    return FlatLower(problem.lower, x, unravel), ravel_pytree(problem.y0)[0]


@stage
def along(lower: FlatLower, y, d):
    """The gradient of `g` and the product of its Hessian with `d`."""
    return jax.jvp(lower.gradient, (y,), (d,))


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
    n, diagonal = hessian.shape[0], jnp.diagonal(hessian)
    noise = n * tolerances(hessian.dtype).definite
    eye = jnp.eye(n, dtype=hessian.dtype)
    root = jnp.linalg.cholesky(hessian, symmetrize_input=False)
    # A failed factor is NaN, and NaN compares false.
    definite = jnp.all(jnp.diagonal(root) ** 2 > noise * diagonal)
    root = jnp.where(definite, root, eye)
    whitener = triangular_solve(root, eye, left_side=True, lower=True).T
    # The last pivot can look sound by rounding; the inverse tells for every direction.
    inflation = diagonal * jnp.sum(whitener**2, axis=1)
    definite = definite & jnp.all(noise * inflation < 1)
    whitener = jnp.where(definite, whitener, eye)
    return Lifted(hessian, whitener, definite, lifted, props, jnp.asarray(softened))


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
        return jnp.any(self.lifted) | self.softened

    @property
    def stiffness(self) -> Float[Array, ""]:
        return jnp.max(self.diagonal)

    @property
    def whitener(self) -> Float[Array, "n n"]:
        n = self.diagonal.size
        return self.flat_whitener.reshape(n, n)

    @property
    def inverse(self) -> Float[Array, "n m"]:
        """`H^{-1}`, and beside it the transpose of `lift`, which is `A H^{-1}`."""
        return self.flat_inverse.reshape(self.diagonal.size, -1)


@stage
def factorise(rows: Rows, prepared: Lifted) -> Factor:
    """The rows in the metric of a Hessian."""
    definite, whitener = prepared.definite, prepared.whitener
    diagonal = jnp.diagonal(prepared.hessian)
    W = rows.A @ whitener
    inverse = whitener @ jnp.concatenate([whitener, W]).T
    lift = W @ whitener.T
    sigma = jnp.sqrt(jnp.sum(W**2, axis=1))
    sigma = jnp.where(sigma > 0, sigma, 1)
    W = W / sigma[:, None]
    return Factor(
        flat_whitener=whitener.reshape(-1),
        flat_inverse=inverse.reshape(-1),
        lift=lift,
        diagonal=jnp.where(definite, diagonal, 1),
        coupled=_coupled(prepared.hessian),
        W=W,
        sigma=sigma,
        gram=W @ W.T,
        definite=definite,
        lifted=prepared.lifted,
        holds=jnp.any(single(rows) & prepared.lifted, axis=1),
        props=prepared.props,
        softened=prepared.softened,
    )


def _coupled(hessian) -> Float[Array, " n"]:
    """The largest `|H_ij| / sqrt(H_ii H_jj)` of each row, the diagonal left out."""
    diagonal = jnp.diagonal(hessian)
    spread = jnp.sqrt(jnp.where(diagonal > 0, diagonal, 1))
    share = jnp.abs(hessian) / (spread[:, None] * spread)
    other = ~jnp.eye(diagonal.size, dtype=bool)
    return jnp.max(jnp.where(other, share, 0), axis=1, initial=0)


def blank_factor(k, n, dtype) -> Factor:
    """The factor of the identity, a placeholder until something is factored."""
    # In stages NumPy, which compiles nothing.
    xp: Any = np if in_stages() else jnp
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
    waves = jnp.sin(1.0 + 2.4 * jnp.arange(like.size))
    return jnp.where(waves > 0, 1.0, -1.0).astype(like.dtype)


def schur_root(gram, active, regularise) -> Float[Array, "k k"]:
    """Cholesky root of `G_SS + regularise I`, identity on rows outside `S`."""
    both = active[:, None] & active[None, :]
    shift = jnp.where(active, regularise, 1)
    return jnp.linalg.cholesky(
        jnp.where(both, gram, 0) + jnp.diag(shift), symmetrize_input=False
    )


def root_solve(root, rhs):
    """`(root root^T)^{-1} rhs` for a vector."""
    half = triangular_solve(root, rhs[:, None], left_side=True, lower=True)
    full = triangular_solve(root, half, left_side=True, lower=True, transpose_a=True)
    return full[:, 0]


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
    return run_unless(inverted.exact, lambda s: _dependent(factor, s), inverted)


@stage
def _dependent(factor: Factor, inverted: Schur) -> Schur:
    pseudo = _pseudo_inverse(factor, inverted.active)
    return inverted._replace(inverse=pseudo / (factor.sigma[:, None] * factor.sigma))


@stage
def _schur(factor: Factor, active) -> Schur:
    tol = tolerances(factor.gram.dtype)
    k, n = factor.W.shape
    rows, gram, part, sigma = jnp.arange(k), factor.gram, active, factor.sigma
    if k > n:
        # More rows than `n` depend on each other: their inverse is not asked for.
        rows = jnp.nonzero(active, size=n, fill_value=k)[0]
        gram, part, sigma = gram[rows][:, rows], rows < k, sigma[rows]
    root = schur_root(gram, part, tol.regularise)
    pivots = jnp.where(part, jnp.diagonal(root) ** 2, 1)
    half = triangular_solve(root, jnp.diag(part / sigma), left_side=True, lower=True)
    plain = half.T @ half
    if k > n:
        pivots = jnp.where(jnp.sum(active) > n, 0, pivots)
        plain = (
            jnp.zeros_like(factor.gram).at[rows[:, None], rows].set(plain, mode="drop")
        )
    # Compared one by one: a failed factor is NaN, and NaN compares false.
    exact = jnp.all(pivots > tol.dependent)
    independent = jnp.all(pivots > jnp.sqrt(tol.eps))
    return Schur(plain, active, independent, exact)


def _pseudo_inverse(factor: Factor, active):
    """The pseudo-inverse of `G_SS`, zero off `S`."""
    both = active[:, None] & active[None, :]
    k, n = factor.W.shape
    if k > n:
        part = jnp.where(active[:, None], factor.W, 0)
        vectors, roots, _ = jnp.linalg.svd(part, full_matrices=False)
        values = roots**2
    else:
        values, vectors = jnp.linalg.eigh(
            jnp.where(both, factor.gram, 0) + jnp.diag(jnp.where(active, 0.0, 1.0))
        )
    zero = values <= active.size * tolerances(factor.gram.dtype).regularise
    weights = jnp.where(zero, 0, 1 / jnp.where(zero, 1, values))
    return jnp.where(both, (vectors * weights) @ vectors.T, 0)


def blank_schur(k, dtype) -> Schur:
    """The inverse for no rows at all, a placeholder until some are active."""
    xp: Any = np if in_stages() else jnp
    yes = xp.asarray(True)
    return Schur(xp.zeros((k, k), dtype), xp.zeros(k, bool), yes, yes)


def kkt_solve(factor: Factor, rows_inverse: Schur, top, bottom):
    """`d, mu` with `H d + A_S^T mu = top` and `A_S d = bottom_S`, `mu = 0` off `S`."""
    n = factor.diagonal.size
    both = top @ factor.inverse
    mu = (both[n:] - bottom) @ rows_inverse.inverse
    d = both[:n] - mu @ factor.lift
    # What products of rows in `S` add to the left side is known: `A_S d` is.
    return d, mu + jnp.where(rows_inverse.active, factor.props * bottom, 0)


def sizes(array: Float[Array, "..."]) -> Float[Array, "..."]:
    """Absolute values, and infinity for NaN.

    Large reductions of XLA on CPUs lose NaNs in `min` and `max`, so that one would go
    unnoticed in a long vector or a large batch.
    """
    return jnp.where(jnp.isnan(array), jnp.inf, jnp.abs(array))


def largest(*arrays) -> list[Float[Array, ""]]:
    """The largest of the `sizes` of each array, in one reduction where shapes allow.

    Small problems are bound by the number of kernels, not by arithmetic.
    """
    if arrays[0].size == 0:
        return [jnp.zeros((), array.dtype) for array in arrays]
    if arrays[0].ndim == 1 and len({array.shape for array in arrays}) == 1:
        return list(jnp.max(sizes(jnp.stack(arrays)), axis=1))
    return [jnp.max(sizes(array)) for array in arrays]


def ratio(part, whole):
    """`part / whole`, and `part` where there is nothing to compare with."""
    return part / jnp.where(whole > 0, whole, 1)
