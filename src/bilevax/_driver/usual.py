"""The program of a short run: its steps and its polish, without rare branches.

An evaluation of `F` is most of what there is to compile, for a step and for the polish
alike. So one program does both: each trip evaluates once, for the step or the search
that is under way. It ends before a trip that needs a rare branch; that one is taken
stage by stage, and the program goes on.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from .._constraints import Box
from .._implicit.hypergradient import exact, is_large
from .._lower.dense import Unravel
from .._methods.asking import AbstractAskingMethod
from .._methods.base import Record
from .._methods.oracle import Oracle
from .._methods.polish import (
    Polish,
    Search,
    aimed,
    ended,
    finished,
    placed_inside,
    search_from,
    search_on,
    searched,
)
from .._problem.problem import Problem, tilted
from .._programs.control import (
    UsualPath,
    cast,
    choose,
    leave_out,
    on_device,
    on_host,
    stage_by_stage,
    usual_steps,
)
from .._status import Status, code_of
from .history import blank_columns, with_scalars
from .steps import Track, step_in_stages, tracked


class Kind(NamedTuple):
    """What does not change in a run.

    - `problem`: without a tilt, and taken to have an answer at every `x`.
    - `size`: the largest number of steps of a chunk; `total`, `chosen`: see `advance`
      in `run.py`.
    - `aux`: what records keep of the auxiliary output, in its shapes.
    """

    problem: Problem
    method: AbstractAskingMethod
    average: Any
    key: PRNGKeyArray
    size: int
    total: int
    chosen: int
    aux: dict[str, Any]


class _Constants(NamedTuple):
    """`end` is the first step that is not taken, or a number of evaluations."""

    problem: Problem
    method: AbstractAskingMethod
    average: Any
    key: PRNGKeyArray
    total: Int[Array, ""]
    chosen: Int[Array, ""]
    first: Int[Array, ""]
    end: Int[Array, ""]
    length: Float[Array, ""]


class _State(NamedTuple):
    """Where steps and search are; `t` is the number of the step."""

    searching: Bool[Array, ""]
    t: Int[Array, ""]
    method: Any
    track: Track
    records: Record
    search: Search


def suits(problem: Problem) -> bool:
    """Whether a run in stages on `problem` may have this program.

    Large factors would be copied in every trip, and projections onto rows are programs
    of their own.
    """
    return isinstance(problem.domain, Box | None) and not is_large(problem)


class _Asked(NamedTuple):
    """An evaluation, and the query or the aim that it answers; zeros in the other."""

    e: Any
    query: Any
    aim: Any


def _evaluate(c: _Constants, s: _State) -> _Asked:
    """`F` for the step or the search."""
    problem = c.problem
    none = jax.tree.map(jnp.zeros_like, problem.y0)

    def ask(s: _State):
        key = jax.random.fold_in(c.key, s.t)
        now, numbers = s.method, dict(step=s.t, num_steps=c.total, key=key)
        query = c.method.ask(problem, now, **numbers)
        return query.at, query.tilt, now.lower, query

    def aim(s: _State):
        aim = aimed(problem.domain, Unravel.like(s.method.x), s.search)
        return aim.tree, tilt, s.search.lower, aim

    shapes = jax.eval_shape(ask, s)
    blank = lambda tree: jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), tree)
    tilt = None if shapes[1] is None else none
    no_query, no_aim = blank(shapes[3]), blank(jax.eval_shape(aim, s)[3])
    at, q, warm, query, target = choose(
        s.searching,
        lambda s: (*(found := aim(s))[:3], no_query, found[3]),
        lambda s: (*(found := ask(s))[:3], found[3], no_aim),
        s,
    )
    e = exact(problem if q is None else tilted(problem, q))(at, warm)
    leave_out(code_of(e.status) == code_of(Status.infeasible))
    return _Asked(e, query, target)


def _step(c: _Constants, s: _State, found: _Asked):
    """What follows, for the step or the search."""
    e = found.e

    def tell(s: _State):
        oracle = Oracle(e, found.query.at, found.query.ahead, jnp.asarray(False))
        new, record = c.method.told(c.problem, c.problem, s.method, found.query, oracle)
        record = with_scalars(record)
        track = tracked(s.track, c.average, new.x, record.value, s.t, c.chosen)
        records = jax.tree.map(
            lambda column, entry: _with_row(column, s.t - c.first, entry),
            s.records,
            record,
        )
        after = s._replace(t=s.t + 1, method=new, track=track, records=records)
        return _like(after, s)

    def search(s: _State):
        point = placed_inside(c.problem.domain, found.aim, e.value, e.grad)
        return _like(s._replace(search=searched(s.search, point, e.lower, c.length)), s)

    s = choose(s.searching, search, tell, s)
    more = s.search.going & (s.search.evaluations < c.end)
    return s, jnp.where(s.searching, more, s.t < c.end)


def _with_row(column, row, entry):
    # A scatter would be a loop of its own, for each column.
    entry = jnp.asarray(entry, column.dtype)
    return jax.lax.dynamic_update_index_in_dim(column, entry, row, 0)


def _like(new: _State, old: _State) -> _State:
    return jax.tree.map(cast, new, old)


_program = usual_steps(_evaluate, _step)


def advance(kind: Kind, problem: Problem, state, kept, mean, first: int, last: int):
    """Steps `first` to `last`; those beside the usual path on `problem`, in stages."""
    s = _begun(kind, state, kept, mean, first)
    constants = _constants(kind, first, last, np.zeros_like(s.track.least))
    problem, method, path = on_host(problem), on_host(kind.method), UsualPath()
    while s.t < last:
        if path.pays():
            before = int(s.t)
            s, stuck = _run(constants, s)
            path.taken += int(s.t) - before + stuck
            path.missed += stuck
            if not stuck:
                break
        with stage_by_stage():
            t = int(s.t)
            new, record = step_in_stages(
                problem, method, s.method, kind.key, t, kind.total
            )
            track = tracked(s.track, kind.average, new.x, record.value, t, kind.chosen)
        columns = jax.tree.leaves(s.records)
        for column, entry in zip(columns, jax.tree.leaves(record), strict=True):
            column[t - first] = entry
        s = s._replace(t=np.asarray(t + 1), method=new, track=track)
    state, kept, mean = on_device((s.method, s.track.kept, s.track.mean))
    return state, kept, mean, s.records


def polish(
    kind: Kind, problem: Problem, state, x, lower, length, max_evaluations: int = 2000
) -> Polish:
    """The polish from `x`; trips beside the usual path on `problem`, in stages.

    `state` is any of the method: no step is taken.
    """
    problem, x, lower, length = on_host((problem, x, lower, length))
    s, unravel, path = _begun(kind, state, x, x, 0), Unravel.like(x), UsualPath()
    with stage_by_stage():
        search = search_from(x, lower, length)
    s = s._replace(searching=np.asarray(True), search=search)
    constants = _constants(kind, 0, max_evaluations, length)
    while s.search.going and s.search.evaluations < max_evaluations and path.pays():
        before = int(s.search.evaluations)
        s, stuck = _run(constants, s)
        path.taken += int(s.search.evaluations) - before + stuck
        path.missed += stuck
        if stuck:
            with stage_by_stage():
                search = search_on(problem, unravel, s.search, length, 1)
            s = s._replace(search=search)
    left = max_evaluations - int(s.search.evaluations)
    if s.search.going and left:
        return finished(problem, x, s.search, length, left)
    with stage_by_stage():
        return on_device(ended(s.search, unravel))


def _begun(kind: Kind, state, kept, mean, first: int) -> _State:
    """The state before step `first`; its search is none."""
    state, kept, mean = on_host((state, kept, mean))
    value: Any = np.asarray(np.inf, jax.tree.leaves(state.lower.y)[0].dtype)
    with stage_by_stage():
        search = search_from(state.x, state.lower, np.zeros_like(value))
    no: Any = np.asarray(False)
    step: Any = np.asarray(first)
    return _State(
        searching=no,
        t=step,
        method=state,
        track=Track(kept, value, None if kind.average is None else mean),
        records=blank_columns(value.dtype, kind.aux, kind.size),
        search=search,
    )


def _constants(kind: Kind, first: int, end: int, length) -> _Constants:
    numbers = map(np.asarray, (kind.total, kind.chosen, first, end))
    fixed = (kind.problem, kind.method, kind.average, kind.key)
    return _Constants._make((*fixed, *numbers, length))


def _run(constants: _Constants, s: _State) -> tuple[_State, bool]:
    """The program; of its results the records may be written on."""
    after, stuck = _program(constants, s)
    after = on_host(after.open())
    return after._replace(records=jax.tree.map(np.array, after.records)), bool(stuck)
