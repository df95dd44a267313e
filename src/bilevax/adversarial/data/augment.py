"""Random crops and flips of a batch, on the device that holds it.

Image `i` of the batch gets the draw of `fold_in(key, i)`: it depends on the key and on
the place in the whole batch, and neither on the size of the batch nor on how it is
spread over devices.
"""

import jax
import jax.numpy as jnp
import jax.random as jr
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Int32, PRNGKeyArray, Shaped


def crop_and_flip(
    images: Shaped[Array, "b h w c"],
    key: PRNGKeyArray,
    padding: int = 4,
    *,
    flip: bool = True,
) -> Shaped[Array, "b h w c"]:
    """Each image shifted by up to `padding` pixels, and mirrored with odds 1/2.

    Pixels that come in from outside are zero, which is black: augment before pixels
    are normalised. `flip=False` is for images whose mirror has another meaning, such as
    digits. Floats and bytes keep their type.
    """
    if padding < 0:
        raise ValueError(f"`padding` is not negative; got {padding}.")
    if images.ndim != 4:
        raise ValueError(
            f"images have shape (batch, height, width, channels); got {images.shape}."
        )
    corners, mirrored = _beside(images, draw(key, images.shape[0], padding))
    images = crop(images, corners, padding)
    return mirror(images, mirrored) if flip else images


def draw(
    key: PRNGKeyArray, count: int, padding: int
) -> tuple[Int32[Array, "b 2"], Bool[Array, " b"]]:
    """Corners of the crops, uniform in `0..2 padding`, and which images to mirror."""

    def one(i):
        # The type is given, so that float64 mode draws the same.
        return jr.randint(jr.fold_in(key, i), (3,), 0, ends, jnp.int32)

    ends = jnp.array([2 * padding + 1, 2 * padding + 1, 2], jnp.int32)
    numbers = jax.vmap(one)(jnp.arange(count, dtype=jnp.uint32))
    return numbers[:, :2], numbers[:, 2] == 1


def _beside(images, draws):
    """The draws, spread over devices like the images where axes of a mesh are explicit.

    Elsewhere the compiler places them.
    """
    sharding = jax.typeof(images).sharding
    if not sharding.spec or sharding.spec[0] is None:
        return draws
    spread = NamedSharding(sharding.mesh, PartitionSpec(sharding.spec[0]))
    return jax.tree.map(lambda x: jax.sharding.reshard(x, spread), draws)


def crop(
    images: Shaped[Array, "b h w c"], corners: Int32[Array, "b 2"], padding: int
) -> Shaped[Array, "b h w c"]:
    """Of each image with a border of zeros, the window of its old size at its corner.

    The corner `(padding, padding)` gives the image itself.
    """
    border = ((0, 0), (padding, padding), (padding, padding), (0, 0))
    size = images.shape[1:]

    def one(image, corner):
        return jax.lax.dynamic_slice(image, (*corner, jnp.int32(0)), size)

    return jax.vmap(one)(jnp.pad(images, border), corners)


def mirror(
    images: Shaped[Array, "b h w c"], mirrored: Bool[Array, " b"]
) -> Shaped[Array, "b h w c"]:
    """The images, with left and right exchanged where `mirrored`."""
    return jnp.where(mirrored[:, None, None, None], images[:, :, ::-1], images)
