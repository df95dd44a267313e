"""Columns by name: `{"flow": M1, "price": M2}`, blocks for entries of a dictionary.

JAX orders the entries of a dictionary by name; nobody need know that who names them.
"""

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from .._programs.arrays import sp, xp
from .base import as_float
from .sparse import SparseMatrix, as_rows, csr_of, from_csr, is_sparse


def as_blocks(value: Mapping, name: str) -> dict:
    """The blocks as matrices with as many rows, or a `ValueError` that names one."""
    blocks = _checked(value, name)
    leaves = jax.tree.leaves(blocks, is_leaf=_is_matrix)
    if not leaves:
        raise ValueError(
            f"`{name}` must hold at least one block of columns; got an empty dict."
        )
    rows = sorted({leaf.shape[0] for leaf in leaves})
    if len(rows) > 1:
        raise ValueError(
            f"the blocks of `{name}` must agree on the number of rows; got "
            f"{' and '.join(map(str, rows))}."
        )
    return blocks


def _checked(value, name: str):
    if isinstance(value, Mapping):
        return {
            key: _checked(block, f"{name}[{key!r}]") for key, block in value.items()
        }
    return as_rows(value, name) if is_sparse(value) else as_float(value, name, 2)


def _is_matrix(value) -> bool:
    return isinstance(value, SparseMatrix)


def rows_of_blocks(blocks: dict) -> int:
    return jax.tree.leaves(blocks, is_leaf=_is_matrix)[0].shape[0]


def structure_of(blocks: dict) -> PyTree[Array]:
    """Zeros with the names and sizes of the blocks: a vector for each."""
    zeros = lambda block: xp.zeros(block.shape[1], block.dtype)
    return jax.tree.map(zeros, blocks, is_leaf=_is_matrix)


def joined(blocks: Any, like: PyTree[Array], name: str, whose: str) -> Any:
    """One matrix, with zeros for what no block is about; `whose` is `y` or `x`."""
    if not isinstance(blocks, dict):
        return blocks
    rows = rows_of_blocks(blocks)
    parts = list(_parts(blocks, like, rows, name, whose))
    if any(isinstance(part, SparseMatrix) for part in parts):
        return from_csr(sp.hstack([csr_of(part) for part in parts], format="csr"))
    return xp.concatenate(parts, axis=1)


def _parts(block, like, rows: int, name: str, whose: str):
    if not isinstance(block, dict):
        size = _size(like)
        if block.shape[1] != size:
            raise ValueError(
                f"`{name}` must have one column per entry of `{whose}`; expected "
                f"{size} columns, got {block.shape[1]}."
            )
        yield block
        return
    if not isinstance(like, Mapping):
        raise ValueError(
            f"`{name}` gives columns by name, and `{whose}` has no names: it is "
            f"{_kind(like)}. Make it a dictionary, or give one matrix."
        )
    unknown = [key for key in block if key not in like]
    if unknown:
        raise ValueError(
            f"`{name}` has columns for {unknown[0]!r}, which is not in `{whose}`; "
            f"there are {', '.join(map(repr, like))}."
        )
    # In the order in which JAX ravels.
    for key in sorted(like) if type(like) is dict else like:
        if key in block:
            inside = f"{name}[{key!r}]", f"{whose}[{key!r}]"
            yield from _parts(block[key], like[key], rows, *inside)
        else:
            yield xp.zeros((rows, _size(like[key])))


def _size(tree) -> int:
    return sum(math.prod(jnp.shape(leaf)) for leaf in jax.tree.leaves(tree))


def _kind(tree) -> str:
    shape = getattr(tree, "shape", None)
    return f"a {type(tree).__name__}" if shape is None else f"an array of {shape}"
