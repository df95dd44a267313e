"""One DS-BLO iteration: bilevax beside a plain cvxpy + NumPy loop, in one run.

    taskset -c 0 python -m benchmarks.ds_blo_speed [--repeats 5]

Both do the same steps on the tight family of section 4.1: tilt, solve the lower level,
closed-form gradient, momentum. The cvxpy loop is written twice, as the paper's way of
computing (the model is built anew at every step) and with parameters, compiled once.
Compilation is not in the times per step and is printed beside them.
"""

import argparse
import time
from typing import Any

import cvxpy as cp
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np

import bilevax as bx
from bilevax._driver.run import advance, start
from bilevax._methods.base import Scales
from bilevax.experiments.families import Member

GAMMA1, GAMMA2, BETA, STD = 100.0, 1.0, 0.9, 1e-3


def cvxpy_loop(problem: bx.Problem, steps: int, rebuild: bool) -> float:
    """Seconds per step."""
    Q1, Q2 = np.asarray(problem.upper.Q1), np.asarray(problem.lower.Q2)
    rows: Any = problem.constraints
    A, B, b = (np.asarray(part) for part in (rows.A, rows.B, rows.b))
    n = Q1.shape[0]
    rng = np.random.default_rng(0)
    y, linear, rhs = cp.Variable(n), cp.Parameter(n), cp.Parameter(len(b))
    model = cp.Problem(cp.Minimize(cp.sum_squares(y) + linear @ y), [A @ y <= rhs])

    def solve(c, h):
        if rebuild:
            z = cp.Variable(n)
            fresh = cp.Problem(cp.Minimize(cp.sum_squares(z) + c @ z), [A @ z <= h])
            fresh.solve()
            return z.value, fresh.constraints[0].dual_value
        linear.value, rhs.value = c, h
        model.solve()
        return y.value, model.constraints[0].dual_value

    def gradient(x):
        q = STD * rng.normal(size=n)
        y, multipliers = solve(Q2.T @ x + q, b - B @ x)
        active = multipliers > 1e-6
        W = A[active]
        f_y = 0.1 * Q1.T @ x + 2 * y + 1
        w = np.linalg.solve(W @ W.T, W @ f_y) if active.any() else np.zeros(0)
        v = (f_y - W.T @ w) / 2
        return 2 * x + 0.1 * Q1 @ y + 1 - Q2 @ v - B[active].T @ w

    x = np.ones(n)
    m = gradient(x)
    began = time.perf_counter()
    for _ in range(steps):
        ahead = x - m / (GAMMA1 * np.linalg.norm(m) + GAMMA2)
        m = BETA * m + (1 - BETA) * gradient(x + rng.random() * (ahead - x))
        x = ahead
    return (time.perf_counter() - began) / steps


def bilevax_loop(problem: bx.Problem, steps: int) -> tuple[float, float]:
    """Seconds per step, and seconds of the first call."""
    method = bx.DSBLO(GAMMA1, GAMMA2, BETA, perturbation=bx.Gaussian(STD))
    x = jnp.ones(problem.lower.Q2.shape[0])
    began = time.perf_counter()
    e = bx.hypergradient(problem, x)
    one = jnp.ones(())
    scales = Scales(one, one, one)
    state = start(problem, method, x, e, scales, jr.key(0))

    def run(first):
        out = advance(
            problem, method, None, steps, state, x, None, jr.key(0),
            jnp.asarray(first), jnp.asarray(first + steps), jnp.asarray(10**9),
            jnp.asarray(-1),
        )  # fmt: skip
        return jax.block_until_ready(out[0].x)

    run(0)
    cold = time.perf_counter() - began
    began = time.perf_counter()
    run(0)
    return (time.perf_counter() - began) / steps, cold


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    jax.config.update("jax_enable_x64", True)
    print(
        "| d, k | bilevax, us | cvxpy rebuilt | ratio | cvxpy parameters | ratio "
        "| cold start, s |"
    )
    print("|---|---:|---:|---:|---:|---:|---:|")
    for size, k in ((10, 5), (50, 10)):
        problem = Member("tight", size, 0).problem
        ours, cold = [], None
        rebuilt, kept = [], []
        for _ in range(options.repeats):
            t, first = bilevax_loop(problem, 2000)
            ours.append(t)
            cold = first if cold is None else cold
            rebuilt.append(cvxpy_loop(problem, 40, True))
            kept.append(cvxpy_loop(problem, 40, False))
        t, r, p = min(ours), min(rebuilt), min(kept)
        print(
            f"| {size}, {k} | {t * 1e6:.1f} | {r * 1e6:.0f} | {r / t:.0f} | "
            f"{p * 1e6:.0f} | {p / t:.0f} | {cold:.1f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
