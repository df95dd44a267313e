"""Steps of a short run, stage by stage: what is seldom needed is not compiled."""

from typing import Any, NamedTuple

import jax
import jax.random as jr
import numpy as np
from jaxtyping import Array, Float, PyTree

from .._implicit.hypergradient import staged
from .._lower.choose import checked_solver, is_on_host
from .._methods.asking import AbstractAskingMethod
from .._problem.problem import AbstractProblem, Problem
from .._programs.control import (
    brief_stage,
    on_device,
    on_host,
    stage_by_stage,
)
from .history import with_scalars

# Runs of more steps are one program: compiling it then costs less than it saves.
_SHORT = 500


def runs_in_stages(problem: AbstractProblem, method, num_steps: int) -> bool:
    """Whether a run takes its steps one by one: by what it is, not by the clock."""
    asks = isinstance(method, AbstractAskingMethod) and method.takes_stages
    short = num_steps <= _SHORT or is_on_host(problem)
    return short and asks and is_usual(problem)


def is_usual(problem: AbstractProblem) -> bool:
    """Whether evaluations of this problem may run stage by stage."""
    if not isinstance(problem, Problem):
        return False
    solver = checked_solver(problem, None, False, on_host=True)
    return staged(problem, (), solver, problem.adjoint)


class Track(NamedTuple):
    """What is kept of a chunk: see `advance`."""

    kept: PyTree[Array]
    least: Float[Array, ""]
    mean: Any


def advance_in_stages(
    problem: Problem,
    method,
    average,
    state,
    kept,
    mean,
    key,
    first,
    last,
    total,
    chosen,
):
    """`advance`, one step after the other."""
    records = []
    with stage_by_stage(often=True):
        problem, method, state = on_host((problem, method, state))
        track = Track(*on_host((kept, np.asarray(np.inf), mean)))
        for t in range(first, last):
            query = on_host(
                method.ask(problem, state, step=t, num_steps=total, key=fold_in(key, t))
            )
            state, record = method.answer(problem, problem, state, query)
            record = with_scalars(record)
            track = _tracked(track, average, state.x, record.value, t, chosen)
            records.append(record)
    columns = jax.tree.map(lambda *entries: np.stack(entries), *records)
    state, kept, mean = on_device((state, track.kept, track.mean))
    return state, kept, mean, columns


@brief_stage
def fold_in(key, number):
    """The key of a step."""
    return jr.fold_in(key, number)


def _tracked(track: Track, average, x, value, t: int, chosen: int) -> Track:
    falls = chosen < 0 and value < track.least
    kept = x if t == chosen or falls else track.kept
    least = value if falls else track.least
    mean = track.mean if average is None else average.update(track.mean, x, t)
    return Track(kept, least, mean)
