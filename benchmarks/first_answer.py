"""What a user waits for: first answers, other functions, single calls, steps of a run.

    git worktree add ../before c9a83af
    python -m benchmarks.first_answer --before ../before/src [--repeats 3] [--json OUT]

Each measurement is a process of its own that loads one version of the library; the two
versions take turns in one run, the best repeat of each counts, and what is printed are
ratios (before / after). First calls include tracing and compilation, without JAX's
persistent cache. Everything goes through the public functions, with their defaults.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

MODELS = ("readme", "market", "rows", "box")
HERE = Path(__file__).resolve().parent.parent


def model(name: str, scale: float):
    """A problem whose functions are new objects at each call, and a start."""
    import jax.numpy as jnp
    import numpy as np

    import bilevax as bx

    if name == "readme":
        roads = bx.Polyhedron(
            A=jnp.array([[1.0, 1.0], [-1, 0], [0, -1]]), b=jnp.array([2.0, 0, 0])
        )
        tolls = bx.Box(jnp.zeros(2), jnp.full(2, 5.0))
        problem = bx.Problem(
            lambda x, y: -scale * jnp.sum(x * y),
            lambda x, y: 0.5 * scale * jnp.sum(y**2) + scale * jnp.sum((x - 4) * y),
            roads,
            domain=tolls,
        )
        return problem, jnp.array([1.0, 2.0])
    rng = np.random.default_rng(0)
    if name == "market":
        return market(scale, rng), jnp.zeros(3)
    n, k = (27, 136) if name == "rows" else (120, 0)
    root = rng.normal(size=(n, n)) / np.sqrt(n)
    H, c = jnp.asarray(root @ root.T + 0.5 * np.eye(n)), jnp.asarray(rng.normal(size=n))
    upper = lambda x, y: scale * jnp.sum((y - 1) ** 2) + jnp.sum(x**2)
    lower = lambda x, y: 0.5 * y @ H @ y + scale * (c + x) @ y
    if name == "box":
        return bx.Problem(upper, lower, bx.Box(-jnp.ones(n), jnp.ones(n))), jnp.zeros(n)
    A, B = rng.normal(size=(k, n)), 0.1 * rng.normal(size=(k, n))
    rows = bx.Polyhedron(
        A=jnp.asarray(A), B=jnp.asarray(B), b=jnp.asarray(rng.uniform(0.5, 1.5, k))
    )
    return bx.Problem(upper, lower, rows), jnp.zeros(n)


def market(scale: float, rng):
    """Mark-ups of 3 of 6 generators before a market with 21 loads and 41 lines.

    27 variables, 136 rows (both directions of each line, bounds) and the balance.
    """
    import jax.numpy as jnp
    import numpy as np

    import bilevax as bx

    share = rng.normal(size=(41, 27)) * rng.uniform(0, 0.5, (41, 1))
    sold = np.r_[np.ones(6), -np.ones(21)]
    limit, most = rng.uniform(10, 40, 41), np.r_[rng.uniform(30, 80, 6), np.full(21, 9)]
    A = np.vstack([share * sold, -share * sold, np.eye(27), -np.eye(27)])
    b = np.concatenate([limit, limit, most, np.zeros(27)])
    rows = bx.Polyhedron(A=A, b=b, A_eq=sold[None], b_eq=np.zeros(1))
    H = jnp.asarray(np.r_[rng.uniform(0.01, 0.1, 6), rng.uniform(1, 8, 21)])
    c = jnp.asarray(np.r_[rng.uniform(1, 3.5, 6), np.full(21, -20.4)])
    cost = lambda y: scale * (0.5 * jnp.sum(H * y**2) + c @ y)
    marked_up = lambda x, y: cost(y) + scale * x @ y[:3]
    price = c[6:9] + H[6:9] * 4.0
    profit = lambda x, y: jnp.sum((c[:3] + x) * y[:3]) - 0.5 * price @ y[6:9]
    return bx.Problem(
        lambda x, y: -scale * profit(x, y), marked_up, rows,
        domain=bx.Box(jnp.zeros(3), jnp.full(3, 6.0)),
    )  # fmt: skip


def measure(name: str) -> dict[str, float]:
    """Seconds, in this process."""
    import jax

    jax.config.update("jax_enable_x64", True)
    import bilevax as bx

    key, out = jax.random.key(0), {}

    def timed(label, function):
        began = time.perf_counter()
        result = function()
        jax.block_until_ready(jax.tree.leaves(getattr(result, "value", result)))
        out[label] = time.perf_counter() - began
        return result

    problem, x = model(name, 1.0)
    options: Any = dict(throw=False)
    e = timed("first hypergradient", lambda: bx.hypergradient(problem, x, **options))
    found = timed("first solve", lambda: bx.solve(problem, None, x, key=key, **options))
    timed("first certify", lambda: bx.certify(problem, found.x, 1e-3, key=key))
    timed("second solve", lambda: bx.solve(problem, None, x, key=key, **options))
    other, x = model(name, 2.0)
    timed("other hypergradient", lambda: bx.hypergradient(other, x, **options))
    timed("other solve", lambda: bx.solve(other, None, x, key=key, **options))
    for label, warm in (("cold call", None), ("warm call", e.lower)):
        call = lambda warm=warm: bx.hypergradient(problem, x, warm=warm, **options)
        # Until it is compiled, whichever call does that.
        for _ in range(50):
            jax.block_until_ready(call().grad)
        began, count = time.perf_counter(), 200
        for _ in range(count):
            last = call()
        jax.block_until_ready(last.grad)
        out[label] = (time.perf_counter() - began) / count
    return out


def run(source: Path, name: str) -> dict[str, float]:
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.first_answer"]
    environment = dict(
        os.environ, PYTHONPATH=str(source), JAX_ENABLE_COMPILATION_CACHE="false"
    )
    out = subprocess.run(
        [*command, "--measure", name], cwd=HERE, env=environment, check=True,
        capture_output=True, text=True,
    )  # fmt: skip
    return json.loads(out.stdout.splitlines()[-1])


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--before", type=Path, help="src of the version before")
    parser.add_argument("--after", type=Path, default=HERE / "src")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--measure", choices=MODELS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure(options.measure)))
        return
    found = {}
    for name in options.models:
        runs = {"before": [], "after": []}
        for _ in range(options.repeats):
            for which in runs:
                runs[which].append(run(getattr(options, which).resolve(), name))
        best = {
            which: {label: min(r[label] for r in part) for label in part[0]}
            for which, part in runs.items()
        }
        found[name] = best
        print(f"\n{name}\n| | before, ms | after, ms | ratio |\n|---|---:|---:|---:|")
        for label, before in best["before"].items():
            after = best["after"][label]
            print(f"| {label} | {1e3 * before:.1f} | {1e3 * after:.1f} | "
                  f"{before / after:.1f} |")  # fmt: skip
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
