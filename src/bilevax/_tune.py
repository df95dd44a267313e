"""Step sizes by trial: a grid of runs with common random numbers."""

from collections.abc import Sequence
from dataclasses import dataclass

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import PRNGKeyArray, PyTree

from ._methods.base import AbstractMethod
from ._methods.ds_blo import DSBLO
from ._problem import AbstractProblem
from ._solve import solve

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
    if getattr(method, parameter, None) is None:
        raise ValueError(
            f"`parameter` must name a number of {type(method).__name__}; "
            f"{parameter!r} is not set."
        )
    where = lambda m: getattr(m, parameter)
    return eqx.tree_at(where, method, jnp.asarray(float(value)))


def tune(
    problem: AbstractProblem,
    x0: PyTree,
    *,
    key: PRNGKeyArray,
    method: AbstractMethod | None = None,
    parameter: str = "first_step",
    grid: Sequence[float] = GRID,
    num_steps: int = 100,
) -> Tuning:
    """Run `method` once for each value of `parameter` and keep the best.

    All runs draw the same tilts, segment points and samples. `parameter` names a field
    of the method that is a number: "first_step" (in units of the problem) by default,
    "gamma1" for a method with explicit constants.
    """
    method = DSBLO() if method is None else method
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
