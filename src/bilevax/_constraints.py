"""Lower-level constraint sets: polyhedra that move with `x`, boxes, simplices.

All of them are `{y : A y + B x <= b, A_eq y + B_eq x = b_eq}`; inequality rows come
first wherever rows are listed, equality rows last.
"""

import abc
import math
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, ArrayLike, Float, PyTree


def as_float(value, name: str, ndim: int | None = None) -> Array:
    """`value` as a floating array of `ndim` axes, or a `ValueError` that names it."""
    try:
        array = jnp.asarray(value)
    except (TypeError, ValueError) as error:
        raise ValueError(f"`{name}` must be an array of numbers; {error}") from None
    if not jnp.issubdtype(array.dtype, jnp.floating):
        if jnp.issubdtype(array.dtype, jnp.complexfloating):
            raise ValueError(f"`{name}` must be real; got dtype {array.dtype}.")
        array = array.astype(jnp.result_type(float))
    if ndim is not None and array.ndim != ndim:
        kind = {1: "a vector", 2: "a matrix"}[ndim]
        raise ValueError(f"`{name}` must be {kind}; got an array of {array.shape}.")
    return array


class AbstractConstraints(eqx.Module):
    """A set for `y`, affine in `(x, y)`."""

    @property
    @abc.abstractmethod
    def num_inequalities(self) -> int:
        """Inequality rows; multipliers list them first."""

    @property
    @abc.abstractmethod
    def num_equalities(self) -> int:
        """Equality rows; multipliers list them last."""

    @abc.abstractmethod
    def start(self) -> PyTree[Array] | None:
        """A point that fixes structure, shape and dtype of `y`, or None."""

    @abc.abstractmethod
    def matrix(self, size: int, dtype) -> Float[Array, "k n"]:
        """All rows as a dense matrix, for the solvers that factor."""

    @abc.abstractmethod
    def push(self, d: Float[Array, " n"]) -> Float[Array, " k"]:
        """`A d` for a flat `d`, without forming `A` where it has structure."""

    @abc.abstractmethod
    def pull(self, mu: Float[Array, " k"]) -> Float[Array, " n"]:
        """`A^T mu`."""

    @abc.abstractmethod
    def rhs(self, x: PyTree[Array]) -> Float[Array, " k"]:
        """`b - B x`, inequality rows first."""

    @abc.abstractmethod
    def rhs_scale(self, x: PyTree[Array]) -> Float[Array, " k"]:
        """`|b| + |B| |x|`, what the rounding of `rhs` is relative to."""

    @abc.abstractmethod
    def coupling(self, x: PyTree[Array], mu: Float[Array, " k"]) -> Float[Array, ""]:
        """`<mu, B x>`; its gradient in `x` is `B^T mu`."""

    @abc.abstractmethod
    def coupling_matrix(self, size: int, dtype) -> Float[Array, "k m"] | None:
        """`B` over the raveled `x`, or None where the set does not move."""

    @abc.abstractmethod
    def check_x(self, x: PyTree[Array]) -> None:
        """Raise a `ValueError` if `x` does not fit the coupling."""

    @property
    def num_rows(self) -> int:
        return self.num_inequalities + self.num_equalities


class Polyhedron(AbstractConstraints):
    """The coupled polyhedron `{y : A y + B x <= b, A_eq y + B_eq x = b_eq}`.

    `y` and `x` are raveled in JAX order. Every part is optional: no `B` means that the
    set does not move with `x`; no `A` (or no `A_eq`) that there are no such rows. Zero
    rows and infinite entries of `b` are allowed.
    """

    A: Float[Array, "k n"] | None
    B: Float[Array, "k m"] | None
    b: Float[Array, " k"] | None
    A_eq: Float[Array, "l n"] | None
    B_eq: Float[Array, "l m"] | None
    b_eq: Float[Array, " l"] | None

    def __init__(self, A=None, B=None, b=None, A_eq=None, B_eq=None, b_eq=None):
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

    @property
    def num_inequalities(self):
        return 0 if self.A is None else self.A.shape[0]

    @property
    def num_equalities(self):
        return 0 if self.A_eq is None else self.A_eq.shape[0]

    def start(self):
        for part in (self.A, self.A_eq):
            if part is not None:
                return jnp.zeros(part.shape[1], self._dtype())
        return None

    def _dtype(self):
        return jnp.result_type(*(leaf for leaf in jax.tree.leaves(self)))

    def matrix(self, size, dtype):
        parts = [jnp.asarray(p, dtype) for p in (self.A, self.A_eq) if p is not None]
        return jnp.concatenate(parts) if parts else jnp.zeros((0, size), dtype)

    def push(self, d):
        parts = [part @ d for part in (self.A, self.A_eq) if part is not None]
        return jnp.concatenate(parts) if parts else jnp.zeros(0, d.dtype)

    def pull(self, mu):
        return mu @ self.matrix(0, mu.dtype) if mu.size else jnp.zeros((), mu.dtype)

    def rhs(self, x):
        parts = []
        for b, B in ((self.b, self.B), (self.b_eq, self.B_eq)):
            if b is not None:
                parts.append(b if B is None else b - B @ _ravel(x, B.dtype))
        return jnp.concatenate(parts) if parts else jnp.zeros(0)

    def rhs_scale(self, x):
        parts = []
        for b, B in ((self.b, self.B), (self.b_eq, self.B_eq)):
            if b is not None:
                size = jnp.abs(b)
                if B is not None:
                    size = size + jnp.abs(B) @ jnp.abs(_ravel(x, B.dtype))
                parts.append(size)
        return jnp.concatenate(parts) if parts else jnp.zeros(0)

    def coupling(self, x, mu):
        total = jnp.zeros((), mu.dtype)
        split = self.num_inequalities
        for part, B in ((mu[:split], self.B), (mu[split:], self.B_eq)):
            if B is not None:
                total = total + part @ (B @ _ravel(x, B.dtype)).astype(mu.dtype)
        return total

    def coupling_matrix(self, size, dtype):
        if self.B is None and self.B_eq is None:
            return None
        parts = [
            jnp.zeros((rows, size), dtype) if B is None else jnp.asarray(B, dtype)
            for B, rows in (
                (self.B, self.num_inequalities),
                (self.B_eq, self.num_equalities),
            )
        ]
        return jnp.concatenate(parts)

    def check_x(self, x):
        size = sum(math.prod(jnp.shape(leaf)) for leaf in jax.tree.leaves(x))
        for name, B in (("B", self.B), ("B_eq", self.B_eq)):
            if B is not None and B.shape[1] != size:
                raise ValueError(
                    f"`{name}` must have one column per entry of `x`; expected "
                    f"{size} columns, got {B.shape[1]}."
                )


class Box(AbstractConstraints):
    """The box `{y : lower <= y <= upper}`, elementwise over any pytree.

    Bounds may be infinite; a scalar broadcasts over the other bound. Multipliers list
    all lower bounds, then all upper bounds.
    """

    lower: PyTree[Array]
    upper: PyTree[Array]

    def __init__(self, lower, upper):
        lower = jax.tree.map(lambda leaf: as_float(leaf, "lower"), lower)
        upper = jax.tree.map(lambda leaf: as_float(leaf, "upper"), upper)
        lower, upper = _broadcast_bounds(lower, upper)
        for low, high in zip(
            jax.tree.leaves(lower), jax.tree.leaves(upper), strict=True
        ):
            if low.shape != high.shape:
                raise ValueError(
                    "`lower` and `upper` must agree in shape; got "
                    f"{low.shape} and {high.shape}."
                )
        self.lower, self.upper = lower, upper

    @property
    def num_inequalities(self):
        return 2 * sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(self.lower))

    @property
    def num_equalities(self):
        return 0

    def start(self):
        return jax.tree.map(jnp.clip, _zeros_like(self.lower), self.lower, self.upper)

    def matrix(self, size, dtype):
        eye = jnp.eye(size, dtype=dtype)
        return jnp.concatenate([-eye, eye])

    def push(self, d):
        return jnp.concatenate([-d, d])

    def pull(self, mu):
        low, high = jnp.split(mu, 2)
        return high - low

    def rhs(self, x):
        return jnp.concatenate([-self.flat_lower(), self.flat_upper()])

    def flat_lower(self):
        return ravel_pytree(self.lower)[0]

    def flat_upper(self):
        return ravel_pytree(self.upper)[0]

    def rhs_scale(self, x):
        return jnp.abs(self.rhs(x))

    def coupling(self, x, mu):
        return jnp.zeros((), mu.dtype)

    def coupling_matrix(self, size, dtype):
        return None

    def check_x(self, x):
        pass

    def project(self, y: Float[Array, " n"]) -> Float[Array, " n"]:
        """The nearest point of the box, for a flat `y`."""
        return jnp.clip(y, self.flat_lower(), self.flat_upper())


class Simplex(AbstractConstraints):
    """Scaled simplices `{y >= 0, sum(y, axis=-1) = total}` along the last axis.

    `shape` is the shape of `y` (an integer for one simplex) and `total` a number or an
    array of `shape[:-1]`. Multipliers list the bounds `y >= 0`, then one equality per
    simplex.
    """

    total: Float[Array, "..."]
    shape: tuple[int, ...] = eqx.field(static=True)

    def __init__(self, shape: int | tuple[int, ...], total: ArrayLike = 1.0):
        shape = (int(shape),) if isinstance(shape, int | np.integer) else tuple(shape)
        if not shape or any(size < 1 for size in shape):
            raise ValueError(f"`shape` must hold positive integers; got {shape}.")
        total = as_float(total, "total")
        try:
            self.total = jnp.broadcast_to(total, shape[:-1])
        except ValueError:
            raise ValueError(
                f"`total` must have shape {shape[:-1]}, one per simplex; got "
                f"{total.shape}."
            ) from None
        self.shape = shape

    @property
    def num_inequalities(self):
        return math.prod(self.shape)

    @property
    def num_equalities(self):
        return math.prod(self.shape[:-1])

    def start(self):
        return jnp.broadcast_to(self.total[..., None] / self.shape[-1], self.shape)

    def matrix(self, size, dtype):
        sums = jnp.repeat(
            jnp.eye(self.num_equalities, dtype=dtype), self.shape[-1], axis=1
        )
        return jnp.concatenate([-jnp.eye(size, dtype=dtype), sums])

    def push(self, d):
        return jnp.concatenate([-d, jnp.sum(d.reshape(self.shape), -1).reshape(-1)])

    def pull(self, mu):
        low, sums = mu[: self.num_inequalities], mu[self.num_inequalities :]
        return jnp.repeat(sums, self.shape[-1]) - low

    def project(self, y: Float[Array, " n"]) -> Float[Array, " n"]:
        """The nearest point of the simplices, for a flat `y`."""
        rows = y.reshape(-1, self.shape[-1])
        total = self.total.reshape(-1).astype(y.dtype)
        return jax.vmap(_onto_simplex)(rows, total).reshape(-1)

    def rhs(self, x):
        zeros = jnp.zeros(self.num_inequalities, self.total.dtype)
        return jnp.concatenate([zeros, self.total.reshape(-1)])

    def rhs_scale(self, x):
        return jnp.abs(self.rhs(x))

    def coupling(self, x, mu):
        return jnp.zeros((), mu.dtype)

    def coupling_matrix(self, size, dtype):
        return None

    def check_x(self, x):
        pass


def _onto_simplex(y, total):
    """Sort and shift; optax's projection takes a static total, ours may be traced."""
    high_first = jnp.sort(y)[::-1]
    shift = (jnp.cumsum(high_first) - total) / (1 + jnp.arange(y.size))
    count = jnp.maximum(jnp.sum(high_first > shift), 1)
    return jnp.maximum(y - shift[count - 1], 0)


def _checked_rows(A, B, b, suffix: str):
    A = None if A is None else as_float(A, f"A{suffix}", 2)
    B = None if B is None else as_float(B, f"B{suffix}", 2)
    b = None if b is None else as_float(b, f"b{suffix}", 1)
    if A is None and (B is not None or b is not None):
        raise ValueError(
            f"`B{suffix}` and `b{suffix}` need `A{suffix}`; for rows that involve `x` "
            "alone use `domain`."
        )
    if A is None:
        return None, None, None
    if b is None:
        raise ValueError(f"`A{suffix}` needs `b{suffix}`, one entry per row.")
    rows = {f"A{suffix}": A, f"B{suffix}": B, f"b{suffix}": b}
    counts = {name: part.shape[0] for name, part in rows.items() if part is not None}
    if len(set(counts.values())) > 1:
        names = " and ".join(f"`{name}`" for name in counts)
        got = ", ".join(map(str, counts.values()))
        raise ValueError(f"{names} must agree on the number of rows; got {got}.")
    return A, B, b


def _broadcast_bounds(lower, upper):
    """Bounds of one structure and shape; a scalar takes the shape of the other."""
    scalar = [
        len(jax.tree.leaves(side)) == 1 and jax.tree.leaves(side)[0].ndim == 0
        for side in (lower, upper)
    ]
    if jax.tree.structure(lower) == jax.tree.structure(upper):
        both = [
            (jnp.broadcast_to(lo, hi.shape), hi)
            if lo.ndim == 0
            else (lo, jnp.broadcast_to(hi, lo.shape))
            if hi.ndim == 0
            else (lo, hi)
            for lo, hi in zip(
                jax.tree.leaves(lower), jax.tree.leaves(upper), strict=True
            )
        ]
        tree = jax.tree.structure(lower)
        return tree.unflatten([p[0] for p in both]), tree.unflatten(
            [p[1] for p in both]
        )
    if scalar[0]:
        return jax.tree.map(lambda hi: jnp.full_like(hi, lower), upper), upper
    if scalar[1]:
        return lower, jax.tree.map(lambda lo: jnp.full_like(lo, upper), lower)
    raise ValueError(
        "`lower` and `upper` must have the same tree structure; got "
        f"{jax.tree.structure(lower)} and {jax.tree.structure(upper)}."
    )


def _zeros_like(tree: Any):
    return jax.tree.map(jnp.zeros_like, tree)


def _ravel(x, dtype) -> Array:
    return ravel_pytree(x)[0].astype(dtype)
