"""Section 4.1: DS-BLO on random quadratic problems, both sizes, uniform and tight."""

import json
import time
from pathlib import Path

import jax
import numpy as np

from .._methods.ds_blo import DSBLO
from .._progress import progress_bar
from .._solve import solve
from .families import Member
from .report import write_report

FAMILIES = ("uniform", "tight")


def run(
    folder: str | Path,
    *,
    sizes: tuple[int, ...] = (10, 50),
    num_seeds: int = 5,
    num_steps: int = 100,
    look_every: int = 4,
    progress: bool = True,
) -> dict:
    """Run all members, write rows as JSON lines, then figure, table and page.

    Returns the paths of what was written. Seconds exclude compilation: each size is
    compiled by a run that is not counted, whose time is in the rows as `compile`.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    rows_path = folder / "rows.jsonl"
    rows = []
    members = [
        Member(family, size, seed)
        for size in sizes
        for family in FAMILIES
        for seed in range(num_seeds)
    ]
    with (
        progress_bar(len(members), enabled=progress, description="runs") as advance,
        open(rows_path, "w") as file,
    ):
        for size in sizes:
            began = time.perf_counter()
            _run(Member("tight", size, 0), num_steps, look_every)
            compiled = time.perf_counter() - began
            for member in (m for m in members if m.size == size):
                row = _run(member, num_steps, look_every) | {"compile": compiled}
                rows.append(row)
                file.write(json.dumps(row) + "\n")
                advance(1)
    return {"rows": str(rows_path), **write_report(folder, rows)}


def _run(member: Member, num_steps: int, look_every: int) -> dict:
    problem = member.problem
    x0 = np.ones(member.size)
    solution = solve(
        problem,
        DSBLO(),
        x0,
        key=jax.random.key(member.seed),
        num_steps=num_steps,
        chunk=look_every,
        throw=False,
    )
    history = solution.history
    return dict(
        method="DS-BLO",
        family=member.family,
        size=member.size,
        seed=member.seed,
        step=history.evaluated_at.tolist(),
        value=history.value.tolist(),
        seconds=history.seconds.tolist(),
        stochastic=solution.stochastic[1],
        polished=solution.value,
        status=solution.status_name,
        lower_solves=history.totals["lower_solves"],
    )
