"""Is the rate of DS-BLO free of the dimension? Goldstein measure against T.

    python -m benchmarks.dimension_free [--seeds 10] [--out benchmarks/results]

The family: `f = |x|^2 / 4 + (sum x / 2 - sum y) / sqrt(d)`, `g = |y - x|^2 / 2` with
`y <= 0`, hence `F = |x|^2 / 4 + |x|_1 / (2 sqrt(d))`. From `x = r 1 / sqrt(d)` the
start value, the bound on gradients over the ball of radius r, and the radius of the
measure are the same in every dimension; so are the constants of the method and the
largest tilt. Each run returns a random iterate, as the theorem does.
"""

import argparse
import json
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np

import bilevax as bx

RADIUS, START = 0.1, 2.0
LENGTHS = (100, 300, 1000, 3000, 10000)


class Upper(eqx.Module):
    def __call__(self, x, y):
        root = jnp.sqrt(x.size)
        return jnp.sum(x**2) / 4 + (jnp.sum(x) / 2 - jnp.sum(y)) / root


class Lower(eqx.Module):
    def __call__(self, x, y):
        return 0.5 * jnp.sum((y - x) ** 2)


def problem(d):
    return bx.Problem(Upper(), Lower(), bx.Polyhedron(A=np.eye(d), b=np.zeros(d)))


def method(T):
    """The scalings of the theorem, `1 - beta ~ eps^2`, `gamma1 ~ 1 / (eps^2 delta)`.

    With `eps ~ T^(-1/4)`; its absolute constants would ask for billions of steps.
    """
    window = np.sqrt(T)
    gamma1 = window / RADIUS
    return bx.DSBLO(
        gamma1, 0.1 * gamma1, 1 - 1 / window, perturbation=bx.UniformBall(1e-2)
    )


def run(d, T, seed):
    s = bx.solve(
        problem(d), method(T), np.full(d, START / np.sqrt(d)), key=jr.key(seed),
        num_steps=T, chunk=T, polish=False, output="random",
    )  # fmt: skip
    c = bx.certify(problem(d), s.x, RADIUS, key=jr.key(seed), num_samples=10 * d)
    return dict(d=d, T=T, seed=seed, measure=c.measure, value=s.value)


def figure(rows, path):
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plot, axis = plt.subplots(figsize=(5, 3.6), layout="constrained")
    for d in sorted({row["d"] for row in rows}):
        means = [
            np.mean([r["measure"] for r in rows if r["d"] == d and r["T"] == T])
            for T in LENGTHS
        ]
        axis.loglog(LENGTHS, means, "o-", label=f"d = {d}")
    axis.loglog(
        LENGTHS, [means[0] * (T / LENGTHS[0]) ** -0.25 for T in LENGTHS], "k:",
        label="T^(-1/4)",
    )  # fmt: skip
    axis.set_xlabel("steps T")
    axis.set_ylabel(f"mean Goldstein measure, radius {RADIUS}")
    axis.grid(alpha=0.3)
    axis.legend()
    plot.savefig(path, dpi=150)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--out", default="benchmarks/results")
    parser.add_argument("--dimensions", default="10,200")
    options = parser.parse_args()
    jax.config.update("jax_enable_x64", True)
    out = Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    rows = []
    with open(out / "dimension_free.jsonl", "w") as file:
        for d in map(int, options.dimensions.split(",")):
            for T in LENGTHS:
                for seed in range(options.seeds):
                    rows.append(run(d, T, seed))
                    file.write(json.dumps(rows[-1]) + "\n")
                here = [r["measure"] for r in rows if r["d"] == d and r["T"] == T]
                print(f"d = {d:3d}, T = {T:6d}: mean measure {np.mean(here):.4f}")
    figure(rows, out / "dimension_free.png")


if __name__ == "__main__":
    main()
