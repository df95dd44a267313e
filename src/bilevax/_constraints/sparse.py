"""Sparse matrices of rows: SciPy's and JAX's, as one kind that programs understand."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Float, Int

from .._programs.arrays import sp, xp
from .._programs.control import in_stages
from .._programs.modules import Plain


class SparseMatrix(Plain):
    """The entries of a matrix that are not zero, row by row, each place once."""

    rows: Int[Array, " nnz"]
    cols: Int[Array, " nnz"]
    values: Float[Array, " nnz"]
    shape: tuple[int, int] = eqx.field(static=True)

    ndim = 2

    @property
    def dtype(self):
        return self.values.dtype

    def __matmul__(self, v):
        """The product with a vector."""
        return _summed(self.rows, self.values * v[self.cols], self.shape[0])

    def pull(self, mu):
        """`mu @ self`."""
        return _summed(self.cols, self.values * mu[self.rows], self.shape[1])

    def dense(self, dtype) -> Float[Array, "k n"]:
        if in_stages():
            full: Any = np.zeros(self.shape, dtype)
            full[self.rows, self.cols] = self.values
            return full
        full = jnp.zeros(self.shape, dtype)
        return full.at[self.rows, self.cols].add(self.values.astype(dtype))

    def csr(self) -> Any:
        """The same as one of SciPy's, in double precision."""
        entries = np.asarray(self.values, float)
        places = (np.asarray(self.rows), np.asarray(self.cols))
        return sp.csr_array((entries, places), shape=self.shape)


def _summed(places, values, size: int):
    if in_stages():
        found = np.bincount(places, weights=values, minlength=size)
        return found.astype(values.dtype)
    return jnp.zeros(size, values.dtype).at[places].add(values)


def is_sparse(value) -> bool:
    """Whether it is a sparse matrix, of whichever package."""
    # Of packages that need not be loaded, so by where the class comes from.
    home = type(value).__module__
    foreign = home.startswith(("scipy.sparse", "jax.experimental.sparse"))
    return foreign or isinstance(value, SparseMatrix)


def as_rows(value, name: str) -> SparseMatrix:
    """A sparse matrix of SciPy or JAX, or a `ValueError` that names it.

    Entries that are given several times are added, as both packages do.
    """
    if isinstance(value, SparseMatrix):
        return value
    if not type(value).__module__.startswith("scipy.sparse"):
        value = _from_jax(value, name)
    if value.ndim != 2:
        raise ValueError(f"`{name}` must be a matrix; got an array of {value.shape}.")
    if value.dtype.kind == "c":
        raise ValueError(f"`{name}` must be real; got dtype {value.dtype}.")
    dtype = value.dtype if value.dtype.kind == "f" else jnp.result_type(float)
    value = value.tocsr().astype(jnp.result_type(dtype), copy=True)
    value.sum_duplicates()
    value.eliminate_zeros()
    return from_csr(value)


def from_csr(matrix) -> SparseMatrix:
    """The entries of a matrix of SciPy."""
    found = matrix.tocoo()
    places = (jnp.asarray(found.row, jnp.int32), jnp.asarray(found.col, jnp.int32))
    return SparseMatrix(*places, jnp.asarray(found.data), tuple(matrix.shape))


def _from_jax(value, name: str):
    if type(value).__name__ not in ("BCOO", "BCSR"):
        raise ValueError(
            f"`{name}` is a sparse matrix of type {type(value).__name__}; what can be "
            "read is BCOO, BCSR or a matrix of scipy.sparse. Convert it with "
            "`BCOO.fromdense(matrix.todense())`."
        )
    if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(value)):
        raise ValueError(
            f"`{name}` is sparse and traced, so where its entries are is unknown here. "
            "Make the Polyhedron outside of `jit`, `vmap` and `grad`, or pass "
            "`.todense()`."
        )
    if value.n_batch or value.n_dense:
        raise ValueError(
            f"`{name}` must be a plain sparse matrix; got {type(value).__name__} with "
            f"{value.n_batch} batch and {value.n_dense} dense axes. Make it with "
            "`n_batch=0, n_dense=0`."
        )
    if value.ndim != 2:
        raise ValueError(f"`{name}` must be a matrix; got an array of {value.shape}.")
    entries = np.asarray(value.data)
    if type(value).__name__ == "BCSR":
        parts = (entries, np.asarray(value.indices), np.asarray(value.indptr))
        return sp.csr_array(parts, shape=value.shape)
    places = np.asarray(value.indices)
    # What lies outside is padding, which JAX leaves out.
    inside = np.all(places < np.asarray(value.shape), axis=1)
    rows, cols = places[inside].T
    return sp.coo_array((entries[inside], (rows, cols)), shape=value.shape)


def dense(matrix, dtype) -> Any:
    """A matrix of either kind as a dense one."""
    if isinstance(matrix, SparseMatrix):
        return matrix.dense(dtype)
    return xp.asarray(matrix, dtype)


def pulled(matrix, mu) -> Any:
    """`mu @ matrix`, for either kind."""
    return matrix.pull(mu) if isinstance(matrix, SparseMatrix) else mu @ matrix


def sizes(matrix) -> Any:
    """Absolute values of the entries, for either kind."""
    if not isinstance(matrix, SparseMatrix):
        return xp.abs(matrix)
    return SparseMatrix(matrix.rows, matrix.cols, xp.abs(matrix.values), matrix.shape)


def csr_of(matrix) -> Any:
    """A matrix of either kind as one of SciPy's."""
    if isinstance(matrix, SparseMatrix):
        return matrix.csr()
    return sp.csr_array(np.asarray(matrix, float))
