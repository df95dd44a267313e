"""10 000 random strongly convex quadratic programs: every answer right or flagged.

Run from the repository root: `python -m benchmarks.random_qps [--total N] [--seed S]`.
n and m up to 50, a third with duplicated or dependent rows, condition up to 1e8, and a
tenth made infeasible. Prints one line per shape and exits with 1 on any silent error.
"""

import argparse
import sys
from collections import Counter

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from rich.progress import track

import bilevax as bx
from tests import zoo
from tests.quadratics import KINDS, kkt_residual, random_quadratic, reference

SHAPES = (
    (1, 1), (2, 3), (5, 5), (10, 5), (10, 20), (20, 10), (20, 40), (30, 50), (50, 10),
    (50, 50),
)  # fmt: skip


@eqx.filter_jit
def evaluate(data):
    one = lambda d: bx.hypergradient(zoo.quadratic_problem(d), d["x"], throw=False)
    return jax.vmap(one)(data)


def make_infeasible(data):
    """Add the opposite of a row, beyond it."""
    i, j = 0, len(data["b"]) - 1
    if i == j:
        return None
    data["A"][j], data["B"][j] = -data["A"][i], -data["B"][i]
    data["b"][j] = -data["b"][i] - 1e-3 * (1 + abs(data["b"][i]))
    return data


def draw(rng, n, k):
    """One program and whether it has a feasible point."""
    data = random_quadratic(
        rng, n, k, min(n, 8), rng.choice(KINDS), 10 ** rng.uniform(0, 8)
    )
    if rng.uniform() < 0.1:
        empty = make_infeasible({name: part.copy() for name, part in data.items()})
        if empty is not None:
            return empty, False
    return data, True


def judge(data, feasible, e) -> tuple[str, float, float]:
    """Verdict, KKT residual and gradient error of one evaluation."""
    name = bx.status_name(e.status)
    if name in ("infeasible", "iteration_limit", "not_strongly_convex", "non_finite"):
        return ("rightly infeasible" if not feasible else f"failed: {name}"), 0.0, 0.0
    residual = kkt_residual(data, e.lower.y, e.lower.multipliers)
    if residual > 1e-8 or not feasible:
        return "SILENT: KKT", residual, 0.0
    if name != "successful":
        return f"flagged: {name}", residual, 0.0
    try:
        _, grad = reference(data, e.lower.active)
    except AssertionError:
        return "SILENT: active set", residual, 0.0
    error = float(np.linalg.norm(e.grad - grad) / np.linalg.norm(grad))
    return ("right" if error <= 1e-8 else "SILENT: gradient"), residual, error


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--total", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    jax.config.update("jax_enable_x64", True)
    rng = np.random.default_rng(options.seed)
    counts: Counter = Counter()
    worst_residual = worst_error = 0.0
    for n, k in SHAPES:
        pairs = [draw(rng, n, k) for _ in range(options.total // len(SHAPES))]
        stacked = {
            name: jnp.asarray(np.stack([d[name] for d, _ in pairs]))
            for name in pairs[0][0]
        }
        # In small batches: a batch takes as long as its slowest member.
        size = min(50, len(pairs))
        parts = [
            jax.tree.map(
                np.asarray,
                evaluate({key: v[i : i + size] for key, v in stacked.items()}),
            )
            for i in range(0, len(pairs), size)
        ]
        out = jax.tree.map(lambda *leaves: np.concatenate(leaves), *parts)
        here: Counter = Counter()
        for i, (data, feasible) in enumerate(
            track(pairs, description=f"n = {n}, m = {k}", transient=True)
        ):
            member = jax.tree.map(lambda leaf, i=i: leaf[i], out)
            verdict, residual, error = judge(data, feasible, member)
            here[verdict] += 1
            worst_residual = max(worst_residual, residual)
            worst_error = max(worst_error, error)
        counts += here
        print(f"n = {n:2d}, m = {k:2d}: {dict(here)}", flush=True)
    print(f"\ntotal: {dict(counts)}")
    print(f"worst KKT residual {worst_residual:.1e}, worst gradient {worst_error:.1e}")
    silent = sum(count for verdict, count in counts.items() if "SILENT" in verdict)
    feasible = options.total - counts["rightly infeasible"]
    failed = sum(count for verdict, count in counts.items() if "failed" in verdict)
    print(f"silent errors: {silent}; failed feasible: {failed} of {feasible}")
    sys.exit(1 if silent or failed > feasible / 1000 else 0)


if __name__ == "__main__":
    main()
