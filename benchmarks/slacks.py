"""Rows that each move with their own entry of x: steps through empty lower levels.

    git worktree add ../before c9a83af
    python -m benchmarks.slacks --before ../before/src [--repeats 2] [--json OUT]

A support vector machine whose slacks are the upper variable, on drawn data: 500 rows,
45 variables below, 500 above. Nearly every step meets a lower level that is empty and
has to find the nearest slacks for which it is not. Two models: *wide* starts well
inside, *tight* at the least-squares slacks of `benchmarks/svm.py`. Seconds a step of
`solve` (DS-BLO, no polish), and of one warm `hypergradient`, both versions in turn in
processes of their own.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve().parent.parent
ROWS, FEATURES = 500, 8


def model(name: str):
    """The problem of `benchmarks/svm.py` on drawn data, and a start."""
    import jax.numpy as jnp

    from .svm import expanded, problem, slacks

    rng = np.random.default_rng(0)
    features = rng.normal(size=(ROWS + 150, FEATURES))
    score = features @ rng.normal(size=FEATURES) + 2 * rng.normal(size=len(features))
    label, z = np.where(score > 0, 1.0, -1.0), expanded(features)
    train, validate = np.arange(ROWS), np.arange(ROWS, len(z))
    start = slacks(z[train], label[train])
    start = np.minimum(start + (2.0 if name == "wide" else 0.0), 9.0)
    return problem(z, label, train, validate), jnp.asarray(start)


def measure(name: str, steps: int, repeats: int) -> dict:
    import jax

    jax.config.update("jax_enable_x64", True)
    import bilevax as bx

    task, x = model(name)
    key = jax.random.key(0)

    def seconds(count):
        began = time.perf_counter()
        found = bx.solve(
            task, bx.DSBLO(), x, key=key, num_steps=count, polish=False, throw=False
        )
        return time.perf_counter() - began, found

    first, _ = seconds(steps)
    later, found = min((seconds(steps) for _ in range(repeats)), key=lambda s: s[0])
    e = bx.hypergradient(task, x, throw=False)
    bx.hypergradient(task, x, warm=e.lower, throw=False)
    began, count = time.perf_counter(), 20
    for _ in range(count):
        e = bx.hypergradient(task, x, warm=e.lower, throw=False)
    jax.block_until_ready(e.grad)
    return {
        "first solve, s": first,
        "ms a step": 1e3 * later / steps,
        "ms a hypergradient": 1e3 * (time.perf_counter() - began) / count,
        "steps from empty lower levels": int(np.sum(found.history["recovered"])),
        "F": float(found.value),
        "status": found.status_name,
    }


def child(options, what: str, name: str) -> dict:
    environment = dict(
        os.environ, JAX_ENABLE_COMPILATION_CACHE="false",
        PYTHONPATH=str(getattr(options, what).resolve()),
    )  # fmt: skip
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.slacks"]
    command += ["--measure", name, "--steps", str(options.steps)]
    command += ["--repeats", str(options.repeats)]
    out = subprocess.run(
        command,
        cwd=HERE,
        env=environment,
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    return json.loads(out.stdout.splitlines()[-1])


def main():
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--before", type=Path, help="src of the version before")
    parser.add_argument("--after", type=Path, default=HERE / "src")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure(options.measure, options.steps, options.repeats)))
        return
    versions = ["after"] if options.before is None else ["before", "after"]
    found = {}
    for name in ("wide", "tight"):
        found[name] = {what: child(options, what, name) for what in versions}
        print(f"\n{name}\n\n| | {' | '.join(versions)} |")
        print("|---|" + "---:|" * len(versions))
        for label in found[name]["after"]:
            cells = [found[name][what][label] for what in versions]
            shown = [f"{c:.4g}" if isinstance(c, float) else str(c) for c in cells]
            print(f"| {label} | {' | '.join(shown)} |", flush=True)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
