"""Trained networks on disk: written by `train`, read back by `load_network`."""

import os
from collections.abc import Mapping
from pathlib import Path

import jax.random as jr
from jaxtyping import PyTree

from ..._files import checkpoint as checkpoints
from ..data.images import Images
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
    checkpoints.save(path, arrays, dict(built=built))


def load_network(
    folder: str | os.PathLike,
    kind: str = "average",
    *,
    like: AbstractNetwork | None = None,
) -> AbstractNetwork:
    """The network that `train` left in `folder`.

    - `kind`: "average" for the running average of the weights, "last", or "best" for
      the average of the best epoch, where the run had a validation.
    - `like`: a network of the same shapes, where `train` was given one of your own;
      the networks that `Settings` names are built from the file.
    """
    if kind not in KINDS:
        raise ValueError(f"`kind` is one of {', '.join(KINDS)}; got {kind!r}.")
    place = RunFolder(Path(folder))
    path = place.best if kind == "best" else place.weights
    if not path.exists():
        needed = "with a validation" if kind == "best" else "that has ended"
        raise ValueError(
            f"{path} does not exist: name the folder of a run of `train` {needed}."
        )
    arrays, meta = checkpoints.load(path)
    if like is None:
        checkpoints.check_kinds(path, meta, dict(built=dict))
        like = build(key=jr.key(0), **meta["built"])
    return checkpoints.unflatten(arrays, f"{kind}_", like, path)
