"""Polyhedra that move with `x`."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from .._programs.arrays import ravel, sp, xp
from .._programs.control import packed
from .._programs.modules import with_fields
from .base import AbstractConstraints, as_float
from .by_name import as_blocks, joined, rows_of_blocks, structure_of
from .columns import units_of_columns
from .layout import Layout, Part
from .moving import (
    at_or_told,
    check_functions_of,
    is_function,
    motion,
    pull_of_rhs,
)
from .sparse import (
    SparseMatrix,
    as_rows,
    csr_of,
    dense,
    from_csr,
    is_sparse,
    pulled,
    sizes,
)

# Entries up to which sparse rows are looked at as a dense matrix.
MOST_DENSE = 1_000_000

_Matrix = Float[Array, "rows columns"] | SparseMatrix | dict | Callable | None
_Vector = Float[Array, " rows"] | Callable | None


class Polyhedron(AbstractConstraints):
    """The coupled polyhedron `{y : A y + B x <= b, A_eq y + B_eq x = b_eq}`.

    `y` and `x` are raveled in JAX order. Matrices may be dense, of scipy.sparse, or
    BCOO and BCSR of JAX; entries of these that are given several times are added. Every
    part is optional: no `B` means that the set does not move with `x`; no `A` (or no
    `A_eq`) that there are no such rows. Zero rows and infinite entries of `b` are
    allowed. `columns` are the units in which the entries of `y` are computed, see
    `columns.py`. `names` and `names_eq` are labels of the inequality rows and of the
    equality rows, by which messages speak of them.

    Where `y` is a dictionary, `A={"flow": M1, "price": M2}` gives columns by name, and
    zeros for entries without a block; so does `B={"toll": ...}` for `x`.

    `A`, `b`, `A_eq` and `b_eq` may be functions of `x`. Of `A` and `b` one is an array,
    or `names` tell how many rows there are.
    """

    A: _Matrix
    B: _Matrix
    b: _Vector
    A_eq: _Matrix
    B_eq: _Matrix
    b_eq: _Vector
    columns: Float[Array, " n"] | None
    names: tuple[str, ...] | None = eqx.field(static=True)
    names_eq: tuple[str, ...] | None = eqx.field(static=True)
    source: Any

    def __init__(
        self,
        A=None,
        B=None,
        b=None,
        A_eq=None,
        B_eq=None,
        b_eq=None,
        *,
        names=None,
        names_eq=None,
    ):
        self.source, self.columns = None, None
        self.names = _labels(names, "names")
        self.names_eq = _labels(names_eq, "names_eq")
        self.A, self.B, self.b = _checked_rows(A, B, b, self.names, "")
        self.A_eq, self.B_eq, self.b_eq = _checked_rows(
            A_eq, B_eq, b_eq, self.names_eq, "_eq"
        )
        for left, right, whose in (("A", "A_eq", "y"), ("B", "B_eq", "x")):
            counts = [_width(getattr(self, name)) for name in (left, right)]
            if None not in counts and counts[0] != counts[1]:
                raise ValueError(
                    f"`{left}` and `{right}` must have one column per entry of "
                    f"`{whose}`; got {counts[0]} and {counts[1]} columns."
                )
        self.columns = _columns(self._matrices())

    @property
    def num_inequalities(self):
        return _rows(self.A, self.b, self.names)

    @property
    def num_equalities(self):
        return _rows(self.A_eq, self.b_eq, self.names_eq)

    @property
    def has_functions(self):
        return any(map(is_function, (self.A, self.b, self.A_eq, self.b_eq)))

    @property
    def turns(self):
        if self.source is not None:
            return self.source.turns
        return is_function(self.A) or is_function(self.A_eq)

    @property
    def moves(self):
        linear = self.B is not None or self.B_eq is not None
        return linear or self.moving is not None

    @property
    def layout(self):
        counts = self.num_inequalities, self.num_equalities
        part = Part(*counts, labels=self.names, labels_eq=self.names_eq)
        return Layout((part,))

    def fitted(self, y):
        if not (isinstance(self.A, dict) or isinstance(self.A_eq, dict)):
            return self
        fitted = with_fields(
            self,
            A=joined(self.A, y, "A", "y"),
            A_eq=joined(self.A_eq, y, "A_eq", "y"),
        )
        return with_fields(fitted, columns=_columns(fitted._matrices()))

    def evaluated(self, x):
        if not self.has_functions:
            return self
        found = {}
        for end, names in (("", self.names), ("_eq", self.names_eq)):
            A, b = getattr(self, "A" + end), getattr(self, "b" + end)
            rows = _rows(A, b, names)
            if is_function(A):
                A = as_float(at_or_told(A, x, "A" + end), f"A{end}(x)", 2)
                _check_count(A, rows, f"A{end}(x)")
            if is_function(b):
                b = as_float(at_or_told(b, x, "b" + end), f"b{end}(x)", 1)
                _check_count(b, rows, f"b{end}(x)")
            found |= {"A" + end: A, "b" + end: b}
        here = with_fields(self, **found)
        return (
            with_fields(here, columns=_columns(here._matrices()))
            if self.turns
            else here
        )

    def _matrices(self) -> list:
        """What is known of `A` and `A_eq`, if that is all of them."""
        parts = [part for part in (self.A, self.A_eq) if part is not None]
        known = all(not (is_function(p) or isinstance(p, dict)) for p in parts)
        return parts if known else []

    def _couplings(self, x) -> list:
        """`b` and `B` of each kind of rows that there is."""
        return [
            (b, joined(B, x, name, "x"))
            for b, B, name in ((self.b, self.B, "B"), (self.b_eq, self.B_eq, "B_eq"))
            if b is not None
        ]

    def check_y(self, y):
        size = sum(math.prod(jnp.shape(leaf)) for leaf in jax.tree.leaves(y))
        for name in ("A", "A_eq"):
            part = getattr(self, name)
            if isinstance(part, dict):
                joined(part, y, name, "y")
            elif _width(part) not in (None, size):
                raise ValueError(
                    f"`{name}` must have one column per entry of `y0`; expected "
                    f"{size} columns, got {_width(part)}."
                )

    def entries(self, size):
        if self.turns:
            return super().entries(size)
        parts = [part for part in (self.A, self.A_eq) if part is not None]
        return sum(map(_entries, parts))

    def start(self):
        named = [part for part in (self.A, self.A_eq) if isinstance(part, dict)]
        if named:
            found = structure_of(named[0])
            return found | structure_of(named[-1])
        for part in (self.A, self.A_eq):
            if _width(part) is not None:
                return xp.zeros(_width(part), self._dtype())
        return None

    def _dtype(self):
        parts = [self.A, self.B, self.b, self.A_eq, self.B_eq, self.b_eq]
        leaves = jax.tree.leaves([part for part in parts if not is_function(part)])
        return jnp.result_type(*(leaf for leaf in leaves if leaf.dtype.kind == "f"))

    def matrix(self, size, dtype):
        parts = [dense(p, dtype) for p in (self.A, self.A_eq) if p is not None]
        return xp.concatenate(parts) if parts else xp.zeros((0, size), dtype)

    def sparse_matrix(self, size):
        parts = [csr_of(p) for p in (self.A, self.A_eq) if p is not None]
        if not parts:
            return sp.csr_array((0, size))
        return sp.vstack(parts, format="csr")

    def row_arrays(self):
        return jax.tree.leaves((self.A, self.A_eq))

    def with_sparse_rows(self) -> "Polyhedron":
        parts = (self.A, self.A_eq)
        if self.turns or all(p is None or isinstance(p, SparseMatrix) for p in parts):
            return self

        def sparse(part):
            return None if part is None else from_csr(csr_of(part).astype(part.dtype))

        return with_fields(self, A=sparse(self.A), A_eq=sparse(self.A_eq))

    def units(self, size, dtype):
        if self.columns is None:
            return xp.ones(size, dtype)
        return xp.asarray(self.columns, dtype)

    def push(self, d):
        parts = [part @ d for part in (self.A, self.A_eq) if part is not None]
        return xp.concatenate(parts) if parts else xp.zeros(0, d.dtype)

    def pull(self, mu):
        if not mu.size:
            return xp.zeros((), mu.dtype)
        split = self.num_inequalities
        both = ((self.A, mu[:split]), (self.A_eq, mu[split:]))
        pulls = [pulled(part, mu) for part, mu in both if part is not None]
        return pulls[0] if len(pulls) == 1 else pulls[0] + pulls[1]

    def rhs(self, x):
        if self.has_functions:
            return self.at(x).rhs(x)
        parts = [
            b if B is None else b - B @ _ravel(x, B.dtype)
            for b, B in self._couplings(x)
        ]
        return xp.concatenate(parts) if parts else xp.zeros(0)

    def rhs_scale(self, x):
        parts = []
        for b, B in self._couplings(x):
            size = xp.abs(b)
            if B is not None:
                size = size + sizes(B) @ xp.abs(_ravel(x, B.dtype))
            parts.append(size)
        return xp.concatenate(parts) if parts else xp.zeros(0)

    def coupling(self, x, mu):
        if self.moving is not None:
            return pull_of_rhs(self.moving, x, mu)
        total = xp.zeros((), mu.dtype)
        split = self.num_inequalities
        parts = ((mu[:split], self.B, "B"), (mu[split:], self.B_eq, "B_eq"))
        for part, B, name in parts:
            if B is not None:
                B = joined(B, x, name, "x")
                total = total + part @ (B @ _ravel(x, B.dtype)).astype(mu.dtype)
        return total

    def coupling_matrix(self, x, dtype, y=None):
        if self.moving is not None:
            y = y if self.turns else None
            return xp.asarray(motion(packed((self.moving,)), x, y), dtype)
        if self.B is None and self.B_eq is None:
            return None
        size = sum(math.prod(jnp.shape(leaf)) for leaf in jax.tree.leaves(x))
        parts = [
            xp.zeros((rows, size), dtype)
            if B is None
            else dense(joined(B, x, name, "x"), dtype)
            for B, rows, name in (
                (self.B, self.num_inequalities, "B"),
                (self.B_eq, self.num_equalities, "B_eq"),
            )
        ]
        return xp.concatenate(parts)

    def check_x(self, x):
        size = sum(math.prod(jnp.shape(leaf)) for leaf in jax.tree.leaves(x))
        for name, B in (("B", self.B), ("B_eq", self.B_eq)):
            if isinstance(B, dict):
                joined(B, x, name, "x")
            elif B is not None and B.shape[1] != size:
                raise ValueError(
                    f"`{name}` must have one column per entry of `x`; expected "
                    f"{size} columns, got {B.shape[1]}."
                )
        check_functions_of(self, x)


def _checked_rows(A, B, b, names, suffix: str):
    A = None if A is None else _matrix(A, f"A{suffix}")
    B = None if B is None else _matrix(B, f"B{suffix}")
    if is_function(B):
        raise ValueError(
            f"`B{suffix}` is the linear case and a matrix; for another dependence on "
            f"`x` let `b{suffix}` be a function of it: `b{suffix}=lambda x: ...`."
        )
    if not (b is None or is_function(b)):
        b = as_float(b, f"b{suffix}", 1)
    if A is None and (B is not None or b is not None):
        raise ValueError(
            f"`B{suffix}` and `b{suffix}` need `A{suffix}`; for rows that involve `x` "
            "alone use `domain`."
        )
    if A is None:
        if names:
            raise ValueError(f"`names{suffix}` need `A{suffix}`, one row per label.")
        return None, None, None
    if _width(A) == 0:
        raise ValueError(
            f"`A{suffix}` must have one column per entry of `y`; got none, in an array "
            f"of {A.shape}. For rows that involve `x` alone use `domain`."
        )
    if b is None:
        raise ValueError(f"`A{suffix}` needs `b{suffix}`, one entry per row.")
    if is_function(A) and is_function(b) and names is None:
        raise ValueError(
            f"`A{suffix}` and `b{suffix}` are both functions of `x`, so the number of "
            f"rows is unknown: give one of them as an array, or `names{suffix}=[...]` "
            "with one label per row."
        )
    rows = {f"A{suffix}": A, f"B{suffix}": B, f"b{suffix}": b}
    counts = {name: _count(part) for name, part in rows.items()}
    counts = {name: count for name, count in counts.items() if count is not None}
    if len(set(counts.values())) > 1:
        told = " and ".join(f"`{name}`" for name in counts)
        got = ", ".join(map(str, counts.values()))
        raise ValueError(f"{told} must agree on the number of rows; got {got}.")
    if names is not None and counts and len(names) not in counts.values():
        raise ValueError(
            f"`names{suffix}` must have one label per row of `A{suffix}`; expected "
            f"{next(iter(counts.values()))}, got {len(names)}."
        )
    return A, B, b


def _count(part) -> int | None:
    """How many rows a part tells that there are."""
    if part is None or is_function(part):
        return None
    return rows_of_blocks(part) if isinstance(part, dict) else part.shape[0]


def _rows(A, b, names) -> int:
    if A is None:
        return 0
    told = (_count(A), _count(b), None if names is None else len(names))
    return next(count for count in told if count is not None)


def _width(part) -> int | None:
    """How many columns a matrix has, where that is known."""
    if part is None or is_function(part) or isinstance(part, dict):
        return None
    return part.shape[1]


def _check_count(part, rows: int, name: str) -> None:
    if part.shape[0] != rows:
        raise ValueError(
            f"`{name}` must have one entry per row; expected {rows}, got "
            f"{part.shape[0]}."
        )


def _labels(names, name: str) -> tuple[str, ...] | None:
    """Labels as a tuple, or a `ValueError`."""
    if names is None:
        return None
    if isinstance(names, str):
        raise ValueError(
            f"`{name}` must be a list with one label per row; got the single text "
            f"{names!r}."
        )
    labels = tuple(map(str, names))
    twice = sorted({label for label in labels if labels.count(label) > 1})
    if twice:
        raise ValueError(
            f"`{name}` must tell rows apart; {', '.join(map(repr, twice[:3]))} is "
            "there more than once."
        )
    return labels


def _entries(matrix) -> int:
    values = getattr(matrix, "values", matrix)
    return int(np.count_nonzero(np.asarray(values)))


def _matrix(value, name: str):
    if isinstance(value, Mapping):
        return as_blocks(value, name)
    if is_function(value):
        return value
    return as_rows(value, name) if is_sparse(value) else as_float(value, name, 2)


def _columns(parts):
    """Units of the columns; of sparse rows as long as these would fit as dense ones."""
    if not parts:
        return None
    if not any(isinstance(part, SparseMatrix) for part in parts):
        return units_of_columns(jnp.concatenate(parts))
    dtype = jnp.result_type(*(part.dtype for part in parts))
    if sum(math.prod(part.shape) for part in parts) > MOST_DENSE:
        return jnp.ones(parts[0].shape[1], dtype)
    return units_of_columns(jnp.concatenate([dense(part, dtype) for part in parts]))


def _ravel(x, dtype) -> Array:
    return ravel(x).astype(dtype)
