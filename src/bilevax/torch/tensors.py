"""Tensors as arrays and back, without copies where memory can be shared.

All is computed in float64, whatever the tensors hold and whatever JAX is set to: active
sets are exact there. JAX's own setting is not touched; ours lasts as long as a call.
"""

from typing import Any

import jax
import torch
from jaxtyping import PyTree


def in_double() -> Any:
    """A context in which JAX computes in float64."""
    return jax.enable_x64(True)


def checked_tensors(tree: PyTree, name: str) -> list[torch.Tensor]:
    """The leaves of `tree`, or a `ValueError` that names the one that does not fit."""
    found = jax.tree_util.tree_flatten_with_path(
        tree, is_leaf=lambda leaf: leaf is None
    )
    first = None
    for path, leaf in found[0]:
        here = name + jax.tree_util.keystr(path)
        _check(leaf, here)
        if first is None:
            first = here, leaf.device
        elif leaf.device != first[1]:
            raise ValueError(
                f"All tensors must be on one device; `{first[0]}` is on {first[1]} and "
                f"`{here}` on {leaf.device}. Move them with `.to({str(first[1])!r})`."
            )
    if first is None:
        raise ValueError(f"`{name}` must hold at least one tensor; got {tree!r}.")
    return [leaf for _, leaf in found[0]]


def _check(leaf, here: str) -> None:
    if not isinstance(leaf, torch.Tensor):
        raise ValueError(
            f"`{here}` must be a torch tensor; got {type(leaf).__name__}. Make it one "
            "with `torch.as_tensor(...)`, or close over it in `instance` if it never "
            "changes."
        )
    if leaf.is_sparse or leaf.layout != torch.strided:
        raise ValueError(
            f"`{here}` must be a dense tensor; got layout {leaf.layout}. Pass "
            "`.to_dense()`."
        )
    if not leaf.is_floating_point():
        remedy = "its real part" if leaf.is_complex() else "`.double()` of it"
        raise ValueError(
            f"`{here}` must hold real floating numbers, for it is differentiated; got "
            f"{leaf.dtype}. Pass {remedy}, or close over it in `instance`."
        )
    if leaf.device.type not in ("cpu", "cuda"):
        raise ValueError(
            f"`{here}` is on {leaf.device}, which JAX does not share memory with. Pass "
            "`.cpu()` of it."
        )
    if leaf.device.type == "cuda" and not _jax_has_cuda():
        raise ValueError(
            f"`{here}` is on {leaf.device}, and JAX sees no such device here: install "
            "`jax[cuda12]` (and see that JAX_PLATFORMS does not exclude cuda), or pass "
            "`.cpu()` of it."
        )


def _jax_has_cuda() -> bool:
    try:
        return bool(jax.devices("cuda"))
    except RuntimeError:
        return False


def to_array(tensor: torch.Tensor) -> jax.Array:
    """The memory of a tensor as an array in double precision."""
    # What is a view of other strides, or negated lazily, has no memory of this form.
    double = tensor.detach().to(torch.float64).resolve_neg().contiguous()
    return jax.dlpack.from_dlpack(double)


def to_tensor(array: jax.Array, dtype: torch.dtype) -> torch.Tensor:
    """A tensor of its own: arrays never change, tensors may be written into."""
    shared = torch.from_dlpack(array)
    return shared.clone() if shared.dtype == dtype else shared.to(dtype)
