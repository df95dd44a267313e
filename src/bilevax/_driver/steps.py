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
from .._programs.arrays import xp
from .._programs.control import (
    brief_stage,
    on_device,
    on_host,
    stage_by_stage,
)
from .history import with_scalars

# Runs of more steps are one program: compiling it then costs less than it saves.
_SHORT = 500
# Programs of runs of more steps are worth to be optimised.
LONG = 3000


def runs_in_stages(problem: AbstractProblem, method, num_steps: int) -> bool:
    """Whether a run takes its steps one by one: by what it is, not by the clock."""
    short = num_steps <= _SHORT or is_on_host(problem)
    return short and asks_for_stages(problem, method)


def runs_usually(problem: AbstractProblem, method, num_steps: int, total: int) -> bool:
    """Whether a run with its polish is one program without rare branches (`usual.py`).

    `total`: steps of all starts. Fewer are done before it is compiled; in a run of more
    it would save nothing, for each of its steps takes longer than an optimised one.
    """
    many = total > _SHORT and num_steps <= LONG
    return many and not is_on_host(problem) and asks_for_stages(problem, method)


def asks_for_stages(problem: AbstractProblem, method) -> bool:
    """Whether steps may be taken one by one."""
    asks = isinstance(method, AbstractAskingMethod) and method.takes_stages
    return asks and is_usual(problem)


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
            state, record = step_in_stages(problem, method, state, key, t, total)
            track = tracked(track, average, state.x, record.value, t, chosen)
            records.append(record)
    columns = jax.tree.map(lambda *entries: np.stack(entries), *records)
    state, kept, mean = on_device((state, track.kept, track.mean))
    return state, kept, mean, columns


def step_in_stages(problem: Problem, method, state, key, t: int, total: int):
    """The state after step `t`, and its record."""
    key = fold_in(key, t)
    query = on_host(method.ask(problem, state, step=t, num_steps=total, key=key))
    state, record = method.answer(problem, problem, state, query)
    return state, with_scalars(record)


@brief_stage
def fold_in(key, number):
    """The key of a step."""
    return jr.fold_in(key, number)


def tracked(track: Track, average, x, value, t, chosen) -> Track:
    falls = (chosen < 0) & (value < track.least)
    keep = (t == chosen) | falls
    kept = jax.tree.map(lambda a, b: xp.where(keep, a, b), x, track.kept)
    least = xp.where(falls, value, track.least)
    mean = track.mean if average is None else average.update(track.mean, x, t)
    return Track(kept, least, mean)
