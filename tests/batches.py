"""Two-variable lower levels that are solved together; a program to run on its own.

One stiff direction, one soft curved one, at an angle. `python -m tests.batches FOLDER`
solves batches of one size and writes their answers one after the other: a process that
may be stopped, should a batch not come back.
"""

import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import Partial

import bilevax as bx

# Each of these is solved in a few steps alone; together they once looped for ever.
PAIR = (
    dict(
        Q=[[1.0, 0.0], [0.0, 1.0]],
        stiff=212502887.12274167,
        soft=0.004163066690573172,
        a=1.0,
        b=0.0,
        h=1.0,
        f=3.1557169870641246,
        s=-2.07117158426189,
        x=[0.037545791857059266, 0.7357917467017543],
    ),
    dict(
        Q=[
            [0.7169205859382378, -0.6971548418091735],
            [0.6971548418091735, 0.7169205859382378],
        ],
        stiff=1.1775115726279484,
        soft=1.6230102125346761,
        a=0.001,
        b=1.0,
        h=0.0,
        f=-17.183176953832128,
        s=-2.221356303604212,
        x=[0.7468856162565439, -1.8473247989741095],
    ),
)


# Which members each batch holds. All have one size, so that one program serves them.
SIZE = 400
BATCHES = {
    "first": np.zeros(SIZE, int),
    "second": np.ones(SIZE, int),
    "pair": np.arange(SIZE) % 2,
    "all": np.arange(SIZE),
}


def members(count: int = 398, seed: int = 2) -> dict:
    """The pair and random members like it, stacked."""
    rng = np.random.default_rng(seed)
    angle = rng.uniform(0, 2 * np.pi, count) * (rng.uniform(size=count) < 0.6)
    cosine, sine = np.cos(angle), np.sin(angle)
    grows = rng.uniform(size=count) < 0.5
    others = dict(
        Q=np.stack([np.stack([cosine, -sine], 1), np.stack([sine, cosine], 1)], 1),
        stiff=10 ** rng.uniform(0, 9, count),
        soft=10 ** rng.uniform(-3, 1, count),
        a=np.where(grows, 1.0, 1e-3),
        b=np.where(grows, 0.0, 1.0),
        h=np.where(grows, 1.0, 0.0),
        f=8 * rng.normal(size=count),
        s=2 * rng.normal(size=count),
        x=rng.normal(size=(count, 2)),
    )
    pair = {name: np.array([member[name] for member in PAIR]) for name in PAIR[0]}
    return {name: np.concatenate([pair[name], others[name]]) for name in pair}


def roots(d) -> np.ndarray:
    """The answers in turned coordinates, where each part has one unknown."""
    low, high = np.full(len(d["f"]), -100.0), np.full(len(d["f"]), 100.0)
    for _ in range(80):
        u = (low + high) / 2
        slope = d["a"] * u + d["b"] * u**3 + d["h"] * np.exp(u) - d["f"]
        low, high = np.where(slope < 0, u, low), np.where(slope < 0, high, u)
    return np.stack([np.minimum(d["x"][:, 0], 1), u + d["s"] * d["x"][:, 1]], 1)


def lower(d, x, y):
    z = d["Q"].T @ y
    u = z[1] - d["s"] * x[1]
    soft = d["a"] * u**2 / 2 + d["b"] * u**4 / 4 + d["h"] * jnp.exp(u) - d["f"] * u
    return 0.5 * d["stiff"] * (z[0] - x[0]) ** 2 + d["soft"] * soft


def upper(d, x, y):
    return (d["Q"].T @ y)[1] + jnp.sum(x**2)


def solve(d):
    rows = bx.Polyhedron(
        A=jnp.stack([d["Q"][:, 0], -d["Q"][:, 0]]), b=jnp.array([1.0, 50.0])
    )
    problem = bx.Problem(Partial(upper, d), Partial(lower, d), rows)
    e = bx.hypergradient(problem, d["x"], throw=False)
    return d["Q"].T @ e.lower.y, e.status


def main(folder):
    jax.config.update("jax_enable_x64", True)
    together = jax.jit(jax.vmap(solve))
    for name, chosen in BATCHES.items():
        z, status = together({key: part[chosen] for key, part in members().items()})
        out = pathlib.Path(folder) / f"{name}.npz"
        np.savez(out, z=z, status=bx.status_name(status))


if __name__ == "__main__":
    main(*sys.argv[1:])
