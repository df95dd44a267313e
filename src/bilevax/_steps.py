"""Steps of a short run, stage by stage: what is seldom needed is not compiled."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Array, Float, PyTree

from ._control import packed, stage, stage_by_stage
from ._history import with_scalars
from ._implicit import staged
from ._lower.choose import checked_solver
from ._methods.asking import AbstractAskingMethod
from ._methods.oracle import gradient_at
from ._problem import AbstractProblem, Problem, outline, tilted

# Runs of more steps are one program: compiling it then costs less than it saves.
_SHORT = 500


def runs_in_stages(problem: AbstractProblem, method, num_steps: int) -> bool:
    """Whether a run takes its steps one by one: by what it is, not by the clock."""
    if not isinstance(problem, Problem) or num_steps > _SHORT:
        return False
    solver = checked_solver(problem, None, False)
    usual = isinstance(method, AbstractAskingMethod)
    return usual and staged(problem, (), solver, problem.adjoint)


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
    track, records = Track(kept, jnp.asarray(jnp.inf), mean), []
    with stage_by_stage():
        known = outline(problem)
        asking = packed((known, method))
        telling = packed((known, method, average))
        for t in range(first, last):
            query = _ask(asking, state, t, total, key)
            now = tilted(problem, query.tilt)
            oracle = gradient_at(now, query.at, query.ahead, state.lower)
            state, track, record = _tell(
                telling, state, query, oracle, track, t, chosen
            )
            records.append(record)
    columns = jax.tree.map(lambda *entries: np.stack(entries), *records)
    return state, track.kept, track.mean, columns


@stage
def _ask(asking, state, t, total, key):
    problem, method = asking
    return method.ask(problem, state, step=t, num_steps=total, key=jr.fold_in(key, t))


@stage
def _tell(telling, state, query, oracle, track: Track, t, chosen):
    problem, method, average = telling
    state, record = method.tell(problem, state, query, oracle)
    record = with_scalars(record)
    falls = (chosen < 0) & (record.value < track.least)
    keep = (t == chosen) | falls
    kept = jax.tree.map(lambda a, b: jnp.where(keep, a, b), state.x, track.kept)
    least = jnp.where(falls, record.value, track.least)
    mean = track.mean if average is None else average.update(track.mean, state.x, t)
    return state, Track(kept, least, mean), record
