"""Trained networks on disk: written by `train`, read back by `load_network`."""

import os
from collections.abc import Mapping
from pathlib import Path

import jax.random as jr
from jaxtyping import PyTree

from ..._files import checkpoint as checkpoints
from ..data.images import Images
from ..files.safetensors_files import load_safetensors
from ..networks.models import build
from ..networks.network import AbstractNetwork
from .run_folder import RunFolder
from .settings import Settings

KINDS = ("average", "last", "best")


def save_networks(
    path: Path, networks: Mapping[str, PyTree], images: Images, settings: Settings
) -> None:
    """Weights by kind, and what is needed to build their network."""
    arrays: dict = {}
    for kind, network in networks.items():
        arrays |= checkpoints.flatten(network, f"{kind}_")
    built = dict(
        name=settings.model,
        classes=images.classes,
        channels=images.x_train.shape[-1],
        mean=list(images.mean),
        std=list(images.std),
        dtype=settings.dtype,
        activation=settings.activation,
        width=settings.width,
    )
    shape = list(images.x_train.shape[1:])
    checkpoints.save(path, arrays, dict(built=built, image_shape=shape))


def image_shape(folder: str | os.PathLike) -> tuple[int, int, int]:
    """Height, width and channels of the images that the run in `folder` has seen."""
    path = _written(RunFolder(Path(folder)), "average")
    _, meta = checkpoints.load(path)
    if "image_shape" not in meta:
        raise ValueError(
            f"{path} does not say how large its images were, as later versions of "
            "bilevax write; say it with `image_size`."
        )
    checkpoints.check_kinds(path, meta, dict(image_shape=list))
    height, width, channels = meta["image_shape"]
    return height, width, channels


def load_network(
    folder: str | os.PathLike,
    kind: str = "average",
    *,
    like: AbstractNetwork | None = None,
) -> AbstractNetwork:
    """The network that `train` left in `folder`, or that `export` wrote as safetensors.

    - `folder`: of the run, or the file `....safetensors`.
    - `kind`: "average" for the running average of the weights, "last", or "best" for
      the average of the best epoch, where the run had a validation.
    - `like`: a network of the same shapes, where `train` was given one of your own;
      the networks that `Settings` names are built from the file.
    """
    if kind not in KINDS:
        raise ValueError(f"`kind` is one of {', '.join(KINDS)}; got {kind!r}.")
    if Path(folder).suffix == ".safetensors":
        return load_safetensors(folder, like)
    path = _written(RunFolder(Path(folder)), kind)
    arrays, meta = checkpoints.load(path)
    if like is None:
        checkpoints.check_kinds(path, meta, dict(built=dict))
        like = build(key=jr.key(0), **meta["built"])
    return checkpoints.unflatten(arrays, f"{kind}_", like, path)


def _written(place: RunFolder, kind: str) -> Path:
    path = place.best if kind == "best" else place.weights
    if not path.exists():
        needed = "with a validation" if kind == "best" else "that has ended"
        raise ValueError(
            f"{path} does not exist: name the folder of a run of `train` {needed}."
        )
    return path
