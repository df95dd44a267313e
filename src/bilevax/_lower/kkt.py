"""KKT systems of the lower level: one factor of the Hessian, any set of rows.

With `H = L L^T` the Hessian of `g` in `y` and unit rows `a_i`, put

    W_i = L^{-1} a_i / sigma_i,   sigma_i = |L^{-1} a_i|,   G = W W^T  (unit diagonal).

A `Factor` holds these, `KKT.on(S)` adds the inverse of the Schur complement
`A_S H^{-1} A_S^T`, and `solve` of that `KKT` is products alone. Both are kept until the
Hessian or the set changes. Methods that change `S` row by row work with `G`.

Two LAPACK calls on batches must never be independent of each other: each of them waits
inside a thread of XLA's pool for the other threads, and with few threads they wait for
ever. So every factorisation here and in its callers feeds the next.
"""

from typing import NamedTuple

from jaxtyping import Array, Bool, Float

from .._programs.arrays import (
    cholesky,
    eigh,
    placed,
    rows_of,
    solve_lower,
    svd,
    which,
    xp,
)
from .._programs.control import run_unless, unless_rarely
from .._tolerances import tolerances
from .dense import BoolLike, Rows


class Convex(NamedTuple):
    """A factored Hessian and what was added to it; the identity if not `definite`.

    `inflation` is how many times rounding counts in the worst direction. `flat`
    coordinates had no curvature of their own. Where they did not suffice it is
    `regularised`: an augmented Lagrangian, `A^T diag(weights) A`, and a proximal term.
    """

    hessian: Float[Array, "n n"]
    whitener: Float[Array, "n n"]
    definite: Bool[Array, ""]
    flat: Bool[Array, " n"]
    weights: Float[Array, " k"]
    regularised: Bool[Array, ""]
    inflation: Float[Array, ""]


def whitened(hessian, flat, weights, regularised) -> Convex:
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
    regularised, inflation = xp.asarray(regularised), xp.max(inflation, initial=1)
    return Convex(hessian, whitener, definite, flat, weights, regularised, inflation)


class Factor(NamedTuple):
    """`R = L^{-T}`, and the rows in the metric of the inverse Hessian `R R^T`.

    `flat`, `weights`, `regularised` and `inflation` are those of `Convex`. Matrices
    that came out of a solve are kept in one line: XLA would store them by columns like
    the solve does, and copy them into rows for every product.
    """

    line_whitener: Float[Array, " nn"]
    line_inverse: Float[Array, " nm"]
    lift: Float[Array, "k n"]
    diagonal: Float[Array, " n"]
    coupled: Float[Array, " n"]
    W: Float[Array, "k n"]
    sigma: Float[Array, " k"]
    gram: Float[Array, "k k"]
    definite: Bool[Array, ""]
    flat: Bool[Array, " n"]
    weights: Float[Array, " k"]
    regularised: Bool[Array, ""]
    inflation: Float[Array, ""]

    @property
    def damped(self) -> Bool[Array, ""]:
        """Whether something was added to the Hessian."""
        return xp.any(self.flat) | self.regularised

    @property
    def stiffness(self) -> Float[Array, ""]:
        return xp.max(self.diagonal)

    @property
    def whitener(self) -> Float[Array, "n n"]:
        n = self.diagonal.size
        return self.line_whitener.reshape(n, n)

    @property
    def inverse(self) -> Float[Array, "n m"]:
        """`H^{-1}`, and beside it the transpose of `lift`, which is `A H^{-1}`."""
        return self.line_inverse.reshape(self.diagonal.size, -1)


def factorise(rows: Rows, convex: Convex) -> Factor:
    """The rows in the metric of a Hessian."""
    definite, whitener = convex.definite, convex.whitener
    diagonal = xp.diagonal(convex.hessian)
    W = rows.A @ whitener
    inverse = whitener @ xp.concatenate([whitener, W]).T
    lift = W @ whitener.T
    sigma = xp.sqrt(xp.sum(W**2, axis=1))
    sigma = xp.where(sigma > 0, sigma, 1)
    W = W / sigma[:, None]
    return Factor(
        line_whitener=whitener.reshape(-1),
        line_inverse=inverse.reshape(-1),
        lift=lift,
        diagonal=xp.where(definite, diagonal, 1),
        coupled=_coupled(convex.hessian),
        W=W,
        sigma=sigma,
        gram=W @ W.T,
        definite=definite,
        flat=convex.flat,
        weights=convex.weights,
        regularised=convex.regularised,
        inflation=convex.inflation,
    )


def _coupled(hessian) -> Float[Array, " n"]:
    """The largest `|H_ij| / sqrt(H_ii H_jj)` of each row, the diagonal left out."""
    diagonal = xp.diagonal(hessian)
    spread = xp.sqrt(xp.where(diagonal > 0, diagonal, 1))
    share = xp.abs(hessian) / (spread[:, None] * spread)
    other = ~xp.eye(diagonal.size, dtype=bool)
    return xp.max(xp.where(other, share, 0), axis=1, initial=0)


def blank_factor(k, n, dtype) -> Factor:
    """A placeholder until something is factored, and not `definite`: nobody may
    believe that something was."""
    return Factor(
        line_whitener=xp.eye(n, dtype=dtype).reshape(-1),
        line_inverse=xp.eye(n, n + k, dtype=dtype).reshape(-1),
        lift=xp.zeros((k, n), dtype),
        diagonal=xp.ones(n, dtype),
        coupled=xp.zeros(n, dtype),
        W=xp.zeros((k, n), dtype),
        sigma=xp.ones(k, dtype),
        gram=xp.eye(k, dtype=dtype),
        definite=xp.asarray(False),
        flat=xp.zeros(n, bool),
        weights=xp.zeros(k, dtype),
        regularised=xp.asarray(False),
        inflation=xp.ones((), dtype),
    )


class Schur(NamedTuple):
    """The inverse of `A_S H^{-1} A_S^T` for one active set `S`, zero off `S`.

    `independent` tells whether the rows of `S` are so, as far as a factor can see;
    where `exact` is false, `inverse` is a pseudo-inverse and solves need refinement.
    """

    inverse: Float[Array, "k k"]
    active: Bool[Array, " k"]
    independent: Bool[Array, ""]
    exact: Bool[Array, ""]


def blank_schur(k, dtype) -> Schur:
    """The inverse for no rows at all, a placeholder until some are active."""
    yes = xp.asarray(True)
    return Schur(xp.zeros((k, k), dtype), xp.zeros(k, bool), yes, yes)


class KKT(NamedTuple):
    """`[[H, A_S^T], [A_S, 0]]` for the rows `S` of `rows`."""

    hessian: Factor
    rows: Schur

    def on(self, active, stale: BoolLike = False) -> "KKT":
        """The system on the `active` rows; `stale` if `rows` is of another Hessian."""
        known = xp.all(active == self.rows.active) & ~xp.asarray(stale)
        invert = lambda _: schur(self.hessian, active)
        return KKT(self.hessian, run_unless(known, invert, self.rows))

    def solve(self, top, bottom):
        """`d, mu` with `H d + A_S^T mu = top` and `A_S d = bottom_S`, `mu = 0` off `S`.

        Of one right-hand side or of several.
        By the Schur complement (Nocedal and Wright 2006, section 16.2).
        """
        factor, n = self.hessian, top.shape[-1]
        both = top @ factor.inverse
        moved, d = both[..., n:], both[..., :n]
        mu = (moved - bottom) @ self.rows.inverse
        # What was lent to the Hessian on rows in `S` is no part of `g`. It pulls by
        # `A_S d`, which is not `bottom` where rows contradict each other.
        met = moved - factor.sigma * ((factor.sigma * mu) @ factor.gram)
        lent = xp.where(self.rows.active, factor.weights * met, 0)
        return d - mu @ factor.lift, mu + lent


def schur(factor: Factor, active) -> Schur:
    """Invert the active block of the row Gram matrix."""
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
    inverse = half.T @ half
    if k > n:
        pivots = xp.where(xp.sum(active) > n, 0, pivots)
        inverse = placed(factor.gram, (rows[:, None], rows), inverse)
    # Compared one by one: a failed factor is NaN, and NaN compares false.
    exact = xp.all(pivots > tol.dependent)
    independent = xp.all(pivots > tol.eps**0.5)
    inverted = Schur(inverse, active, independent, exact)
    # Of dependent rows an explicit inverse would have no correct digit.
    return unless_rarely(exact, lambda s: _dependent(factor, s), inverted)


def _dependent(factor: Factor, inverted: Schur) -> Schur:
    """With the pseudo-inverse of `G_SS`, zero off `S`."""
    active, sigma = inverted.active, factor.sigma
    both, tol = active[:, None] & active[None, :], tolerances(sigma.dtype)
    k, n = factor.W.shape
    if k > n:
        part = xp.where(active[:, None], factor.W, 0)
        vectors, roots, _ = svd(part)
        # Of a root half of the digits count: smaller ones magnify rounding more.
        values, least = roots**2, tol.eps
    else:
        others = xp.diag(xp.where(active, 0, xp.ones_like(sigma)))
        values, vectors = eigh(xp.where(both, factor.gram, 0) + others)
        least = active.size * tol.regularise
    zero = values <= least
    weights = xp.where(zero, 0, 1 / xp.where(zero, 1, values))
    pseudo = xp.where(both, (vectors * weights) @ vectors.T, 0)
    return inverted._replace(inverse=pseudo / (sigma[:, None] * sigma))


def schur_root(gram, active, regularise) -> Float[Array, "k k"]:
    """Cholesky root of `G_SS + regularise I`, identity on rows outside `S`."""
    both = active[:, None] & active[None, :]
    shift = xp.where(active, regularise, 1).astype(gram.dtype)
    return cholesky(xp.where(both, gram, 0) + xp.diag(shift))


def root_solve(root, rhs):
    """`(root root^T)^{-1} rhs` for a vector."""
    half = solve_lower(root, rhs[:, None])
    return solve_lower(root, half, transpose=True)[:, 0]
