"""The attack on a batch of images as a lower level: what it minimises, and where.

With `delta` the perturbation of a batch, the attacker minimises

    l(theta, delta) = -sum_i CE(theta; image_i + delta_i)

over the box of perturbations that keep pixels in [0, 1] and the ball of radius epsilon.
A lower level must be strongly convex, so the loss is linearised where a first attack
ends, or kept and given a quadratic term.
"""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ..._problem.problem import AbstractLocalLower
from ..attacks.losses import cross_entropy, kl_divergence


class AttackLoss(eqx.Module):
    """`l(theta, delta)`, summed over images: each image has an attack of its own.

    - `kind`: "cross-entropy", or "kl": minus the divergence from the clean answer, the
      attack of TRADES.
    - `training`: whether batch norm uses the statistics of the batch.
    """

    images: Float[Array, "batch h w c"]
    labels: Int[Array, " batch"]
    kind: str = eqx.field(static=True, default="cross-entropy")
    training: bool = eqx.field(static=True, default=True)

    def __call__(self, model: Any, delta) -> Float[Array, ""]:
        logits = model(self.images + delta, training=self.training)[0]
        if self.kind == "kl":
            clean = model(self.images, training=self.training)[0]
            return -jnp.sum(kl_divergence(clean, logits))
        return -jnp.sum(cross_entropy(logits, self.labels))


class Linearised(eqx.Module):
    """`<grad l(theta, z), y - z> + curvature / 2 |y - z|^2` around a fixed `z`.

    The linear term is a derivative along `y - z`, so that its mixed derivative is
    reverse over forward: one pass through the network less than the other way round.
    """

    loss: AttackLoss
    z: Float[Array, "batch h w c"]
    curvature: Float[Array, ""]

    def __call__(self, model, y):
        along = y - self.z
        slope = jax.jvp(lambda d: self.loss(model, d), (self.z,), (along,))[1]
        curvature = self.curvature.astype(y.dtype)
        return slope + 0.5 * curvature * jnp.sum(along**2)


class LinearisedAttack(AbstractLocalLower):
    """Linearised where `steps` projected steps from `start` end.

    Plain steps have the length `1 / curvature`, so that the projection that solves the
    linearised problem is one more of them; sign steps have the length `sign_step`.
    How far the first attack came is treated as constant in derivatives.
    """

    loss: AttackLoss
    start: Float[Array, "batch h w c"]
    low: Float[Array, "batch h w c"]
    high: Float[Array, "batch h w c"]
    curvature: Float[Array, ""]
    steps: Int[Array, ""]
    sign_step: Float[Array, ""] | None = None

    def at(self, x):
        def step(_, z):
            gradient = jax.grad(self.loss, argnums=1)(x, z)
            if self.sign_step is None:
                move = gradient / self.curvature.astype(z.dtype)
            else:
                move = self.sign_step.astype(z.dtype) * jnp.sign(gradient)
            return jnp.clip(z - move, self.low, self.high)

        z = jax.lax.fori_loop(0, self.steps, step, self.start)
        return Linearised(self.loss, z, self.curvature)


class RegularisedAttack(eqx.Module):
    """`l(theta, y) + curvature / 2 |y - start|^2`, with the network's own curvature.

    Strongly convex only where `curvature` outweighs that of the loss.
    """

    loss: AttackLoss
    start: Float[Array, "batch h w c"]
    curvature: Float[Array, ""]

    def __call__(self, model, y):
        term = 0.5 * self.curvature.astype(y.dtype) * jnp.sum((y - self.start) ** 2)
        return self.loss(model, y) + term
