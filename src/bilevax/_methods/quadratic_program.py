"""Small dense quadratic programs, as steps of sequential quadratic programming need.

    min_d  <g, d> + <d, H d> / 2   subject to   G d <= r   (the first rows: equalities)

With `H = L L^T` and `z = L^T d + L^{-1} g` this is the shortest `z` in a polyhedron,
which is one non-negative least-squares problem (Lawson and Hanson, chapter 23).
"""

from typing import NamedTuple

import numpy as np


class Step(NamedTuple):
    """The minimiser and the multipliers of all rows."""

    d: np.ndarray
    multipliers: np.ndarray


def quadratic_program(H, g, G, r, equalities: int = 0) -> Step | None:
    """The solution, or None where no point satisfies the rows."""
    # A quarter of the time that `import bilevax` would take.
    from scipy.linalg import solve_triangular
    from scipy.optimize import nnls

    try:
        L = np.linalg.cholesky(H)
    except np.linalg.LinAlgError:
        return None
    down = lambda b: solve_triangular(L, b, lower=True)
    up = lambda z: solve_triangular(L.T, z)
    newton = down(g)
    if len(r) == 0:
        return Step(-up(newton), np.zeros(0))
    # Rows in the metric of H: E z <= f, each of length one.
    E = down(G.T).T
    f = r + E @ newton
    length = np.linalg.norm(E, axis=1)
    length = np.where(length > 0, length, 1)
    E, f = E / length[:, None], f / length
    # An equality is a pair of inequalities.
    signs = np.r_[np.ones(len(r)), -np.ones(equalities)]
    rows = np.r_[np.arange(len(r)), np.arange(equalities)]
    size = np.abs(f).max(initial=0)
    if size == 0:
        return _sharpened(H, g, G, r, np.zeros(len(r)), equalities, up(-newton))
    matrix = -np.vstack([(signs[:, None] * E[rows]).T, signs * f[rows] / size])
    target = np.zeros(len(g) + 1)
    target[-1] = 1
    try:
        u, _ = nnls(matrix, target, maxiter=50 * (matrix.shape[1] + 10))
    except RuntimeError:  # cycling, by rounding
        return None
    rest = matrix @ u - target
    if not rest[-1] < -1e-12:
        return None
    u = -size * u / rest[-1]
    multipliers = np.bincount(rows, signs * u, len(r)) / length
    z = -size * rest[:-1] / rest[-1]
    return _sharpened(H, g, G, r, multipliers, equalities, up(z - newton))


def _sharpened(H, g, G, r, multipliers, equalities: int, d) -> Step:
    """Solved again on the working rows: least squares lose some digits."""
    working = multipliers != 0
    working[:equalities] = True
    W = G[working]
    n = len(g)
    matrix = np.block([[H, W.T], [W, np.zeros((len(W), len(W)))]])
    sharp = np.linalg.lstsq(matrix, np.r_[-g, r[working]], rcond=1e-14)[0]
    new = sharp[:n]
    signs = sharp[n + equalities :]
    size = np.abs(r).max(initial=0) + np.abs(G).max(initial=0) * np.linalg.norm(d)
    inside = np.all((G @ new - r)[equalities:] <= 1e-9 * size)
    near = np.linalg.norm(new - d) <= 1e-3 * (np.linalg.norm(d) + np.linalg.norm(new))
    if not (inside and near and np.all(signs >= 0) and np.isfinite(sharp).all()):
        return Step(d, multipliers)
    found = np.zeros(len(r))
    found[working] = sharp[n:]
    return Step(new, found)
