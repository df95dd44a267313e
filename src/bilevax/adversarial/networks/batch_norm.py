"""Batch normalisation whose running statistics are plain leaves of the network."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from .layers import WEIGHT_DTYPES


class Moments(eqx.Module):
    """Mean and variance by channel.

    The variance is the plain one, divided by the number of values and not by one less:
    running statistics of one repeated batch are then the very statistics that training
    uses.
    """

    mean: Float[Array, " c"]
    variance: Float[Array, " c"]

    @staticmethod
    def of(x: Float[Array, "b h w c"], near: Float[Array, " c"]) -> "Moments":
        """Those of a whole batch, with `near` a guess of its mean.

        Sums over the axes of one array: where the batch is spread over devices, these
        are still the moments of all of it. Both come from one pass, as
        `E(x - near)^2 - (E(x - near))^2`, which holds for any `near`; a difference of
        squares loses digits only where `near` is many deviations off.
        """
        off = x - near
        shift = jnp.mean(off, axis=(0, 1, 2))
        variance = jnp.mean(jnp.square(off), axis=(0, 1, 2)) - jnp.square(shift)
        return Moments(near + shift, jnp.maximum(variance, 0))

    def moved(self, seen: "Moments", rate: float) -> "Moments":
        """`(1 - rate) self + rate seen`; no gradient passes."""
        move = lambda old, new: jax.lax.stop_gradient((1 - rate) * old + rate * new)
        return jax.tree.map(move, self, seen)


class BatchNorm(eqx.Module):
    """`scale (x - mean) / sqrt(variance + epsilon) + offset` by channel.

    Computed in float32, or in float64 where the weights are; the result has the type
    of `x`.
    """

    scale: Float[Array, " c"]
    offset: Float[Array, " c"]
    running: Moments
    epsilon: float = eqx.field(static=True)

    def __init__(self, channels: int, *, dtype: str, epsilon: float = 1e-5):
        ones, zeros = (
            jnp.full(channels, value, WEIGHT_DTYPES[dtype]) for value in (1, 0)
        )
        self.scale, self.offset = ones, zeros
        self.running = Moments(zeros, ones)
        self.epsilon = epsilon

    def __call__(
        self, x: Float[Array, "b h w c"], training: bool
    ) -> tuple[Float[Array, "b h w c"], tuple[Moments, ...]]:
        """The normalised batch, and in a tuple the moments it had when training."""
        wide = x.astype(jnp.promote_types(self.scale.dtype, jnp.float32))
        used, seen = jax.lax.stop_gradient(self.running), ()
        if training:
            used = Moments.of(wide, near=used.mean)
            seen = (used,)
        factor = self.scale * jax.lax.rsqrt(used.variance + self.epsilon)
        return ((wide - used.mean) * factor + self.offset).astype(x.dtype), seen
