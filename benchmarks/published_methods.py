"""All methods on published problems: best gap, and lower-level solves to come there.

    python -m benchmarks.published_methods PROBLEMS.py --out FOLDER --json CELLS.jsonl
    python -m benchmarks.published_methods --table CELLS.jsonl

`PROBLEMS.py` is as for `benchmarks.published`; problems whose upper level has rows in
`y`, and those marked delicate, are left out. Every method runs with its defaults, 300
steps and no polish, from the given start and seven random ones, the same for all. The
gap is (F - best known F) / scale. A killed run goes on where it stopped. CELLS holds a
line per problem and method: the best gap, how many of the starts came within the
tolerance of the problem, and the median of the lower-level solves that these took.
"""

import argparse
import json
from pathlib import Path

import jax
import numpy as np

import bilevax as bx
from bilevax._methods.catalogue import CATALOGUE

from .published import allowed, build, load, random_starts

STARTS = 8


def case(entry) -> bx.Case:
    rng = np.random.default_rng(0)
    starts = [np.asarray(entry["x_start"], float)]
    starts += random_starts(entry, STARTS - 1, rng)
    return bx.Case(entry["name"], build(entry), lambda seed: starts[seed])


def reference(entry) -> float:
    if entry["name"].startswith("qpec_100"):
        return entry["local_reference_F"]
    return entry["verified_F"]


def cell(rows, entry) -> dict:
    """What one method did on one problem."""
    found: dict = dict(problem=entry["name"], method=rows[0]["method"])
    if rows[0]["status"] == "refused":
        return found | dict(refused=rows[0]["message"])
    best, solves = np.inf, []
    for row in rows:
        values = np.array([np.nan if v is None else v for v in row["value"]], float)
        gap = (values - reference(entry)) / entry["F_scale"]
        best = min(best, np.nanmin(gap, initial=np.inf))
        close = np.flatnonzero(gap < allowed(entry))
        if len(close):
            solves.append(row["solves"][close[0]])
    return found | dict(
        best_gap=float(best) if np.isfinite(best) else None,
        starts=len(rows),
        close=len(solves),
        median_solves=float(np.median(solves)) if solves else None,
    )


def text(cell: dict) -> str:
    if "refused" in cell:
        return "–"
    if cell["best_gap"] is None:
        return "failed"
    gap = f"{max(cell['best_gap'], 0):.0e}"
    if not cell["close"]:
        return gap
    return f"**{gap}**, {cell['median_solves']:.0f} ({cell['close']})"


def table(cells: list[dict]) -> str:
    """A line per problem, then what each method solved in all."""
    names = list(dict.fromkeys(cell["method"] for cell in cells))
    problems = list(dict.fromkeys(cell["problem"] for cell in cells))
    find = {(cell["problem"], cell["method"]): cell for cell in cells}
    lines = ["| problem | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
    for problem in problems:
        own = [text(find[problem, name]) for name in names]
        lines.append(f"| {problem} | " + " | ".join(own) + " |")
    lines += [
        "",
        "| method | problems accepted | solved | starts that came there | solves |",
        "|---|---:|---:|---:|---:|",
    ]
    for name in names:
        own = [find[problem, name] for problem in problems]
        own = [cell for cell in own if "refused" not in cell]
        solved = [cell for cell in own if cell["close"]]
        starts = sum(c["close"] for c in own) / max(1, sum(c["starts"] for c in own))
        solves = [cell["median_solves"] for cell in solved]
        middle = f"{np.median(solves):.0f}" if solves else "–"
        lines.append(
            f"| {name} | {len(own)} | {len(solved)} | {starts:.0%} | {middle} |"
        )
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("problems", nargs="?")
    parser.add_argument("--table", type=Path, help="print these cells, run nothing")
    parser.add_argument("--out", default="results/published-methods")
    parser.add_argument("--json", type=Path, default=Path("results/cells.jsonl"))
    parser.add_argument("--only", nargs="*")
    parser.add_argument("--largest", type=int, default=100, help="most entries of x")
    options = parser.parse_args()
    if options.table is not None:
        lines = options.table.read_text().splitlines()
        print(table([json.loads(line) for line in lines]))
        return
    if options.problems is None:
        parser.error("name the file with the problems.")
    jax.config.update("jax_enable_x64", True)
    entries = [
        entry
        for entry in load(options.problems)
        if entry["upper"] != "coupled"
        and entry["lower"] == "qp"
        and "delicate" not in entry["tags"]
        and entry["n_x"] <= options.largest
        and (not options.only or entry["name"] in options.only)
    ]
    methods = {entry.name: entry.kind() for entry in CATALOGUE.values()}
    out = Path(options.out)
    cells = []
    for entry in entries:
        found = bx.compare(
            [case(entry)], methods, STARTS, bx.Budget(300, look_every=20), folder=out
        )
        for name in methods:
            own = [row for row in found.rows if row["method"] == name]
            cells.append(cell(own, entry))
        print(entry["name"], *map(text, cells[-len(methods) :]), sep=" | ", flush=True)
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text("".join(json.dumps(cell) + "\n" for cell in cells))
    print(table(cells))


if __name__ == "__main__":
    main()
