"""One hypergradient, next to other differentiable QP solvers, in one run.

Part 1 takes the problem family of section 4.1 of the paper,

    f = |x|^2 + 0.1 x^T Q1 y + |y|^2 + 1^T x + 1^T y,
    g = |x|^2 + x^T Q2 y + |y|^2   subject to   A y + B x <= b,

follows a path of points `x` on which the active set changes now and then, and measures
for every tool the time of one gradient of `F(x) = f(x, y*(x))` and its worst error
against a closed form in extended precision. Part 2 solves and differentiates a box
lower level with a million variables by products alone.

All of part 1 runs in one thread, part 2 in as many as there are cores. The tools are
imported where they are used: one that is missing gets a row that says so, and the
memory of each is measured in a process that loads nothing else.
"""

import argparse
import importlib
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import time
import warnings
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from .large_box import box_table, large_box, peak_megabytes
from .lower_level_tools import JITTED, TOOLS, missing
from .section_4_1 import draw, exact_gradient, path

MODULE = "benchmarks.lower_level"
SIZES = "10,5 50,10 200,50"
# A tool that has used this many seconds at one size is repeated no further.
BUDGET_S = 15
# One thread for every library: on a shared machine threads wait for each other, some
# tools' more than others'.
ONE_THREAD = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false",
}
PACKAGES = (
    "bilevax", "jax", "numpy", "daqp", "proxsuite", "qpax", "qpth", "cvxpylayers",
    "diffcp", "cvxpy", "clarabel", "scs", "torch",
)  # fmt: skip


# Part 1


class Entry:
    """One tool at one size: its two ways to be called, and the best times so far.

    Times are pairs of CPU seconds of this process and wall seconds. In one thread they
    are the same on an idle machine; on a busy one the first is the fair one.
    """

    def __init__(self, name, data, xs):
        self.call, self.own_loop = TOOLS[name][0](data, xs)
        self.jitted = name in JITTED
        self.count = len(xs)
        self.grads = []
        self.first = _timed(lambda: self.grads.append(np.stack(self._loop())))[1]
        if self.own_loop is not None:
            self.grads.append(np.stack(self._calls()))
        self.cold = self.looped = np.full(2, np.inf)
        self.spent = 0.0

    def _calls(self):
        return [self.call(i) for i in range(self.count)]

    def _loop(self):
        return self._calls() if self.own_loop is None else self.own_loop()

    def measure(self):
        """Time every point once each way; the best of the repeats counts."""
        if self.spent > BUDGET_S:
            return
        looped = _timed(self._loop)
        cold = looped if self.own_loop is None else _timed(self._calls)
        self.looped = np.minimum(self.looped, looped / self.count)
        self.cold = np.minimum(self.cold, cold / self.count)
        self.spent += looped[1] + cold[1]

    def result(self, truth):
        norms = np.linalg.norm(truth, axis=1)
        wrong = [np.linalg.norm(g - truth, axis=1) / norms for g in self.grads]
        compiling = self.first - self.count * self.looped[1]
        return {
            "cold_us": 1e6 * self.cold[0],
            "loop_us": 1e6 * self.looped[0],
            "cold_wall_us": 1e6 * self.cold[1],
            "loop_wall_us": 1e6 * self.looped[1],
            "compile_s": compiling if self.jitted else 0.0,
            "worst_error": float(np.max(wrong)),
        }


def _timed(function):
    cpu, wall = time.process_time(), time.perf_counter()
    function()
    return np.array([time.process_time() - cpu, time.perf_counter() - wall])


def compare(n, k, points, repeats, advance):
    """All tools on one problem; a dictionary of results, ready for JSON."""
    data, xs = draw(n, k), path(n, points)
    exact = [exact_gradient(data, x) for x in xs]
    truth = np.stack([grad for grad, _, _ in exact])
    masks = np.stack([active for _, active, _ in exact])
    entries, results = {}, {}
    for name in TOOLS:
        advance(f"n={n}: {name}, first call")
        if module := missing(name):
            results[name] = {"note": f"not installed ({module})"}
            continue
        try:
            entries[name] = Entry(name, data, xs)
        except Exception as error:  # of any tool; the row says so
            results[name] = {"note": f"failed: {type(error).__name__}: {error}"}
    # Interleaved, so that a busy moment of the machine hits all tools.
    for repeat in range(repeats):
        for name, entry in entries.items():
            advance(f"n={n}: {name}, repeat {repeat + 1}")
            entry.measure()
    results |= {name: entry.result(truth) for name, entry in entries.items()}
    return {
        "n": n,
        "k": k,
        "points": points,
        "active_rows": [int(masks.sum(1).min()), int(masks.sum(1).max())],
        "active_set_changes": int(np.any(masks[1:] != masks[:-1], axis=1).sum()),
        "least_margin": min(margin for _, _, margin in exact),
        "tools": {name: results[name] for name in TOOLS},
    }


def size_table(result, memory):
    low, high = result["active_rows"]
    table = Table(
        title=f"n = {result['n']}, k = {result['k']}: {result['points']} points, "
        f"{low} to {high} active rows, {result['active_set_changes']} changes of the "
        f"active set, least margin {result['least_margin']:.0e}",
        caption="CPU time, best of the repeats. Ratios are to bilevax in the loop; "
        "errors are relative to the norm of the gradient. Memory: a process with this "
        "tool alone.",
    )
    table.add_column("tool")
    for column in ("cold us", "loop us", "cold ratio", "loop ratio", "worst error",
                   "compile s", "peak MB"):  # fmt: skip
        table.add_column(column, justify="right")
    base = result["tools"]["bilevax"].get("loop_us", np.nan)
    for name, row in result["tools"].items():
        if "note" in row:
            table.add_row(name, row["note"])
            continue
        table.add_row(
            name,
            f"{row['cold_us']:,.0f}",
            f"{row['loop_us']:,.1f}"
            if row["loop_us"] < 100
            else f"{row['loop_us']:,.0f}",
            f"{row['cold_us'] / base:,.1f}",
            f"{row['loop_us'] / base:,.1f}",
            f"{row['worst_error']:.0e}",
            f"{row['compile_s']:.1f}" if row["compile_s"] > 0.05 else "–",
            f"{memory[name]:,.0f}" if memory.get(name) else "–",
        )
    return table


# Processes of their own


def memory_of(name, n, k):
    """Peak memory of a fresh process that uses one tool for three points."""
    out, _ = child("--memory-of", name, "--sizes", f"{n},{k}")
    return float(out) if out else None


def child(*options, env=None):
    """Run this script with `options`: its last line of output, or None and why."""
    command = [sys.executable, "-m", MODULE, *options]
    out = subprocess.run(command, capture_output=True, text=True, env=env)
    if out.returncode == 0:
        return out.stdout.splitlines()[-1], ""
    return None, (out.stderr.splitlines() or ["no message"])[-1]


def print_memory(name, n, k):
    call, loop = TOOLS[name][0](draw(n, k), path(n, 3))
    for i in range(3):
        call(i)
    if loop is not None:
        loop()
    print(peak_megabytes())


def box_in_child(n):
    """`large_box` in a process of its own, with all threads."""
    env = {name: v for name, v in os.environ.items() if name not in ONE_THREAD}
    out, why = child("--box-only", "--box", str(n), env=env)
    return json.loads(out) if out else {"note": f"failed: {why}"}


# The command


def version(package):
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        module = sys.modules.get(package)
        return getattr(module, "__version__", "not installed")


def sizes_of(text):
    return [tuple(map(int, pair.split(","))) for pair in text.split()]


def arguments():
    parser = argparse.ArgumentParser(description="One hypergradient, tool by tool.")
    parser.add_argument("--sizes", default=SIZES, help='pairs "n,k n,k"')
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--points", type=int, default=600)
    parser.add_argument("--box", type=int, default=10**6, help="variables; 0 for none")
    parser.add_argument("--json", metavar="OUT", help="write all numbers to a file")
    parser.add_argument("--memory-of", help=argparse.SUPPRESS)
    parser.add_argument("--box-only", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def main():
    args = arguments()
    sizes = sizes_of(args.sizes)
    warnings.simplefilter("ignore")  # of other people's packages
    if args.box_only:
        return print(json.dumps(large_box(args.box)))
    if any(os.environ.get(name) != value for name, value in ONE_THREAD.items()):
        # Libraries read these when they are loaded, so start again.
        command = [sys.executable, "-m", MODULE, *sys.argv[1:]]
        os.execve(sys.executable, command, os.environ | ONE_THREAD)
    # And one core: even a single thread of XLA hands its work on to another.
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    if args.memory_of:
        return print_memory(args.memory_of, *sizes[-1])
    began = time.perf_counter()
    console = Console(width=max(Console().width, 110))
    memory: dict[str, float | None] = {}
    results: list[dict[str, Any]] = []
    box = None
    total = len(TOOLS) * (1 + len(sizes) * (1 + args.repeats)) + bool(args.box)
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("", total=total)

        def advance(what):
            progress.update(task, advance=1, description=what)

        # First, while this process is small: a child starts with its parent's peak.
        for name in TOOLS:
            advance(f"memory: {name}")
            memory[name] = memory_of(name, *sizes[-1])
        for n, k in sizes:
            results.append(compare(n, k, args.points, args.repeats, advance))
            console.print(
                size_table(results[-1], memory if (n, k) == sizes[-1] else {})
            )
        if args.box:
            advance("the large box")
            box = box_in_child(args.box)
            console.print(box_table(box))
    report = {
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "versions": {package: version(package) for package in PACKAGES},
        "sizes": results,
        "peak_mb": memory,
        "box": box,
        "wall_s": time.perf_counter() - began,
    }
    versions = (f"{name} {number}" for name, number in report["versions"].items())
    console.print(f"Python {report['python']}, {', '.join(versions)}.")
    console.print(f"{report['cores']} cores, {report['wall_s']:.0f} s in all.")
    if args.json:
        with open(args.json, "w") as file:
            json.dump(report, file, indent=1)


if __name__ == "__main__":
    main()
