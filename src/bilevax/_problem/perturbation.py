"""Laws of the linear tilt `q` that `problem.perturbed(q)` adds to the lower level."""

import abc

import jax
import jax.numpy as jnp
import jax.random as jr
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, ArrayLike, PRNGKeyArray, PyTree

from .._arguments import check_fields
from .._programs.modules import Plain


class AbstractPerturbation(Plain):
    """A continuous law on the space of `y`."""

    def __check_init__(self):
        check_fields(self)

    @abc.abstractmethod
    def sample(self, like: PyTree[Array], *, key: PRNGKeyArray) -> PyTree[Array]:
        """One tilt with the structure, shapes and dtypes of `like`."""

    @abc.abstractmethod
    def radius(self, size: int) -> ArrayLike:
        """`sup |q|` over the law in `size` dimensions (`prop:perturbed_prob`)."""


class Gaussian(AbstractPerturbation):
    """Independent normal entries with standard deviation `std`; unbounded."""

    std: ArrayLike

    def sample(self, like, *, key):
        flat, unravel = ravel_pytree(like)
        return unravel(jnp.asarray(self.std) * jr.normal(key, flat.shape, flat.dtype))

    def radius(self, size):
        return jnp.inf


class UniformBall(AbstractPerturbation):
    """Uniform in the Euclidean ball of radius `max_norm`."""

    max_norm: ArrayLike

    def sample(self, like, *, key):
        flat, unravel = ravel_pytree(like)
        direction_key, radius_key = jr.split(key)
        direction = jr.normal(direction_key, flat.shape, flat.dtype)
        direction = direction / jnp.linalg.norm(direction)
        # The radius of a uniform point has distribution function (r / max_norm)^n.
        share = jr.uniform(radius_key, (), flat.dtype) ** (1 / flat.size)
        return unravel(self.max_norm * share * direction)

    def radius(self, size):
        return self.max_norm


class TruncatedGaussian(AbstractPerturbation):
    """Normal entries of deviation `std`, conditioned on `|q_i| <= width * std`."""

    std: ArrayLike
    width: float = 3.0

    def sample(self, like, *, key):
        flat, unravel = ravel_pytree(like)
        draw = jr.truncated_normal(key, -self.width, self.width, flat.shape, flat.dtype)
        return unravel(jnp.asarray(self.std) * draw)

    def radius(self, size):
        return self.width * self.std * jnp.sqrt(size)


def tree_add(a: PyTree[Array], b: PyTree[Array]) -> PyTree[Array]:
    """Leafwise sum."""
    return jax.tree.map(jnp.add, a, b)
