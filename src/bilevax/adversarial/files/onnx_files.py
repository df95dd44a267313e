"""Networks as ONNX, through jax2onnx: pixels in, logits out, for any runtime."""

import os
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from ..._files.checkpoint import CheckpointError
from ..networks.models import computing_in
from ..networks.network import AbstractNetwork


def save_onnx(
    network: AbstractNetwork,
    path: str | os.PathLike,
    image_shape: tuple[int, int, int],
) -> None:
    """Write the network in evaluation mode, computing in float32.

    - `image_shape`: height, width and channels. The file takes float32 of shape
      `(batch, channels, height, width)` in [0, 1], any batch, as is usual in ONNX.
    """
    height, width, channels = image_shape
    if channels != len(network.normalise.mean):
        raise ValueError(
            f"`image_shape` has {channels} channels, the network "
            f"{len(network.normalise.mean)}; it is (height, width, channels)."
        )
    convert = _converter()
    network = computing_in(network, "float32")

    def logits(pixels):
        images = jnp.transpose(pixels, (0, 2, 3, 1))
        return network(images, training=False)[0].astype("float32")

    path = Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        convert(
            logits,
            [("batch", channels, height, width)],
            model_name="network",
            return_mode="file",
            output_path=str(path),
        )
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be written ({error.strerror or error}); free space, mend "
            "permissions or name another file."
        ) from error


def _converter() -> Any:
    try:
        from jax2onnx import to_onnx
    except ImportError:
        raise ImportError(
            "Files of ONNX need the package jax2onnx: pip install 'bilevax[onnx]'."
        ) from None
    return to_onnx
