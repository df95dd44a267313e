"""Many small arrays as few.

A call of a compiled program costs a microsecond or two for each array that goes in or
comes out; for small problems that is as much as the computation.
"""

import math
from typing import Any, NamedTuple

import jax

from .arrays import xp

# Larger arrays stay what they are: copying them costs more.
_SMALL = 256


class Bundle:
    """A pytree of arrays in which the small ones of a dtype are one vector."""

    def __init__(self, tree: Any):
        leaves, structure = jax.tree.flatten(tree)
        parts: dict[Any, list] = {}
        places, others = [], []
        for leaf in leaves:
            size = math.prod(leaf.shape)
            if size > _SMALL:
                others.append(leaf)
                places.append(None)
                continue
            part = parts.setdefault(leaf.dtype, [])
            part.append(xp.ravel(leaf))
            places.append(_Place(list(parts).index(leaf.dtype), size, leaf.shape))
        vectors = [xp.concatenate(part) for part in parts.values()]
        self.arrays = (*vectors, *others)
        self.form = structure, len(vectors), tuple(places)

    def open(self) -> Any:
        structure, count, places = self.form
        others, begins, leaves = iter(self.arrays[count:]), [0] * count, []
        for place in places:
            if place is None:
                leaves.append(next(others))
                continue
            begin = begins[place.vector]
            end = begins[place.vector] = begin + place.size
            leaves.append(self.arrays[place.vector][begin:end].reshape(place.shape))
        return structure.unflatten(leaves)


class _Place(NamedTuple):
    """In which vector an array lies; its beginning follows from those before it."""

    vector: int
    size: int
    shape: tuple[int, ...]


def _bundle(form, arrays) -> Bundle:
    bundle = object.__new__(Bundle)
    bundle.form, bundle.arrays = form, tuple(arrays)
    return bundle


jax.tree_util.register_pytree_node(
    Bundle, lambda bundle: (bundle.arrays, bundle.form), _bundle
)
