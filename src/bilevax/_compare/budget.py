"""How long a run may be, and what a run has spent."""

from dataclasses import asdict, dataclass

import numpy as np

from .._arguments import check_count, check_number
from .._driver.history import History


@dataclass(frozen=True)
class Budget:
    """When a run of a comparison ends: with the first of these that is spent.

    - `steps`: of the method. Methods whose steps fall plan for this number.
    - `lower_solves`: solves in `y`, those of penalised, barrier and saddle problems
      among them; at least one per step is charged.
    - `seconds`: in steps alone, without compilation and looks at `F`.
    - `look_every`: steps between two looks at `F`; a budget is watched there, and
      curves are cut at the last look within it.
    """

    steps: int = 300
    lower_solves: int | None = None
    seconds: float | None = None
    look_every: int = 10

    def __post_init__(self):
        for name in ("steps", "look_every", "lower_solves"):
            number = getattr(self, name)
            if number is not None or name != "lower_solves":
                check_count(number, name)
        if self.seconds is not None:
            what = "positive, or None for as long as the steps take"
            check_number(self.seconds, "seconds", what, np.nextafter(0, 1))

    @property
    def chunk(self) -> int:
        return min(self.look_every, self.steps)

    def as_dict(self) -> dict:
        return asdict(self)

    def is_spent(self, history: History) -> bool:
        """Whether a run with this history must end."""
        return bool(
            self._over(solves_at_looks(history)[-1], history.working[-1], strict=False)
        )

    def within(self, solves: np.ndarray, seconds: np.ndarray) -> np.ndarray:
        """Which looks of a run count; the first always does."""
        inside = ~self._over(solves, seconds, strict=True)
        inside[:1] = True
        return inside

    def _over(self, solves, seconds, *, strict: bool):
        over = np.zeros(np.shape(solves), bool)
        for limit, spent in ((self.lower_solves, solves), (self.seconds, seconds)):
            if limit is not None:
                over = over | (spent > limit if strict else spent >= limit)
        return over


def solves_at_looks(history: History) -> np.ndarray:
    """Solves in `y` until each look at `F`.

    A step without a solve, as single-loop methods take it, is charged one; otherwise
    such a method would be free on this scale.
    """
    solves = at_looks(history, "lower_solves") + at_looks(history, "penalty_solves")
    return np.maximum(solves, history.evaluated_at)


def at_looks(history: History, name: str) -> np.ndarray:
    """A counter of work, summed until each look at `F`."""
    if not len(history):
        return np.zeros(len(history.evaluated_at), int)
    sums = np.concatenate([[0], np.cumsum(history[name])])
    return sums[history.evaluated_at]
