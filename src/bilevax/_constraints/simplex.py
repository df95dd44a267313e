"""Products of scaled simplices."""

import math
import operator
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float

from .._programs.arrays import sp, xp
from .base import AbstractFixedSet, as_float
from .layout import Layout, Part
from .moving import at_or_told, is_function


class Simplex(AbstractFixedSet):
    """Scaled simplices `{y >= 0, sum(y, axis=-1) = total}` along the last axis.

    `shape` is the shape of `y` (an integer for one simplex) and `total` a number or an
    array of `shape[:-1]`, or a function of `x` that gives one. Multipliers list the
    bounds `y >= 0`, then one equality per simplex.
    """

    total: Float[Array, "..."] | Callable
    shape: tuple[int, ...] = eqx.field(static=True)
    source: Any

    def __init__(self, shape: int | tuple[int, ...], total: ArrayLike | Callable = 1.0):
        self.shape, self.source = _checked_shape(shape), None
        self.total = total if is_function(total) else _totals(total, self.shape)

    @property
    def has_functions(self):
        return is_function(self.total)

    @property
    def moves(self):
        return self.moving is not None

    def evaluated(self, x):
        if not is_function(self.total):
            return self
        return Simplex(self.shape, at_or_told(self.total, x, "total"))

    @property
    def num_inequalities(self):
        return math.prod(self.shape)

    @property
    def num_equalities(self):
        return math.prod(self.shape[:-1])

    @property
    def layout(self):
        counts = self.num_inequalities, self.num_equalities
        return Layout((Part(*counts, bounds=("lower",)),))

    def entries(self, size):
        return 2 * size

    def start(self):
        if is_function(self.total):
            return xp.full(self.shape, 1 / self.shape[-1])
        return xp.broadcast_to(self.total[..., None] / self.shape[-1], self.shape)

    def matrix(self, size, dtype):
        sums = xp.repeat(
            xp.eye(self.num_equalities, dtype=dtype), self.shape[-1], axis=1
        )
        return xp.concatenate([-xp.eye(size, dtype=dtype), sums])

    def sparse_matrix(self, size):
        eye = sp.eye_array(size, format="csr")
        member = np.arange(size) // self.shape[-1]
        places = (member, np.arange(size))
        sums = sp.csr_array((np.ones(size), places))
        return sp.vstack([-eye, sums], format="csr")

    def push(self, d):
        return xp.concatenate([-d, xp.sum(d.reshape(self.shape), -1).reshape(-1)])

    def pull(self, mu):
        low, sums = mu[: self.num_inequalities], mu[self.num_inequalities :]
        return xp.repeat(sums, self.shape[-1]) - low

    def project(self, y):
        rows = y.reshape(-1, self.shape[-1])
        total = self.total.reshape(-1).astype(y.dtype)
        return jax.vmap(_onto_simplex)(rows, total).reshape(-1)

    def rhs(self, x):
        if self.has_functions:
            return self.at(x).rhs(x)
        zeros = xp.zeros(self.num_inequalities, self.total.dtype)
        return xp.concatenate([zeros, self.total.reshape(-1)])


def _totals(total, shape) -> Array:
    total = as_float(total, "total")
    try:
        return jnp.broadcast_to(total, shape[:-1])
    except ValueError:
        raise ValueError(
            f"`total` must have shape {shape[:-1]}, one per simplex; got {total.shape}."
        ) from None


def _checked_shape(shape) -> tuple[int, ...]:
    try:
        sizes = tuple(map(operator.index, shape if np.ndim(shape) else (shape,)))
    except (TypeError, ValueError):
        sizes = ()
    if not sizes or min(sizes) < 1:
        raise ValueError(
            "`shape` must be a positive integer or a tuple of them, the shape of `y`; "
            f"got {shape!r}."
        )
    return sizes


def _onto_simplex(y, total):
    """Sort and shift; optax's projection takes a static total, ours may be traced."""
    high_first = jnp.sort(y)[::-1]
    shift = (jnp.cumsum(high_first) - total) / (1 + jnp.arange(y.size))
    count = jnp.maximum(jnp.sum(high_first > shift), 1)
    return jnp.maximum(y - shift[count - 1], 0)
