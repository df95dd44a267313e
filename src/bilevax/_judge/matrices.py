"""Numbers that tell of a matrix, for dense and sparse ones; sparse ones stay sparse."""

from typing import Any

import numpy as np

from .._programs.arrays import sp

# Where the smallest eigenvalue is looked for, below zero, in units of the largest row.
_BELOW = 1e-7
# Up to this size a dense decomposition is as quick, and exact.
_SMALL = 50


def row_lengths(A) -> np.ndarray:
    """Euclidean norms of the rows."""
    if not sp.issparse(A):
        return np.linalg.norm(A, axis=1)
    return np.sqrt(A.multiply(A).sum(axis=1))


def with_column(A, column) -> Any:
    """`[A, column]`."""
    if not sp.issparse(A):
        return np.c_[A, column]
    return sp.hstack([A, sp.csr_array(column[:, None])]).tocsr()


def least_eigenvalue(H) -> float:
    """The smallest eigenvalue of a symmetric sparse matrix that is nearly definite.

    By Lanczos with a factor of the matrix, from a little below zero; NaN where that
    does not end.
    """
    if H.shape[0] <= _SMALL:
        return float(np.linalg.eigvalsh(H.toarray())[0])
    # A quarter of the time that `import bilevax` would take.
    from scipy.sparse.linalg import ArpackError, eigsh

    size = abs(H).sum(axis=1).max()
    start = np.random.default_rng(0).normal(size=H.shape[0])
    if size == 0:
        return 0.0
    try:
        found = eigsh(
            sp.csc_matrix(H), k=1, sigma=-_BELOW * size, v0=start,
            return_eigenvectors=False,
        )  # fmt: skip
    except (ArpackError, RuntimeError):
        return np.nan
    return float(found[0])


def least_singular_value(rows) -> float:
    """The smallest singular value of sparse rows, each made a unit; zero where there
    are more rows than columns."""
    if rows.shape[0] > rows.shape[1]:
        return 0.0
    lengths = row_lengths(rows)
    unit = sp.diags_array(1 / np.where(lengths > 0, lengths, 1)) @ rows
    return float(np.sqrt(max(least_eigenvalue((unit @ unit.T).tocsr()), 0.0)))
