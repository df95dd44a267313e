"""`compare`: every method on every problem from every seed, under the same rules."""

import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.random as jr
import numpy as np

from .._driver.solve import solve
from .._files import checkpoint as checkpoints
from .._files.progress import progress_bar
from .._methods.base import AbstractMethod, refused
from .budget import Budget, at_looks, solves_at_looks
from .cases import Case, Instance, as_cases, as_methods, as_seeds
from .curves import read_looks
from .grid import StepGrid, best_trial
from .rows import Journal, identity
from .tables import summary

ROWS = "rows.jsonl"


@dataclass(frozen=True)
class Comparison:
    """The rows of a comparison, one dictionary per run; `report` makes the rest.

    - `rows`: the runs that count; `trials`: those that chose step sizes.
    - `folder`: where the rows lie, or None.
    """

    rows: list[dict]
    trials: list[dict]
    folder: Path | None = None

    def __str__(self) -> str:
        """A table with a line per problem and method."""
        return summary(self.rows)

    def __repr__(self) -> str:
        return (
            f"Comparison({len(self.rows)} rows, {len(self.trials)} trials, "
            f"folder={str(self.folder) if self.folder else None!r})"
        )

    def report(self, folder: str | os.PathLike | None = None, **texts) -> dict:
        """Write tables, figures and a page; returns their paths by name.

        `texts` are the `title` and `intro` of the page. Needs matplotlib.
        """
        from .report import write_report

        folder = self.folder if folder is None else Path(folder)
        if folder is None:
            raise ValueError(
                "name a folder, as in `report('results')`: the comparison was kept in "
                "memory."
            )
        return write_report(folder, self.rows, **texts)


def compare(
    problems: Mapping[str, Any] | Iterable[Case],
    methods: Mapping[str, AbstractMethod] | Iterable[AbstractMethod],
    seeds: int | Sequence[int] = 5,
    budget: Budget | None = None,
    *,
    tune: StepGrid | int | None = None,
    folder: str | os.PathLike | None = None,
    progress: bool = False,
) -> Comparison:
    """Run all methods on all problems from all seeds.

    - `problems`: a list of `Case`, or `{name: problem}`, `{name: (problem, x0)}`.
    - `methods`: `{name: method}`, or a list, named by class.
    - `seeds`: how many, or which.
    - `tune`: a `StepGrid`, or its number of trials. Every method then tries the same
      number of values, on seeds that are not among `seeds`, and its best one runs.
      Trials and their cost are in the rows. Without it methods run as they are.
    - `folder`: keeps `rows.jsonl`, a line for each run the moment it ends. The same
      call goes on where a killed one stopped.

    A seed fixes the start and all draws: tilts, segment points, samples and directions
    are the same for all methods. `F` is always evaluated with the lower level
    unperturbed and solved exactly. Seconds are those of the steps alone; a run that is
    not counted compiles first. Nothing is polished, and the last iterate counts, not
    the best one. A method that refuses a problem and a run that fails
    leave a row that says why.
    """
    cases, named, seeds = as_cases(problems), as_methods(methods), as_seeds(seeds)
    budget = Budget() if budget is None else budget
    if not isinstance(budget, Budget):
        raise ValueError(
            f"`budget` must be a Budget, such as Budget(steps=300); got {budget!r}."
        )
    grid = StepGrid(tune) if isinstance(tune, int) and tune else tune or None
    if grid is not None and set(grid.seeds) & set(seeds):
        raise ValueError("Seeds of `tune` must not be among the `seeds` that count.")
    plans = [
        _Plan(case, name, m, budget, grid)
        for case in cases
        for name, m in named.items()
    ]
    folder = None if folder is None else Path(folder)
    journal = Journal(None if folder is None else folder / ROWS)
    bench = _Bench(journal, budget)
    total = len(plans) * len(seeds) + sum(len(plan.trials()) for plan in plans)
    rows, trials = [], []
    with progress_bar(total, enabled=progress, description="runs") as advance:
        for case in cases:
            mine = [plan for plan in plans if plan.case is case]
            for plan in mine:
                for value, seed in plan.trials():
                    trials += bench.trial(plan, value, seed)
                    advance(1)
            for seed in seeds:
                for plan in mine:
                    rows.append(bench.run(plan, seed))
                    advance(1)
    return Comparison(rows, trials, folder)


class _Plan:
    """One method on one case: what it tries, and what identifies its runs."""

    def __init__(self, case: Case, name: str, method: AbstractMethod, budget, grid):
        self.case, self.name, self.grid = case, name, grid
        candidates = [method] if grid is None else grid.candidates(name, method)
        self.candidates: list[AbstractMethod] = candidates
        self.choice: tuple[int, dict | None] | None = None if grid else (0, None)
        self.fixed = dict(
            problem=case.name,
            signature=case.signature,
            method=name,
            settings=[f"{m!r} {checkpoints.fingerprint(m)}" for m in candidates],
            budget=budget.as_dict(),
            precision=str(jax.numpy.zeros(()).dtype),
        )

    def trials(self) -> list[tuple[int, int]]:
        """Which value of the grid on which seed."""
        if self.grid is None:
            return []
        return [
            (i, seed) for i in range(len(self.candidates)) for seed in self.grid.seeds
        ]

    def identity(self, kind: str, seed: int, instance, value: int | None) -> str:
        tuning = None if self.grid is None else [self.grid.values, self.grid.seeds]
        data = checkpoints.fingerprint((instance.problem, instance.x0, instance.target))
        return identity(
            self.fixed | dict(kind=kind, seed=seed, data=data, value=value, tune=tuning)
        )


class _Bench:
    """Does runs that are not in the journal yet, and knows what has been compiled."""

    def __init__(self, journal: Journal, budget: Budget):
        self.journal, self.budget = journal, budget
        self.compiled: dict[Any, float] = {}

    def trial(self, plan: _Plan, value: int, seed: int) -> list[dict]:
        """One trial; none where the method refuses the problem."""
        instance = plan.case.instance(seed)
        name = plan.identity("trial", seed, instance, value)
        if name in self.journal:
            return [self.journal[name]]
        method = plan.candidates[value]
        if _refusal(method, instance) is not None:
            return []
        row = self._row("trial", plan, seed, instance, method)
        tuning = dict(value=plan.grid.values[value])
        return [self.journal.append({"id": name} | row | {"tuning": tuning})]

    def run(self, plan: _Plan, seed: int) -> dict:
        instance = plan.case.instance(seed)
        name = plan.identity("run", seed, instance, None)
        if name in self.journal:
            return self.journal[name]
        plan.choice = self._chosen(plan) if plan.choice is None else plan.choice
        chosen, tuning = plan.choice
        row = self._row("run", plan, seed, instance, plan.candidates[chosen])
        return self.journal.append({"id": name} | row | {"tuning": tuning})

    def _chosen(self, plan: _Plan) -> tuple[int, dict | None]:
        """Which candidate runs, and what it cost to find it."""
        seeds, count = plan.grid.seeds, len(plan.candidates)
        cost = [row for i, seed in plan.trials() for row in self.trial(plan, i, seed)]
        if len(cost) < count * len(seeds):
            return 0, None
        ends = np.array([_last(row) for row in cost]).reshape(count, len(seeds))
        starts = np.array([_first(row) for row in cost]).reshape(count, len(seeds))
        best = best_trial(ends, starts[0])
        parameter = plan.grid.parameter(plan.name)
        work = lambda name: sum(row["totals"].get(name, 0) for row in cost)
        return best, dict(
            parameter=parameter if isinstance(parameter, str) else "step",
            grid=plan.grid.values,
            values=ends.tolist(),
            chosen=plan.grid.values[best],
            at_the_edge=count > 1 and best in (0, count - 1),
            trials=len(cost),
            lower_solves=work("lower_solves"),
            penalty_solves=work("penalty_solves"),
            solves=sum((row["solves"] or [0])[-1] for row in cost),
            seconds=sum((row["seconds"] or [0.0])[-1] for row in cost),
        )

    def _row(self, kind: str, plan: _Plan, seed, instance, method) -> dict:
        row = dict(
            kind=kind,
            problem=plan.case.name,
            method=plan.name,
            seed=seed,
            status="finished",
            message="",
            x0=checkpoints.fingerprint(instance.x0),
            target=instance.target,
            budget=self.budget.as_dict(),
            step=[],
            value=[],
            seconds=[],
            solves=[],
            lower_solves=[],
            totals={},
            compile_seconds=None,
            jax=jax.__version__,
            device=str(jax.devices()[0].device_kind),
        )
        refusal = _refusal(method, instance)
        if refusal is not None:
            return row | dict(status="refused", message=refusal)
        try:
            compiled = self._warm_up(instance, method)
            solution = self._solve(instance, method, seed, self.budget.steps)
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            return row | dict(status="failed", message=text)
        history = solution.history
        return row | dict(
            status="finished" if solution.success else "failed",
            message=solution.message,
            ended=solution.stopped,
            step=history.evaluated_at.tolist(),
            value=history.value.tolist(),
            seconds=history.working.tolist(),
            solves=solves_at_looks(history).tolist(),
            lower_solves=at_looks(history, "lower_solves").tolist(),
            totals=history.totals,
            compile_seconds=compiled,
        )

    def _solve(self, instance, method, seed: int, steps: int):
        return solve(
            instance.problem,
            method,
            instance.x0,
            key=jr.key(seed),
            num_steps=steps,
            polish=False,
            throw=False,
            chunk=self.budget.chunk,
            callback=lambda step, x, value, history: self.budget.is_spent(history),
        )

    def _warm_up(self, instance, method) -> float:
        """Seconds to compile; nothing is compiled again for shapes seen before."""
        shapes = _shapes((instance.problem, method, instance.x0))
        if shapes not in self.compiled:
            took = []
            for _ in range(2):
                began = time.perf_counter()
                self._solve(instance, method, 0, self.budget.chunk)
                took.append(time.perf_counter() - began)
            self.compiled[shapes] = max(took[0] - took[1], 0.0)
        return self.compiled[shapes]


def _shapes(tree) -> Any:
    """What decides whether a compiled program can be used again."""
    leaves, structure = jax.tree.flatten(tree)
    parts = [
        (np.shape(leaf), str(leaf.dtype)) if hasattr(leaf, "dtype") else leaf
        for leaf in leaves
    ]
    key = (structure, *parts)
    try:
        hash(key)
    except TypeError:
        return object()
    return key


def _refusal(method: AbstractMethod, instance: Instance) -> str | None:
    try:
        return refused(method, instance.problem)
    except Exception:  # the run itself will say what went wrong
        return None


def _first(row: dict) -> float:
    value = read_looks(row).value
    return float(value[0]) if len(value) else np.nan


def _last(row: dict) -> float:
    """`F` at the end of a run, within its budget."""
    value = read_looks(row).value
    return float(value[-1]) if row["status"] == "finished" else np.nan
