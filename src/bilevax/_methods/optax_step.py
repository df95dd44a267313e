"""The outer step of DS-BLO for people who bring their own gradients and loop."""

from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp

from .base import tree_norm

if TYPE_CHECKING:
    import optax


class NormalisedMomentumState(NamedTuple):
    """The momentum, and whether it has seen a gradient."""

    momentum: Any
    started: jax.Array


def scale_by_normalised_momentum(
    gamma1: float, gamma2: float, beta: float = 0.9
) -> "optax.GradientTransformation":
    """`-m / (gamma1 |m| + gamma2)` with `m = beta m + (1 - beta) grad`, `m_1 = g_1`.

    The update of `Algo: DS-BLO`; take the gradient at a uniform point between the last
    two iterates and of a freshly tilted problem to get the whole method.
    """

    # Slow to import, and nothing else here needs it.
    import optax

    def init(params):
        zeros = jax.tree.map(jnp.zeros_like, params)
        return NormalisedMomentumState(zeros, jnp.asarray(False))

    def update(updates, state, params=None):
        weight = jnp.where(state.started, beta, 0)
        momentum = jax.tree.map(
            lambda m, g: weight * m + (1 - weight) * g, state.momentum, updates
        )
        length = 1 / (gamma1 * tree_norm(momentum) + gamma2)
        steps = jax.tree.map(lambda m: -length * m, momentum)
        return steps, NormalisedMomentumState(momentum, jnp.asarray(True))

    return optax.GradientTransformation(init, update)
