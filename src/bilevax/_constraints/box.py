"""Boxes over any pytree."""

import math
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from .._programs.arrays import ravel, sp, xp
from .._programs.modules import with_fields
from .base import AbstractFixedSet, check_like, check_not_empty, tree_as_float
from .layout import Layout, Part
from .moving import at_or_told, is_function


class Box(AbstractFixedSet):
    """The box `{y : lower <= y <= upper}`, elementwise over any pytree.

    Bounds may be infinite; a scalar broadcasts over the other bound. A bound may be a
    function of `x`; the other one, or `y0` of the problem, then tells the shapes.
    Multipliers list all lower bounds, then all upper bounds.
    """

    lower: PyTree[Array] | Callable
    upper: PyTree[Array] | Callable
    like: PyTree[Array] | None
    source: Any

    def __init__(self, lower, upper):
        self.like = self.source = None
        numbers = {}
        for name, bound in (("lower", lower), ("upper", upper)):
            if not is_function(bound):
                numbers[name] = tree_as_float(bound, name)
                check_not_empty(numbers[name], name)
        if len(numbers) == 2:
            self.lower, self.upper = _broadcast_bounds(**numbers)
            return
        self.lower, self.upper = (
            numbers.get("lower", lower), numbers.get("upper", upper),
        )  # fmt: skip
        for bound in numbers.values():
            # A bare number fits any shape, so it tells none.
            if not (eqx.is_array(bound) and bound.ndim == 0):
                self.like = jax.tree.map(jnp.zeros_like, bound)

    @property
    def has_functions(self):
        return is_function(self.lower) or is_function(self.upper)

    @property
    def moves(self):
        return self.moving is not None

    def fitted(self, y):
        if not self.has_functions or self.like is not None:
            return self
        return with_fields(self, like=jax.tree.map(jnp.zeros_like, y))

    def evaluated(self, x):
        if not self.has_functions:
            return self
        bounds = []
        for name, bound in (("lower", self.lower), ("upper", self.upper)):
            if is_function(bound):
                bound = tree_as_float(at_or_told(bound, x, name), f"{name}(x)")
            if eqx.is_array(bound) and bound.ndim == 0:
                bound = jax.tree.map(
                    lambda leaf, b=bound: jnp.full_like(leaf, b), self.like
                )
            check_like(bound, self.like, f"{name}(x)", "y0")
            bounds.append(bound)
        return Box(*bounds)

    @property
    def num_inequalities(self):
        like = self.like if self.has_functions else self.lower
        if like is None:
            raise ValueError(
                "The shapes of this Box are unknown, for its bounds are functions of "
                "`x` or a single number: pass `y0` to the Problem, or one bound as an "
                "array."
            )
        return 2 * sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(like))

    @property
    def num_equalities(self):
        return 0

    @property
    def layout(self):
        count = self.num_inequalities
        return Layout((Part(count, 0, bounds=("lower", "upper")),))

    def entries(self, size):
        return 2 * size

    def start(self):
        if self.has_functions:
            return self.like
        return jax.tree.map(
            lambda low, high: xp.clip(xp.zeros_like(low), low, high),
            self.lower,
            self.upper,
        )

    def matrix(self, size, dtype):
        eye = xp.eye(size, dtype=dtype)
        return xp.concatenate([-eye, eye])

    def sparse_matrix(self, size):
        eye = sp.eye_array(size, format="csr")
        return sp.vstack([-eye, eye], format="csr")

    def push(self, d):
        return xp.concatenate([-d, d])

    def pull(self, mu):
        low, high = xp.split(mu, 2)
        return high - low

    def rhs(self, x):
        if self.has_functions:
            return self.at(x).rhs(x)
        return xp.concatenate([-self.flat_lower(), self.flat_upper()])

    def flat_lower(self):
        return ravel(self.lower)

    def flat_upper(self):
        return ravel(self.upper)

    def project(self, y):
        return jnp.clip(y, self.flat_lower(), self.flat_upper())

    def shrunk(self, share) -> "Box":
        """Each bound moved inside by a share of the range, or of max(1, its size)."""

        def margin(low, high):
            ends = jnp.maximum(_size(low), _size(high))
            both = jnp.isfinite(low) & jnp.isfinite(high)
            return share * jnp.where(both, high - low, jnp.maximum(ends, 1))

        margins = jax.tree.map(margin, self.lower, self.upper)
        return Box(
            jax.tree.map(jnp.add, self.lower, margins),
            jax.tree.map(jnp.subtract, self.upper, margins),
        )


def _size(bound):
    return jnp.where(jnp.isfinite(bound), jnp.abs(bound), 0)


def _broadcast_bounds(lower, upper):
    """Bounds of one structure and shape; a scalar takes those of the other."""
    tree = jax.tree.structure(lower)
    if tree == jax.tree.structure(upper):
        pairs = map(_broadcast_pair, jax.tree.leaves(lower), jax.tree.leaves(upper))
        lower, upper = zip(*pairs, strict=True)
        return tree.unflatten(lower), tree.unflatten(upper)
    # A scalar in a container has a structure of its own and broadcasts over nothing.
    if eqx.is_array(lower) and lower.ndim == 0:
        return jax.tree.map(lambda high: jnp.full_like(high, lower), upper), upper
    if eqx.is_array(upper) and upper.ndim == 0:
        return lower, jax.tree.map(lambda low: jnp.full_like(low, upper), lower)
    raise ValueError(
        "`lower` and `upper` must have the same tree structure; got "
        f"{jax.tree.structure(lower)} and {jax.tree.structure(upper)}. A bare scalar "
        "fits any structure."
    )


def _broadcast_pair(low, high):
    if low.ndim == 0:
        return jnp.broadcast_to(low, high.shape), high
    if high.ndim == 0:
        return low, jnp.broadcast_to(high, low.shape)
    if low.shape != high.shape:
        raise ValueError(
            "`lower` and `upper` must agree in shape; got "
            f"{low.shape} and {high.shape}."
        )
    return low, high
