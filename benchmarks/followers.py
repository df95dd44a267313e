"""How time and memory of one hypergradient grow with the number of followers.

    python -m benchmarks.followers [--counts 10 100 1000 10000] [--batch B]

Followers have 24 variables, ramp limits in both directions and a forecast that the
leader shifts hour by hour. Each count is a process of its own; one line of JSON each:
seconds of the first call, of a second one that starts cold, of one with a warm start,
the largest resident memory, and the device. Fitted exponents come last.
"""

import argparse
import json
import resource
import subprocess
import sys
import time

import numpy as np

HOURS = 24


def measure(count: int, batch: int | None) -> dict:
    import jax
    import jax.numpy as jnp

    import bilevax as bx

    jax.config.update("jax_enable_x64", True)
    numbers = np.random.default_rng(0)
    steps = np.diff(np.eye(HOURS), axis=0)
    ramps = bx.Polyhedron(
        A=np.concatenate([steps, -steps]), b=np.full(2 * (HOURS - 1), 0.4)
    )

    def day(d):
        return bx.Problem(
            lambda x, y: jnp.sum((y - d["load"]) ** 2),
            lambda x, y: 0.5 * jnp.sum((y - d["forecast"] - x) ** 2),
            ramps,
        )

    load = np.cumsum(numbers.normal(size=(count, HOURS)) / 3, axis=1)
    noise = numbers.normal(size=load.shape) / 5
    followers = bx.Followers(day, dict(load=load, forecast=load + noise), batch=batch)

    def timed(x, warm=None):
        began = time.perf_counter()
        e = bx.hypergradient(followers, jnp.asarray(x), warm=warm)
        jax.block_until_ready(e.grad)
        return time.perf_counter() - began, e

    first, e = timed(np.zeros(HOURS))
    cold, _ = timed(np.full(HOURS, 0.01))
    timed(np.full(HOURS, 0.01), e.lower)
    warm, _ = timed(np.full(HOURS, 0.02), e.lower)
    return dict(
        followers=count,
        batch=batch,
        first=round(first, 3),
        cold=round(cold, 5),
        warm=round(warm, 5),
        peak_mb=round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
        status=str(bx.status_name(e.status)),
        device=jax.devices()[0].device_kind,
    )


def exponent(rows: list[dict], name: str) -> float:
    """The slope of the logarithm over the larger half of the counts."""
    part = rows[len(rows) // 2 - 1 :]
    x = np.log([row["followers"] for row in part])
    return float(np.polyfit(x, np.log([row[name] for row in part]), 1)[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--counts", type=int, nargs="+", default=[10, 100, 1000, 10_000]
    )
    parser.add_argument("--batch", type=int)
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(options.one, options.batch)))
        return
    rows = []
    for count in options.counts:
        command = [sys.executable, "-m", "benchmarks.followers", "--one", str(count)]
        if options.batch:
            command += ["--batch", str(options.batch)]
        line = subprocess.run(command, check=True, capture_output=True, text=True)
        print(line.stdout.strip(), flush=True)
        rows.append(json.loads(line.stdout))
    if len(rows) > 2:
        print(
            json.dumps({f"{n}_exponent": exponent(rows, n) for n in ("cold", "warm")})
        )


if __name__ == "__main__":
    main()
