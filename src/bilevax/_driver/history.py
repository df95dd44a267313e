"""What a run leaves behind: one row per step, one per look at the true `F`."""

from dataclasses import dataclass, field, fields, replace
from typing import Any

import jax
import numpy as np

from .._files.checkpoint import REMEDY, CheckpointError
from .._methods.base import WORK, Record
from .._programs.modules import made, with_fields

# The columns with one entry per look.
_LOOKS = ("evaluated_at", "value", "seconds", "working")
# The columns with one entry per step that every method fills.
_COLUMNS = tuple(f.name for f in fields(Record) if f.name != "aux")


@dataclass
class History:
    """Numbers of a run, as NumPy arrays.

    - `steps`: the fields of `Record`, one entry per step; and the scalars of the
      auxiliary output of `upper`, where that is a dictionary.
    - `evaluated_at`, `value`, `seconds`: after how many steps the unperturbed `F` was
      evaluated, what it was, and the seconds spent until then, compilation included.
    - `working`: those of the seconds that the steps themselves took, without measuring
      scales, without looks at `F` and without compilation.
    """

    steps: dict[str, np.ndarray] = field(default_factory=dict)
    evaluated_at: np.ndarray = field(default_factory=lambda: np.zeros(0, int))
    value: np.ndarray = field(default_factory=lambda: np.zeros(0))
    seconds: np.ndarray = field(default_factory=lambda: np.zeros(0))
    working: np.ndarray = field(default_factory=lambda: np.zeros(0))

    def __getitem__(self, name: str) -> np.ndarray:
        return self.steps[name]

    def __len__(self) -> int:
        return len(next(iter(self.steps.values()), ()))

    @property
    def totals(self) -> dict[str, int]:
        """Work of the whole run."""
        return {name: int(self.steps[name].sum()) for name in WORK if len(self)}

    def extended(self, records: Record, count: int) -> "History":
        """With the first `count` rows of a buffer of records."""
        columns = vars(records) | records.aux
        del columns["aux"]
        new = {name: np.asarray(column)[:count] for name, column in columns.items()}
        steps = {
            name: np.concatenate([self.steps.get(name, column[:0]), column])
            for name, column in new.items()
        }
        return replace(self, steps=steps)

    def evaluated(
        self, step: int, value: Any, seconds: float, working: float
    ) -> "History":
        """With one more look at `F`."""
        return History(
            self.steps,
            np.append(self.evaluated_at, step),
            np.append(self.value, float(value)),
            np.append(self.seconds, seconds),
            np.append(self.working, working),
        )


def to_arrays(history: History) -> dict[str, np.ndarray]:
    """All columns under one name each, for a checkpoint."""
    columns = {f"step_{name}": column for name, column in history.steps.items()}
    return columns | {f"history_{name}": getattr(history, name) for name in _LOOKS}


def checked_history(path: Any, arrays: dict[str, np.ndarray], step: int) -> History:
    """The inverse of `to_arrays`, after `step` steps, or a `CheckpointError`."""
    steps = {
        name.removeprefix("step_"): column
        for name, column in arrays.items()
        if name.startswith("step_")
    }
    looks = {name: arrays.get(f"history_{name}", np.zeros((0, 0))) for name in _LOOKS}
    shapes = {column.shape for column in looks.values()}
    at = looks["evaluated_at"]
    fine = (
        set(_COLUMNS) <= set(steps)
        and {column.shape for column in steps.values()} == {(step,)}
        and all(c.dtype.kind in "biuf" for c in (*steps.values(), *looks.values()))
        and len(shapes) == at.ndim == 1
        and at.size > 0
        and at[-1] == step
    )
    if not fine:
        raise CheckpointError(
            f"{path} is damaged: its history is not that of {step} steps. {REMEDY}"
        )
    return History(steps, **looks)


_ARRAYS = jax.Array | np.ndarray | np.generic


def scalars(aux: Any) -> dict:
    """The entries of a dictionary `aux` that are single numbers; else none."""
    if not isinstance(aux, dict):
        return {}
    return {
        name: entry
        for name, entry in aux.items()
        if isinstance(entry, _ARRAYS) and entry.ndim == 0
    }


def with_scalars(record: Record) -> Record:
    """`record` with what is kept of its auxiliary output."""
    return with_fields(record, aux=scalars(record.aux))


# The columns with real numbers; the others count.
_REAL = ("value", "gradient_norm", "momentum_norm", "move", "tilt")


def blank_columns(dtype: Any, aux: dict[str, Any], length: int) -> Record:
    """A buffer for `length` records, where no shapes are known but those of `aux`."""
    whole = jax.dtypes.canonicalize_dtype(int)
    column = lambda name: np.zeros(length, dtype if name in _REAL else whole)
    more = {name: np.zeros(length, entry.dtype) for name, entry in aux.items()}
    return made(Record, **{name: column(name) for name in _COLUMNS}, aux=more)


def blank_records(shapes: Record, length: int):
    """A buffer for `length` records."""
    return jax.tree.map(
        lambda leaf: jax.numpy.zeros((length, *leaf.shape), leaf.dtype), shapes
    )
