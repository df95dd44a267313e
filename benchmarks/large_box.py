"""A box lower level with a million variables, by products alone."""

import resource
import sys
import time

import numpy as np
from rich.table import Table


def peak_megabytes():
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**20 if sys.platform == "darwin" else 2**10)


def large_box(n):
    """A chain of `n` springs between two walls each, by products alone."""
    import jax
    import jax.numpy as jnp

    import bilevax as bx

    jax.config.update("jax_enable_x64", True)
    jax.config.update("jax_enable_compilation_cache", False)
    block = max(n // 1000, 1)

    def lower(x, y):
        stiffness = 1 + jnp.exp(jnp.repeat(x["log_stiffness"], block))[:n]
        chain = 0.5 * jnp.sum(stiffness * y**2) + jnp.sum((y[1:] - y[:-1]) ** 2)
        return chain - x["load"] @ y

    def upper(x, y):
        return 0.5 * jnp.sum((y - 0.5) ** 2) + 0.01 * jnp.sum(x["load"] ** 2)

    problem = bx.Problem(upper, lower, bx.Box(jnp.zeros(n), jnp.ones(n)))
    rng = np.random.default_rng(0)
    x = {
        "load": jnp.asarray(16 * rng.random(n) - 6),
        "log_stiffness": jnp.asarray(0.3 * rng.standard_normal(-(-n // block))),
    }
    d = jax.tree.map(lambda leaf: jnp.asarray(rng.random(leaf.shape)), x)

    def at(step, warm=None):
        moved = jax.tree.map(lambda a, b: a + step * b, x, d)
        began = time.perf_counter()
        e = jax.block_until_ready(bx.hypergradient(problem, moved, warm=warm))
        return e, time.perf_counter() - began

    e, first = at(0.0)
    h = 1e-6
    (up, later), (down, again) = at(h), at(-h)
    at(0.0, e.lower)
    _, warm = at(1e-3, e.lower)
    slope = sum(jax.tree.leaves(jax.tree.map(lambda a, b: jnp.sum(a * b), e.grad, d)))
    difference = (up.value - down.value) / (2 * h)
    return {
        "variables": n,
        "leaves_of_x": {name: leaf.size for name, leaf in x.items()},
        "active_bounds": int(e.lower.active.sum()),
        "status": bx.status_name(e.status),
        "rounds": int(e.lower.iterations.passes),
        "first_call_s": first,
        "later_call_s": min(later, again),
        "warm_call_s": warm,
        "kkt_residual": float(e.lower.kkt_residual),
        "slope": float(slope),
        "difference_error": float(abs(difference - slope) / abs(slope)),
        "peak_mb": peak_megabytes(),
    }


def box_table(box):
    if "note" in box:
        return f"The large box: {box['note']}"
    leaves = " and ".join(f"{v:,}" for v in box["leaves_of_x"].values())
    table = Table(
        title=f"A box with {box['variables']:,} variables, x with leaves of {leaves}",
        show_header=False,
    )
    rows = {
        "status": box["status"],
        "active bounds": f"{box['active_bounds']:,}",
        "rounds of the solver": f"{box['rounds']}",
        "first call, with compilation": f"{box['first_call_s']:.1f} s",
        "later call, cold start": f"{box['later_call_s']:.1f} s",
        "later call, warm start": f"{box['warm_call_s']:.1f} s",
        "KKT residual, relative": f"{box['kkt_residual']:.0e}",
        "slope against central difference": f"{box['difference_error']:.0e}",
        "peak memory of its process": f"{box['peak_mb']:,.0f} MB",
    }
    for name, value in rows.items():
        table.add_row(name, value)
    return table
