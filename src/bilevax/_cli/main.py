"""`bilevax solve | explain | certify | experiment`."""

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np

from .._certificate import Certificate, certify
from .._checkpoint import CheckpointError
from .._explain import explain
from .._methods.ds_blo import DSBLO
from .._solve import Solution, solve
from .._status import BilevelError, status_name
from .problem_file import FileError, in_user_lines, load


def main(arguments: list[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    options = parser().parse_args(arguments)
    if options.precision == "float64":
        jax.config.update("jax_enable_x64", True)
    try:
        return options.run(options)
    except FileError as error:
        return complain(str(error))
    except (CheckpointError, BilevelError) as error:
        return complain(str(error))
    except KeyboardInterrupt:
        return interrupted(options)
    except Exception as error:
        file = getattr(options, "file", None)
        if file is None or os.environ.get("BILEVAX_TRACEBACK"):
            raise
        return complain(
            in_user_lines(error, file)
            + "\n(Set BILEVAX_TRACEBACK=1 to see the whole traceback.)"
        )


def complain(text: str) -> int:
    print(text, file=sys.stderr)
    return 1


def interrupted(options) -> int:
    path = getattr(options, "checkpoint", None)
    if path and Path(path).exists():
        print(
            f"\nInterrupted. The run so far is in {path}; the same command goes on "
            "from there.",
            file=sys.stderr,
        )
    else:
        print(
            "\nInterrupted before anything was saved. With --checkpoint FILE a run "
            "can be resumed.",
            file=sys.stderr,
        )
    return 130


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        prog="bilevax", description="Constrained bilevel optimisation."
    )
    top.add_argument(
        "--precision", choices=("float64", "float32"), default="float64",
        help="of all computations (default: float64)",
    )  # fmt: skip
    commands = top.add_subparsers(required=True, metavar="COMMAND")

    run = command(commands, "solve", run_solve, "minimise F from the x0 of a file")
    run.add_argument("file", metavar="FILE.py", help="defines `problem` and `x0`")
    run.add_argument("--steps", type=int, help="steps of the method (default: 300)")
    run.add_argument("--starts", type=int, default=1, help="how many starting points")
    run.add_argument("--seed", type=int, default=0)
    run.add_argument("--no-polish", action="store_true", help="stochastic phase only")
    run.add_argument("--certify", type=float, metavar="RADIUS")
    run.add_argument(
        "--checkpoint", metavar="FILE", help="saves after every chunk, and resumes"
    )
    run.add_argument("--chunk", type=int, default=100, help="steps between two saves")

    look = command(commands, "explain", run_explain, "which assumptions hold at x0")
    look.add_argument("file", metavar="FILE.py", help="defines `problem` and `x0`")

    proof = command(commands, "certify", run_certify, "how far x0 is from stationary")
    proof.add_argument("file", metavar="FILE.py", help="defines `problem` and `x0`")
    proof.add_argument("--radius", type=float, default=1e-3)
    proof.add_argument("--samples", type=int)
    proof.add_argument("--seed", type=int, default=0)

    paper = command(
        commands, "experiment", run_experiment, "an experiment of the paper"
    )
    paper.add_argument("name", choices=("numerical",))
    paper.add_argument("--out", default="results/numerical", metavar="FOLDER")
    paper.add_argument("--seeds", type=int, default=5)
    paper.add_argument("--steps", type=int, default=100)
    paper.add_argument(
        "--sizes", default="10,50", help="dimensions of both levels (10 and 50)"
    )
    return top


def command(commands, name, run, text) -> argparse.ArgumentParser:
    sub = commands.add_parser(name, help=text, description=text)
    sub.set_defaults(run=run)
    sub.add_argument("--json", action="store_true", help="machine-readable output")
    return sub


def run_solve(options) -> int:
    names = load(options.file)
    solution = solve(
        names["problem"],
        names.get("method", DSBLO()),
        names["x0"],
        key=jax.random.key(options.seed),
        num_steps=options.steps,
        num_starts=options.starts,
        polish=False if options.no_polish else None,
        certify=options.certify,
        checkpoint=options.checkpoint,
        chunk=options.chunk,
        progress=not options.json and sys.stderr.isatty(),
        throw=False,
    )
    if options.json:
        print(json.dumps(solution_as_json(solution)))
    else:
        print_solution(solution)
    return 0 if solution.success else 1


def print_solution(solution: Solution) -> None:
    before = solution.stochastic[1]
    print(f"F = {solution.value:.10g}   ({solution.status_name}, {solution.stopped})")
    if solution.polish is not None:
        print(f"    before the polish: {before:.10g}")
    print(f"x = {short(solution.x)}")
    print(f"y = {short(solution.y)}")
    if solution.starts:
        values = ", ".join(f"{s.value:.6g}" for s in solution.starts)
        print(f"starts: {values}")
    totals = solution.history.totals
    print("work: " + ", ".join(f"{n} {name}" for name, n in totals.items()))
    if solution.certificate is not None:
        print(solution.certificate)
    if solution.message:
        print(solution.message)


def short(tree: Any) -> str:
    leaves = jax.tree.leaves(tree)
    shown = [
        np.array2string(np.asarray(leaf), precision=6, threshold=20) for leaf in leaves
    ]
    return shown[0] if len(shown) == 1 else ", ".join(shown)


def solution_as_json(solution: Solution) -> dict:
    certificate = solution.certificate
    return dict(
        x=as_lists(solution.x),
        y=as_lists(solution.y),
        value=solution.value,
        success=solution.success,
        status=solution.status_name,
        message=solution.message,
        stopped=solution.stopped,
        value_before_polish=solution.stochastic[1],
        starts=[s.value for s in solution.starts],
        work=solution.history.totals,
        history=dict(
            step=solution.history.evaluated_at.tolist(),
            value=solution.history.value.tolist(),
            seconds=solution.history.seconds.tolist(),
        ),
        certificate=None if certificate is None else certificate_as_json(certificate),
    )


def certificate_as_json(c: Certificate) -> dict:
    return dict(
        measure=c.measure,
        radius=c.radius,
        samples=c.samples,
        undefined=c.undefined,
        path=[list(pair) for pair in c.path],
        gradient_error=c.gradient_error,
        interval=c.interval,
    )


def as_lists(tree: Any) -> list:
    return [np.asarray(leaf).tolist() for leaf in jax.tree.leaves(tree)]


def run_explain(options) -> int:
    names = load(options.file)
    found = explain(names["problem"].draw(jax.random.key(0)), names["x0"])
    if options.json:
        rows = [vars(finding) for finding in found.findings]
        status = status_name(found.evaluation.status)
        print(json.dumps(dict(holds=found.holds, status=status, findings=rows)))
    else:
        print(found)
    return 0


def run_certify(options) -> int:
    names = load(options.file)
    problem = names["problem"].draw(jax.random.key(0))
    found = certify(
        problem,
        names["x0"],
        options.radius,
        key=jax.random.key(options.seed),
        num_samples=options.samples,
    )
    print(json.dumps(certificate_as_json(found)) if options.json else found)
    return 0


def run_experiment(options) -> int:
    try:
        from ..experiments.numerical import run
    except ImportError as error:
        return complain(f"{error}. Install bilevax[cli,plot].")
    sizes = tuple(int(part) for part in options.sizes.split(","))
    report = run(
        options.out, sizes=sizes, num_seeds=options.seeds, num_steps=options.steps
    )
    print(json.dumps(report) if options.json else f"report: {report['report']}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
