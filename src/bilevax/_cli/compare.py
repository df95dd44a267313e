"""`bilevax compare`: methods side by side on families or files of problems."""

import argparse
import contextlib
import multiprocessing
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from .._compare.ablations import ablations
from .._compare.budget import Budget
from .._compare.cases import Case
from .._compare.grid import StepGrid
from .._compare.runs import ROWS, Comparison, compare
from .._compare.tables import result_table, trouble_table
from .._methods.base import AbstractMethod
from .._methods.catalogue import CATALOGUE
from ..experiments.families import family_case
from .arguments import count
from .problem_file import InFile, load
from .text import print_json

TEXT = "run methods side by side, then write tables, figures and a page"


def add_arguments(sub: argparse.ArgumentParser) -> None:
    sub.add_argument(
        "--problems", nargs="+", default=["tight-10"], metavar="NAME",
        help="families such as tight-10 or uniform-50 (a member per seed), or files "
        "that define `problem` and `x0`, and perhaps `target` (default: tight-10)",
    )  # fmt: skip
    sub.add_argument(
        "--methods", nargs="+", metavar="NAME",
        help=f"all (default), or some of {', '.join(CATALOGUE)}",
    )  # fmt: skip
    sub.add_argument(
        "--ablations", action="store_true",
        help="add DS-BLO without tilts (no q), with one tilt (one fixed q), without "
        "segment points, without momentum; with no --methods these alone",
    )  # fmt: skip
    sub.add_argument(
        "--seeds",
        type=count,
        default=5,
        help="runs per problem and method (default: 5)",
    )
    sub.add_argument(
        "--steps", type=count, default=300, help="most steps of a run (default: 300)"
    )
    sub.add_argument(
        "--lower-solves", type=int,
        help="most lower-level solves of a run, watched at its looks",
    )  # fmt: skip
    sub.add_argument("--seconds", type=float, help="most seconds of a run, likewise")
    sub.add_argument(
        "--look-every", type=int, default=10,
        help="steps between two looks at F, the points of all curves (default: 10)",
    )  # fmt: skip
    sub.add_argument(
        "--tune", type=int, default=0, metavar="N",
        help="trials per method for its step (default: 0, each with its own default)",
    )  # fmt: skip
    sub.add_argument(
        "--out", default="results/compare", metavar="FOLDER",
        help="for rows, tables, figures and the page; the same command goes on where "
        "it was interrupted (default: results/compare)",
    )  # fmt: skip
    sub.add_argument(
        "--workers", type=count, default=1, metavar="N",
        help="processes that share the runs (default: 1, this one)",
    )  # fmt: skip


def kept(options) -> str:
    """What an interrupted comparison leaves behind."""
    return (
        f"Finished runs are kept in {Path(options.out) / ROWS}; the same command goes "
        "on from there."
    )


def run(options) -> int:
    with workers(options.workers) as executor:
        comparison = compare(
            [case(name) for name in options.problems],
            methods(options.methods, options.ablations),
            options.seeds,
            Budget(
                options.steps, options.lower_solves, options.seconds, options.look_every
            ),
            tune=StepGrid(options.tune) if options.tune else None,
            folder=options.out,
            progress=not options.json,
            executor=executor,
        )
    return show(comparison, comparison.report(), options.json)


def show(comparison: Comparison, paths: dict[str, str], as_json: bool) -> int:
    """Print the results and where the report is."""
    if as_json:
        results = result_table(comparison.rows)
        trouble = trouble_table(comparison.rows)
        print_json(dict(results=results, trouble=trouble, files=paths))
        return 0
    print(comparison)
    print(f"report: {paths['report']}")
    return 0


def workers(number: int) -> contextlib.AbstractContextManager[Any]:
    """So many processes; none where one is enough."""
    if number == 1:
        return contextlib.nullcontext()
    # Forks of a process that uses JAX hang.
    context = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(number, context, initializer=_prints_aside)


def _prints_aside() -> None:
    """What the functions of a file print is no result."""
    sys.stdout = sys.stderr


def case(name: str) -> Case:
    """A family by its name, or the problem of a file."""
    if not name.endswith(".py"):
        return family_case(name)
    names = load(name)
    made = InFile.kept(name, names["problem"])
    target = names.get("target")
    return Case(Path(name).stem, made, names["x0"], target, made.digest)


def methods(names: list[str] | None, with_ablations: bool) -> dict[str, AbstractMethod]:
    """Methods by the name they have in tables; names may be split by commas too."""
    listed = [] if with_ablations else ["all"]
    if names is not None:
        listed = [word.lower() for word in ",".join(names).replace(",", " ").split()]
    chosen: dict[str, AbstractMethod] = {}
    for command in CATALOGUE if listed == ["all"] else listed:
        if command not in CATALOGUE:
            known = ", ".join(CATALOGUE)
            raise ValueError(f"{command!r} is no method; there are {known}.")
        entry = CATALOGUE[command]
        chosen[entry.name] = entry.kind()
    return chosen | (dict(ablations()) if with_ablations else {})
