"""Minibatches of images, augmented on the device."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array, Float, Int, PRNGKeyArray, UInt8

from ..._problem.samplers import AbstractSampler, epoch_rows
from .augment import crop_and_flip


class Batch(eqx.Module):
    """Images in [0, 1], their labels and rows, and a key for what is drawn later."""

    images: Float[Array, "batch h w c"]
    labels: Int[Array, " batch"]
    rows: Int[Array, " batch"]
    key: PRNGKeyArray


class ImageBatches(AbstractSampler):
    """Every image once per epoch, cropped and perhaps flipped at random.

    - `padding`: of the random crop; zero for none. `flip`: left to right.
    - `sharding`: how the batch lies on devices; None leaves it to JAX.
    """

    images: UInt8[Array, "n h w c"]
    labels: Int[Array, " n"]
    batch_size: int = eqx.field(static=True)
    seed: Int[Array, ""] = eqx.field(converter=jnp.asarray, default=0)
    padding: int = eqx.field(static=True, default=4)
    flip: bool = eqx.field(static=True, default=True)
    dtype: str = eqx.field(static=True, default="float32")
    sharding: jax.sharding.Sharding | None = eqx.field(static=True, default=None)

    def __call__(self, key, step=None):
        rows_key, augment_key, later = jr.split(key, 3)
        count = self.images.shape[0]
        rows = epoch_rows(count, self.batch_size, self.seed, rows_key, step)
        images, labels = self.images[rows], self.labels[rows]
        if self.sharding is not None:
            hold = lambda leaf: jax.lax.with_sharding_constraint(leaf, self.sharding)
            images, labels, rows = hold(images), hold(labels), hold(rows)
        images = images.astype(self.dtype) / 255
        if self.padding or self.flip:
            images = crop_and_flip(images, augment_key, self.padding, flip=self.flip)
        return Batch(images, labels, rows, later)
