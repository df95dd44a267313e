"""`train`: a robust classifier by the methods and the driver of the library."""

import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np

from .._checkpoint import CheckpointError, load
from .._history import History
from .._progress import progress_bar
from .._solve import solve
from .batches import ImageBatches
from .boxes import unit_range
from .devices import batch_sharding, everywhere
from .evaluate import evaluate
from .images import Images
from .losses import correct
from .models import build
from .network import AbstractNetwork
from .pgd import pgd
from .problem import adversarial_problem
from .recipes import instance_of, method_of
from .settings import Settings

# Training images on which clean and robust accuracy are watched, and steps of PGD.
_WATCHED, _WATCH_STEPS = 1000, 10


@dataclass
class Trained:
    """The end of a training run.

    - `model`, `average`: last weights, and the running average of all.
    - `rows`: one dictionary per epoch.
    - `stopped`: why it ended; `collapsed` if the guard ended it.
    """

    model: AbstractNetwork
    average: Any
    history: History
    rows: list[dict]
    stopped: str
    collapsed: bool = False


@dataclass
class Watch:
    """What happens between epochs: rows, the guard, and what the caller wants."""

    images: Images
    settings: Settings
    steps_per_epoch: int
    log: Path | None
    every_epoch: Callable | None
    advance: Callable
    rows: list[dict] = field(default_factory=list)

    def __call__(self, step, model, value, history: History, average) -> bool:
        """Called by the driver after every epoch; true ends the run."""
        epoch, count = step // self.steps_per_epoch, self.steps_per_epoch
        last = lambda name: float(np.mean(history[name][-count:]))
        working = np.diff(history.working)[-1]
        row = dict(
            epoch=epoch,
            loss=last("loss"),
            accuracy=last("accuracy"),
            free=last("free"),
            gradient=last("gradient_norm"),
            **self._accuracies(model),
            seconds=float(working),
            images_per_second=count * self.settings.batch_size / float(working),
        )
        if self.every_epoch is not None:
            row |= self.every_epoch(epoch, model, average, row) or {}
        self.rows.append(row)
        self.advance(1, in_words(row))
        if self.log is not None and jax.process_index() == 0:
            with open(self.log, "a") as file:
                file.write(json.dumps(row) + "\n")
        return self.collapsed or not np.isfinite(row["loss"])

    @property
    def collapsed(self) -> bool:
        """Whether the last epoch has; without an attack there is nothing to lose."""
        row = self.rows[-1]
        attacked = self.settings.method != "clean"
        return attacked and collapsed(row["accuracy"], row["clean"], row["robust"])

    def _accuracies(self, model) -> dict[str, float]:
        x, y = self.images.x_train[:_WATCHED], self.images.y_train[:_WATCHED]
        x, y = jnp.asarray(x), jnp.asarray(y)
        attacked = pgd(
            predict, model, x, y,
            epsilon=self.settings.epsilon, steps=_WATCH_STEPS, restarts=1,
            key=jr.key(0),
        )  # fmt: skip
        robust = float(jnp.mean(attacked.robust))
        return dict(clean=float(_accuracy(model, x, y)), robust=robust)


def in_words(row: dict) -> str:
    """An epoch in a line."""
    return (
        f"loss {row['loss']:.3f}  attacked {row['accuracy']:.1%}  clean "
        f"{row['clean']:.1%}  PGD {row['robust']:.1%}  "
        f"{row['images_per_second']:,.0f} images/s"
    )


def collapsed(attacked: float, clean: float, robust: float) -> bool:
    """Whether accuracy under the training attack no longer says anything.

    Attacked images that are classified far better than clean ones: no attack helps a
    classifier that does not control it, so the weights write labels into the
    perturbation. Or far better than under PGD: the weights have learned the weakness
    of this one attack (catastrophic overfitting).
    """
    if attacked > clean + 0.2:
        return True
    # A weak attack is no collapse: healthy runs were within 0.25 and a factor of two.
    return attacked > robust + 0.3 and attacked > 4 * robust


def train(
    images: Images,
    settings: Settings | None = None,
    *,
    folder: str | os.PathLike | None = None,
    progress: bool = False,
    every_epoch: Callable | None = None,
    devices: list | None = None,
    resume: bool = True,
) -> Trained:
    """Train a classifier on `images` as `settings` say.

    - `folder`: gets `epochs.jsonl`, a row per epoch, and `checkpoint.npz`, from which
      the same call goes on if it was interrupted (`resume=False` starts afresh).
    - `every_epoch(epoch, model, average, row)`: after each epoch; what it returns is
      added to the row.
    - `devices`: over which batches are spread; by default all. Every process of a
      distributed run makes the same call.

    A run ends early when its loss is no number, or when the training attack no longer
    attacks (`collapsed`).
    """
    settings = Settings() if settings is None else settings
    steps_per_epoch = len(images.x_train) // settings.batch_size
    if steps_per_epoch == 0:
        raise ValueError(
            f"`batch_size` is {settings.batch_size}, more than the "
            f"{len(images.x_train)} training images; take a smaller one."
        )
    num_steps = settings.epochs * steps_per_epoch
    devices = jax.devices() if devices is None else devices
    key = jr.key(settings.seed)
    model = everywhere(initial_model(images, settings), devices)
    problem = adversarial_problem(
        image_batches(images, settings, devices), instance_of(settings)
    )
    log, checkpoint = _files(folder, resume, settings)
    rows = _earlier_rows(log, checkpoint)
    with progress_bar(
        settings.epochs, enabled=progress, description="compiling"
    ) as advance:
        watch = Watch(images, settings, steps_per_epoch, log, every_epoch, advance)
        watch.rows += rows
        advance(len(rows))
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
            checkpoint=checkpoint,
            throw=False,
        )
    stopped = found.stopped
    if not np.isfinite(watch.rows[-1]["loss"]):
        stopped = "the loss is no longer a number: lower the rate."
    if watch.collapsed:
        stopped = (
            "collapsed: images under the training attack were classified far better "
            "than clean ones or than under PGD. Take more steps of the attack, raise "
            "the implicit weight, or do not tie it to the attack step."
        )
    return Trained(
        found.x, found.average, found.history, watch.rows, stopped, watch.collapsed
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


def predict(model: AbstractNetwork, images):
    """Logits with running statistics, as in evaluation."""
    return model(images, training=False)[0]


def score(
    model: AbstractNetwork, images: Images, settings: Settings, **options
) -> dict:
    """Clean and robust accuracy on the test images; see `evaluate`."""
    return evaluate(
        predict,
        model,
        jnp.asarray(images.x_test),
        jnp.asarray(images.y_test),
        epsilon=settings.epsilon,
        key=jr.fold_in(jr.key(settings.seed), 2),
        **options,
    )


@eqx.filter_jit
def _accuracy(model, images, labels):
    return jnp.mean(correct(predict(model, unit_range(images)), labels))


def _files(folder, resume: bool, settings: Settings) -> tuple[Path | None, Path | None]:
    if folder is None:
        return None, None
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    log, checkpoint = folder / "epochs.jsonl", folder / "checkpoint.npz"
    recorded, mine = folder / "settings.json", settings.as_row()
    if not resume or not checkpoint.exists():
        for path in (log, checkpoint):
            path.unlink(missing_ok=True)
        if jax.process_index() == 0:
            recorded.write_text(json.dumps(mine, indent=1) + "\n")
        return log, checkpoint
    theirs = json.loads(recorded.read_text()) if recorded.exists() else {}
    for name, value in mine.items():
        if theirs.get(name, value) != value:
            raise CheckpointError(
                f"{folder} holds another run: its {name} is {theirs[name]!r}, this one "
                f"has {value!r}. Name another folder, or repeat the command that made "
                "it."
            )
    return log, checkpoint


def _earlier_rows(log: Path | None, checkpoint: Path | None) -> list[dict[str, Any]]:
    """Rows of the epochs that the checkpoint holds; later ones are cut off."""
    if log is None or checkpoint is None or not checkpoint.exists():
        return []
    done = len(load(checkpoint)[0]["history_evaluated_at"]) - 1
    rows = [json.loads(line) for line in log.read_text().splitlines()[:done]]
    log.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return rows
