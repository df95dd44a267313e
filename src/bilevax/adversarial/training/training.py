"""`train`: a robust classifier by the methods and the driver of the library."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr

from ..._driver.history import History
from ..._driver.solve import solve
from ..._files.checkpoint import fingerprint
from ..._files.progress import progress_bar
from ..attacks.evaluate import evaluate
from ..data.batches import ImageBatches
from ..data.images import Images, split
from ..networks.models import build
from ..networks.network import AbstractNetwork
from .devices import batch_sharding, everywhere
from .model_card import write_card
from .problem import adversarial_problem
from .recipes import instance_of, method_of
from .run_folder import RunFolder
from .settings import Settings
from .watch import Watch, predict
from .weights import load_network, save_networks


@dataclass
class Trained:
    """The end of a training run.

    - `model`, `average`: last weights, and the running average of all.
    - `best`, `best_epoch`: the average after the epoch that withstood most on the
      images of the validation; None without one.
    - `rows`: one dictionary per epoch.
    - `stopped`: why it ended; `collapsed` or `diverged` where that is no success.
    """

    model: AbstractNetwork
    average: Any
    history: History
    rows: list[dict]
    stopped: str
    collapsed: bool = False
    diverged: bool = False
    best: AbstractNetwork | None = None
    best_epoch: int | None = None

    @property
    def failed(self) -> bool:
        return self.collapsed or self.diverged


def train(
    images: Images,
    settings: Settings | None = None,
    *,
    folder: str | os.PathLike | None = None,
    progress: bool = False,
    every_epoch: Callable | None = None,
    devices: list | None = None,
    resume: bool = True,
    network: AbstractNetwork | None = None,
) -> Trained:
    """Train a classifier on `images` as `settings` say.

    - `folder`: gets `epochs.jsonl`, a row per epoch, `checkpoint.npz`, from which the
      same call goes on if it was interrupted (`resume=False` starts afresh), and
      `weights.npz` for `load_network` when the run has ended, or as soon as an epoch is
      the best so far, `best.npz`; and `model_card.md`.
    - `every_epoch(epoch, model, average, row)`: after each epoch; what it returns is
      added to the row.
    - `devices`: over which batches are spread; by default all. Every process of a
      distributed run makes the same call.
    - `network`: where to start: one of your own, or one that `load_network` found, to
      train it further. By default `settings.model` with fresh weights.

    A run ends early when it diverges, or when the training attack no longer attacks
    (`collapsed`).
    """
    settings = Settings() if settings is None else settings
    devices = jax.devices() if devices is None else devices
    whole = images
    if settings.validation:
        images = split(images, settings.validation)
    _check(images, settings, len(devices))
    steps_per_epoch = len(images.x_train) // settings.batch_size
    num_steps = settings.epochs * steps_per_epoch
    key = jr.key(settings.seed)
    start = None if network is None else fingerprint(network)
    network = initial_model(images, settings) if network is None else network
    _check_leaves(network)
    model = everywhere(network, devices)
    problem = adversarial_problem(
        image_batches(images, settings, devices), instance_of(settings)
    )
    place = None if folder is None else RunFolder(Path(folder))
    mine = settings.as_row() | dict(start=start)
    rows = [] if place is None else place.claim(mine, resume)
    with progress_bar(
        settings.epochs, enabled=progress, description="compiling"
    ) as advance:
        watch = Watch(
            images, settings, steps_per_epoch, place, every_epoch, advance, rows
        )
        if place is not None and place.best.exists():
            watch.best = load_network(place.path, "best", like=network)
        advance(len(rows), "compiling" if len(rows) < settings.epochs else None)
        found = solve(
            problem,
            method_of(settings, model, num_steps),
            model,
            key=key,
            num_steps=num_steps,
            chunk=steps_per_epoch,
            average=settings.average,
            looks=False,
            polish=False,
            callback=watch,
            checkpoint=None if place is None else place.checkpoint,
            throw=False,
        )
    stopped = watch.verdict or found.stopped
    if watch.verdict is None and watch.rows[-1]["clean"] < 1.2 / images.classes:
        stopped += "; no better than guessing: lower the rate, or take more epochs"
    if place is not None:
        ended = dict(average=found.average, last=found.x)
        save_networks(place.weights, ended, images, settings)
        write_card(place.path, found.x, whole, settings, stopped)
    return Trained(
        model=found.x,
        average=found.average,
        history=found.history,
        rows=watch.rows,
        stopped=stopped,
        collapsed=watch.collapsed,
        diverged=watch.diverged,
        best=watch.best,
        best_epoch=watch.best_epoch,
    )


def _check(images: Images, settings: Settings, devices: int) -> None:
    """Raise where images, settings and devices do not fit together."""
    count, side = len(images.x_train), min(images.x_train.shape[1:3])
    if settings.batch_size > count:
        raise ValueError(
            f"`batch_size` is {settings.batch_size}, more than the {count} training "
            "images; take a smaller one."
        )
    if settings.batch_size % devices:
        raise ValueError(
            f"`batch_size` is {settings.batch_size}, which {devices} devices cannot "
            f"share evenly; take a multiple of {devices}."
        )
    if 2 * settings.padding > side:
        raise ValueError(
            f"`padding` is {settings.padding}: crops of images {side} pixels wide "
            f"would lose more than half. Take at most {side // 2}."
        )


def _check_leaves(network: AbstractNetwork) -> None:
    for leaf in jax.tree.leaves(network):
        if not eqx.is_array(leaf):
            raise ValueError(
                f"the network has a leaf of type {type(leaf).__name__}; all leaves are "
                "trained, so they must be JAX arrays. Fields that are no weights: mark "
                "them as static, `eqx.field(static=True)`."
            )


def initial_model(images: Images, settings: Settings) -> AbstractNetwork:
    """The network of `settings` for these images, with fresh weights."""
    return build(
        settings.model,
        key=jr.fold_in(jr.key(settings.seed), 1),
        classes=images.classes,
        channels=images.x_train.shape[-1],
        mean=images.mean,
        std=images.std,
        dtype=settings.dtype,
        activation=settings.activation,
        width=settings.width,
    )


def image_batches(images: Images, settings: Settings, devices) -> ImageBatches:
    """The training images, on all devices, as minibatches."""
    return ImageBatches(
        everywhere(jnp.asarray(images.x_train), devices),
        everywhere(jnp.asarray(images.y_train), devices),
        settings.batch_size,
        settings.seed,
        settings.padding,
        settings.flip,
        "float64" if settings.dtype == "float64" else "float32",
        batch_sharding(devices),
    )


def score(
    model: AbstractNetwork, images: Images, settings: Settings, **options
) -> dict:
    """Clean and robust accuracy on the test images; see `evaluate`.

    Over all devices where they can share the images evenly.
    """
    devices = jax.devices()
    spread = batch_sharding(devices)
    if spread is None or len(images.x_test) % len(devices):
        placed = everywhere((images.x_test, images.y_test), devices)
    else:
        placed = jax.device_put((images.x_test, images.y_test), spread)
    return evaluate(
        predict,
        everywhere(model, devices),
        *placed,
        epsilon=settings.epsilon,
        key=jr.fold_in(jr.key(settings.seed), 2),
        **options,
    )
