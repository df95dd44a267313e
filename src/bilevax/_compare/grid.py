"""Step sizes by trial: the same number of trials for every method."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from .._arguments import check_count, check_number, listed
from .._driver.tune import with_value
from .._methods.base import AbstractMethod


@dataclass(frozen=True)
class StepGrid:
    """Values that every method tries before its runs count.

    - `trials`: how many, spread evenly in the logarithm from `low` to `high`.
    - `by`: the field that takes the value; by default `first_step`, the first step in
      units of the problem, which every method has. Or a dictionary from names of
      methods to a field or to a function from the value to the method.
    - `seeds`: of the trials; none of them may be a seed of the comparison.
    """

    trials: int = 7
    low: float = 1e-3
    high: float = 1e-1
    by: str | Mapping[str, str | Callable[[float], AbstractMethod]] = "first_step"
    seeds: tuple[int, ...] = (1_000_000,)

    def __post_init__(self):
        check_count(self.trials, "trials")
        for name in ("low", "high"):
            check_number(getattr(self, name), name, "a positive number")
        if not isinstance(self.by, str | Mapping):
            raise ValueError(
                "`by` must name a field of the methods, or be a dictionary from names "
                f"of methods to fields or functions; got {self.by!r}."
            )
        for seed in listed(self.seeds, "seeds", "whole numbers"):
            check_number(seed, "seeds", "a list of whole numbers")
        if not 0 < self.low <= self.high:
            raise ValueError(
                "`low` and `high` must be positive and in order; got "
                f"{self.low!r} and {self.high!r}."
            )
        if len(self.seeds) == 0:
            raise ValueError("`seeds` must hold at least one seed to tune on.")

    @property
    def values(self) -> tuple[float, ...]:
        return tuple(np.geomspace(self.low, self.high, self.trials).tolist())

    def parameter(self, name: str) -> str | Callable[[float], AbstractMethod]:
        """What takes the value in the method called `name`."""
        return self.by if isinstance(self.by, str) else self.by.get(name, "first_step")

    def candidates(self, name: str, method: AbstractMethod) -> list[AbstractMethod]:
        """The method at every value."""
        parameter = self.parameter(name)
        if callable(parameter):
            return [parameter(value) for value in self.values]
        return [with_value(method, parameter, value) for value in self.values]


def best_trial(ends: np.ndarray, starts: np.ndarray) -> int:
    """The value of the grid with the smallest mean gap.

    `ends[i, j]` is the last `F` of value `i` on seed `j`, NaN where there is none, and
    `starts[j]` the first. Gaps are shares of the largest progress on each seed, so that
    seeds weigh the same.
    """
    ends = np.where(np.isfinite(ends), ends, np.inf)
    best = ends.min(axis=0)
    # A seed on which every value failed says nothing.
    told = np.isfinite(best)
    if not told.any():
        return 0
    ends, best, starts = ends[:, told], best[told], starts[told]
    scale = np.where(starts > best, starts - best, 1.0)
    return int(np.argmin(np.mean((ends - best) / scale, axis=1)))
