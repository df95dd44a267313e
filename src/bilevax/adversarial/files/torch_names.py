"""The arrays of a network as PyTorch names and lays them out.

A name is the way to a layer, as in `state_dict` of a torch module with the same fields:
`blocks.0.conv1.weight`, `norm.running_mean`, `head.bias`. Torch has convolutions as
`(out, in, height, width)` and linear maps as `(out, in)`.
"""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from ..networks.batch_norm import BatchNorm
from ..networks.layers import Conv, Linear
from ..networks.network import AbstractNetwork

# By field of our layer, as it is found in the tree: torch's name of it.
_NORM = {
    "scale": "weight",
    "offset": "bias",
    "running.mean": "running_mean",
    "running.variance": "running_var",
}
_TO_TORCH = {Conv: (3, 2, 0, 1), Linear: (1, 0)}


def to_torch(network: AbstractNetwork) -> dict[str, np.ndarray]:
    """All arrays of the network by torch's names, in torch's layout."""
    found = {}
    for name, axes, leaf in _named(network):
        array = np.asarray(leaf)
        # Files of arrays know no strides.
        found[name] = np.ascontiguousarray(array.transpose(axes) if axes else array)
    return found


def from_torch(arrays: dict[str, np.ndarray], like: AbstractNetwork) -> AbstractNetwork:
    """A network shaped like `like` with these arrays; a `ValueError` says why not."""
    leaves = []
    named = list(_named(like))
    strangers = sorted(set(arrays) - {name for name, _, _ in named})
    if strangers:
        raise ValueError(f"it has {strangers[0]!r}, which the network has not")
    for name, axes, leaf in named:
        stored = arrays.get(name)
        if stored is None:
            raise ValueError(f"it has no {name!r}")
        if axes and stored.ndim == len(axes):
            stored = stored.transpose(np.argsort(axes))
        if stored.shape != leaf.shape or stored.dtype.kind != "f":
            raise ValueError(
                f"its {name!r} is {stored.dtype} of shape {stored.shape}; the network "
                f"needs floats of shape {leaf.shape} (in the order of JAX)"
            )
        if not np.isfinite(stored).all():
            raise ValueError(f"its {name!r} has entries that are not finite")
        leaves.append(jnp.asarray(stored, leaf.dtype))
    dynamic, static = eqx.partition(like, eqx.is_array)
    structure = jax.tree.structure(dynamic)
    return eqx.combine(structure.unflatten(leaves), static)


def _named(network: AbstractNetwork) -> list[tuple[str, tuple[int, ...] | None, Any]]:
    """Name, axes in torch's order (None: as they are) and leaf, in the order of JAX."""
    dynamic = eqx.filter(network, eqx.is_array)
    layers, _ = jax.tree_util.tree_flatten_with_path(dynamic, is_leaf=_is_layer)
    found = []
    for path, layer in layers:
        for rest, leaf in jax.tree_util.tree_leaves_with_path(layer):
            inner = _dotted(rest)
            if isinstance(layer, BatchNorm):
                inner = _NORM[inner]
            axes = _TO_TORCH.get(type(layer)) if inner == "weight" else None
            name = ".".join(part for part in (_dotted(path), inner) if part)
            found.append((name, axes, leaf))
    return found


def _is_layer(node) -> bool:
    return isinstance(node, BatchNorm | Conv | Linear)


def _dotted(path) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".")
