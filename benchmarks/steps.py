"""What a step costs: `solve` with its defaults, its bare loop, NumPy and DAQP by hand.

    git worktree add ../before c9a83af
    python -m benchmarks.steps --before ../before/src [--repeats 3] [--json OUT]

The tight family of section 4.1 at (n, k) = (10, 5), (50, 10), (200, 50). Each
measurement is a process of its own, the versions take turns, the best repeat counts:

- *first*, *later*: seconds of a first and of a later `solve` of 6 000 steps, polish and
  looks included; *a step*: what 5 000 more steps cost, from runs of 1 000 and 6 000.
- *bare loop*: the compiled chunk of 1 000 steps alone, called again and again.
- *NumPy + DAQP*: the same algorithm by hand (normalised momentum, falling steps and
  tilts, the closed form of the gradient), with `daqp.solve` at each point, and with
  DAQP's workspace kept and everything that does not depend on `x` computed once.

Each is measured pinned to one core; `solve` also on all cores there are.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from .section_4_1 import draw

SIZES = ((10, 5), (50, 10), (200, 50))
SHORT, LONG, CHUNK = 1000, 6000, 1000
HERE = Path(__file__).resolve().parent.parent


def by_hand(n: int, k: int, repeats: int) -> dict[str, float]:
    """Seconds a step of DS-BLO with DAQP."""
    import daqp

    data = draw(n, k)
    Q1, Q2, A, B, b, H = data
    inverse = np.linalg.inv(H)
    lifted = inverse @ A.T
    gram = A @ lifted
    model = daqp.Model()
    model.setup(H, Q2.T @ np.ones(n), A, b - B @ np.ones(n))

    def solve(linear, rhs):
        y, _, flag, info = daqp.solve(H, linear, A, rhs)
        assert flag == 1, f"DAQP: exit flag {flag}"
        return y, info["lam"]

    def solve_kept(linear, rhs):
        model.update(f=linear, bupper=rhs)
        y, _, flag, info = model.solve()
        assert flag == 1, f"DAQP: exit flag {flag}"
        return y, info["lam"]

    def adjoint(f_y, active):
        rows = A[active]
        both = np.linalg.solve(H, np.column_stack([f_y, rows.T]))
        free, up = both[:, 0], both[:, 1:]
        w = np.linalg.solve(rows @ up, rows @ free)
        return free - up @ w, w

    def adjoint_kept(f_y, active):
        free, up = inverse @ f_y, lifted[:, active]
        w = np.linalg.solve(gram[np.ix_(active, active)], rows_of(active, free))
        return free - up @ w, w

    def rows_of(active, free):
        return A[active] @ free

    def run(steps, solve, adjoint):
        rng = np.random.default_rng(0)
        x, m = np.ones(n), np.zeros(n)
        length, decay, tilt, beta = 0.1, 1e-5, 1e-3, 0.9
        for t in range(steps):
            share = t / steps
            norm = np.sqrt(m @ m)
            step = 0 if t == 0 else length * decay**share / (norm + 1e-300)
            ahead = x - step * m
            at = x + rng.random() * (ahead - x)
            q = tilt * 1e-4**share * rng.normal(size=n)
            y, multipliers = solve(Q2.T @ at + q, b - B @ at)
            f_y = 0.1 * Q1.T @ at + 2 * y + 1
            active = multipliers > 0
            v, w = adjoint(f_y, active)
            grad = 2 * at + 0.1 * Q1 @ y + 1 - Q2 @ v - B[active].T @ w
            m = grad if t == 0 else beta * m + (1 - beta) * grad
            x = ahead
        return x

    out = {}
    for name, parts in (
        ("NumPy + DAQP", (solve, adjoint)),
        ("NumPy + DAQP, workspace kept", (solve_kept, adjoint_kept)),
    ):
        steps = 2000 if n < 200 else 300
        times = []
        for _ in range(repeats):
            began = time.perf_counter()
            run(steps, *parts)
            times.append((time.perf_counter() - began) / steps)
        out[name] = min(times)
    return out


def by_library(n: int, k: int, repeats: int, bare: bool) -> dict[str, float]:
    """Seconds of `solve`, and of its loop alone."""
    import jax
    import jax.numpy as jnp

    jax.config.update("jax_enable_x64", True)
    import bilevax as bx
    from bilevax.experiments.families import Lower, Upper

    Q1, Q2, A, B, b, _ = map(jnp.asarray, draw(n, k))
    problem = bx.Problem(Upper(Q1), Lower(Q2), bx.Polyhedron(A, B, b))
    x, key = jnp.ones(n), jax.random.key(0)

    def seconds(steps):
        began = time.perf_counter()
        found = bx.solve(problem, bx.DSBLO(), x, key=key, num_steps=steps, throw=False)
        jax.block_until_ready(found.x)
        return time.perf_counter() - began

    out = {"first": seconds(LONG)}
    seconds(SHORT)
    short = min(seconds(SHORT) for _ in range(repeats))
    long = min(seconds(LONG) for _ in range(repeats))
    out |= {"later": long, "a step": (long - short) / (LONG - SHORT)}
    if bare:
        out["bare loop"] = bare_loop(problem, x, key, repeats)
    return out


def bare_loop(problem, x, key, repeats):
    """Seconds a step of the compiled chunk, whatever its home is called."""
    import jax
    import jax.numpy as jnp

    import bilevax as bx

    try:
        from bilevax._driver.run import advance, start
        from bilevax._methods.base import Scales
    except ImportError:  # before there were rooms
        from bilevax._run import advance, start

        from bilevax._methods.base import Scales
    problem = problem.assuming_feasible()
    one = jnp.ones(())
    e = bx.hypergradient(problem, x)
    method = bx.DSBLO()
    state = start(problem, method, x, e, Scales(one, one, one), key)
    kept = x

    def chunk():
        out = advance(
            problem, method, None, CHUNK, state, kept, None, key, jnp.asarray(0),
            jnp.asarray(CHUNK), jnp.asarray(LONG), jnp.asarray(-1),
        )  # fmt: skip
        return jax.block_until_ready(out[0].x)

    chunk()
    times = []
    for _ in range(3 * repeats):
        began = time.perf_counter()
        chunk()
        times.append((time.perf_counter() - began) / CHUNK)
    return min(times)


def child(options, what: str, n: int, k: int, pinned: bool) -> dict[str, float]:
    source = options.before if what == "before" else options.after
    environment = dict(
        os.environ, JAX_ENABLE_COMPILATION_CACHE="false",
        PYTHONPATH=str(source.resolve()),
    )  # fmt: skip
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.steps"]
    command += ["--measure", what, str(n), str(k), "--repeats", str(options.repeats)]
    if pinned:
        command.append("--pinned")
    out = subprocess.run(
        command,
        cwd=HERE,
        env=environment,
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    return json.loads(out.stdout.splitlines()[-1])


def measured(options) -> dict[str, float]:
    what, n, k = options.measure[0], *map(int, options.measure[1:])
    if options.pinned:
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    if what == "hand":
        return by_hand(n, k, options.repeats)
    return by_library(n, k, options.repeats, options.pinned)


def main():
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--before", type=Path, help="src of the version before")
    parser.add_argument("--after", type=Path, default=HERE / "src")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=2, help="turns of each version")
    parser.add_argument("--sizes", nargs="+", default=[f"{n},{k}" for n, k in SIZES])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--measure", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--pinned", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measured(options)))
        return
    versions = ["after"] if options.before is None else ["before", "after"]
    found = {}
    for size in options.sizes:
        n, k = map(int, size.split(","))
        best: dict[str, float] = {}
        for _ in range(options.rounds):
            for what, pinned in [
                *((version, True) for version in versions),
                ("hand", True),
                *((version, False) for version in versions),
            ]:
                for name, value in child(options, what, n, k, pinned).items():
                    label = name if what == "hand" else f"{what}: {name}"
                    label += "" if pinned else ", all cores"
                    best[label] = min(value, best.get(label, np.inf))
        found[size] = best
        show(size, best)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


def show(size: str, best: dict[str, float]) -> None:
    step = best["after: a step"]
    print(f"\n(n, k) = ({size})\n\n| | us, or s | ratio to a step of `solve` |")
    print("|---|---:|---:|")
    for label, value in best.items():
        whole = "first" in label or "later" in label
        shown = f"{value:.2f} s" if whole else f"{1e6 * value:.1f}"
        ratio = "" if whole else f"{value / step:.2f}"
        print(f"| {label} | {shown} | {ratio} |", flush=True)


if __name__ == "__main__":
    main()
