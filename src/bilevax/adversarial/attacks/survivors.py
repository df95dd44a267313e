"""Rounds of attacks on a whole set, each on the images that are left.

Batches all have one shape, so that a kind of attack is compiled once; the last one is
filled up with images whose outcome is dropped.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, PRNGKeyArray, PyTree

from .attack import Climb, Loss, Predict, Target
from .boxes import Images, image_keys, unit_range
from .losses import Classes
from .restarts import check_batch

Alive = Bool[np.ndarray, " N"]


class Aim(eqx.Module):
    """How a batch becomes a target: the classifier and one loss."""

    predict: Predict
    loss: Loss

    def __call__(self, model: PyTree, images: Images, labels: Classes) -> Target:
        return Target(self.predict, model, images, labels, self.loss)


class Layout(NamedTuple):
    """Where batches live on a mesh of devices, and where their outcome goes."""

    batch: NamedSharding
    outcome: NamedSharding


class Crowd:
    """A set on the device, with the size of its batches.

    A set that is split over a mesh along its images has its batches split alike, and
    their size is rounded up to a multiple of the number of parts. Any other set is
    attacked where it is. On a mesh with explicit axes every device works on everything:
    how a classifier splits its operations there cannot be known here.
    """

    def __init__(self, images, labels, batch_size: int):
        if batch_size < 1:
            raise ValueError(f"a batch has at least one image, not {batch_size}.")
        self.images, self.labels = jnp.asarray(images), jnp.asarray(labels)
        check_batch(self.images, self.labels)
        if not len(self.images):
            raise ValueError("there are no images.")
        self.images, self.labels = _settled(self.images), _settled(self.labels)
        self.layout, parts = _layout(self.images)
        self.batch_size = -(-min(batch_size, len(self)) // parts) * parts

    def __len__(self) -> int:
        return self.images.shape[0]

    def strike(
        self,
        climb: Climb,
        aim: Callable[..., Target],
        model: PyTree,
        alive: Alive,
        *,
        key: PRNGKeyArray,
        advance: Callable = lambda count: None,
    ) -> Alive:
        """Who is left of `alive` after one climb each.

        Draws depend on `key` and on the number of the image alone. `advance` hears of
        every image of the set, at once of those that are out already.
        """
        left = alive.copy()
        numbers = np.flatnonzero(alive)
        advance(len(self) - numbers.size)
        size = self.batch_size
        batches = [numbers[i : i + size] for i in range(0, numbers.size, size)]
        # All are under way before the first outcome is waited for.
        outcomes = [
            _outcome(
                climb,
                aim,
                model,
                self.images,
                self.labels,
                np.resize(batch, size),
                key,
                self.layout,
            )
            for batch in batches
        ]
        for batch, outcome in zip(batches, outcomes, strict=True):
            left[batch] = np.asarray(outcome)[: batch.size]
            advance(batch.size)
        return left


@eqx.filter_jit
def _outcome(climb, aim, model, images, labels, numbers, key, layout) -> Array:
    # The whole set stays on the device as bytes; a batch is gathered there.
    images, labels = images[numbers], labels[numbers]
    keys = image_keys(key, numbers)
    if layout is not None:
        images = jax.lax.with_sharding_constraint(images, layout.batch)
        labels = jax.lax.with_sharding_constraint(labels, layout.batch)
    robust = climb(aim(model, unit_range(images), labels), keys).robust
    if layout is not None:
        robust = jax.lax.with_sharding_constraint(robust, layout.outcome)
    return robust


def _settled(array: Array) -> Array:
    """The array; a whole copy per device where it is split along explicit axes."""
    sharding = array.sharding
    if not isinstance(sharding, NamedSharding) or sharding.is_fully_replicated:
        return array
    if AxisType.Explicit not in sharding.mesh.axis_types:
        return array
    return jax.device_put(array, NamedSharding(sharding.mesh, PartitionSpec()))


def _layout(images: Array) -> tuple[Layout | None, int]:
    """The layout of batches, and into how many parts they are split."""
    sharding = images.sharding
    if not isinstance(sharding, NamedSharding):
        return None, 1
    axes = (*sharding.spec, None)[0]
    names = () if axes is None else axes if isinstance(axes, tuple) else (axes,)
    batch = NamedSharding(sharding.mesh, PartitionSpec(axes))
    outcome = NamedSharding(sharding.mesh, PartitionSpec())
    return Layout(batch, outcome), math.prod(sharding.mesh.shape[n] for n in names)
