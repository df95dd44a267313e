"""PGD: projected sign-gradient ascent from random starts."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PRNGKeyArray, PyTree, Shaped

from .attack import Attack, Loss, Predict, Target
from .boxes import check_radius, pixel_box, random_start
from .losses import cross_entropy
from .restarts import check_steps, restarted


class PGD(eqx.Module):
    """One climb `d+ = P(d + a sign grad loss(x + d))`, `P` onto the pixel box.

    Only the last iterate counts, as is usual for PGD.

    Madry, Makelov, Schmidt, Tsipras and Vladu, Towards deep learning models resistant
    to adversarial attacks, ICLR 2018.
    """

    epsilon: Float[Array, ""]
    step_size: Float[Array, ""]
    steps: int = eqx.field(static=True)

    def __init__(self, epsilon, step_size=None, *, steps: int):
        check_steps(steps)
        # Arrays, so that other numbers use the same program.
        self.epsilon = jnp.asarray(epsilon, float)
        check_radius(self.epsilon)
        length = self.epsilon / 4 if step_size is None else step_size
        self.step_size = jnp.asarray(length, float)
        self.steps = steps

    def __call__(self, target: Target, keys: Shaped[PRNGKeyArray, " B"]) -> Attack:
        low, high = pixel_box(target.images, self.epsilon)
        length = self.step_size.astype(target.images.dtype)

        def step(_, perturbation):
            _, sign = target.ascent(perturbation)
            return jnp.clip(perturbation + length * sign, low, high)

        start = random_start(target.images, self.epsilon, keys)
        return target(jax.lax.fori_loop(0, self.steps, step, start))


def pgd(
    predict: Predict,
    model: PyTree,
    images: Shaped[Array | np.ndarray, " B *pixels"],
    labels: Int[Array | np.ndarray, " B"],
    *,
    epsilon: float | Float[Array, ""],
    steps: int = 50,
    step_size: float | Float[Array, ""] | None = None,
    restarts: int = 10,
    key: PRNGKeyArray,
    loss: Loss = cross_entropy,
) -> Attack:
    """`PGD` from `restarts` random starts; the step is `epsilon / 4` by default.

    An image is robust if its class is right as it is and at the end of every start.
    `predict(model, images)` gives logits in evaluation mode. Calls with the same
    `predict`, `loss`, shapes and counts share one program.
    """
    climb = PGD(epsilon, step_size, steps=steps)
    return restarted(
        climb, predict, model, images, labels, loss, restarts=restarts, key=key
    )
