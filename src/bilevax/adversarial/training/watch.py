"""What happens between epochs: a row, which epoch was best, whether to go on."""

from collections.abc import Callable
from dataclasses import dataclass, field

import jax.numpy as jnp
import jax.random as jr
import numpy as np

from ..._driver.history import History
from ..attacks.pgd import pgd
from ..data.images import Images
from ..networks.network import AbstractNetwork
from .run_folder import RunFolder
from .settings import Settings
from .weights import save_networks

# Training images on which clean and robust accuracy are watched, and steps of PGD.
_WATCHED, _STEPS = 1000, 10


@dataclass
class Watch:
    """Called by the driver after every epoch; keeps the rows and the best average.

    `images` are those of the training; as its test images those of the validation, if
    there are any.
    """

    images: Images
    settings: Settings
    steps_per_epoch: int
    folder: RunFolder | None
    every_epoch: Callable | None
    advance: Callable
    rows: list[dict] = field(default_factory=list)
    best: AbstractNetwork | None = None

    def __call__(self, step, model, value, history: History, average) -> bool:
        """True ends the run."""
        epoch, count = step // self.steps_per_epoch, self.steps_per_epoch
        last = lambda name: history[name][-count:]
        moved = np.isfinite(last("gradient_norm")) & np.isfinite(last("value"))
        working = float(np.diff(history.working)[-1])
        row = dict(
            epoch=epoch,
            loss=float(np.mean(last("loss"))),
            accuracy=float(np.mean(last("accuracy"))),
            free=float(np.mean(last("free"))),
            gradient=float(np.mean(last("gradient_norm")[moved])) if moved.any() else 0,
            skipped=int(count - moved.sum()),
            **accuracies(model, self.images, self.settings.epsilon),
            seconds=working,
            images_per_second=count * self.settings.batch_size / working,
        )
        if self.settings.validation:
            row |= dict(validation=validation(average, self.images, self.settings))
        if self.every_epoch is not None:
            row |= self.every_epoch(epoch, model, average, row) or {}
        self.rows.append(row)
        if self.best_epoch == epoch:
            self._keep(average)
        self.advance(1, in_words(row))
        if self.folder is not None:
            self.folder.add(row)
        return self.collapsed or self.diverged

    def _keep(self, average: AbstractNetwork) -> None:
        self.best = average
        if self.folder is not None:
            save_networks(
                self.folder.best, dict(best=average), self.images, self.settings
            )

    @property
    def best_epoch(self) -> int | None:
        """The first with the highest accuracy on the images of the validation."""
        if not self.settings.validation:
            return None
        return max(self.rows, key=lambda row: row["validation"])["epoch"]

    @property
    def collapsed(self) -> bool:
        """Whether the last epoch has; without an attack there is nothing to lose."""
        return self.settings.method != "clean" and collapsed(self.rows[-1])

    @property
    def diverged(self) -> bool:
        """Whether the loss of the last epoch is no number, or most of its steps had
        no finite gradient. Such steps are skipped, so the weights stay where they are.
        """
        row = self.rows[-1]
        # A row that was read from a file has None for what is no number.
        lost = row["loss"] is None or not np.isfinite(row["loss"])
        return lost or row["skipped"] > self.steps_per_epoch / 2

    @property
    def verdict(self) -> str | None:
        """Why the run should not have gone on, and what to change."""
        if self.diverged:
            return (
                "diverged: the loss is no number or gradients are not finite. Lower "
                "the rate."
            )
        if self.collapsed:
            return (
                "collapsed: images under the training attack were classified far "
                "better than clean ones or than under PGD. Take more steps of the "
                "attack and a shorter last one (the default), raise the implicit "
                "weight, or do not tie it to the attack step. " + self._remains
            )
        return None

    @property
    def _remains(self) -> str:
        if self.best_epoch is None:
            return "A validation keeps the weights of the best epoch."
        return f"The weights of the best epoch, {self.best_epoch}, were kept."


def validation(average: AbstractNetwork, images: Images, settings: Settings) -> float:
    """Accuracy of the average under PGD on images it was not trained on."""
    x, y = images.x_test, images.y_test
    parts = [slice(i, i + _WATCHED) for i in range(0, len(x), _WATCHED)]
    right = [
        _withstood(predict, average, x[part], y[part], settings.epsilon)
        for part in parts
    ]
    return float(sum(map(jnp.sum, right)) / len(x))


def accuracies(model, images: Images, epsilon: float) -> dict[str, float]:
    """Clean accuracy and that under PGD on some training images.

    `..._by_batch` is with the statistics of the batch, as in a training pass: running
    statistics lag behind where an epoch has few steps, or where a run collapses.
    """
    x, y = images.x_train[:_WATCHED], images.y_train[:_WATCHED]
    share = lambda by, **options: float(
        jnp.mean(_withstood(by, model, x, y, epsilon, **options))
    )
    return dict(
        clean=share(predict, restarts=0),
        clean_by_batch=share(predict_by_batch, restarts=0),
        robust=share(predict),
        robust_by_batch=share(predict_by_batch),
    )


def _withstood(by, model, x, y, epsilon: float, restarts: int = 1):
    """Which images are classified correctly, also after PGD from `restarts` starts."""
    return pgd(
        by, model, x, y,
        epsilon=epsilon, steps=_STEPS, restarts=restarts, key=jr.key(0),
    ).robust  # fmt: skip


def predict(model: AbstractNetwork, images):
    """Logits with running statistics, as in evaluation."""
    return model(images, training=False)[0]


def predict_by_batch(model: AbstractNetwork, images):
    """Logits with the statistics of the batch."""
    return model(images, training=True)[0]


def collapsed(row: dict) -> bool:
    """Whether accuracy under the training attack no longer says anything.

    Attacked images that are classified far better than clean ones: no attack helps a
    classifier that does not control it, so the weights write labels into the
    perturbation. Or far better than under PGD: the weights have learned the weakness
    of this one attack (catastrophic overfitting).
    """
    attacked, clean, robust = (
        row[name] for name in ("accuracy", "clean_by_batch", "robust_by_batch")
    )
    # A weak attack is no collapse: healthy runs were within 0.25 and a factor of two.
    far = attacked > robust + 0.3 and attacked > 4 * robust
    return attacked > clean + 0.2 or far


def in_words(row: dict) -> str:
    """An epoch in a line."""
    return (
        f"loss {row['loss']:.3f}  attacked {row['accuracy']:.1%}  clean "
        f"{row['clean']:.1%}  PGD {row['robust']:.1%}  "
        f"{row['images_per_second']:,.0f} images/s"
    )
