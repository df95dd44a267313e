"""The program that solves members: compiled once, run in a process that may be stopped.

`python -m benchmarks.hostile_engine` reads lines `IN OUT` and writes a line when done.
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import Partial

import bilevax as bx

jax.config.update("jax_enable_x64", True)


def lower(d, x, y):
    """The objective of the lower level, one for every class."""
    u = d["G"] @ y - d["S"] @ x - d["t"]
    bends = d["h"] > 0
    growth = jnp.where(bends, d["h"] * jnp.exp(jnp.where(bends, u, 0)), 0)
    soft = d["d"] * u**2 / 2 + d["q"] * u**4 / 4 + growth - d["f"] * u
    return 0.5 * y @ (d["H"] @ y) + y @ (d["C"] @ x + d["c"]) + jnp.sum(soft)


def lower_in_plane(d, x, y):
    """The same for two variables and a diagonal `S`, entry by entry.

    Programs differ in the order in which they round; some loop for ever in this one.
    """
    z = d["G"] @ y
    first, u = z[0] - d["S"][0, 0] * x[0], z[1] - d["S"][1, 1] * x[1]
    soft = d["d"][1] * u**2 / 2 + d["q"][1] * u**4 / 4 + d["h"][1] * jnp.exp(u)
    return 0.5 * d["d"][0] * first**2 + soft - d["f"][1] * u


def upper(d, x, y):
    """A quadratic with every term that couples `x` and `y`."""
    return 0.5 * x @ x + x @ (d["R"] @ y) + d["p"] @ y + 0.5 * jnp.sum(d["P"] * y**2)


def one(d):
    """What is judged of one member."""
    equalities = (d["E"], d["D"], d["e"]) if d["e"].size else ()
    coupling = d["B"] if d["B"].size else None
    rows = bx.Polyhedron(d["A"], coupling, d["b"], *equalities)
    objective = lower_in_plane if d["c"].size == 2 else lower
    problem = bx.Problem(Partial(upper, d), Partial(objective, d), rows)
    e = bx.hypergradient(problem, d["x"], throw=False)
    return dict(
        y=e.lower.y,
        multipliers=e.lower.multipliers,
        active=e.lower.active,
        weak=e.lower.weak,
        margin=e.lower.margin,
        error=e.lower.error,
        kkt=e.lower.kkt_residual,
        passes=e.lower.iterations.passes,
        safeguard=e.lower.iterations.safeguard,
        value=e.value,
        grad=e.grad,
        status=e.status,
    )


together = jax.jit(jax.vmap(one))


def solve(data: dict, dtype) -> dict:
    """Answers of a batch as NumPy arrays, statuses by name."""
    out = together({name: jnp.asarray(part, dtype) for name, part in data.items()})
    names = bx.status_name(out.pop("status"))
    return {name: np.asarray(part) for name, part in out.items()} | {"status": names}


def main():
    for line in sys.stdin:
        source, target, dtype = line.split()
        with np.load(source) as data:
            answers = solve(dict(data), np.dtype(dtype))
        np.savez(target, **answers)
        print("done", flush=True)


if __name__ == "__main__":
    main()
