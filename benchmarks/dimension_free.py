"""Is the rate of DS-BLO free of the dimension? Goldstein measure against T.

    python -m benchmarks.dimension_free [--seeds 8] [--out benchmarks/results]

The family: `f = |x|^2 / 4 + (sum x / 2 - sum y) / sqrt(d)`, `g = |y - x|^2 / 2` with
`y <= 0`, hence `F = |x|^2 / 4 + |x|_1 / (2 sqrt(d))`. From `x = r 1 / sqrt(d)` the
start value, the bound on gradients over the ball of radius r, and the radius of the
measure are the same in every dimension; so are the constants of the method and the
largest tilt. As in the theorem, the measure is that of random iterates; several of
each run are looked at.
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
from bilevax._methods.base import Scales

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
    return bx.Problem(Upper(), Lower(), bx.Box(np.full(d, -np.inf), np.zeros(d)))


def method(T):
    """The scalings of the theorem, `1 - beta ~ eps^2`, `gamma1 ~ 1 / (eps^2 delta)`.

    With `eps ~ T^(-1/4)`; its absolute constants would ask for billions of steps.
    """
    window = np.sqrt(T)
    gamma1 = window / RADIUS
    return bx.DSBLO(
        gamma1, 0.1 * gamma1, 1 - 1 / window, perturbation=bx.UniformBall(1e-2)
    )


@eqx.filter_jit
def iterates(problem, method, x, lower, keep, keys, T):
    """`x` before the steps `keep`, for one run per key."""
    one = jnp.ones(())

    def run(keep, key):
        state = method.init(problem, x, lower, Scales(one, one, one), key=key)
        arrays, rest = eqx.partition(state, eqx.is_array)

        def body(carry):
            t, arrays, kept = carry
            state = eqx.combine(arrays, rest)
            kept = jnp.where((keep == t)[:, None], state.x, kept)
            state, _ = method.step(
                problem, state, step=t, num_steps=T, key=jr.fold_in(key, t)
            )
            new = eqx.filter(state, eqx.is_array)
            new = jax.tree.map(lambda a, b: a.astype(b.dtype), new, arrays)
            return t + 1, new, kept

        kept = jnp.zeros((keep.size, x.size))
        return jax.lax.while_loop(lambda c: c[0] < T, body, (0, arrays, kept))[2]

    return jax.vmap(run)(keep, keys)


def measures(d, T, seeds, per_run):
    """Rows of the Goldstein measure at random iterates of runs of `T` steps."""
    here, x = problem(d), jnp.full(d, START / np.sqrt(d))
    lower = bx.hypergradient(here, x).lower
    rng = np.random.default_rng(T)
    keep = rng.integers(0, T, (seeds, per_run))
    keys = jax.vmap(jr.key)(jnp.arange(seeds))
    points = iterates(here, method(T), x, lower, jnp.asarray(keep), keys, T)
    for seed in range(seeds):
        for i in range(per_run):
            c = bx.certify(here, points[seed, i], RADIUS, key=jr.key(i))
            yield dict(
                d=d, T=T, seed=seed, step=int(keep[seed, i]), measure=c.measure,
                norm=float(jnp.linalg.norm(points[seed, i])), samples=c.samples,
            )  # fmt: skip


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
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--per-run", type=int, default=8, help="iterates of each run")
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
                here = list(measures(d, T, options.seeds, options.per_run))
                file.writelines(json.dumps(row) + "\n" for row in here)
                rows += here
                mean = np.mean([row["measure"] for row in here])
                print(f"d = {d:3d}, T = {T:6d}: mean measure {mean:.4f}", flush=True)
    figure(rows, out / "dimension_free.svg")


if __name__ == "__main__":
    main()
