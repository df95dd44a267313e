"""`bilevax solve FILE.py`."""

import argparse
from pathlib import Path

import jax

from .._driver.report import report
from .._driver.solution import Solution
from .._driver.solve import solve
from .._methods.ds_blo import DSBLO
from .arguments import count, positive
from .certify import certificate_as_json
from .problem_file import add_file, load, names_of
from .text import as_lists, print_json, short

TEXT = "minimise F from the x0 of a file"


def add_arguments(sub: argparse.ArgumentParser) -> None:
    add_file(sub)
    sub.add_argument("--steps", type=count, help="steps of the method (default: 300)")
    sub.add_argument(
        "--starts", type=count,
        help="how many starting points (default: several where x is in a small bounded "
        "box and nothing is saved, else 1)",
    )  # fmt: skip
    sub.add_argument("--seed", type=int, default=0, help="of all draws (default: 0)")
    sub.add_argument("--no-polish", action="store_true", help="stochastic phase only")
    sub.add_argument(
        "--certify", type=positive, metavar="RADIUS",
        help="say how far the result is from stationary within this radius",
    )  # fmt: skip
    sub.add_argument(
        "--checkpoint", metavar="FILE", help="saves after every chunk, and resumes"
    )
    sub.add_argument("--chunk", type=count, default=100, help="steps between two saves")


def kept(options) -> str:
    """What an interrupted solve leaves behind."""
    path = options.checkpoint
    if path and Path(path).exists():
        return f"The run so far is in {path}; the same command goes on from there."
    if options.checkpoint:
        return "Nothing was saved yet: the first chunk of steps had not ended."
    return "Nothing was saved. With --checkpoint FILE a run can be resumed."


def run(options) -> int:
    names = load(options.file, needed=("problem",))
    called = names_of(options.file, names, "x")
    solution = solve(
        names["problem"],
        names.get("method", DSBLO()),
        names.get("x0"),
        key=jax.random.key(options.seed),
        num_steps=options.steps,
        num_starts=options.starts,
        polish=False if options.no_polish else None,
        certify=options.certify,
        checkpoint=options.checkpoint,
        chunk=options.chunk,
        progress=not options.json,
        throw=False,
    )
    if options.json:
        print_json(solution_as_json(solution))
    else:
        print_solution(solution, called)
    return 0 if solution.success else 1


def print_solution(solution: Solution, names: list[str] | None) -> None:
    print(report(solution, names))
    print(f"{'y':<11}{short(solution.y)}")
    totals = solution.history.totals
    work = ", ".join(f"{n} {name}" for name, n in totals.items() if n)
    print(f"{'work':<11}{work}")
    if solution.certificate is not None:
        print(solution.certificate)


def solution_as_json(solution: Solution) -> dict:
    certificate = solution.certificate
    return dict(
        x=as_lists(solution.x),
        y=as_lists(solution.y),
        value=solution.value,
        success=solution.success,
        converged=solution.converged,
        status=solution.status_name,
        message=solution.message,
        stopped=solution.stopped,
        value_before_polish=solution.stochastic[1],
        bounds=solution.bounds,
        multipliers=as_lists(solution.multipliers),
        starts=[s.value for s in solution.starts],
        work=solution.history.totals,
        history=dict(
            step=solution.history.evaluated_at.tolist(),
            value=solution.history.value.tolist(),
            seconds=solution.history.seconds.tolist(),
        ),
        violation=solution.violation,
        upper_multipliers=None
        if solution.upper is None
        else as_lists(solution.upper_multipliers),
        certificate=None if certificate is None else certificate_as_json(certificate),
    )
