"""Steps of an optax optimiser, for methods that only need a gradient."""

from typing import TYPE_CHECKING, Any

from jaxtyping import Array, Bool, PyTree

from .._implicit.feasible import onto_domain
from .._problem.problem import Problem
from .._programs.control import packed, stage
from .search import select

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
    ahead, after = _updated(packed((optimiser,)), memory, x, grad)
    return select(usable, (onto_domain(problem, ahead), after), (x, memory))


@stage
def _updated(optimiser, memory, x, grad):
    import optax  # here, since it takes a while to import

    updates, after = optimiser[0].update(grad, memory, x)
    return optax.apply_updates(x, updates), after
