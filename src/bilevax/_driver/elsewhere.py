"""Runs of `solve` and `solve_many` that an executor does."""

import os
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

from jaxtyping import PRNGKeyArray

from .._executors.gather import Job, Lost, gathered
from .._files.digest import digest
from .._problem.problem import AbstractProblem, Problem
from .._problem.stochastic import representative
from .._programs.threads import few_threads
from .._status import Status, message
from .coupled import answer_from
from .history import History
from .plan import Begun
from .requests import alone, together
from .run import Run
from .solution import Solution

# So many pieces keep as many workers busy, while each has many instances for one
# program, which every worker compiles.
_PIECES = 16
# What belongs to the process that asked.
_HERE = ("callback", "tick", "checkpoint", "view")


def elsewhere(
    executor: Any, begun: Sequence[Begun], tick: Callable, batch: int = 1
) -> list[Solution]:
    """The solutions of all runs, in their order; those that were lost say so."""
    jobs, runs = [], []
    for i, one in enumerate(begun):
        for j, run in enumerate(one.runs):
            names = [f"instance {i}"] if len(begun) > 1 else []
            names += [f"start {j}"] if len(one.runs) > 1 or not names else []
            jobs.append(Job(", ".join(names), _as_data(run, one)))
            runs.append(run)
    size = min(batch, max(1, len(runs) // _PIECES))
    found: list[Any] = [None] * len(runs)
    for i, result in gathered(executor, solutions_of, jobs, size):
        if isinstance(result, Lost):
            result = lost(runs[i], jobs[i].name, result.reason)
        found[i] = result
        tick(runs[i].num_steps)
    return found


def solutions_of(jobs: list[dict]) -> list[Solution]:
    """What a worker does: these runs, as they would be done without an executor."""
    runs, asking = [], []
    for job in jobs:
        certify, look_key = job.pop("certify"), job.pop("look_key")
        view = _view(job["problem"], look_key)
        run = Run(**job, view=view, callback=None, tick=_no_tick)
        runs.append(run)
        asking.append(answer_from(run, run.x0, certify))
    with few_threads(runs[0].view):
        if runs[0].together:
            return together(asking, len(asking))
        return [alone(one) for one in asking]


def _view(problem: AbstractProblem, look_key: PRNGKeyArray) -> Problem:
    """The problem by which runs are judged; one that was drawn serves all of them."""
    if isinstance(problem, Problem):
        return problem
    name = digest((problem, look_key))
    if name not in _views:
        _views.clear()
        _views[name] = representative(problem, look_key)
    return _views[name]


_views: dict[str, Problem] = {}


def lost(run: Run, name: str, reason: str) -> Solution:
    """What stands for a run that did not come back: it has no answer."""
    nothing = float("nan")
    return Solution(
        x=run.x0,
        y=None,
        value=nothing,
        status=Status.lost,
        success=False,
        message=f"{name} was lost ({reason}). {message(Status.lost)}",
        history=History(),
        stopped="lost",
        stochastic=(run.x0, nothing),
    )


def _as_data(run: Run, begun: Begun) -> dict:
    held = {f.name: getattr(run, f.name) for f in fields(run) if f.name not in _HERE}
    path = run.checkpoint
    return held | dict(
        checkpoint=None if path is None else os.path.abspath(path),
        certify=begun.certify,
        # By it the view is found again, which need not travel then.
        look_key=begun.look_key,
    )


def _no_tick(count: int) -> None:
    """Steps are counted where the run was asked for, when it has ended."""
