"""Steps whose followers come from host memory: one program a step, fed by Python."""

from collections.abc import Callable

import jax
import jax.random as jr
import numpy as np

from .._methods.base import draws
from .._problem.host import fed


def advance_fed(
    program: Callable, problem, method, average, state, kept, mean, key,
    first: int, last: int, total: int, chosen: int,
):  # fmt: skip
    """As `program`, which is `advance`, for the steps from `first` to `last`.

    While a step is computed the batch of the next one travels.
    """
    least, records = np.inf, []
    ahead = _batch(problem, key, first)
    for step in range(first, last):
        state, seen, mean, record = program(
            ahead, method, average, 1, state, kept, mean, key,
            *map(jax.numpy.asarray, (step, step + 1, total, chosen)),
        )  # fmt: skip
        if step + 1 < last:
            ahead = _batch(problem, key, step + 1)
        value = float(record.value[0])
        if step == chosen or (chosen < 0 and value < least):
            kept, least = seen, value
        records.append(record)
    columns = jax.tree.map(
        lambda *rows: np.concatenate([np.asarray(row) for row in rows]), *records
    )
    return state, kept, mean, columns


def _batch(problem, key, step: int):
    return fed(problem, draws(jr.fold_in(key, step)).sample, step)
