"""An attack from several random starts on one batch, in one program."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, PRNGKeyArray, PyTree, Shaped

from ..._status import is_traced
from .attack import Attack, Climb, Loss, Predict, Target, at_rest, worst
from .boxes import image_keys, unit_range


def restarted(
    climb: Climb,
    predict: Predict,
    model: PyTree,
    images: Shaped[Array | np.ndarray, " B *pixels"],
    labels: Int[Array | np.ndarray, " B"],
    loss: Loss,
    *,
    restarts: int,
    key: PRNGKeyArray,
) -> Attack:
    """The worst of the images as they are and of `restarts` climbs."""
    images, labels = jnp.asarray(images), jnp.asarray(labels)
    check_batch(images, labels)
    if restarts < 0:
        raise ValueError(f"the number of restarts is {restarts}.")
    # An array: another number of restarts needs no other program.
    count = jnp.asarray(restarts)
    return _restarted(climb, predict, model, images, labels, loss, count, key)


@eqx.filter_jit
def _restarted(climb, predict, model, images, labels, loss, restarts, key) -> Attack:
    target = Target(predict, model, unit_range(images), labels, loss)
    numbers = jnp.arange(images.shape[0])

    def restart(count, found):
        keys = image_keys(jax.random.fold_in(key, count), numbers)
        return worst(found, climb(target, keys))

    return jax.lax.fori_loop(0, restarts, restart, at_rest(target))


def check_batch(images: Array, labels: Array) -> None:
    """Raise where images and labels cannot belong together."""
    if labels.shape != images.shape[:1]:
        raise ValueError(
            f"one label per image: images have shape {images.shape}, labels "
            f"{labels.shape}."
        )
    if not jnp.issubdtype(labels.dtype, jnp.integer):
        raise ValueError(f"labels are class numbers, not {labels.dtype}.")
    floating = jnp.issubdtype(images.dtype, jnp.floating)
    if not floating and images.dtype != jnp.uint8:
        raise ValueError(
            f"images are floats in [0, 1] or uint8 in 0..255, not {images.dtype}."
        )
    if floating and images.size and not is_traced(images):
        low, high = float(jnp.min(images)), float(jnp.max(images))
        # False for NaN as well.
        if not (low >= 0 and high <= 1):
            raise ValueError(
                f"images are floats in [0, 1]; these go from {low:g} to {high:g}. "
                "Divide bytes by 255, and let the classifier normalise."
            )


def check_steps(steps: int) -> None:
    """Raise where an attack could not move."""
    if steps < 1:
        raise ValueError(f"an attack takes at least one step, not {steps}.")
