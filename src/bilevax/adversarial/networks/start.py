"""Starting weights, all of a network in one draw.

One draw and not one for each layer, since each would be compiled on its own: that takes
longer than the first steps of training.
"""

import functools
import math
from typing import TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array, PRNGKeyArray

from .layers import Conv, Linear

Layers = TypeVar("Layers")


def drawn(layers: Layers, key: PRNGKeyArray) -> Layers:
    """The same tree, each `Conv` and `Linear` in it with weights of its own.

    Uniform within `1/sqrt(fan_in)`: the Kaiming-uniform law with `a = sqrt(5)` from
    which the usual CIFAR networks start.
    """
    found = _drawable(layers)
    blanks = _weights(found)
    bounds = tuple(
        1 / math.sqrt(layer.fan_in) for layer in found for _ in _weights([layer])
    )
    shapes = tuple(blank.shape for blank in blanks)
    new = _uniform(key, shapes, bounds, blanks[0].dtype)
    return eqx.tree_at(lambda tree: _weights(_drawable(tree)), layers, new)


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _uniform(key, shapes, bounds, dtype) -> list[Array]:
    ends = [sum(map(math.prod, shapes[:i])) for i in range(1, len(shapes) + 1)]
    flat = jr.uniform(key, (ends[-1],), dtype, -1, 1)
    parts = jnp.split(flat, ends[:-1])
    together = zip(parts, shapes, bounds, strict=True)
    return [part.reshape(shape) * bound for part, shape, bound in together]


def _drawable(tree) -> list[Conv | Linear]:
    match = lambda node: isinstance(node, Conv | Linear)
    return [leaf for leaf in jax.tree.leaves(tree, is_leaf=match) if match(leaf)]


def _weights(layers) -> list:
    return jax.tree.leaves(layers)
