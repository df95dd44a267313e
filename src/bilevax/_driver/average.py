"""A running average of the iterates."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PyTree

from .._programs.arrays import xp
from .._programs.modules import Plain


class Average(Plain):
    """`mean = d mean + (1 - d) x` with `d = min(decay, (1 + t) / (10 + t))`.

    The second term lets a short run forget its start.
    """

    decay: Float[Array, ""] = eqx.field(converter=lambda d: jnp.asarray(d, float))

    def update(
        self, mean: PyTree[Array], x: PyTree[Array], step: Int[Array, ""]
    ) -> PyTree[Array]:
        """The average after `x` was reached in step `step` (counted from zero)."""
        t = xp.asarray(step, self.decay.dtype)
        decay = xp.minimum(self.decay, (1 + t) / (10 + t))

        def blend(a, b):
            weight = decay.astype(a.dtype)
            return weight * a + (1 - weight) * b

        return jax.tree.map(blend, mean, x)
