"""A run and what follows it: polish, second looks, the words for its end."""

import os
from dataclasses import dataclass, field, replace
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, PyTree

from .._constraints import Box
from .._implicit.feasible import moves, onto_allowed
from .._implicit.hypergradient import Evaluation
from .._judge.certificate import Certificate, certify as certify_at
from .._lower.base import LowerSolution
from .._methods.polish import Polish, polish as polish_from
from .._problem.chart import Chart
from .._programs.control import on_device
from .._programs.modules import with_fields
from .._status import Status, as_status, has_value, message, status_code, status_name
from .._tolerances import tolerances
from . import solution_file
from .falling import Beyond, beyond, still_falling
from .history import History
from .report import holding, report
from .requests import Asking, Request
from .run import End, Run, evaluate_allowed, plain
from .second_look import SecondLook, second_look
from .upper_report import UpperReport
from .usual import polish as polish_usually

# What a round of the polish must gain for another one, in units of `accept`.
_SMALL_GAIN = 1e-2
_POLISH_ROUNDS = 4
# Second looks that may each lead on to a lower point.
_LOOKS = 8
# Share of the range of `x` by which bounds are moved where `F` is undefined on them.
_HAIR = 1e-7


@dataclass(repr=False)
class Solution:
    """The end of a run.

    - `x`, `y`, `value`: the point, the follower's answer and `F`, from an unperturbed,
      tightly solved lower level. `lower` is all that is known of it: `multipliers`,
      `prices`, active rows; None where nothing was evaluated.
    - `status`, `message`, `success`: of that evaluation. A kink is a success, since
      minimisers of `F` sit there. Whether the run was one is another question:
      `converged`.
    - `history`: the run in numbers.
    - `stochastic`: `x` and `F` before the polish; `polish`: what the polish did.
    - `certificate`: how far `x` is from stationary, where asked for.
    - `average`: the running average of the iterates, where asked for.
    - `stopped`: why the run ended.
    - `starts`: one solution per start, where there were several; this is the best.
    - `upper`: the upper constraints at `x`, where the problem has some that involve
      `y`; an answer that violates them is no success. `history` then follows the
      penalised objective, all else is about `F`.
    - `around`: what a second look saw around `x`; None without a polish.

    `print(solution)` is a short report: what the point is worth, and what to try next.
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
    upper: UpperReport | None = None
    lower: LowerSolution | None = None
    around: SecondLook | None = None
    bounds: dict[str, str] = field(default_factory=dict)

    @property
    def status_name(self) -> str:
        return status_name(self.status)

    @property
    def upper_multipliers(self) -> PyTree[Array]:
        """The multipliers of `upper_constraints`; None where there are none."""
        return None if self.upper is None else self.upper.multipliers

    @property
    def violation(self) -> float:
        """By how much upper constraints are violated."""
        return 0.0 if self.upper is None else self.upper.violation

    @property
    def feasible(self) -> bool:
        """Whether `x` satisfies the upper constraints, to rounding."""
        return self.upper is None or self.upper.feasible

    @property
    def multipliers(self) -> Any:
        """Of the lower-level rows at `x`; one row per follower where there are many."""
        return None if self.lower is None else self.lower.multipliers

    @property
    def prices(self) -> Any:
        """The multipliers; of an `Intersection` by the names of its sets."""
        return None if self.lower is None else self.lower.prices

    @property
    def converged(self) -> bool:
        """Whether the run came to rest at a stationary point, as far as was looked.

        About the run, whereas `success` is about the evaluation at its end. After a
        polish: no probe around `x` was lower, and gradients there combine to zero.
        Without one: the steps or the momentum vanished, or a certificate was reached.
        """
        ran_out = "still falling" in self.stopped or self.status_name == "unbounded"
        if not self.success or ran_out:
            return False
        if self.around is None:
            return any(word in self.stopped for word in ("vanished", "certified"))
        if self.around.open:
            return False
        if self.upper is not None:
            # Of the constraints the gradients count, too, and those very near to `x`.
            return self.around.counts_as_zero(self.upper.residual, self.around.radius)
        return self.around.is_stationary

    def save(self, path: str | os.PathLike) -> None:
        """Write it to one file, `.npz`: arrays and text, no pickle.

        Trees of `x` and `y` may be dictionaries, lists and tuples of arrays.
        """
        solution_file.write(path, self)

    @classmethod
    def load(cls, path: str | os.PathLike) -> "Solution":
        """What `save` wrote; a damaged file is a `CheckpointError`."""
        return solution_file.read(path, cls)

    def __str__(self):
        return report(self)

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
    # Of answers that violate upper constraints, the one that does least.
    outside = 0.0 if solution.feasible else solution.violation
    return (not solution.success, outside, value if np.isfinite(value) else np.inf)


def solution_from(run: Run, point, certify) -> Asking[Solution]:
    """The run from one start, and again a hair inside bounds on which `F` has no value.

    Without a polish it is the method alone that is asked for, as in comparisons.
    """
    end = yield from run.go(point)
    found = yield from _finish(run, end, certify)
    box = run.view.domain
    asked = run.polish and not run.problem.is_sampled
    if not (asked and isinstance(box, Box) and _met_undefined(found)):
        return in_units_of_x(run.chart, found)
    again = _within(run, box.shrunk(_HAIR))
    end = yield from again.go(point)
    inside = yield from _finish(again, end, certify)
    inside.stopped += "; F is undefined on a bound, which was moved inside"
    return in_units_of_x(run.chart, min(found, inside, key=rank))


def in_units_of_x(chart: Chart | None, found: Solution) -> Solution:
    """What a run in units of its own has found, in those of the caller."""
    if chart is None:
        return found
    x, slopes = chart.x(found.x), chart.slopes(found.x)
    bounds = (ravel_pytree(x)[1](bound) for bound in (chart.low, chart.high))
    before, value = found.stochastic
    polished, around = found.polish, found.around
    if polished is not None:
        polished = with_fields(polished, x=chart.x(polished.x))
    return replace(
        found,
        x=x,
        stochastic=(chart.x(before), value),
        polish=polished,
        around=None if around is None else around.in_units(slopes),
        bounds=holding(Box(*bounds), x),
    )


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
        x, e, polished = yield from polish_rounds(run, end.length, x, e, end)
    if run.looks and moves(run.view) and status_name(e.status) == "dependent_rows":
        # At the edge of the set of `x` with a non-empty lower level: a hair inside, or
        # another solver would find it empty.
        near = yield Request(onto_allowed, (run.view, x))
        inside, new = yield from evaluate_allowed(run.view, near, run.looks_often)
        if has_value(new.status):
            x, e = inside, new
    status, stopped = _judged(run, end, x, e)
    around = None
    if polished is not None and stopped == end.reason and has_value(status):
        x, e, polished, around = yield from _looked_around(run, end, x, e, polished)
        status, stopped = _judged(run, end, x, e)
    answer = has_value(status)
    certificate = None
    if certify is not None and answer:
        certificate = certify_at(run.view, x, certify, key=run.key)
    lower = with_fields(e.lower, factor=None) if run.looks else None
    # Members of a batch are NumPy's.
    x, lower, mean, code = on_device((x, lower, end.mean, status._value))
    return Solution(
        x=x,
        y=None if lower is None else lower.y,
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
        lower=lower,
        around=around,
        bounds=holding(run.view.domain, x),
    )


def _looked_around(run: Run, end: End, x, e, done: Polish) -> Asking[tuple]:
    """Second looks, each followed by a polish, as long as they lead on."""
    history, around = end.history, None
    for _ in range(_LOOKS):
        change = abs(float(history.value[0]) - float(e.value))
        asked = (run.view, x, e, end.length, change, run.key)
        seen, near, there = yield from second_look(*asked)
        seen = seen.after(around)
        if not seen.open:
            around = seen
            break
        before = float(e.value)
        x, e, more = yield from polish_rounds(run, end.length, near, there, end)
        around = seen.led_on(before - float(e.value))
        told = lambda p: (p.start_value, p.steps, p.evaluations)
        both = (done.steps + more.steps, done.evaluations + more.evaluations)
        done = eqx.tree_at(told, more, (done.start_value, *both))
    return x, e, done, around


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


def _polishing(run: Run, end: End | None, problem, *begin) -> Request:
    """A polish, by the program of the run where it has one."""
    if end is None or end.kind is None:
        return Request(polish_from, (problem, *begin, not run.together), late=2)
    return Request(polish_usually, (end.kind, problem, end.state, *begin), late=2)


def polish_rounds(
    run: Run, length, x, e, end: End | None = None
) -> Asking[tuple[Any, Evaluation, Polish]]:
    """Polish as long as that lowers `F`.

    A search that gave up on a kink often finds the way along it from there: what it had
    learned of the curvature was in its way.
    """
    first: Any = np.asarray(1e-3 * length, jax.tree.leaves(x)[0].dtype)
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
