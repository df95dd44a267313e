"""What each method tries and runs on each case, and the books of what is done."""

import jax
import numpy as np

from .._files import checkpoint as checkpoints
from .._methods.base import AbstractMethod
from .bench import Bench, refused
from .budget import Budget
from .cases import Case, Instance
from .curves import read_looks
from .grid import StepGrid, best_trial
from .rows import Journal, identity


class Plan:
    """One method on one case: what it tries, and what identifies its runs."""

    def __init__(
        self,
        case: Case,
        name: str,
        method: AbstractMethod,
        budget: Budget,
        grid: StepGrid | None,
    ):
        self.case, self.name, self.grid = case, name, grid
        candidates = [method] if grid is None else grid.candidates(name, method)
        self.candidates: list[AbstractMethod] = candidates
        self.choice: tuple[int, dict | None] | None = None if grid else (0, None)
        # Whether a trial was lost, so that another call might choose otherwise.
        self.tentative = False
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

    def identity(
        self, kind: str, seed: int, instance: Instance, value: int | None
    ) -> str:
        tuning = None if self.grid is None else [self.grid.values, self.grid.seeds]
        data = checkpoints.fingerprint((instance.problem, instance.x0, instance.target))
        return identity(
            self.fixed | dict(kind=kind, seed=seed, data=data, value=value, tune=tuning)
        )


class Books:
    """The rows that there are; those that are missing are run."""

    def __init__(self, journal: Journal, bench: Bench):
        self.journal, self.bench = journal, bench

    def trial(self, plan: Plan, value: int, seed: int) -> list[dict]:
        """One trial; none where the method refuses the problem."""
        instance = plan.case.instance(seed)
        name = plan.identity("trial", seed, instance, value)
        if name in self.journal:
            return [self.journal[name]]
        method = plan.candidates[value]
        if refused(method, instance) is not None:
            return []
        row = self._row("trial", plan, seed, instance, method)
        return [self.enter_trial(name, plan, value, row)]

    def run(self, plan: Plan, seed: int) -> dict:
        instance = plan.case.instance(seed)
        name = plan.identity("run", seed, instance, None)
        if name in self.journal:
            return self.journal[name]
        method = self.chosen(plan)
        row = self._row("run", plan, seed, instance, method)
        return self.enter_run(name, plan, row)

    def enter_trial(
        self, name: str, plan: Plan, value: int, row: dict, lost: bool = False
    ) -> dict:
        """Keep the row of a trial; one that was lost for this call alone."""
        assert plan.grid is not None
        plan.tentative |= lost
        tuning = dict(value=plan.grid.values[value])
        whole = {"id": name} | row | {"tuning": tuning}
        return self.journal.append(whole, written=not lost)

    def enter_run(self, name: str, plan: Plan, row: dict, lost: bool = False) -> dict:
        """Keep the row of a run; for this call alone where something was lost."""
        assert plan.choice is not None
        whole = {"id": name} | row | {"tuning": plan.choice[1]}
        return self.journal.append(whole, written=not (lost or plan.tentative))

    def chosen(self, plan: Plan) -> AbstractMethod:
        """The candidate that runs."""
        plan.choice = self._choice(plan) if plan.choice is None else plan.choice
        return plan.candidates[plan.choice[0]]

    def _choice(self, plan: Plan) -> tuple[int, dict | None]:
        """Which candidate runs, and what it cost to find it."""
        assert plan.grid is not None
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

    def _row(self, kind: str, plan: Plan, seed: int, instance, method) -> dict:
        return self.bench.row(kind, plan.case.name, plan.name, seed, instance, method)


def _first(row: dict) -> float:
    value = read_looks(row).value
    return float(value[0]) if len(value) else np.nan


def _last(row: dict) -> float:
    """`F` at the end of a run, within its budget."""
    value = read_looks(row).value
    return float(value[-1]) if row["status"] == "finished" else np.nan
