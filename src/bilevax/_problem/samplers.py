"""Which rows of the data a step sees."""

import abc
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array, Int, PRNGKeyArray, PyTree

from .._programs.modules import Plain


class AbstractSampler(Plain):
    """`sampler(key, step)` gives the batch of one step; `step` may be None."""

    @abc.abstractmethod
    def __call__(
        self, key: PRNGKeyArray, step: Int[Array, ""] | None = None
    ) -> Any: ...


class WithReplacement(AbstractSampler):
    """Rows drawn independently of each other and of other steps."""

    data: PyTree[Array]
    batch_size: int = eqx.field(static=True)

    def __call__(self, key, step=None):
        rows = jax.tree.leaves(self.data)[0].shape[0]
        index = jr.randint(key, (self.batch_size,), 0, rows)
        return jax.tree.map(lambda leaf: leaf[index], self.data)


class Epochs(AbstractSampler):
    """Every row once per epoch, in an order that is new in each epoch.

    What is left of an epoch after the last whole batch is skipped. `seed` chooses the
    orders. A step that has no number gets rows with replacement.
    """

    data: PyTree[Array]
    batch_size: int = eqx.field(static=True)
    seed: int = 0

    def __call__(self, key, step=None):
        rows = jax.tree.leaves(self.data)[0].shape[0]
        index = epoch_rows(rows, self.batch_size, self.seed, key, step)
        return jax.tree.map(lambda leaf: leaf[index], self.data)


class Given(AbstractSampler):
    """A batch that was drawn before."""

    batch: PyTree[Array]

    def __call__(self, key, step=None):
        return self.batch


def epoch_rows(
    rows: int, batch_size: int, seed, key: PRNGKeyArray, step: Int[Array, ""] | None
) -> Int[Array, " batch"]:
    """The rows of step `step` of a run that goes through the data in epochs."""
    if step is None:
        return jr.randint(key, (batch_size,), 0, rows)
    if batch_size > rows:
        raise ValueError(
            f"`batch_size` must not exceed the number of rows; got {batch_size} for "
            f"{rows} rows."
        )
    per_epoch = rows // batch_size
    epoch, place = step // per_epoch, step % per_epoch
    # The order is found again in every step: one sort, and nothing to carry or save.
    bits = jr.bits(jr.fold_in(jr.key(seed), epoch), (rows,), jnp.uint32)
    order = jnp.argsort(bits)
    return jax.lax.dynamic_slice(order, (place * batch_size,), (batch_size,))
