"""A robust accuracy without settings: APGD on cross-entropy, then on every target."""

from collections.abc import Callable
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, PyTree, Shaped

from .apgd import APGD
from .attack import Predict, Target, at_rest
from .boxes import Images, unit_range
from .losses import (
    Classes,
    Towards,
    cross_entropy,
    targeted_dlr,
    targeted_margin,
    wrong_classes,
)
from .survivors import Aim, Alive, Crowd


class Ensemble(NamedTuple):
    """Who survived everything, and how many were left after each attack in turn."""

    robust: Bool[np.ndarray, " N"]
    left: dict[str, int]


class RankedAim(eqx.Module):
    """Towards the class that is the `rank`-th most likely wrong one of the clean image.

    With fewer than four classes, where the targeted DLR loss is undefined, the margin
    to the target takes its place: the sign of its gradient needs no scale.
    """

    predict: Predict
    rank: Int[Array, ""]

    def __call__(self, model: PyTree, images: Images, labels: Classes) -> Target:
        logits = self.predict(model, images)
        classes = wrong_classes(logits, labels)[:, self.rank]
        loss = targeted_dlr if logits.shape[-1] > 3 else targeted_margin
        return Target(self.predict, model, images, labels, Towards(loss, classes))


def robust_ensemble(
    predict: Predict,
    model: PyTree,
    images: Shaped[Array | np.ndarray, " N *pixels"],
    labels: Int[Array | np.ndarray, " N"],
    *,
    epsilon: float | Float[Array, ""],
    key: PRNGKeyArray,
    steps: int = 100,
    restarts: int = 1,
    targets: int = 9,
    batch_size: int = 1000,
) -> Ensemble:
    """The images that survive `APGD` on cross-entropy and towards `targets` classes.

    Each attack meets the survivors of those before it, `restarts` times from random
    starts. The targets are the most likely wrong classes, at most all of them. This is
    AutoAttack without its minimal-norm and its score-based attack (FAB, Square), so an
    upper bound of its robust accuracy.
    """
    crowd = Crowd(images, labels, batch_size)
    clean = crowd.strike(
        at_rest, Aim(predict, cross_entropy), model, np.ones(len(crowd), bool), key=key
    )
    return ensemble_on(
        crowd, predict, model, clean,
        epsilon=epsilon, key=key, steps=steps, restarts=restarts, targets=targets,
    )  # fmt: skip


def ensemble_on(
    crowd: Crowd,
    predict: Predict,
    model: PyTree,
    clean: Alive,
    *,
    epsilon: float | Float[Array, ""],
    key: PRNGKeyArray,
    steps: int = 100,
    restarts: int = 1,
    targets: int = 9,
    advance: Callable = lambda count: None,
) -> Ensemble:
    """The same on a set whose correctly classified images are known."""
    climb = APGD(epsilon, steps=steps)
    aims: dict[str, Callable[..., Target]] = {"apgd_ce": Aim(predict, cross_entropy)}
    for rank in range(target_count(predict, model, crowd, targets)):
        aims[f"apgd_t{rank + 1}"] = RankedAim(predict, jnp.asarray(rank))
    alive, left = clean, {"clean": int(clean.sum())}
    for number, (name, aim) in enumerate(aims.items()):
        for restart in range(restarts):
            once = jax.random.fold_in(jax.random.fold_in(key, number), restart)
            alive = crowd.strike(climb, aim, model, alive, key=once, advance=advance)
        left[name] = int(alive.sum())
    return Ensemble(alive, left)


def target_count(predict: Predict, model: PyTree, crowd: Crowd, most: int = 9) -> int:
    """How many wrong classes there are to aim at, at most `most`."""
    shape = (crowd.batch_size, *crowd.images.shape[1:])
    logits = jax.eval_shape(
        lambda images: predict(model, unit_range(images)),
        jax.ShapeDtypeStruct(shape, crowd.images.dtype),
    )
    if logits.shape[-1] < 2:
        raise ValueError("a classifier has at least two classes.")
    return min(most, logits.shape[-1] - 1)
