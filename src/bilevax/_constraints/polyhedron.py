"""Polyhedra that move with `x`."""

import math

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from .._programs.arrays import ravel, sp, xp
from .._programs.modules import with_fields
from .base import AbstractConstraints, as_float
from .columns import units_of_columns
from .layout import Layout, Part
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


class Polyhedron(AbstractConstraints):
    """The coupled polyhedron `{y : A y + B x <= b, A_eq y + B_eq x = b_eq}`.

    `y` and `x` are raveled in JAX order. Matrices may be dense, of scipy.sparse, or
    BCOO and BCSR of JAX; entries of these that are given several times are added. Every
    part is optional: no `B` means that the set does not move with `x`; no `A` (or no
    `A_eq`) that there are no such rows. Zero rows and infinite entries of `b` are
    allowed. `columns` are the units in which the entries of `y` are computed, see
    `columns.py`. `names` and `names_eq` are labels of the inequality rows and of the
    equality rows, by which messages speak of them.
    """

    A: Float[Array, "k n"] | SparseMatrix | None
    B: Float[Array, "k m"] | SparseMatrix | None
    b: Float[Array, " k"] | None
    A_eq: Float[Array, "l n"] | SparseMatrix | None
    B_eq: Float[Array, "l m"] | SparseMatrix | None
    b_eq: Float[Array, " l"] | None
    columns: Float[Array, " n"] | None
    names: tuple[str, ...] | None = eqx.field(static=True)
    names_eq: tuple[str, ...] | None = eqx.field(static=True)

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
        self.A, self.B, self.b = _checked_rows(A, B, b, "")
        self.A_eq, self.B_eq, self.b_eq = _checked_rows(A_eq, B_eq, b_eq, "_eq")
        if self.A is not None and self.A_eq is not None:
            if self.A.shape[1] != self.A_eq.shape[1]:
                raise ValueError(
                    "`A` and `A_eq` must have one column per entry of `y`; got "
                    f"{self.A.shape[1]} and {self.A_eq.shape[1]} columns."
                )
        if self.B is not None and self.B_eq is not None:
            if self.B.shape[1] != self.B_eq.shape[1]:
                raise ValueError(
                    "`B` and `B_eq` must have one column per entry of `x`; got "
                    f"{self.B.shape[1]} and {self.B_eq.shape[1]} columns."
                )
        self.names = _labels(names, "names", "A", self.num_inequalities)
        self.names_eq = _labels(names_eq, "names_eq", "A_eq", self.num_equalities)
        parts = [part for part in (self.A, self.A_eq) if part is not None]
        self.columns = _columns(parts) if parts else None

    @property
    def num_inequalities(self):
        return 0 if self.A is None else self.A.shape[0]

    @property
    def num_equalities(self):
        return 0 if self.A_eq is None else self.A_eq.shape[0]

    @property
    def moves(self):
        return self.B is not None or self.B_eq is not None

    @property
    def layout(self):
        counts = self.num_inequalities, self.num_equalities
        part = Part(*counts, labels=self.names, labels_eq=self.names_eq)
        return Layout((part,))

    def check_y(self, y):
        size = sum(math.prod(jnp.shape(leaf)) for leaf in jax.tree.leaves(y))
        like = self.start()
        if like is not None and like.size != size:
            raise ValueError(
                "`A` must have one column per entry of `y0`; expected "
                f"{size} columns, got {like.size}."
            )

    def entries(self, size):
        parts = [part for part in (self.A, self.A_eq) if part is not None]
        return sum(map(_entries, parts))

    def start(self):
        for part in (self.A, self.A_eq):
            if part is not None:
                return xp.zeros(part.shape[1], self._dtype())
        return None

    def _dtype(self):
        floating = [p for p in jax.tree.leaves(self) if p.dtype.kind == "f"]
        return jnp.result_type(*floating)

    def matrix(self, size, dtype):
        parts = [dense(p, dtype) for p in (self.A, self.A_eq) if p is not None]
        return xp.concatenate(parts) if parts else xp.zeros((0, size), dtype)

    def sparse_matrix(self, size):
        parts = [csr_of(p) for p in (self.A, self.A_eq) if p is not None]
        if not parts:
            return sp.csr_array((0, size))
        return sp.vstack(parts, format="csr")

    def with_sparse_rows(self) -> "Polyhedron":
        parts = (self.A, self.A_eq)
        if all(part is None or isinstance(part, SparseMatrix) for part in parts):
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
        parts = []
        for b, B in ((self.b, self.B), (self.b_eq, self.B_eq)):
            if b is not None:
                parts.append(b if B is None else b - B @ _ravel(x, B.dtype))
        return xp.concatenate(parts) if parts else xp.zeros(0)

    def rhs_scale(self, x):
        parts = []
        for b, B in ((self.b, self.B), (self.b_eq, self.B_eq)):
            if b is not None:
                size = xp.abs(b)
                if B is not None:
                    size = size + sizes(B) @ xp.abs(_ravel(x, B.dtype))
                parts.append(size)
        return xp.concatenate(parts) if parts else xp.zeros(0)

    def coupling(self, x, mu):
        total = xp.zeros((), mu.dtype)
        split = self.num_inequalities
        for part, B in ((mu[:split], self.B), (mu[split:], self.B_eq)):
            if B is not None:
                total = total + part @ (B @ _ravel(x, B.dtype)).astype(mu.dtype)
        return total

    def coupling_matrix(self, size, dtype):
        if self.B is None and self.B_eq is None:
            return None
        parts = [
            xp.zeros((rows, size), dtype) if B is None else dense(B, dtype)
            for B, rows in (
                (self.B, self.num_inequalities),
                (self.B_eq, self.num_equalities),
            )
        ]
        return xp.concatenate(parts)

    def check_x(self, x):
        if self.B is None and self.B_eq is None:
            return
        size = sum(math.prod(jnp.shape(leaf)) for leaf in jax.tree.leaves(x))
        for name, B in (("B", self.B), ("B_eq", self.B_eq)):
            if B is not None and B.shape[1] != size:
                raise ValueError(
                    f"`{name}` must have one column per entry of `x`; expected "
                    f"{size} columns, got {B.shape[1]}."
                )


def _checked_rows(A, B, b, suffix: str):
    A = None if A is None else _matrix(A, f"A{suffix}")
    B = None if B is None else _matrix(B, f"B{suffix}")
    b = None if b is None else as_float(b, f"b{suffix}", 1)
    if A is None and (B is not None or b is not None):
        raise ValueError(
            f"`B{suffix}` and `b{suffix}` need `A{suffix}`; for rows that involve `x` "
            "alone use `domain`."
        )
    if A is None:
        return None, None, None
    if A.shape[1] == 0:
        raise ValueError(
            f"`A{suffix}` must have one column per entry of `y`; got none, in an array "
            f"of {A.shape}. For rows that involve `x` alone use `domain`."
        )
    if b is None:
        raise ValueError(f"`A{suffix}` needs `b{suffix}`, one entry per row.")
    rows = {f"A{suffix}": A, f"B{suffix}": B, f"b{suffix}": b}
    counts = {name: part.shape[0] for name, part in rows.items() if part is not None}
    if len(set(counts.values())) > 1:
        names = " and ".join(f"`{name}`" for name in counts)
        got = ", ".join(map(str, counts.values()))
        raise ValueError(f"{names} must agree on the number of rows; got {got}.")
    return A, B, b


def _labels(names, name: str, rows: str, count: int) -> tuple[str, ...] | None:
    """One label per row, or a `ValueError`."""
    if names is None:
        return None
    if isinstance(names, str):
        raise ValueError(
            f"`{name}` must be a list with one label per row of `{rows}`; got the "
            f"single text {names!r}."
        )
    labels = tuple(map(str, names))
    if len(labels) != count:
        raise ValueError(
            f"`{name}` must have one label per row of `{rows}`; expected {count}, got "
            f"{len(labels)}."
        )
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
    return as_rows(value, name) if is_sparse(value) else as_float(value, name, 2)


def _columns(parts):
    """Units of the columns; of sparse rows as long as these would fit as dense ones."""
    if not any(isinstance(part, SparseMatrix) for part in parts):
        return units_of_columns(jnp.concatenate(parts))
    dtype = jnp.result_type(*(part.dtype for part in parts))
    if sum(math.prod(part.shape) for part in parts) > MOST_DENSE:
        return jnp.ones(parts[0].shape[1], dtype)
    return units_of_columns(jnp.concatenate([dense(part, dtype) for part in parts]))


def _ravel(x, dtype) -> Array:
    return ravel(x).astype(dtype)
