"""The lower level as dense arrays: unit rows at one `x`, and `g` of a flat `y`.

Nothing in the methods knows more of a problem than this.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Bool, Float, PyTree

from .._problem.checks import scalar
from .._programs.arrays import ravel, xp
from .._programs.control import in_stages, once, stage
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
    fixed = once(_directions, constraints, size, dtype, columns)
    A, norm, plain_norm, zero_row, equality = fixed
    rhs = constraints.rhs(x).astype(dtype)
    scale = constraints.rhs_scale(x).astype(dtype)
    noise = tolerances(dtype).rounding * scale
    impossible = xp.where(equality, xp.isinf(rhs), rhs == -xp.inf)
    violated = xp.where(equality, xp.abs(rhs) > noise, rhs < -noise)
    # A NaN stays in play, so that it is found.
    usable = (~zero_row & ~xp.isinf(rhs)) | xp.isnan(rhs)
    return Rows(
        A=A,
        rhs=xp.where(usable, rhs / norm, 0),
        scale=xp.where(usable, scale / norm, 0),
        norm=norm,
        plain_norm=plain_norm,
        usable=usable,
        equality=equality,
        empty=xp.any(impossible) | xp.any(zero_row & violated),
    )


def _directions(constraints, size: int, dtype, columns):
    """What does not depend on `x`: `A`, its norms, rows of zeros, equations."""
    plain = A = constraints.matrix(size, dtype)
    A = A if columns is None else A * columns
    largest, norm = _norms(A)
    plain_norm = norm if columns is None else _norms(plain)[1]
    equality = xp.arange(A.shape[0]) >= constraints.num_inequalities
    return A / norm[:, None], norm, plain_norm, largest == 0, equality


def _norms(A):
    """The largest entry and the norm of each row (one for rows of zeros)."""
    # Two steps, so that rows near the limits of the exponent neither over- nor
    # underflow.
    largest = xp.max(sizes(A), axis=1, initial=0)
    safe = xp.where(largest > 0, largest, 1)
    norm = safe * xp.sqrt(xp.sum((A / safe[:, None]) ** 2, axis=1))
    return largest, xp.where(largest > 0, norm, 1)


def single(rows: Rows) -> Bool[Array, "k n"]:
    """Where rows have their only entry; false in rows with several."""
    entries = rows.A != 0
    return entries & (xp.sum(entries, axis=1) == 1)[:, None]


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
            xp.eye(y.size, dtype=y.dtype)
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
        shapes = tuple(np.shape(leaf) for leaf in leaves)
        return cls(structure, shapes, tuple(leaf.dtype for leaf in leaves))

    @property
    def size(self) -> int:
        return sum(math.prod(shape) for shape in self.shapes)

    def __call__(self, flat: Float[Array, " n"]) -> PyTree[Array]:
        if len(self.shapes) == 1:
            return self.structure.unflatten(
                [flat.reshape(self.shapes[0]).astype(self.dtypes[0])]
            )
        ends = np.cumsum([math.prod(shape) for shape in self.shapes])[:-1]
        parts = xp.split(flat, ends)
        leaves = [
            part.reshape(shape).astype(dtype)
            for part, shape, dtype in zip(parts, self.shapes, self.dtypes, strict=True)
        ]
        return self.structure.unflatten(leaves)


def flatten(problem, x) -> tuple[FlatLower, Float[Array, " n"]]:
    """The flat lower level and the flat start point."""
    unravel = Unravel.like(problem.y0)
    return FlatLower(problem.lower, x, unravel), ravel(problem.y0)


@stage
def along(lower: FlatLower, y, d):
    """The gradient of `g` and the product of its Hessian with `d`."""
    return jax.jvp(lower.gradient, (y,), (d,))


@stage
def gradient_errors(lower: FlatLower, y, near):
    """What the Hessian at `y` does not explain of the gradient at points `near` it."""
    start = lower.gradient(y)

    def error(at):
        moved = at - y
        return lower.gradient(at) - start - lower.hessian_product(y, moved)

    return jax.vmap(error)(near)


def curvature(lower: Any, y, d) -> Float[Array, " n"]:
    """`H d`; in stages by the program of `along`, which exists already."""
    if in_stages():
        return along(lower, y, d)[1]
    return lower.hessian_product(y, d)


def hessian_operator(lower: Any, y) -> Callable:
    """`d -> H d` for many `d`; in stages by the matrix, which is one call."""
    if in_stages():
        return hessian_of(lower, y).__matmul__
    return lambda d: lower.hessian_product(y, d)


@stage
def value_of(lower: FlatLower, y) -> Float[Array, ""]:
    return lower.value(y)


@stage
def hessian_of(lower: FlatLower, y) -> Float[Array, "n n"]:
    return lower.hessian(y)


def probe(like: Float[Array, " n"]) -> Float[Array, " n"]:
    """Numbers without a pattern that data could share, the same in every run."""
    return xp.cos(1.0 + 2.4 * xp.arange(like.size)).astype(like.dtype)


def random_signs(like: Float[Array, " n"]) -> Float[Array, " n"]:
    """The signs of another `probe`."""
    waves = xp.sin(1.0 + 2.4 * xp.arange(like.size))
    return xp.where(waves > 0, 1.0, -1.0).astype(like.dtype)


def sizes(array: Float[Array, "..."]) -> Float[Array, "..."]:
    """Absolute values, and infinity for NaN.

    Large reductions of XLA on CPUs lose NaNs in `min` and `max`, so that one would go
    unnoticed in a long vector or a large batch.
    """
    return xp.where(xp.isnan(array), xp.inf, xp.abs(array))


def largest(*arrays) -> list[Float[Array, ""]]:
    """The largest of the `sizes` of each array, in one reduction where shapes allow.

    Small problems are bound by the number of kernels, not by arithmetic.
    """
    if arrays[0].size == 0:
        return [xp.zeros((), array.dtype) for array in arrays]
    if arrays[0].ndim == 1 and len({array.shape for array in arrays}) == 1:
        return list(xp.max(sizes(xp.stack(arrays)), axis=1))
    return [xp.max(sizes(array)) for array in arrays]


def ratio(part, whole):
    """`part / whole`, and `part` where there is nothing to compare with."""
    return part / xp.where(whole > 0, whole, 1)
