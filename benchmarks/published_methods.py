"""All methods on published problems: best gap, and lower-level solves to come there.

    python -m benchmarks.published_methods PROBLEMS.py --out FOLDER [--only NAME ...]

`PROBLEMS.py` is as for `benchmarks.published`; problems whose upper level has rows in
`y`, and those marked delicate, are left out. Every method runs with its defaults, 300
steps and no polish, from the given start and seven random ones, the same for all. The
gap is (F - best known F) / scale. A killed run goes on where it stopped.
"""

import argparse
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


def cell(rows, entry) -> str:
    """Best gap of a method, and median solves of the runs that came close enough."""
    if rows[0]["status"] == "refused":
        return "–"
    best, solves = np.inf, []
    for row in rows:
        values = np.array([np.nan if v is None else v for v in row["value"]], float)
        gap = (values - reference(entry)) / entry["F_scale"]
        best = min(best, np.nanmin(gap, initial=np.inf))
        close = np.flatnonzero(gap < allowed(entry))
        if len(close):
            solves.append(row["solves"][close[0]])
    if not np.isfinite(best):
        return "failed"
    found = f", {np.median(solves):.0f} ({len(solves)})" if solves else ""
    return f"{max(best, 0):.0e}{found}"


def table(entries, rows) -> str:
    names = [entry.name for entry in CATALOGUE.values()]
    lines = ["| problem | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
    for entry in entries:
        mine = [row for row in rows if row["problem"] == entry["name"]]
        if not mine:
            continue
        cells = [
            cell([row for row in mine if row["method"] == name], entry)
            for name in names
        ]
        lines.append(f"| {entry['name']} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("problems")
    parser.add_argument("--out", default="results/published-methods")
    parser.add_argument("--only", nargs="*")
    parser.add_argument("--largest", type=int, default=100, help="most entries of x")
    options = parser.parse_args()
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
    rows = []
    for entry in entries:
        found = bx.compare(
            [case(entry)], methods, STARTS, bx.Budget(300, look_every=20), folder=out
        )
        rows += found.rows
        print(table([entry], found.rows).splitlines()[-1], flush=True)
        jax.clear_caches()
    (out / "table.md").write_text(table(entries, rows))


if __name__ == "__main__":
    main()
