"""Array functions of two libraries: JAX's in a program, NumPy's stage by stage.

What depends on shapes alone is written once, with `xp` for `jax.numpy`. As part of a
program it is traced as usual. Where a call runs stage by stage the same lines compute
with NumPy, which compiles nothing; what only one of both offers has a name here.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import scipy.sparse
from jax.flatten_util import ravel_pytree
from jax.lax.linalg import triangular_solve
from scipy.linalg import get_blas_funcs

from .control import in_stages


class _Namespace:
    """`jax.numpy` or `numpy`, whichever computes at the moment."""

    def __getattr__(self, name):
        return getattr(np if in_stages() else jnp, name)


xp: Any = _Namespace()
# To type checkers its matrices are anything, down to plain numbers.
sp: Any = scipy.sparse


def cholesky(matrix) -> Any:
    """The lower root, read off the lower triangle; NaN where there is none."""
    if not in_stages():
        return jnp.linalg.cholesky(matrix, symmetrize_input=False)
    try:
        return np.linalg.cholesky(matrix)
    except np.linalg.LinAlgError:
        return np.full_like(matrix, np.nan)


def eigh(matrix) -> Any:
    """Eigenvalues and eigenvectors, read off the lower triangle."""
    if not in_stages():
        return jnp.linalg.eigh(matrix, symmetrize_input=False)
    try:
        return np.linalg.eigh(matrix)
    except np.linalg.LinAlgError:
        return np.full_like(matrix[0], np.nan), np.full_like(matrix, np.nan)


def svd(matrix) -> Any:
    """The thin singular value decomposition."""
    if not in_stages():
        return jnp.linalg.svd(matrix, full_matrices=False)
    try:
        return np.linalg.svd(matrix, full_matrices=False)
    except np.linalg.LinAlgError:
        least = matrix[: min(matrix.shape)]
        nan = np.full_like(least @ least.T, np.nan)
        return matrix[:, : len(nan)] * np.nan, nan[0], least * np.nan


# A function of its own, like the other factorisations have: in the bodies of nested
# loops XLA may lose what kind of call a bare one is, and then knows none of that name.
@functools.partial(jax.jit, static_argnums=2)
def _solve_lower(root, rhs, transpose: bool):
    return triangular_solve(
        root, rhs, left_side=True, lower=True, transpose_a=transpose
    )


def solve_lower(root, rhs, transpose: bool = False) -> Any:
    """`root^{-1} rhs`, or `root^{-T} rhs`, for a lower triangle and a matrix."""
    if not rhs.size:
        return rhs
    if not in_stages():
        return _solve_lower(root, rhs, transpose)
    # BLAS reads columns first: what it is given is the upper triangle transposed.
    return _triangular(root.dtype)(
        1.0, root.T, rhs, lower=0, trans_a=0 if transpose else 1
    )


@functools.cache
def _triangular(dtype) -> Any:
    return get_blas_funcs("trsm", dtype=dtype)


def which(mask, size: int) -> Any:
    """The indices where `mask` holds, at most `size`, filled up with its length."""
    if not in_stages():
        return jnp.nonzero(mask, size=size, fill_value=mask.size)[0]
    found = np.flatnonzero(mask)[:size]
    return np.concatenate([found, np.full(size - found.size, mask.size, found.dtype)])


def placed(like, index, values) -> Any:
    """Zeros like `like` with `values` at `index`; what lies outside is dropped."""
    if not in_stages():
        return jnp.zeros_like(like).at[index].set(values, mode="drop")
    # One more in each direction, for what is dropped.
    full = np.zeros([size + 1 for size in like.shape], like.dtype)
    full[index] = values
    return full[tuple(slice(size) for size in like.shape)]


def rows_of(matrix, index) -> Any:
    """`matrix[index]`, with any row where `index` is beyond the last."""
    return matrix[index] if not in_stages() else matrix.take(index, 0, mode="clip")


def ravel(tree) -> Any:
    """All leaves in one vector."""
    if not in_stages():
        return ravel_pytree(tree)[0]
    leaves = [np.ravel(leaf) for leaf in jax.tree.leaves(tree)]
    return leaves[0] if len(leaves) == 1 else np.concatenate(leaves)
