"""One classifier under attack at one batch, and what an attack has found there."""

from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PRNGKeyArray, PyTree, Shaped

from .boxes import Images
from .losses import Classes, Logits, PerImage, correct

Predict = Callable[[PyTree, Images], Logits]
# Loss per image, of logits and labels.
Loss = Callable[[Logits, Classes], PerImage]


class Attack(eqx.Module):
    """The worst perturbation of each image so far and its loss.

    `robust` is true where no perturbation that was tried changed the class.
    """

    robust: Bool[Array, " B"]
    perturbation: Float[Array, " B *pixels"]
    loss: PerImage


class Target(eqx.Module):
    """The loss of one batch as a function of its perturbation."""

    predict: Predict
    model: PyTree
    images: Images
    labels: Classes
    loss: Loss

    def __call__(self, perturbation: Images) -> Attack:
        """What this one perturbation does."""
        logits = self.predict(self.model, self.images + perturbation)
        # Losses in half precision vanish for images that are classified with certainty.
        logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
        loss = self.loss(logits, self.labels)
        # NaN compares as false both ways; below everything, it is never preferred.
        loss = jnp.where(jnp.isnan(loss), -jnp.inf, loss)
        return Attack(correct(logits, self.labels), perturbation, loss)

    def ascent(self, perturbation: Images) -> tuple[Attack, Images]:
        """The same, with the sign of the gradient of the loss."""

        def total(perturbation):
            found = self(perturbation)
            return jnp.sum(found.loss), found

        slope, found = jax.grad(total, has_aux=True)(perturbation)
        # A slope that is not a number moves nothing: perturbations stay in their box.
        return found, jnp.where(jnp.isnan(slope), 0, jnp.sign(slope))


# An attack climbs from random starts, one key per image.
Climb = Callable[[Target, Shaped[PRNGKeyArray, " B"]], Attack]


def at_rest(target: Target, keys: Shaped[PRNGKeyArray, " B"] | None = None) -> Attack:
    """The attack that changes nothing."""
    return target(jnp.zeros_like(target.images))


def choose(second: Bool[Array, " B"], b: PyTree[Array], a: PyTree[Array]) -> PyTree:
    """Image by image, `b` where `second` holds, else `a`."""
    pick = lambda b, a: jnp.where(jnp.expand_dims(second, range(1, b.ndim)), b, a)
    return jax.tree.map(pick, b, a)


def worst(a: Attack, b: Attack) -> Attack:
    """Image by image: a changed class before a kept one, then the higher loss."""
    better = (a.robust & ~b.robust) | ((a.robust == b.robust) & (b.loss > a.loss))
    return choose(better, b, a)
