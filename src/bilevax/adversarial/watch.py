"""What happens between epochs: a row, and whether the run should go on."""

from collections.abc import Callable
from dataclasses import dataclass, field

import jax.numpy as jnp
import jax.random as jr
import numpy as np

from .._history import History
from .images import Images
from .network import AbstractNetwork
from .pgd import pgd
from .run_folder import RunFolder
from .settings import Settings

# Training images on which clean and robust accuracy are watched, and steps of PGD.
_WATCHED, _STEPS = 1000, 10


@dataclass
class Watch:
    """Called by the driver after every epoch; keeps the rows."""

    images: Images
    settings: Settings
    steps_per_epoch: int
    folder: RunFolder | None
    every_epoch: Callable | None
    advance: Callable
    rows: list[dict] = field(default_factory=list)

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
        if self.every_epoch is not None:
            row |= self.every_epoch(epoch, model, average, row) or {}
        self.rows.append(row)
        self.advance(1, in_words(row))
        if self.folder is not None:
            self.folder.add(row)
        return self.collapsed or self.diverged

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
                "attack, raise the implicit weight, or do not tie it to the attack "
                "step."
            )
        return None


def accuracies(model, images: Images, epsilon: float) -> dict[str, float]:
    """Clean accuracy and that under PGD on some training images.

    `clean_by_batch` is with the statistics of the batch, as in a training pass.
    """
    x, y = images.x_train[:_WATCHED], images.y_train[:_WATCHED]
    find = lambda by, restarts: pgd(
        by, model, x, y,
        epsilon=epsilon, steps=_STEPS, restarts=restarts, key=jr.key(0),
    )  # fmt: skip
    share = lambda attack: float(jnp.mean(attack.robust))
    return dict(
        clean=share(find(predict, 0)),
        clean_by_batch=share(find(predict_by_batch, 0)),
        robust=share(find(predict, 1)),
    )


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
    attacked, clean = row["accuracy"], row["clean_by_batch"]
    if attacked > clean + 0.2:
        return True
    # Running statistics, on which PGD works, lag behind where an epoch has few steps.
    settled = row["clean"] > clean - 0.1
    # A weak attack is no collapse: healthy runs were within 0.25 and a factor of two.
    far = attacked > row["robust"] + 0.3 and attacked > 4 * row["robust"]
    return settled and far


def in_words(row: dict) -> str:
    """An epoch in a line."""
    return (
        f"loss {row['loss']:.3f}  attacked {row['accuracy']:.1%}  clean "
        f"{row['clean']:.1%}  PGD {row['robust']:.1%}  "
        f"{row['images_per_second']:,.0f} images/s"
    )
