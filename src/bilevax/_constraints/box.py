"""Boxes over any pytree."""

import math

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from .._programs.arrays import ravel, sp, xp
from .base import AbstractFixedSet, check_not_empty, tree_as_float
from .layout import Layout, Part


class Box(AbstractFixedSet):
    """The box `{y : lower <= y <= upper}`, elementwise over any pytree.

    Bounds may be infinite; a scalar broadcasts over the other bound. Multipliers list
    all lower bounds, then all upper bounds.
    """

    lower: PyTree[Array]
    upper: PyTree[Array]

    def __init__(self, lower, upper):
        lower, upper = tree_as_float(lower, "lower"), tree_as_float(upper, "upper")
        check_not_empty(lower, "lower")
        check_not_empty(upper, "upper")
        self.lower, self.upper = _broadcast_bounds(lower, upper)

    @property
    def num_inequalities(self):
        return 2 * sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(self.lower))

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
