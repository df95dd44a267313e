"""Runs of a comparison that an executor does."""

import uuid
from collections.abc import Callable
from typing import Any, NamedTuple

from .._executors.description import refusal
from .._executors.gather import Job, Lost, gathered
from .._problem.problem import AbstractProblem
from .bench import Bench, blank_row, refused
from .budget import Budget
from .cases import Case, Instance
from .plans import Books, Plan


class _Run(NamedTuple):
    """A run that is not in the books yet."""

    name: str
    plan: Plan
    value: int | None
    seed: int
    instance: Instance
    job: Job


def done_elsewhere(
    executor: Any, books: Books, plans: list[Plan], seeds: list[int], advance: Callable
) -> None:
    """Fill the books: all trials, then all runs, which need what the trials chose.

    Refusals are left out; to find them takes no time.
    """
    travels = _Travelling()
    for kind in ("trial", "run"):
        missing = []
        for plan in plans:
            runs = [(None, seed) for seed in seeds]
            for value, seed in plan.trials() if kind == "trial" else runs:
                run = _missing(kind, books, plan, value, seed, travels)
                missing += [run] if run else []
                advance(0 if run else 1)
        jobs = [run.job for run in missing]
        for i, result in gathered(executor, rows_of, jobs):
            _enter(books, kind, missing[i], result)
            advance(1)


def _missing(
    kind: str, books: Books, plan: Plan, value: int | None, seed: int, travels
) -> _Run | None:
    instance = plan.case.instance(seed)
    name = plan.identity(kind, seed, instance, value)
    if name in books.journal:
        return None
    method = books.chosen(plan) if value is None else plan.candidates[value]
    if refused(method, instance) is not None:
        return None
    arguments = dict(
        kind=kind,
        problem=travels.problem(plan.case, seed, instance),
        method=method,
        x0=instance.x0,
        names=[plan.case.name, plan.name],
        seed=seed,
        target=instance.target,
        budget=books.bench.budget.as_dict(),
        comparison=travels.ticket,
    )
    called = f"{plan.name} on {plan.case.name} from seed {seed}"
    return _Run(name, plan, value, seed, instance, Job(called, arguments))


def _enter(books: Books, kind: str, run: _Run, result: dict | Lost) -> None:
    lost = isinstance(result, Lost)
    if lost:
        called = run.plan.case.name, run.plan.name
        row = blank_row(kind, *called, run.seed, run.instance, books.bench.budget)
        told = f"{run.job.name} was lost twice by its executor: {result.reason}"
        result = row | dict(status="failed", message=told)
    if run.value is not None:
        books.enter_trial(run.name, run.plan, run.value, result, lost)
    else:
        books.enter_run(run.name, run.plan, result, lost)


class _Travelling:
    """How problems get there: as they are, or as the function that makes them."""

    def __init__(self):
        # Workers keep what they compiled as long as the comparison is the same.
        self.ticket = uuid.uuid4().hex
        self.known: dict[tuple[str, int], Any] = {}

    def problem(self, case: Case, seed: int, instance: Instance) -> Any:
        known = self.known.get((case.name, seed))
        if known is None:
            known = self.known[case.name, seed] = _form(case, seed, instance)
        return known


def _form(case: Case, seed: int, instance: Instance) -> Any:
    made = not isinstance(case.problem, AbstractProblem)
    if made and refusal(instance.problem) and not refusal(case.problem):
        return case.problem, seed
    return instance.problem


# The benches of this process, by comparison: the last one alone.
_benches: dict[str, Bench] = {}


def rows_of(jobs: list[dict]) -> list[dict]:
    """What a worker does."""
    return [_row(**job) for job in jobs]


def _row(*, kind, problem, method, x0, names, seed, target, budget, comparison):
    if not isinstance(problem, AbstractProblem):
        make, argument = problem
        problem = make(argument)
    if comparison not in _benches:
        _benches.clear()
        _benches[comparison] = Bench(Budget(**budget))
    instance = Instance(problem, x0, target)
    case, name = names
    return _benches[comparison].row(kind, case, name, seed, instance, method)
