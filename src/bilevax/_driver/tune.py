"""Step sizes by trial: a grid of runs with common random numbers."""

import functools
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import PRNGKeyArray, PyTree

from .._arguments import check_number, listed
from .._methods.base import AbstractMethod
from .._methods.ds_blo import DSBLO
from .._problem.problem import AbstractProblem
from .solve import solve

F = TypeVar("F", bound=Callable[..., Any])
GRID = tuple(np.logspace(-3, -1, 7))


@dataclass(frozen=True)
class Tuning:
    """The best method of a grid.

    - `method`: ready for `solve`.
    - `grid`, `values`: every value tried and the `F` it ended with (NaN on failure).
    - `num_steps`: steps of each trial, so that its cost can be reported.
    """

    method: AbstractMethod
    parameter: str
    grid: tuple[float, ...]
    values: tuple[float, ...]
    num_steps: int

    def __str__(self):
        lines = [
            f"  {self.parameter} = {value:<10.4g} F = {F:.6g}"
            for value, F in zip(self.grid, self.values, strict=True)
        ]
        return "\n".join(lines)


def with_value(method: AbstractMethod, parameter: str, value: float) -> AbstractMethod:
    """`method` with another value of the number called `parameter`."""
    known = isinstance(parameter, str) and isinstance(method, AbstractMethod)
    if not known or getattr(method, parameter, None) is None:
        raise ValueError(
            f"`parameter` must name a number of {type(method).__name__}; "
            f"{parameter!r} is not set."
        )
    where = lambda m: getattr(m, parameter)
    return eqx.tree_at(where, method, jnp.asarray(float(value)))


def _in_either_order(tune: F) -> F:
    """Calls of an earlier version gave `x0` before `method`."""

    @functools.wraps(tune)
    def call(problem, *arguments, **named):
        is_method = lambda thing: thing is None or isinstance(thing, AbstractMethod)
        if arguments and not is_method(arguments[0]) and "x0" not in named:
            x0, *more = arguments
            if len(more) == 0 or is_method(more[0]):
                warnings.warn(
                    "`tune(problem, x0)` is now `tune(problem, method, x0)`, as in "
                    "`solve`; `method` may be None.",
                    DeprecationWarning,
                    stacklevel=2,
                )
                method = more[0] if more else named.pop("method", None)
                return tune(problem, method, x0, **named)
        return tune(problem, *arguments, **named)

    return call  # pyright: ignore[reportReturnType]


@_in_either_order
def tune(
    problem: AbstractProblem,
    method: AbstractMethod | None = None,
    x0: PyTree | None = None,
    *,
    key: PRNGKeyArray | int,
    parameter: str = "first_step",
    grid: Sequence[float] = GRID,
    num_steps: int = 100,
) -> Tuning:
    """Run `method` (by default `DSBLO()`) for each value of `parameter`; keep the best.

    The arguments are those of `solve`, in its order.

    All runs draw the same tilts, segment points and samples. `parameter` names a field
    of the method that is a number: "first_step" (in units of the problem) by default,
    "gamma1" for a method with explicit constants.
    """
    method = DSBLO() if method is None else method
    if getattr(problem, "is_coupled", False):
        raise ValueError(
            "`tune` compares values of one objective, and the problem has upper "
            "constraints: tune on `bx.penalised(problem, weight)`."
        )
    grid = listed(grid, "grid", "numbers")
    for value in grid:
        check_number(value, "grid", "a list of numbers")
    if len(grid) == 0:
        raise ValueError("`grid` must hold at least one value.")
    trials = [with_value(method, parameter, value) for value in grid]
    values = []
    for trial in trials:
        run = solve(
            problem, trial, x0, key=key, num_steps=num_steps, polish=False, throw=False
        )
        values.append(run.value if run.success else float("nan"))
    if np.all(np.isnan(values)):
        best = 0
    else:
        best = int(np.nanargmin(values))
    return Tuning(
        trials[best], parameter, tuple(map(float, grid)), tuple(values), num_steps
    )
