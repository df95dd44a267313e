"""Steps of an optax optimiser, for methods that only need a gradient."""

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, PyTree

from .._implicit.feasible import onto_domain
from .._problem.problem import Problem

if TYPE_CHECKING:
    import optax


def check_optimiser(optimiser: Any) -> None:
    """Raise a `ValueError` unless `optimiser` is one of optax."""
    if not (hasattr(optimiser, "init") and hasattr(optimiser, "update")):
        raise ValueError(
            "`optimiser` must be an optax optimiser such as optax.sgd(0.1); got "
            f"{optimiser!r}."
        )


def optimiser_step(
    optimiser: "optax.GradientTransformation",
    problem: Problem,
    memory: Any,
    x: PyTree[Array],
    grad: PyTree[Array],
    usable: Bool[Array, ""],
) -> tuple[PyTree[Array], Any]:
    """`P(x + u)` with the update `u` of the optimiser, and its new memory.

    Where there is no usable gradient nothing changes.
    """
    import optax  # here, since it takes a while to import

    updates, after = optimiser.update(grad, memory, x)
    ahead = onto_domain(problem, optax.apply_updates(x, updates))
    keep = lambda new, old: jnp.where(usable, new, old)
    return jax.tree.map(keep, ahead, x), jax.tree.map(keep, after, memory)
