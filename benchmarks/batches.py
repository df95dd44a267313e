"""Batches of followers on an accelerator beside the CPU of the same host.

    python -m benchmarks.batches [--batches 10000x10 10000x50 1000x200]
                                 [--rows ROWS.jsonl]

One warm hypergradient of `COUNTxN`: so many followers with `N` variables and `N / 2`
rows that move with `x`, in one process on every device JAX sees. A line of JSON tells
microseconds per follower on each, their ratio, and the largest difference of value and
gradient relative to their size, which should be at most 1e-12. Without an accelerator
the CPU is measured alone.
"""

import argparse
import json
import pathlib
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import bilevax as bx

LEADERS, REPEATS = 5, 3
EQUAL = 1e-12


def data_of(count: int, n: int):
    """Strongly convex quadratic programs, feasible around zero."""
    numbers = np.random.default_rng(0)
    rows = n // 2
    root = numbers.normal(size=(count, n, n)) / np.sqrt(n)
    return dict(
        H=root @ root.transpose(0, 2, 1) + np.eye(n),
        C=numbers.normal(size=(count, n, LEADERS)),
        A=numbers.normal(size=(count, rows, n)),
        B=0.1 * numbers.normal(size=(count, rows, LEADERS)),
        b=numbers.uniform(0.05, 0.5, size=(count, rows)),
        target=numbers.normal(size=(count, n)),
    )


def follower(d):
    return bx.Problem(
        lambda x, y: jnp.sum((y - d["target"]) ** 2),
        lambda x, y: 0.5 * y @ d["H"] @ y + y @ (d["C"] @ x),
        bx.Polyhedron(A=d["A"], b=d["b"], B=d["B"]),
        always_feasible=True,
    )


def on(device, data) -> tuple[dict, bx.Evaluation]:
    """Microseconds per follower on a device, and the evaluation."""
    with jax.default_device(device):
        followers = bx.Followers(follower, jax.device_put(data, device))
        xs = [jax.device_put(jnp.full(LEADERS, 0.01 * i), device) for i in range(2)]

        def timed(x, warm=None):
            began = time.perf_counter()
            e = bx.hypergradient(followers, x, warm=warm, throw=False)
            jax.block_until_ready(e.grad)
            return time.perf_counter() - began, e

        first, start = timed(xs[0])
        cold = min(timed(xs[0])[0] for _ in range(REPEATS))
        timed(xs[1], start.lower)
        warm, e = min(
            (timed(xs[1], start.lower) for _ in range(REPEATS)), key=lambda t: t[0]
        )
    per = 1e6 / len(followers)
    times = dict(
        device=device.device_kind,
        first_s=round(first, 2),
        cold_us=round(cold * per, 3),
        warm_us=round(warm * per, 3),
        solved=float(np.mean(np.asarray(e.lower.success))),
    )
    return times, e


def difference(a: bx.Evaluation, b: bx.Evaluation) -> float:
    """The largest relative one, of the value and of the gradient."""
    pairs = ((a.value, b.value), (a.grad, b.grad))
    return max(
        float(np.linalg.norm(np.subtract(u, v)) / np.linalg.norm(v)) for u, v in pairs
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--batches", nargs="+", default=["10000x10", "10000x50", "1000x200"]
    )
    parser.add_argument("--rows", type=pathlib.Path, help="a file to append rows to")
    options = parser.parse_args()
    jax.config.update("jax_enable_x64", True)
    host, others = jax.devices("cpu")[0], jax.devices()
    others = [device for device in others if device.platform != "cpu"][:1]
    for batch in options.batches:
        count, n = map(int, batch.split("x"))
        data = data_of(count, n)
        times, wanted = on(host, data)
        row: dict[str, Any] = dict(followers=count, n=n, host=times)
        for device in others:
            times, found = on(device, data)
            row["accelerator"] = times
            row["ratio"] = round(row["host"]["warm_us"] / times["warm_us"], 1)
            row["difference"] = difference(found, wanted)
            row["equal"] = row["difference"] <= EQUAL
        print(json.dumps(row), flush=True)
        if options.rows is not None:
            with options.rows.open("a") as file:
                print(json.dumps(row), file=file)


if __name__ == "__main__":
    main()
