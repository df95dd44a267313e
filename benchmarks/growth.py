"""How one hypergradient grows: with the followers, and with the size of one.

    python -m benchmarks.growth [--family followers networks] [--rows ROWS.jsonl]

`followers`: 10 to 10 000 followers of 24 variables with ramp limits. `networks`: one
follower with 10^3 to 10^5 variables, three goods on a grid. Both quadratic. Each size
is a process of its own on one core and one thread, which prints one line of JSON; times
are CPU seconds, because the machine is shared:

- seconds of the first call, of a cold one at another `x` once all is compiled, and of
  a warm one a little farther on; the largest resident memory of the process;
- seconds of Clarabel (the answer alone, at tight tolerance), and of Moreau (forward,
  and backward), where they are installed, and how far `F` is from Clarabel's.

Exponents of time and memory, fitted over the larger half of the sizes, come last.
"""

import argparse
import json
import os
import pathlib
import resource
import subprocess
import sys
import time
from typing import Any

import numpy as np
import scipy.sparse as sp

HOURS, GOODS, FLAT = 24, 3, 1e-2
SIZES = dict(
    followers=[10, 100, 1000, 10_000],
    # Sides of the grid: 1080, 10 440 and 100 464 variables.
    networks=[10, 30, 92],
)
CLOSE = 1e-3


class Days:
    """Followers with ramp limits; the leader shifts all forecasts."""

    def __init__(self, count: int):
        numbers = np.random.default_rng(0)
        steps = np.diff(np.eye(HOURS), axis=0)
        self.A, self.b = np.concatenate([steps, -steps]), np.full(2 * (HOURS - 1), 0.4)
        self.load = np.cumsum(numbers.normal(size=(count, HOURS)) / 3, axis=1)
        self.forecast = self.load + numbers.normal(size=self.load.shape) / 5
        self.size, self.x = HOURS, np.zeros(HOURS)

    def problem(self):
        import jax.numpy as jnp

        import bilevax as bx

        ramps = bx.Polyhedron(A=self.A, b=self.b)

        def day(d):
            return bx.Problem(
                lambda x, y: jnp.sum((y - d["load"]) ** 2),
                lambda x, y: 0.5 * jnp.sum((y - d["forecast"] - x) ** 2),
                ramps,
            )

        return bx.Followers(day, dict(load=self.load, forecast=self.forecast))

    def programs(self, x):
        """`P, c, A, b`, the number of equalities, for each follower."""
        P, A = sp.eye_array(HOURS, format="csc"), sp.csc_array(self.A)
        return [(P, -(f + x), A, self.b, 0) for f in self.forecast]

    def value(self, ys) -> float:
        return float(np.mean(np.sum((np.array(ys) - self.load) ** 2, axis=1)))

    def slopes(self, ys):
        """The derivative of `F` in each answer."""
        return 2 * (np.array(ys) - self.load) / len(self.load)


class Grid:
    """Goods on a grid, each to its own corner; the leader tolls ten links."""

    def __init__(self, side: int):
        numbers = np.random.default_rng(0)
        nodes = np.arange(side * side).reshape(side, side)
        a = np.r_[nodes[:, :-1].ravel(), nodes[:-1].ravel()]
        b = np.r_[nodes[:, 1:].ravel(), nodes[1:].ravel()]
        tail, head = np.r_[a, b], np.r_[b, a]
        links, at = len(tail), np.arange(len(tail))
        places = (np.r_[tail, head], np.r_[at, at])
        leaves = sp.csr_array((np.r_[np.ones(links), -np.ones(links)], places))
        rows, demand = [], []
        for good, goal in enumerate((0, side - 1, side * side - 1)):
            others = np.flatnonzero(np.arange(side * side) != goal)
            one = sp.csr_array(np.eye(GOODS)[good : good + 1])
            rows.append(sp.kron(leaves[others], one))
            trips = numbers.uniform(0, 2, len(others)) / side**2
            demand.append(trips * (numbers.uniform(size=len(others)) < 0.5))
        self.balance, self.demand = sp.vstack(rows).tocsr(), np.concatenate(demand)
        self.time, self.load = (
            numbers.uniform(1, 3, links),
            numbers.uniform(0.1, 1, links),
        )
        self.links, self.size, self.x = links, links * GOODS, np.zeros(10)

    def problem(self):
        import jax.numpy as jnp

        import bilevax as bx

        time, load, links = map(jnp.asarray, (self.time, self.load, self.links))

        def lower(x, y):
            V = y.reshape(-1, GOODS).sum(1)
            toll = jnp.zeros_like(time).at[: x.size].set(x)
            delay = jnp.sum((time + toll) * V + load * V**2 / 2)
            return delay + 0.5 * FLAT * jnp.sum(y**2)

        def upper(x, y):
            V = y.reshape(-1, GOODS).sum(1)
            return jnp.sum(V * (time + load * V))

        rows = bx.Polyhedron(
            A=-sp.eye_array(self.size), b=np.zeros(self.size),
            A_eq=self.balance, b_eq=self.demand,
        )  # fmt: skip
        return bx.Problem(upper, lower, rows)

    def programs(self, x):
        one = np.ones((GOODS, GOODS))
        P = sp.kron(sp.diags_array(self.load), one) + FLAT * sp.eye_array(self.size)
        toll = np.zeros(self.links)
        toll[: x.size] = x
        c = np.repeat(self.time + toll, GOODS)
        A = sp.vstack([self.balance, -sp.eye_array(self.size)])
        b = np.concatenate([self.demand, np.zeros(self.size)])
        return [(sp.csc_array(P), c, sp.csc_array(A), b, len(self.demand))]

    def value(self, ys) -> float:
        V = np.asarray(ys[0]).reshape(-1, GOODS).sum(1)
        return float(np.sum(V * (self.time + self.load * V)))

    def slopes(self, ys):
        V = np.asarray(ys[0]).reshape(-1, GOODS).sum(1)
        return [np.repeat(self.time + 2 * self.load * V, GOODS)]


def by_clarabel(programs) -> tuple[float, list[np.ndarray]]:
    """Seconds, and the answers at tight tolerance."""
    import clarabel as peer

    clarabel: Any = peer
    settings = clarabel.DefaultSettings()
    settings.verbose, settings.max_threads = False, 1
    settings.tol_gap_abs = settings.tol_gap_rel = settings.tol_feas = 1e-12
    answers, spent = [], 0.0
    for P, c, A, b, equal in programs:
        cones = [clarabel.ZeroConeT(equal)] if equal else []
        cones.append(clarabel.NonnegativeConeT(len(b) - equal))
        P, A = sp.csc_matrix(sp.triu(P)), sp.csc_matrix(A)
        began = time.process_time()
        found = clarabel.DefaultSolver(P, c, A, b, cones, settings).solve()
        spent += time.process_time() - began
        answers.append(np.array(found.x))
    return spent, answers


def by_moreau(model, programs) -> tuple[float, float]:
    """Seconds forward and backward; followers as one batch."""
    import moreau as peer

    moreau: Any = peer
    P, c, A, b, equal = programs[0]
    P, A = sp.csr_array(P), sp.csr_array(A)
    solver = moreau.CompiledSolver(
        n=len(c), m=len(b),
        P_row_offsets=P.indptr, P_col_indices=P.indices,
        A_row_offsets=A.indptr, A_col_indices=A.indices,
        cones=moreau.Cones(num_zero_cones=equal, num_nonneg_cones=len(b) - equal),
        settings=moreau.Settings(
            device="cpu", batch_size=len(programs), enable_grad=True
        ),
    )  # fmt: skip
    count = len(programs)
    solver.setup(np.tile(P.data, (count, 1)), np.tile(A.data, (count, 1)))
    cs, bs = np.array([p[1] for p in programs]), np.array([p[3] for p in programs])
    solver.solve(cs, bs)
    began = time.process_time()
    found = solver.solve(cs, bs)
    forward = time.process_time() - began
    slopes = np.array(model.slopes(np.asarray(found.x)))
    began = time.process_time()
    solver.backward(slopes)
    return forward, time.process_time() - began


def measure(family: str, size: int) -> dict:
    model: Any = (Days if family == "followers" else Grid)(size)
    import jax

    import bilevax as bx

    jax.config.update("jax_enable_x64", True)
    problem, x = model.problem(), model.x

    def timed(x, warm=None):
        began = time.process_time()
        e = bx.hypergradient(problem, jax.numpy.asarray(x), warm=warm)
        jax.block_until_ready(e.grad)
        return time.process_time() - began, e

    first, e = timed(x)
    cold, there = timed(x + CLOSE)
    # The first call with a warm start compiles.
    timed(x + CLOSE, e.lower)
    warm, _ = timed(x + 2 * CLOSE, there.lower)
    row = dict(
        family=family,
        size=size if family == "followers" else model.size,
        first=first,
        cold=cold,
        warm=warm,
        # Before anything else takes memory.
        peak_mb=round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
        status=str(bx.status_name(e.status)),
    )
    programs = model.programs(x)
    try:
        row["clarabel"], answers = by_clarabel(programs)
        wanted = model.value(answers)
        row["error"] = abs(float(e.value) - wanted) / abs(wanted)
    except ImportError:
        row["clarabel"] = None
    try:
        row["moreau"], row["moreau_backward"] = by_moreau(model, programs)
    except ImportError:
        row["moreau"] = None
    except Exception as failure:  # noqa: BLE001 - a peer may fail; its words are kept
        row["moreau"], row["moreau_says"] = None, str(failure)[:200]
    return row


def exponent(rows: list[dict], name: str) -> float:
    """The slope of the logarithm over the larger half of the sizes."""
    part = rows[len(rows) // 2 - 1 :] if len(rows) > 2 else rows
    x = np.log([row["size"] for row in part])
    return float(np.polyfit(x, np.log([row[name] for row in part]), 1)[0])


def table(rows: list[dict]) -> str:
    """One family as Markdown; ratios are to the cold hypergradient."""
    lines = [
        "| size | first, s | cold, s | warm, s | memory, MB | Clarabel / cold | "
        "Moreau forward + backward / cold | F against Clarabel |",
        "|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        clarabel, moreau = row.get("clarabel"), row.get("moreau")
        both = None if moreau is None else moreau + row["moreau_backward"]
        ratio = lambda value, row=row: (
            "-" if value is None else f"{value / row['cold']:.2g}"
        )
        error = f"{row['error']:.0e}" if clarabel is not None else "-"
        lines.append(
            f"| {row['size']} | {row['first']:.3g} | {row['cold']:.3g} | "
            f"{row['warm']:.3g} | {row['peak_mb']} | {ratio(clarabel)} | "
            f"{ratio(both)} | {error} |"
        )
    if len(rows) > 1:
        told = (
            f"{name} {exponent(rows, name):.2f}" for name in ("cold", "warm", "peak_mb")
        )
        lines.append(f"\nExponents: {', '.join(told)}.")
    return "\n".join(lines)


HEAD = """# Growth of one hypergradient

CPU seconds on one core of a shared machine, `first` with whatever of the programs JAX's
cache did not know; ratios are to the cold hypergradient, so above 1 the peer takes
longer. Clarabel finds the answers alone, at 1e-12, one program after the other; Moreau
is compiled and set up beforehand. `python -m benchmarks.growth --page` made this from
[results/growth.jsonl](results/growth.jsonl).
"""


def page(rows: list[dict]) -> str:
    parts = [HEAD]
    for family in SIZES:
        own = [row for row in rows if row["family"] == family]
        if own:
            parts.append(f"## {family.capitalize()}\n\n{table(own)}\n")
    return "\n".join(parts).rstrip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--family", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--most", type=int, default=3, help="index of the last size")
    parser.add_argument("--rows", type=pathlib.Path, help="a file to append rows to")
    parser.add_argument("--page", type=pathlib.Path, help="print the page of rows")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(options.one[0], int(options.one[1]))))
        return
    if options.page:
        print(page([json.loads(row) for row in options.page.read_text().splitlines()]))
        return
    threads = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "RAYON_NUM_THREADS")
    alone = os.environ | dict.fromkeys(threads, "1")
    alone["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false"
    for family in options.family:
        rows = []
        for size in SIZES[family][: options.most + 1]:
            command = [sys.executable, "-m", "benchmarks.growth", "--one", family]
            line = subprocess.run(
                [*command, str(size)], check=True, capture_output=True, text=True,
                env=alone,
            )  # fmt: skip
            print(line.stdout.strip(), flush=True)
            rows.append(json.loads(line.stdout))
            if options.rows is not None:
                with options.rows.open("a") as file:
                    print(json.dumps(rows[-1]), file=file)
        print(f"\n{family}\n\n{table(rows)}\n", flush=True)


if __name__ == "__main__":
    main()
