"""`solve` and `solve_many`: problems, starts and methods in, solutions out."""

import os
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.random as jr
from jaxtyping import Array, PRNGKeyArray, PyTree

from .._arguments import check_count, check_flag, checked_key, listed
from .._files.progress import progress_bar
from .._methods.base import AbstractMethod
from .._problem.problem import AbstractProblem
from .._programs.threads import few_threads
from .._status import BilevelError, is_traced
from .elsewhere import elsewhere
from .plan import Begun, Task, planned
from .requests import alone, together
from .run import Stop
from .solution import Solution, best_of


def solve(
    problem: AbstractProblem,
    method: AbstractMethod | None = None,
    x0: PyTree | None = None,
    *,
    key: PRNGKeyArray | int,
    num_steps: int | None = None,
    throw: bool = True,
    starts: Sequence[PyTree] = (),
    num_starts: int | None = None,
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
    executor: Any = None,
) -> Solution:
    """Minimise `F` from `x0` with `method` (by default `DSBLO()`).

    - `key`: of all draws; an integer is the seed of one.
    - `num_steps`: steps of the method; by default 300, with early stopping.
    - `x0`: may be left out where `domain` is a box with finite bounds: its middle then.
    - `starts`, `num_starts`: further starting points, or how many starts in all, the
      rest drawn from the domain (without one, around `x0`). The best result counts.
      By default one; where such a box has at most 20 entries and the lower level at
      most 200 variables and rows, up to eight, until the best value has come three
      times. `num_starts=1` is one; so is a run that is saved, watched or not polished.
    - `polish`: whether a deterministic descent on `F` follows; by default for
      deterministic problems with at most 2000 entries of `x`.
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
    - `executor`: does the starts in other processes, such as a `ProcessPoolExecutor` or
      the client of dask: anything with `submit(function, *arguments)`. A start whose
      process dies is tried once more, then it counts as one without an answer.

    Where the lower level is empty, `x` goes to the nearest point where it is not. In a
    box whose widths, or positive bounds, are far apart, a run that is polished computes
    in units of its own (a coordinate with bounds three decades apart in logarithms). A
    result that is no answer raises a `BilevelError`, unless `throw=False`.
    """
    starts = listed(starts, "starts", "starting points")
    _check_not_traced("solve", problem, method, x0, key, starts)
    check_flag(throw, "throw")
    check_flag(progress, "progress")
    if executor is not None and callback is not None:
        raise ValueError(
            "`callback` is a function of this process, and with an `executor` the run "
            "is in another one. Leave one of them out; `checkpoint` and `stop` go "
            "along."
        )
    plan = planned(
        method=method,
        num_steps=num_steps,
        starts=starts,
        num_starts=num_starts,
        polish=polish,
        certify=certify,
        output=output,
        average=average,
        looks=looks,
        stop=stop,
        chunk=chunk,
        callback=callback,
        checkpoint=checkpoint,
    )
    task = Task(problem, x0, checked_key(key))
    with progress_bar(plan.total, enabled=progress) as tick:
        begun = plan.begun(task, tick)
        if executor is not None:
            best = best_of(begun.needed(elsewhere(executor, [begun], tick)))
        else:
            with few_threads(begun.view):
                best = best_of(_one_by_one(begun))
    if throw and not best.success:
        raise BilevelError(f"The solve failed. {best.message}", best.status, best)
    return best


def _one_by_one(begun: Begun) -> list[Solution]:
    """The ends of all runs, or of the first ones if these are enough."""
    ends: list[Solution] = []
    for run in begun.asking:
        if begun.until(ends):
            break
        ends.append(alone(run))
    return ends


def solve_many(
    problems: Sequence[AbstractProblem],
    x0s: Sequence[PyTree] | Array,
    keys: Sequence[PRNGKeyArray] | PRNGKeyArray | int,
    method: AbstractMethod | None = None,
    *,
    num_steps: int | None = None,
    num_starts: int = 1,
    polish: bool | None = None,
    certify: float | None = None,
    output: str = "last",
    average: float | None = None,
    stop: Stop | None = None,
    chunk: int | None = None,
    batch: int = 1000,
    progress: bool = False,
    executor: Any = None,
) -> list[Solution]:
    """`solve` for many instances at once: one program for all, a `Solution` for each.

    - `problems`: any number; those with the same functions and shapes are solved
      together, `batch` at a time, others one by one. Data that differ between them are
      arrays bound to the functions (`jax.tree_util.Partial`, or fields of an
      `equinox.Module`), not numbers found around a lambda.
    - `x0s`: one start per problem, in a sequence.
    - `keys`: one key per problem; a single key, or an integer, is split.

    - `executor`: as in `solve`; the instances are dealt out in pieces of at most
      `batch`. One whose process dies twice has the status `lost`.

    The other arguments, and the results, are those of `solve` for each problem alone
    with `num_starts=1`, to rounding. Nothing is raised for a member that has no answer:
    `success`, `status` and `message` of its solution tell, and the others stay right.
    Seconds in the histories are those of the whole batch.
    """
    problems = listed(problems, "problems", "problems")
    _check_not_traced("solve_many", problems, method, x0s, keys)
    check_count(num_starts, "num_starts")
    check_flag(progress, "progress")
    plan = planned(
        method=method,
        num_steps=num_steps,
        num_starts=num_starts,
        polish=polish,
        certify=certify,
        output=output,
        average=average,
        stop=stop,
        chunk=chunk,
        together=len(problems) * num_starts > 1,
    )
    check_count(batch, "batch")
    total = len(problems) * plan.total
    with progress_bar(total, enabled=progress) as tick:
        begun = [plan.begun(task, tick) for task in _tasks(problems, x0s, keys)]
        if not begun:
            return []
        if executor is not None:
            found = iter(elsewhere(executor, begun, tick, batch))
        else:
            _warn_of_functions(problems)
            runs = [run for one in begun for run in one.asking]
            with few_threads(begun[0].view):
                found = iter(together(runs, batch))
    return [best_of([next(found) for _ in one.runs]) for one in begun]


def _warn_of_functions(problems) -> None:
    """Warn where no two problems can share a program."""
    structures = {jax.tree.structure(problem) for problem in problems}
    functions = {_functions(problem) for problem in problems}
    if len(functions) == len(problems) > len(structures):
        warnings.warn(
            "All problems have functions of their own, such as a lambda that was made "
            "for each, so none shares a program with another. Write the functions once "
            "and bind what differs: `jax.tree_util.Partial(function, data)`.",
            stacklevel=3,
        )


def _functions(problem) -> tuple:
    return tuple(leaf for leaf in jax.tree.leaves(problem) if callable(leaf))


def _tasks(problems, x0s, keys) -> list[Task]:
    count = len(problems)
    x0s = listed(x0s, "x0s", "starting points, one per problem,")
    if not isinstance(keys, Iterable) or getattr(keys, "shape", None) == ():
        keys = jr.split(checked_key(keys), count)
    keys = [checked_key(key) for key in keys]
    for name, things in (("x0s", x0s), ("keys", keys)):
        if len(things) != count:
            raise ValueError(
                f"`{name}` must have one entry per problem; got {len(things)} for "
                f"{count} problems."
            )
    return [Task(*one) for one in zip(problems, x0s, keys, strict=True)]


def _check_not_traced(what: str, *arguments) -> None:
    """Raise a `ValueError` inside `jit`, `vmap` or `grad`."""
    if is_traced(arguments):
        raise ValueError(
            f"`{what}` runs in Python between compiled chunks of steps, so it cannot "
            "be inside `jit`, `vmap` or `grad`: its arguments have no values there. "
            "Call it outside; it compiles what it needs, once for all problems of one "
            "structure. Many instances at once are `solve_many`; derivatives are those "
            "of `hypergradient` and `solution_map`."
        )
