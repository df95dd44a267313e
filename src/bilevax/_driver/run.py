"""One start of a run: compiled chunks of steps, and everything between them.

The loop over steps is compiled. What a person sees (progress, callbacks, looks at the
true `F`, early stopping, checkpoints) happens in Python between chunks of steps.
"""

import functools
import os
import platform
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jax.flatten_util import ravel_pytree
from jaxtyping import PRNGKeyArray

from .._arguments import check_number
from .._files import checkpoint as checkpoints
from .._implicit.feasible import moves, onto_allowed, onto_domain
from .._implicit.hypergradient import (
    Evaluation,
    hypergradient,
    is_large,
    looked_at,
)
from .._judge.certificate import certify
from .._lower.active_set import opened_factor
from .._lower.base import strongly_typed
from .._lower.choose import is_on_host
from .._methods.base import AbstractMethod, Record, Scales
from .._problem.chart import Chart
from .._problem.followers import Followers
from .._problem.host import is_in_host_memory
from .._problem.problem import AbstractProblem, Problem
from .._programs.control import stage_by_stage
from .._programs.quick import once_jit, quick_jit
from .._programs.stopwatch import Stopwatch
from .._status import Status, has_value, status_code, status_name
from . import usual
from .average import Average
from .feeding import advance_fed
from .history import (
    History,
    blank_records,
    checked_history,
    scalars,
    to_arrays,
    with_scalars,
)
from .requests import Asking, Request
from .scales import measure_scales
from .steps import (
    LONG,
    advance_in_stages,
    fold_in,
    is_usual,
    runs_in_stages,
    runs_usually,
)

# Folded into the key of a run for draws that last all of it; no step has this number.
_WHOLE_RUN = 2**31 - 1
# So many steps without a move end a run.
_STEPS_TO_JUDGE = 10
_TIME_SPENT = "the time is spent"
# What a checkpoint says of a run, beside what identifies it.
_META = dict(
    step=int, spent=float, running=float, recovering=bool, ended=str | None, stop=str,
)  # fmt: skip


@dataclass(frozen=True)
class Stop:
    """When to end before `num_steps`; looked at between chunks.

    - `momentum`: `|m|` below this share of the first gradient. Not used where there is
      a domain, on whose boundary gradients do not vanish.
    - `move`: steps of `x` below this share of the length scale of the problem.
    - `seconds`: time spent, without compilation.
    - `certificate`: `(radius, eps)`: the Goldstein measure at this `radius` is
      at most `eps`.
    """

    momentum: float = 1e-9
    move: float = 1e-12
    seconds: float = float("inf")
    certificate: tuple[float, float] | None = None

    def __post_init__(self):
        for name in ("momentum", "move", "seconds"):
            value, what = getattr(self, name), "a limit, zero or more"
            # Infinity, too, is a limit.
            if not (isinstance(value, float) and value == np.inf):
                check_number(value, name, what, 0)
        if self.certificate is not None:
            pair = self.certificate
            if not (isinstance(pair, tuple | list) and len(pair) == 2):
                raise ValueError(
                    "`certificate` must be a pair `(radius, eps)`; got "
                    f"{self.certificate!r}."
                )
            check_number(pair[0], "certificate", "of a positive radius", 5e-324)
            check_number(pair[1], "certificate", "of a bound `eps`, zero or more", 0)


@dataclass
class Run:
    """One start: everything that does not change while it runs."""

    problem: AbstractProblem
    view: Problem
    method: AbstractMethod
    x0: Any
    key: PRNGKeyArray
    num_steps: int
    stop: Stop
    chunk: int
    output: str
    polish: bool
    average: Average | None
    looks: bool
    callback: Callable | None
    checkpoint: Any
    tick: Callable
    # Whether other runs are computed by the same programs.
    together: bool = False
    # Where `x` is in units of the run, the way back to those of the caller.
    chart: Chart | None = None
    # Steps of all starts; zero for those of this one.
    all_steps: int = 0

    def go(self, x0) -> Asking["End"]:
        """All chunks."""
        watch = Stopwatch()
        x, e = yield from self._look(strongly_typed(x0))
        if not has_value(e.status):
            return End((x, e), (x, e), History(), "no start", 1.0, None)
        scales = Scales(*(jnp.asarray(1.0),) * 3)
        if self.method.uses_scales:
            scales = yield from measure_scales(
                plain(self.view), x, e, self.problem.is_sampled, self.looks_often
            )
        e, scales = self._fitting(x, e, scales)
        begin = (self.view, self.method, x, e, scales, self.key)
        first = start_in_stages if self.in_stages else start
        state = yield Request(first, begin)
        kept, chosen = x, self._chosen_step()
        kind = self._kind(e, chosen)
        mean = None if self.average is None else x
        history, step = History().evaluated(0, e.value, 0.0, 0.0), 0
        ended = None
        # The way back from an empty lower level is long to compile and rarely needed:
        # a chunk that would need it is run again with it.
        problem: Any = self.problem.assuming_feasible()
        if self.in_stages:
            problem = untilted(self.problem)
        if self.checkpoint is not None and os.path.exists(self.checkpoint):
            (state, kept, x, mean), history, meta = self._restore(state, kept, x, mean)
            step, ended = meta["step"], self._ended(meta)
            watch = Stopwatch(meta["spent"], meta["running"])
            problem = self.problem if meta["recovering"] else problem
            x, e = yield from self._look(x)
            self.tick(step if ended is None else self.num_steps)
        reason, best, restored = ended or "all steps taken", (x, e), step
        while step < self.num_steps and ended is None:
            last = min(step + self.chunk, self.num_steps)
            before = (kind, state, kept, mean, step, last, chosen)
            left = watch.running
            state, kept, mean, records = yield self._chunk(problem, *before)
            jax.block_until_ready(records)
            hopeful = moves(self.view) and problem is not self.problem
            hopeful = hopeful and not self.in_stages
            if hopeful and _met_empty(records, last - step):
                problem = self.problem
                state, kept, mean, records = yield self._chunk(problem, *before)
                jax.block_until_ready(records)
            working = float(history.working[-1]) + watch.running - left
            history = history.extended(records, last - step)
            self.tick(last - step)
            first, step = step, last
            x, e = yield from self._look(state.x, history)
            history = history.evaluated(step, e.value, watch.seconds, working)
            if has_value(e.status) and not float(e.value) > float(best[1].value):
                best = (x, e)
            if self._kept_may_be_lower(history, last - first, best[1].value):
                best = yield from self._lower_of(best, kept)
            early = self._reason_to_stop(x, e, history, scales, watch)
            if self._callback_stops(step, x, e.value, history, mean):
                early = "the callback asked"
            # After the callback, so that what it wrote covers what is saved.
            if self.checkpoint is not None:
                recovering = problem is self.problem
                tree = (state, kept, best[0], mean)
                self._save(tree, history, step, watch, recovering, early)
            if early is not None:
                reason = early
                self.tick(self.num_steps - step)
                break
        if self.output == "random":
            x, e = yield from self._look(kept)
        elif step == restored:
            x, e = yield from self._look(state.x, history)
        if self.looks and not has_value(e.status):
            reason = "the last iterate has no answer, the best one seen is returned"
            x, e = best
        length = float(scales.length)
        return End((x, e), best, history, reason, length, mean, kind, state)

    def _fitting(self, x, e: Evaluation, scales: Scales):
        """The first look and scales for steps that see some of many followers."""
        drawn = self.problem.draw(self.key, 0) if self.problem.is_sampled else None
        if not isinstance(drawn, Followers):
            return e, scales
        lower = blank_evaluation(drawn, x).lower
        unsolved = lambda code: jnp.full_like(code, status_code(Status.iteration_limit))
        lower = eqx.tree_at(
            lambda s: (s.y, s.status._value),
            lower,
            (drawn.y0, unsolved(lower.status._value)),
        )
        count = lambda problem: ravel_pytree(problem.y0)[0].size
        share = (count(drawn) / count(self.view)) ** 0.5
        e = eqx.tree_at(lambda e: e.lower, e, lower)
        return e, eqx.tree_at(lambda s: s.force, scales, share * scales.force)

    def _look(self, x, history: History | None = None) -> Asking:
        """`F` at `x`; without looks, what the last step of `history` found instead."""
        if self.looks:
            return (yield from evaluate_allowed(self.view, x, self.looks_often))
        seen = blank_evaluation(self.view, x)
        if history is not None and len(history):
            last = lambda name: jnp.asarray(history[name][-1])
            status = eqx.tree_at(lambda s: s._value, seen.status, last("status"))
            seen = eqx.tree_at(
                lambda e: (e.value, e.status), seen, (last("value"), status)
            )
        return x, seen

    def _kept_may_be_lower(self, history: History, count: int, value) -> bool:
        """Whether a step of the last chunk saw less than `value`: `kept` is from there.

        Long first steps may jump over the best part of `F` between two looks.
        """
        wanted = self.polish and self.output == "last"
        return wanted and bool(np.any(history["value"][-count:] < float(value)))

    def _lower_of(self, best, kept) -> Asking:
        """`best`, or what the last chunk has kept if `F` is lower there."""
        x, e = yield from self._look(kept)
        lower = has_value(e.status) and float(e.value) < float(best[1].value)
        return (x, e) if lower else best

    def _callback_stops(self, step, x, value, history, mean) -> bool:
        if self.callback is None:
            return False
        more = () if self.average is None else (mean,)
        return bool(self.callback(step, x, value, history, *more))

    @property
    def total(self) -> int:
        return max(self.all_steps, self.num_steps)

    @functools.cached_property
    def has_own_program(self) -> bool:
        """Whether steps and polish are a program without rare branches."""
        usually = runs_usually(self.problem, self.method, self.num_steps, self.total)
        return self.polish and not self.together and usually and usual.suits(self.view)

    @property
    def looks_often(self) -> bool:
        """Whether looks at `F` are worth a program; see `looked_at`."""
        return not self.has_own_program

    def _kind(self, e: Evaluation, chosen: int) -> usual.Kind | None:
        """What the program of a short run is made for; None where it has none."""
        method: Any = self.method
        if not self.has_own_program:
            return None
        return usual.Kind(
            problem=plain(self.view),
            method=method,
            average=self.average,
            key=self.key,
            size=self.chunk,
            total=self.num_steps,
            chosen=chosen,
            aux=scalars(e.aux),
        )

    def _chunk(self, problem, kind, state, kept, mean, step, last, chosen) -> Request:
        if kind is not None:
            steps = kind, problem, state, kept, mean, step, last
            return Request(usual.advance, steps)
        if self.in_stages:
            return Request(advance_in_stages, (
                problem, self.method, self.average, state, kept, mean,
                self.key, step, last, self.num_steps, chosen,
            ))  # fmt: skip
        program = advance_briefly if self.is_brief else advance
        if is_in_host_memory(self.problem):
            # Its own number of steps: Python goes through them.
            return Request(advance_fed, (
                program, problem, self.method, self.average, state, kept, mean,
                self.key, step, last, self.num_steps, chosen,
            ), late=1)  # fmt: skip
        return Request(program, (
            problem, self.method, self.average, self.chunk, state, kept, mean,
            self.key, *map(jnp.asarray, (step, last, self.num_steps, chosen)),
        ), late=1)  # fmt: skip

    @functools.cached_property
    def in_stages(self) -> bool:
        """Whether steps are taken one by one, not by a program.

        Without a polish it is the method alone that is asked for, as in comparisons,
        where methods are timed beside each other.
        """
        if self.has_own_program:
            return True
        steps = runs_in_stages(self.problem, self.method, self.num_steps)
        if is_on_host(self.problem):
            return steps
        return self.polish and steps and not self.together

    @functools.cached_property
    def is_brief(self) -> bool:
        """Whether a program compiled in half of the time is done sooner."""
        if isinstance(self.view, Followers):
            # As a single evaluation of them.
            return jax.default_backend() == "cpu"
        small = is_usual(self.problem) and not is_large(self.view)
        return small and self.num_steps <= LONG

    def _chosen_step(self) -> int:
        """The step whose `x` is kept for `output="random"` (`Thm:Main_I`)."""
        if self.output != "random":
            return -1
        drawn = jr.randint(jr.fold_in(self.key, self.num_steps), (), 0, self.num_steps)
        return max(0, int(drawn) - self.method.lag)

    def _reason_to_stop(self, x, e, history, scales, watch: Stopwatch) -> str | None:
        momentum = history["momentum_norm"][-1]
        # One step proves nothing: the first one of DS-BLO stays where it is.
        enough = max(self.chunk, _STEPS_TO_JUDGE)
        move = np.max(history["move"][-enough:])
        if self.view.domain is None and momentum < self.stop.momentum * float(
            scales.slope
        ):
            return "the momentum vanished"
        if len(history) >= enough and move < self.stop.move * float(scales.length):
            return "the steps vanished"
        if watch.running > self.stop.seconds:
            return _TIME_SPENT
        if self.stop.certificate is not None:
            radius, eps = self.stop.certificate
            found = certify(self.view, x, radius, key=self.key)
            if found.measure <= eps:
                return f"certified: {found.measure:.1e} at radius {radius:g}"
        return None

    @functools.cached_property
    def _meta(self) -> dict:
        # Once per run: the digest reads all data.
        return dict(
            jax=jax.__version__,
            python=".".join(platform.python_version_tuple()[:2]),
            method=checkpoints.label(self.method),
            problem=checkpoints.fingerprint(self.problem),
            num_steps=self.num_steps,
            chunk=self.chunk,
            average=None if self.average is None else float(self.average.decay),
            looks=self.looks,
            x0=checkpoints.fingerprint(self.x0),
            output=self.output,
            polish=self.polish,
            key=np.asarray(jr.key_data(self.key)).tolist(),
            # Last: where it differs because of another choice, that one is named.
            stages=self.in_stages,
            usual=self.has_own_program,
        )

    def _ended(self, meta: dict) -> str | None:
        """Why the run of a checkpoint ended early, under the same rules; else None."""
        same = meta["stop"] == repr(self.stop)
        return meta["ended"] if same and meta["ended"] != _TIME_SPENT else None

    def _save(self, tree, history, step, watch: Stopwatch, recovering, ended):
        arrays = checkpoints.flatten(tree, "state_") | to_arrays(history)
        meta = self._meta | dict(
            step=step, spent=watch.seconds, running=watch.running,
            recovering=recovering, ended=ended, stop=repr(self.stop),
        )  # fmt: skip
        checkpoints.save(self.checkpoint, arrays, meta)

    def _restore(self, *like):
        arrays, meta = checkpoints.load(self.checkpoint)
        checkpoints.check_kinds(self.checkpoint, meta, _META)
        checkpoints.check_same(self.checkpoint, meta, self._meta)
        tree = checkpoints.unflatten(arrays, "state_", like, self.checkpoint)
        history = checked_history(self.checkpoint, arrays, meta["step"])
        if meta["step"] < self.num_steps and self._ended(meta) is None:
            checkpoints.check_writable(self.checkpoint)
        return tree, history, meta


class End(NamedTuple):
    """How a run ended.

    - `last`, `best`: an `x` and its evaluation, at the end and where `F` was lowest.
    - `length`: the length scale; `mean`: the average of the iterates, where kept.
    - `kind`: what its program was made for, where it has one of its own; `state`: the
      last one of the method.
    """

    last: tuple[Any, Evaluation]
    best: tuple[Any, Evaluation]
    history: History
    reason: str
    length: float
    mean: Any
    kind: usual.Kind | None = None
    state: Any = None


def blank_evaluation(problem: Problem, x) -> Evaluation:
    """The shapes of an evaluation, with nothing computed; its value is NaN."""
    evaluate = lambda p, x: hypergradient(p, x, throw=False)
    shapes = eqx.filter_eval_shape(evaluate, plain(problem), x)
    blank = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
    return eqx.tree_at(lambda e: e.value, blank, jnp.full_like(blank.value, jnp.nan))


@once_jit
def start(problem: Problem, method: AbstractMethod, x, e: Evaluation, scales, key):
    """The state before the first step."""
    whole = jr.fold_in(key, _WHOLE_RUN)
    state = method.init(problem, x, opened_factor(e.lower), scales, key=whole)
    return strongly_typed(state)


def start_in_stages(problem: Problem, method, x, e: Evaluation, scales, key):
    """The same as an object in Python: too little to be worth a program."""
    with stage_by_stage():
        whole = fold_in(key, _WHOLE_RUN)
    return strongly_typed(method.init(problem, x, e.lower, scales, key=whole))


def _advance(
    problem, method, average, size, state, kept, mean, key, first, last, total, chosen
):
    """Steps `first` to `last`, at most `size` of them.

    `kept` becomes the `x` of step `chosen`; if that is negative, the `x` of the step
    that saw the least value.
    """

    def step(state, t):
        state, record = method.step(
            problem, state, step=t, num_steps=total, key=jr.fold_in(key, t)
        )
        x = problem.absorbed(state.x, record.aux)
        state = eqx.tree_at(lambda s: s.x, state, x)
        return state, with_scalars(record)

    dynamic, static = eqx.partition(state, eqx.is_array)
    shapes = eqx.filter_eval_shape(step, state, first)[1]

    def body(carry):
        dynamic, kept, least, mean, records, t = carry
        state, record = step(eqx.combine(dynamic, static), t)
        # Before anything looks at `x`: a method may compute in a higher precision.
        dynamic = _like(eqx.filter(state, eqx.is_array), dynamic)
        state = eqx.combine(dynamic, static)
        records = jax.tree.map(
            lambda column, entry: column.at[t - first].set(entry), records, record
        )
        falls = (chosen < 0) & (record.value < least)
        keep = (t == chosen) | falls
        kept = jax.tree.map(lambda a, b: jnp.where(keep, a, b), state.x, kept)
        least = jnp.where(falls, record.value, least)
        if average is not None:
            mean = average.update(mean, state.x, t)
        return dynamic, kept, least, mean, records, t + 1

    least = jnp.full_like(shapes.value, jnp.inf)
    carry = (dynamic, kept, least, mean, blank_records(shapes, size), first)
    carry = jax.lax.while_loop(lambda c: c[-1] < last, body, carry)
    dynamic, kept, _, mean, records, _ = carry
    return eqx.combine(dynamic, static), kept, mean, records


advance = quick_jit(_advance)
advance_briefly = once_jit(_advance)


def _like(new, old):
    """`new` with the dtypes of `old`, and no weak types."""

    def cast(a, b):
        if jnp.issubdtype(b.dtype, jax.dtypes.prng_key):
            return a
        return jax.lax.convert_element_type(a, b.dtype)

    return jax.tree.map(cast, new, old)


def _met_empty(records: Record, count: int) -> bool:
    codes = np.asarray(records.status)[:count]
    return bool(np.any(codes == status_code(Status.infeasible)))


def plain(problem: Problem) -> Problem:
    """`problem` as it looks inside a step of a method, but with no tilt.

    To trace one form of the lower level instead of three makes a start twice as fast.
    """
    return untilted(problem.assuming_feasible())


def untilted(problem: Any) -> Problem:
    """`problem` with a tilt of zero."""
    return problem.perturbed(jax.tree.map(jnp.zeros_like, problem.y0))


def evaluate_allowed(
    problem: Problem, x, often: bool = True
) -> Asking[tuple[Any, Evaluation]]:
    """`F` at `x`, or at the nearest `x` that is allowed; which one comes first.

    `often`: see `looked_at`.
    """
    x, e = yield Request(_inside, (plain(problem), x, often))
    if status_name(e.status) == "infeasible" and moves(problem):
        near = yield Request(onto_allowed, (problem, x))
        _, there = yield Request(_inside, (plain(problem), near, often))
        # Where no allowed point exists at all, the first answer stands.
        if has_value(there.status):
            x, e = near, there
    return x, e


def _inside(problem: Problem, x, often: bool):
    """The nearest point of the domain, and `F` there."""
    x = onto_domain(problem, x)
    return x, looked_at(problem, x, often)
