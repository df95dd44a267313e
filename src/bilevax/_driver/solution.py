"""A run and what follows it: polish, second thoughts, the words for its end."""

from dataclasses import dataclass, field, replace
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PyTree

from .._constraints import Box
from .._implicit.feasible import moves, onto_allowed
from .._implicit.hypergradient import Evaluation
from .._judge.certificate import Certificate, certify as certify_at
from .._methods.polish import Polish, polish as polish_from
from .._programs.control import on_device
from .._status import Status, as_status, has_value, message, status_code, status_name
from .._tolerances import tolerances
from .falling import Beyond, beyond, still_falling
from .history import History
from .requests import Asking, Request
from .run import End, Run, evaluate_allowed, plain
from .usual import polish as polish_usually

# What a round of the polish must gain for another one, in units of `accept`.
_SMALL_GAIN = 1e-2
_POLISH_ROUNDS = 4
# Share of the range of `x` by which bounds are moved where `F` is undefined on them.
_HAIR = 1e-7


@dataclass(repr=False)
class Solution:
    """The end of a run.

    - `x`, `y`, `value`: the point, the follower's answer and `F`, from an unperturbed,
      tightly solved lower level.
    - `status`, `message`, `success`: of that evaluation. A kink is a success, since
      minimisers of `F` sit there.
    - `history`: the run in numbers.
    - `stochastic`: `x` and `F` before the polish; `polish`: what the polish did.
    - `certificate`: how far `x` is from stationary, where asked for.
    - `average`: the running average of the iterates, where asked for.
    - `stopped`: why the run ended.
    - `starts`: one solution per start, where there were several; this is the best.
    """

    x: PyTree[Array]
    y: PyTree[Array]
    value: float
    status: Any
    success: bool
    message: str
    history: History
    stopped: str
    stochastic: tuple[PyTree[Array], float]
    polish: Polish | None = None
    certificate: Certificate | None = None
    average: PyTree[Array] | None = None
    starts: list["Solution"] = field(default_factory=list)

    @property
    def status_name(self) -> str:
        return status_name(self.status)

    def __repr__(self):
        return (
            f"Solution(value={self.value:.10g}, status={self.status_name}, "
            f"x={self.x}, y={self.y}, steps={len(self.history)}, "
            f"stopped={self.stopped!r})"
        )


def best_of(solutions: list[Solution]) -> Solution:
    """The best of several starts, which keeps them all."""
    best = min(solutions, key=rank)
    return replace(best, starts=solutions) if len(solutions) > 1 else best


def rank(solution: Solution):
    value = float(solution.value)
    return (not solution.success, value if np.isfinite(value) else np.inf)


def solution_from(run: Run, point, certify) -> Asking[Solution]:
    """The run from one start, and again a hair inside bounds on which `F` has no value.

    Without a polish it is the method alone that is asked for, as in comparisons.
    """
    end = yield from run.go(point)
    found = yield from _finish(run, end, certify)
    box = run.view.domain
    asked = run.polish and not run.problem.is_sampled
    if not (asked and isinstance(box, Box) and _met_undefined(found)):
        return found
    again = _within(run, box.shrunk(_HAIR))
    end = yield from again.go(point)
    inside = yield from _finish(again, end, certify)
    inside.stopped += "; F is undefined on a bound, which was moved inside"
    return min(found, inside, key=rank)


def _met_undefined(found: Solution) -> bool:
    """Whether `F` was undefined somewhere, so that bounds on `x` may be to blame.

    Projections end on bounds. Where `F` has a pole or a logarithm there, a run would
    stay where it is.
    """
    undefined = status_code(Status.non_finite)
    codes = found.history["status"] if len(found.history) else ()
    polish = found.polish
    return (
        status_code(found.status) == undefined
        or undefined in codes
        or (polish is not None and bool(polish.undefined))
    )


def _within(run: Run, box: Box) -> Run:
    """The same run with other bounds on `x`."""
    inside = lambda problem: eqx.tree_at(lambda p: p.domain, problem, box)
    return replace(
        run, problem=inside(run.problem), view=inside(run.view), checkpoint=None,
        tick=lambda count: None,
    )  # fmt: skip


def _finish(run: Run, end: End, certify) -> Asking[Solution]:
    (x, e), best = end.last, end.best
    stochastic = (x, float(e.value))
    polished = None
    # A run that was carried to a flat part of `F` would end there.
    if run.polish and run.output == "last" and float(best[1].value) < float(e.value):
        x, e = best
    if run.polish and has_value(e.status):
        x, e, polished = yield from _polished(run, end, x, e)
    if run.looks and moves(run.view) and status_name(e.status) == "dependent_rows":
        # At the edge of the set of `x` with a non-empty lower level: a hair inside, or
        # another solver would find it empty.
        near = yield Request(onto_allowed, (run.view, x))
        inside, new = yield from evaluate_allowed(run.view, near, run.looks_often)
        if has_value(new.status):
            x, e = inside, new
    status, stopped = _judged(run, end, x, e)
    answer = has_value(status)
    certificate = None
    if certify is not None and answer:
        certificate = certify_at(run.view, x, certify, key=run.key)
    y = e.lower.y if run.looks else None
    # Members of a batch are NumPy's.
    x, y, mean, code = on_device((x, y, end.mean, status._value))
    return Solution(
        x=x,
        y=y,
        value=float(e.value),
        status=as_status(code),
        success=answer,
        message=e.message if status is e.status else message(status),
        history=end.history,
        stopped=stopped,
        stochastic=stochastic,
        polish=polished,
        certificate=certificate,
        average=mean,
    )


def _judged(run: Run, end: End, x, e: Evaluation) -> tuple[Any, str]:
    """The status of the result, and why the run ended.

    A value that is no number is no answer, and neither is one that has no end. Whether
    it has is asked with or without a polish; only a run that never looks at `F` cannot
    know, and one on samples, whose end is noise, asks a shorter question.
    """
    if has_value(e.status) and not np.isfinite(e.value):
        return Status.non_finite, end.reason
    if not (run.looks and has_value(e.status)):
        return e.status, end.reason
    if run.problem.is_sampled and not run.polish:
        told = still_falling(run.view, x, e, end.length)
        return e.status, end.reason if told is None else f"{end.reason}; {told}"
    found = beyond(run.view, run.x0, x, e, end.length, run.looks_often)
    if found is Beyond.unbounded:
        return Status.unbounded, found.value
    told = f"; {found.value}" if found is Beyond.level else ""
    return e.status, end.reason + told


def _polishing(run: Run, end: End, problem, *begin) -> Request:
    """A polish, by the program of the run where it has one."""
    if end.kind is None:
        return Request(polish_from, (problem, *begin, not run.together), late=2)
    return Request(polish_usually, (end.kind, problem, end.state, *begin), late=2)


def _polished(run: Run, end: End, x, e) -> Asking[tuple[Any, Evaluation, Polish]]:
    """Polish as long as that lowers `F`.

    A search that gave up on a kink often finds the way along it from there: what it had
    learned of the curvature was in its way.
    """
    first: Any = np.asarray(1e-3 * end.length, jax.tree.leaves(x)[0].dtype)
    start, steps, evaluations = e.value, 0, 0
    for _ in range(_POLISH_ROUNDS):
        begin = (x, e.lower, first)
        done = yield _polishing(run, end, plain(run.view), *begin)
        if int(done.empty) and moves(run.view):
            done = yield _polishing(run, end, run.view, *begin)
        steps, evaluations = (
            steps + int(done.steps),
            evaluations + int(done.evaluations),
        )
        new_x, new = yield from evaluate_allowed(run.view, done.x, run.looks_often)
        gain = float(e.value) - float(new.value)
        tol, size = tolerances(e.value.dtype), abs(float(e.value))
        # A gain within rounding is no reason to move, least of all along flat parts.
        if not (has_value(new.status) and gain > 8 * tol.eps * size):
            break
        x, e = new_x, new
        if gain <= _SMALL_GAIN * tol.accept * size:
            break
    told = lambda p: (p.x, p.value, p.start_value, p.steps, p.evaluations)
    counts = (jnp.asarray(steps), jnp.asarray(evaluations))
    return x, e, eqx.tree_at(told, done, (x, e.value, start, *counts))
