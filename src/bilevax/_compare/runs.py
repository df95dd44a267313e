"""`compare`: every method on every problem from every seed, under the same rules."""

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .._arguments import check_count, check_flag, check_path
from .._executors.gather import check_executor
from .._files.progress import progress_bar
from .._methods.base import AbstractMethod
from .bench import Bench
from .budget import Budget
from .cases import Case, as_cases, as_methods, as_seeds
from .elsewhere import done_elsewhere
from .grid import StepGrid
from .plans import Books, Plan
from .rows import Journal
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
    executor: Any = None,
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
    - `executor`: does the runs in other processes, such as a `ProcessPoolExecutor` or
      the client of dask: anything with `submit(function, *arguments)`. A run whose
      process dies is tried once more, then its row says so; such a row is not kept in
      `folder`, so that the next call tries again.

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
    check_flag(progress, "progress")
    check_path(folder, "folder")
    grid = tune if isinstance(tune, StepGrid) else None
    if not (tune is None or isinstance(tune, StepGrid)):
        check_count(tune, "tune")
        grid = StepGrid(int(tune))
    if grid is not None and set(grid.seeds) & set(seeds):
        raise ValueError("Seeds of `tune` must not be among the `seeds` that count.")
    if executor is not None:
        check_executor(executor)
    plans = [
        Plan(case, name, m, budget, grid) for case in cases for name, m in named.items()
    ]
    folder = None if folder is None else Path(folder)
    journal = Journal(None if folder is None else folder / ROWS)
    books = Books(journal, Bench(budget))
    total = len(plans) * len(seeds) + sum(len(plan.trials()) for plan in plans)
    rows, trials = [], []
    with progress_bar(total, enabled=progress, description="runs") as advance:
        if executor is not None:
            done_elsewhere(executor, books, plans, seeds, advance)
            advance = lambda count: None
        # What was done elsewhere is in the books by now.
        for case in cases:
            mine = [plan for plan in plans if plan.case is case]
            for plan in mine:
                for value, seed in plan.trials():
                    trials += books.trial(plan, value, seed)
                    advance(1)
            for seed in seeds:
                for plan in mine:
                    rows.append(books.run(plan, seed))
                    advance(1)
    return Comparison(rows, trials, folder)
