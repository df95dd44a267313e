"""One call for every kind of file; the end of its name says which."""

import os
from pathlib import Path

from ..networks.network import AbstractNetwork
from .onnx_files import save_onnx
from .safetensors_files import save_safetensors


def export(
    network: AbstractNetwork,
    path: str | os.PathLike,
    *,
    image_shape: tuple[int, int, int] | None = None,
) -> None:
    """Write a network for others to load.

    - `path`: `....safetensors` for the arrays, with the names and layouts of PyTorch,
      which `load_network` reads back; `....onnx` for all of the network, which takes
      float32 pixels in [0, 1] of shape (batch, channels, height, width) and gives
      logits.
    - `image_shape`: height, width and channels of the images, for ONNX.
    """
    kind = Path(path).suffix
    if kind == ".safetensors":
        return save_safetensors(network, path)
    if kind != ".onnx":
        raise ValueError(
            f"`path` ends in .safetensors or .onnx, which says what is written; got "
            f"{str(path)!r}."
        )
    if image_shape is None:
        raise ValueError(
            "ONNX needs `image_shape`: height, width and channels of the images."
        )
    return save_onnx(network, path, image_shape)
