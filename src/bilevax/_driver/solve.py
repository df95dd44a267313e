"""`solve`: run a method from one start or many, and say how good the result is."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, PRNGKeyArray, PyTree

from .._arguments import check_count, check_number, checked_key
from .._constraints import Box, Polyhedron, check_polyhedron
from .._files.checkpoint import check_writable
from .._files.progress import progress_bar
from .._implicit.feasible import moves, onto_allowed
from .._implicit.hypergradient import Evaluation, hypergradient
from .._judge.certificate import Certificate, certify as certify_at
from .._methods.base import AbstractMethod
from .._methods.ds_blo import DSBLO
from .._methods.polish import Polish, polish as polish_from
from .._problem.checks import checked_point
from .._problem.problem import AbstractProblem, Problem
from .._problem.stochastic import representative
from .._programs.control import often
from .._programs.threads import few_threads
from .._status import (
    BilevelError,
    Status,
    has_value,
    is_traced,
    message,
    status_code,
    status_name,
)
from .._tolerances import tolerances
from .average import Average
from .falling import Beyond, beyond
from .history import History
from .run import End, Run, Stop, evaluate_allowed, plain

DEFAULT_STEPS = 300
# Larger problems are not polished unless asked: BFGS keeps a dense matrix.
_POLISH_LIMIT = 1000
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


def solve(
    problem: AbstractProblem,
    method: AbstractMethod | None = None,
    x0: PyTree | None = None,
    *,
    key: PRNGKeyArray | int,
    num_steps: int | None = None,
    throw: bool = True,
    starts: Sequence[PyTree] = (),
    num_starts: int = 1,
    polish: bool | None = None,
    certify: float | None = None,
    output: str = "last",
    average: float | None = None,
    looks: bool = True,
    stop: Stop | None = None,
    chunk: int | None = None,
    progress: bool = False,
    callback: Callable | None = None,
    checkpoint: str | os.PathLike | None = None,
) -> Solution:
    """Minimise `F` from `x0` with `method` (by default `DSBLO()`).

    - `key`: of all draws; an integer is the seed of one.
    - `num_steps`: steps of the method; by default 300, with early stopping.
    - `starts`, `num_starts`: further starting points, or how many starts in all, the
      rest drawn from the domain (without one, around `x0`). The best result counts.
    - `polish`: whether a deterministic descent on `F` follows; by default for
      deterministic problems with at most 1000 entries of `x`.
    - `certify`: a radius at which to measure stationarity of the result.
    - `output`: "last", or "random" for an iterate drawn as in `Thm:Main_I`.
    - `average`: the decay of a running average of the iterates, `solution.average`.
    - `looks`: whether `F` is evaluated between chunks and at the end. Without, `value`
      is what the last step found, on its sample and under its tilt, and `y` is None.
    - `stop`: early stopping; `chunk`: steps between two looks at the run; by
      default a tenth of the run, at least 100 and at most 1000.
    - `progress`: a bar; `callback(step, x, value, history)` after every chunk, with the
      average as a fifth argument where one is kept; a true result ends the run.
    - `checkpoint`: a file to write after every chunk. If it exists, the run continues
      from it and ends exactly as if it had never been interrupted. A run that has ended
      is found again; one that ended early goes on with another `stop`.

    Where the lower level is empty, `x` goes to the nearest point where it is not. A
    result that is no answer raises a `BilevelError`, unless `throw=False`.
    """
    _check_not_traced("solve", problem, method, x0, key, starts)
    _check_arguments(
        problem, method, x0, num_steps, chunk, output, num_starts, stop, callback
    )
    _check_looks(looks, polish, certify, average)
    key = checked_key(key)
    method = DSBLO() if method is None else method
    refusal = method.refusal(problem)
    if refusal is not None:
        raise ValueError(refusal)
    stop = (Stop() if num_steps is None else Stop(0, 0)) if stop is None else stop
    num_steps = DEFAULT_STEPS if num_steps is None else num_steps
    look_key, start_key, key, first_key = _keys(key)
    view = representative(problem, look_key)
    if isinstance(view.domain, Polyhedron):
        check_polyhedron(view.domain)
    points = _starting_points(view, x0, starts, num_starts, start_key)
    if polish is None:
        size = ravel_pytree(points[0])[0].size
        polish = looks and isinstance(problem, Problem) and size <= _POLISH_LIMIT
    total = len(points) * num_steps
    solutions = []
    bar = progress_bar(total, enabled=progress)
    with bar as tick, often(), few_threads(view):
        for i, point in enumerate(points):
            path = _numbered(checkpoint, i, len(points))
            if path is not None and not os.path.isfile(path):
                check_writable(path)
            run = Run(
                problem=problem,
                view=view,
                method=method,
                x0=point,
                key=jr.fold_in(key, i) if i else first_key,
                num_steps=num_steps,
                stop=stop,
                chunk=min(
                    _default_chunk(num_steps) if chunk is None else chunk, num_steps
                ),
                output=output,
                polish=polish,
                average=None if average is None else Average(average),
                looks=looks,
                callback=callback,
                checkpoint=path,
                tick=tick,
            )
            solutions.append(_solve_from(run, point, certify))
    best = min(solutions, key=_rank)
    if len(solutions) > 1:
        best = replace(best, starts=solutions)
    if throw and not best.success:
        raise BilevelError(f"The solve failed. {best.message}", best.status, best)
    return best


@jax.jit
def _keys(key):
    """Of the look, of the starts, of all runs, and of the first one."""
    look, starts, runs = jr.split(key, 3)
    return look, starts, runs, jr.fold_in(runs, 0)


def _default_chunk(num_steps: int) -> int:
    """Looks cost some steps each, and records are copied once per step: a long chunk of
    a long run hides the first, and is too short for the second to show."""
    return min(max(100, -(-num_steps // 10)), 1000)


def _rank(solution: Solution):
    value = float(solution.value)
    return (not solution.success, value if np.isfinite(value) else np.inf)


def _solve_from(run: Run, point, certify) -> Solution:
    """The run from one start, and again a hair inside bounds on which `F` has no value.

    Without a polish it is the method alone that is asked for, as in comparisons.
    """
    found = _finish(run, run.go(point), certify)
    box = run.view.domain
    asked = run.polish and isinstance(run.problem, Problem)
    if not (asked and isinstance(box, Box) and _met_undefined(found)):
        return found
    again = _within(run, box.shrunk(_HAIR))
    inside = _finish(again, again.go(point), certify)
    inside.stopped += "; F is undefined on a bound, which was moved inside"
    return min(found, inside, key=_rank)


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


def _finish(run: Run, end: End, certify) -> Solution:
    (x, e), best = end.last, end.best
    stochastic = (x, float(e.value))
    polished = None
    # A run that was carried to a flat part of `F` would end there.
    if run.polish and run.output == "last" and float(best[1].value) < float(e.value):
        x, e = best
    if run.polish and has_value(e.status):
        x, e, polished = _polished(run, end.length, x, e)
    if run.looks and moves(run.view) and status_name(e.status) == "dependent_rows":
        # At the edge of the set of `x` with a non-empty lower level: a hair inside, or
        # another solver would find it empty.
        inside = onto_allowed(run.view, x)
        new = hypergradient(run.view, inside, throw=False)
        if has_value(new.status):
            x, e = inside, new
    status, stopped = _judged(run, end, x, e)
    answer = has_value(status)
    certificate = None
    if certify is not None and answer:
        certificate = certify_at(run.view, x, certify, key=run.key)
    return Solution(
        x=x,
        y=e.lower.y if run.looks else None,
        value=float(e.value),
        status=status,
        success=answer,
        message=message(status),
        history=end.history,
        stopped=stopped,
        stochastic=stochastic,
        polish=polished,
        certificate=certificate,
        average=end.mean,
    )


def _judged(run: Run, end: End, x, e: Evaluation) -> tuple[Any, str]:
    """The status of the result, and why the run ended.

    A value that is no number is no answer, and neither is one that has no end. Whether
    it has is asked where a polish was asked for: comparisons pay for no look at `F`
    beyond their own.
    """
    if has_value(e.status) and not np.isfinite(e.value):
        return Status.non_finite, end.reason
    if not (run.polish and has_value(e.status)):
        return e.status, end.reason
    found = beyond(run.view, run.x0, x, e, end.length)
    if found is Beyond.unbounded:
        return Status.unbounded, found.value
    told = f"; {found.value}" if found is Beyond.level else ""
    return e.status, end.reason + told


def _polished(run: Run, length: float, x, e) -> tuple[Any, Evaluation, Polish]:
    """Polish as long as that lowers `F`.

    A search that gave up on a kink often finds the way along it from there: what it had
    learned of the curvature was in its way.
    """
    first: Any = np.asarray(1e-3 * length, jax.tree.leaves(x)[0].dtype)
    start, steps, evaluations = e.value, 0, 0
    for _ in range(_POLISH_ROUNDS):
        done = polish_from(plain(run.view), x, e.lower, first)
        if int(done.empty) and moves(run.view):
            done = polish_from(run.view, x, e.lower, first)
        steps, evaluations = (
            steps + int(done.steps),
            evaluations + int(done.evaluations),
        )
        new_x, new = evaluate_allowed(run.view, done.x)
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


def _starting_points(problem: Problem, x0, starts, num_starts, key):
    first = checked_point(problem, x0)
    points = [first, *(checked_point(problem, point) for point in starts)]
    flat, unravel = ravel_pytree(first)
    for i in range(num_starts - len(points)):
        points.append(unravel(_random_start(problem, flat, jr.fold_in(key, i))))
    return points


def _random_start(problem: Problem, flat, key):
    """Uniform in a bounded box; along free coordinates normal around `x0`."""
    spread = jnp.maximum(jnp.linalg.norm(flat) / np.sqrt(flat.size), 1.0)
    point = flat + spread * jr.normal(key, flat.shape, flat.dtype)
    domain = problem.domain
    if not isinstance(domain, Box):
        return point
    low, high = ravel_pytree(domain.lower)[0], ravel_pytree(domain.upper)[0]
    bounded = jnp.isfinite(low) & jnp.isfinite(high)
    share = jr.uniform(jr.fold_in(key, 0), flat.shape, flat.dtype)
    inside = jnp.where(bounded, low, 0) + share * jnp.where(bounded, high - low, 0)
    return jnp.where(bounded, inside, jnp.clip(point, low, high))


def _numbered(checkpoint, i: int, count: int):
    if checkpoint is None or count == 1:
        return checkpoint
    root, ending = os.path.splitext(os.fspath(checkpoint))
    return f"{root}-{i}{ending}"


def _check_arguments(
    problem, method, x0, num_steps, chunk, output, num_starts, stop, callback
):
    if not isinstance(problem, AbstractProblem):
        raise ValueError(
            "`problem` must be a Problem or a StochasticProblem; got "
            f"{type(problem).__name__}."
        )
    if method is not None and not isinstance(method, AbstractMethod):
        got = method.__name__ if isinstance(method, type) else repr(method)
        raise ValueError(f"`method` must be a method such as DSBLO(); got {got}.")
    if x0 is None:
        raise ValueError("`x0` is needed: the point to start from.")
    counts = dict(num_steps=num_steps, chunk=chunk, num_starts=num_starts)
    for name, count in counts.items():
        if count is not None:
            check_count(count, name)
    if output not in ("last", "random"):
        raise ValueError(f"`output` must be 'last' or 'random'; got {output!r}.")
    if not (stop is None or isinstance(stop, Stop)):
        raise ValueError(
            f"`stop` must be a Stop, such as `Stop(seconds=60)`; got {stop!r}."
        )
    if not (callback is None or callable(callback)):
        raise ValueError(
            "`callback` must be a function of (step, x, value, history); got "
            f"{callback!r}."
        )


def _check_looks(looks, polish, certify, average):
    if certify is not None:
        check_number(certify, "certify", "a positive radius", np.nextafter(0, 1))
    if average is not None:
        check_number(average, "average", "a decay in [0, 1)", 0, 1)
    if not looks and (polish or certify is not None):
        raise ValueError(
            "`looks=False` never evaluates F, which `polish` and `certify` need."
        )


def _check_not_traced(what: str, *arguments) -> None:
    """Raise a `ValueError` inside `jit`, `vmap` or `grad`."""
    if is_traced(arguments):
        raise ValueError(
            f"`{what}` runs in Python between compiled chunks of steps, so it cannot "
            "be inside `jit`, `vmap` or `grad`: its arguments have no values there. "
            "Call it outside; it compiles what it needs, once for all problems of one "
            "structure. For batches and derivatives there are `hypergradient` and "
            "`solution_map`."
        )
