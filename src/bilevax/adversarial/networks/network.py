"""What every network has: the call on a batch, running statistics, counts."""

import abc

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from .batch_norm import Moments
from .layers import Linear, Normalise


class AbstractNetwork(eqx.Module):
    """An image classifier, called on a whole batch of pixels in `[0, 1]`.

        logits, seen = model(images, training=True)
        model = model.absorb(seen)

    Logits come in the precision of the weights. With `training=True` batch norm uses
    the statistics of the batch and `seen` holds them; with `training=False` it uses
    the running ones and `seen` is None. Nothing changes in place: `absorb` is the only
    way by which running statistics move.

    Fields that hold a batch norm are declared in the order of their use, since `absorb`
    matches the two by position.
    """

    normalise: eqx.AbstractVar[Normalise]
    head: eqx.AbstractVar[Linear]
    classes: eqx.AbstractVar[int]

    @abc.abstractmethod
    def features(
        self, x: Float[Array, "b h w c"], training: bool
    ) -> tuple[Float[Array, "b p q d"], tuple[Moments, ...]]:
        """What is pooled before the last layer, and the moments of each batch norm."""

    def __call__(
        self, images: Float[Array, "b h w c"], *, training: bool
    ) -> tuple[Float[Array, "b classes"], PyTree | None]:
        channels = len(self.normalise.mean)
        if images.ndim != 4 or images.shape[-1] != channels:
            raise ValueError(
                f"images have shape (batch, height, width, {channels}); got "
                f"{images.shape}. Add the missing axis, or build the network for "
                "these channels."
            )
        if not jnp.issubdtype(images.dtype, jnp.floating):
            raise ValueError(
                f"images are floats in [0, 1]; got {images.dtype}. Divide bytes by 255."
            )
        precision = self.head.weight.dtype
        x, seen = self.features(self.normalise(images, precision), training)
        logits = self.head(jnp.mean(x, axis=(1, 2), dtype=precision))
        return logits, seen if training else None

    def absorb(self, seen: PyTree, rate: float = 0.1):
        """The network with running statistics `(1 - rate) running + rate seen`."""
        old = _running(self)
        new = _running(seen)
        if len(old) != len(new):
            raise ValueError(
                f"`seen` holds the moments of {len(new)} batch norms, this network has "
                f"{len(old)}. Pass what the network returned with training=True."
            )
        moved = [a.moved(b, rate) for a, b in zip(old, new, strict=True)]
        return eqx.tree_at(_running, self, moved)


def statistics_mask(model: PyTree) -> PyTree[bool]:
    """True at the running statistics, False at every other leaf; for `eqx.partition`.

    Weights and statistics part as
    `statistics, weights = eqx.partition(model, statistics_mask(model))`.
    """
    mark = lambda leaf: jax.tree.map(lambda _: _is_moments(leaf), leaf)
    return jax.tree.map(mark, model, is_leaf=_is_moments)


def num_weights(model: PyTree) -> int:
    """How many numbers training decides; running statistics are not among them."""
    weights = eqx.filter(model, statistics_mask(model), inverse=True)
    return sum(leaf.size for leaf in jax.tree.leaves(weights) if eqx.is_array(leaf))


def _is_moments(node) -> bool:
    return isinstance(node, Moments)


def _running(tree) -> list[Moments]:
    leaves = jax.tree.leaves(tree, is_leaf=_is_moments)
    return [leaf for leaf in leaves if _is_moments(leaf)]
