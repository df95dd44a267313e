"""Where a perturbation may be: the ball of the maximum norm, within the pixel range."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray, Shaped

from ..._status import is_traced

Images = Float[Array, " B *pixels"]


def check_radius(epsilon: float | Float[Array, "..."]) -> None:
    """Raise where there is no such ball, if that can be known before running."""
    if is_traced(epsilon) or jnp.ndim(epsilon):
        return
    if not 0 <= float(epsilon) <= 1:
        raise ValueError(
            "`epsilon` is in units of the pixel range [0, 1], such as 8/255; got "
            f"{float(epsilon):g}."
        )


def pixel_box(images: Images, epsilon: Float[Array, ""]) -> tuple[Images, Images]:
    """`max(-eps, -x)` and `min(eps, 1 - x)`: `x + d` stays in [0, 1], `|d| <= eps`."""
    epsilon = jnp.asarray(epsilon, images.dtype)
    return jnp.maximum(-epsilon, -images), jnp.minimum(epsilon, 1 - images)


def random_start(
    images: Images, epsilon: Float[Array, ""], keys: Shaped[PRNGKeyArray, " B"]
) -> Images:
    """Uniform in the ball, then clipped to the pixel box; one key per image."""
    draw = lambda key: jax.random.uniform(
        key, images.shape[1:], images.dtype, minval=-1, maxval=1
    )
    ball = jnp.asarray(epsilon, images.dtype) * jax.vmap(draw)(keys)
    return jnp.clip(ball, *pixel_box(images, epsilon))


def image_keys(key: PRNGKeyArray, index: Int[Array, " B"]) -> Array:
    """A key for each image from its number: its draws do not depend on the batch."""
    return jax.vmap(lambda i: jax.random.fold_in(key, i))(index)


def unit_range(images: Shaped[Array, " B *pixels"]) -> Images:
    """Bytes as float32 in [0, 1]; floating images as they are."""
    if images.dtype == jnp.uint8:
        return images.astype(jnp.float32) / 255
    return images
