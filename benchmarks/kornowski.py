"""The random family of Kornowski et al. (2024), beside their published losses.

    f = c^T y + 0.01 |x|^2 + 0.01 |y|^2,   g = y^T Q y / 2 + x^T P y,   A x + B y <= b

with 100 entries in `x`, `dl` in `y` and `dl / 5` rows. The published instances come
from torch's generator. Where torch is missing, draws of the same law from NumPy stand
in, unless `--instances` names a file that `--dump` has written elsewhere:

    python benchmarks/kornowski.py --dump instances.npz      (needs torch only)
    python benchmarks/kornowski.py --instances instances.npz
"""

import argparse
import os
import time

import numpy as np

SIZES = (10, 20, 50, 100)
SEEDS = range(1, 11)
STEPS = 1000
UPPER = 100
# Mean and deviation of the final loss over seeds 1 to 10: exact differentiation, and
# the penalty oracle, both under Adam; and the penalty oracle in the clipped loop.
PUBLISHED = {
    10: ((-7.779, 1.659), (-7.424, 1.766), (-7.432, 1.768)),
    20: ((-4.446, 0.988), (-4.434, 0.985), (-4.090, 0.995)),
    50: ((-2.755, 0.609), (-2.756, 0.595), (-2.772, 0.597)),
    100: ((-1.756, 0.294), (-1.755, 0.291), (-1.787, 0.291)),
}
NAMES = ("L", "c", "P", "A", "B", "b", "x")


def shapes(dl: int):
    k = dl // 5
    return ((dl, dl), (dl,), (UPPER, dl), (k, UPPER), (k, dl), (k,), (UPPER,))


def torch_draws(dl: int, seed: int):
    import torch

    torch.manual_seed(seed)
    return [torch.rand(*shape).double().numpy() for shape in shapes(dl)]


def numpy_draws(dl: int, seed: int):
    rng = np.random.default_rng(seed)
    return [rng.random(shape) for shape in shapes(dl)]


def source(path):
    """A function `(dl, seed) -> arrays`, and what it is."""
    if path is not None:
        stored = np.load(path)
        read = lambda dl, seed: [stored[f"{dl}-{seed}-{name}"] for name in NAMES]
        return read, "instances of torch's generator, as published"
    try:
        import torch  # noqa: F401
    except ImportError:
        return numpy_draws, "NumPy draws of the same law: torch is not installed"
    return torch_draws, "instances of torch's generator, as published"


def dump(path: str) -> None:
    arrays = {
        f"{dl}-{seed}-{name}": array
        for dl in SIZES
        for seed in SEEDS
        for name, array in zip(NAMES, torch_draws(dl, seed), strict=True)
    }
    np.savez(path, **arrays)


def solvers():
    """`name -> (problem, x0, seed) -> final loss`, and how to make a problem."""
    os.environ.setdefault("XLA_FLAGS", "--xla_cpu_use_fusion_emitters=false")
    import equinox as eqx
    import jax
    import jax.numpy as jnp
    import jax.random as jr
    import optax

    import bilevax as bx

    jax.config.update("jax_enable_x64", True)

    class Upper(eqx.Module):
        c: jax.Array

        def __call__(self, x, y):
            return self.c @ y + 0.01 * (jnp.sum(x**2) + jnp.sum(y**2))

    class Lower(eqx.Module):
        Q: jax.Array
        P: jax.Array

        def __call__(self, x, y):
            return 0.5 * y @ self.Q @ y + x @ self.P @ y

    def problem_of(arrays):
        L, c, P, A, B, b, x = arrays
        Q = L.T @ L + np.eye(len(c))
        lower = Lower(jnp.asarray(Q), jnp.asarray(P))
        upper = Upper(jnp.asarray(c / np.linalg.norm(c)))
        return bx.Problem(upper, lower, bx.Polyhedron(A=B, B=A, b=b)), x

    def adam(gradient):
        rule = optax.adam(0.01)

        @eqx.filter_jit
        def run(problem, x, warm):
            def step(carry, _):
                x, state, warm = carry
                e = gradient(problem, x, warm)
                updates, state = rule.update(e.grad, state)
                return (optax.apply_updates(x, updates), state, e.lower), None

            first = (x, rule.init(x), warm)
            return jax.lax.scan(step, first, None, length=STEPS)[0][0]

        def final(problem, x, seed):
            x = jnp.asarray(x)
            warm = bx.hypergradient(problem, x, throw=False).lower
            return value(problem, run(problem, x, warm))

        return final

    def value(problem, x):
        return float(bx.hypergradient(problem, x, throw=False).value)

    def by(method):
        def run(problem, x, seed):
            s = bx.solve(
                problem, method, x, key=jr.key(seed), num_steps=STEPS, polish=False
            )
            return s.value

        return run

    exact = lambda p, x, warm: bx.hypergradient(p, x, warm=warm, throw=False)
    penalty = lambda p, x, warm: bx.penalty_gradient(
        p, x, a1=100.0, a2=1e4, warm=warm, throw=False
    )
    runs = {
        "Adam, hypergradient": adam(exact),
        "Adam, penalty_gradient": adam(penalty),
        "PIGD()": by(bx.PIGD()),
        "DSBLO()": by(bx.DSBLO()),
    }
    return runs, problem_of, value


def main(sizes, instances, out) -> None:
    draw, origin = source(instances)
    runs, problem_of, value = solvers()
    lines = [
        "# Random family of Kornowski et al. (2024)",
        "",
        f"Loss `f(x, y*(x))` after {STEPS} iterations, mean and deviation over seeds "
        f"{SEEDS[0]} to {SEEDS[-1]}; {origin}. Published: exact differentiation and "
        "the penalty oracle under Adam (step 0.01), and the penalty oracle in their "
        "clipped loop. Ours: the same two gradients under the same Adam (`a1 = 100`, "
        "`a2 = 1e4`), without noise in `x`; and two methods with no argument, "
        "before any polish.",
        "",
        "| dl | start | published exact | published penalty | published clipped | "
        + " | ".join(runs)
        + " |",
        "|" + "---|" * (5 + len(runs)),
    ]
    for dl in sizes:
        cells = {name: [] for name in ("start", *runs)}
        began = time.perf_counter()
        for seed in SEEDS:
            problem, x = problem_of(draw(dl, seed))
            cells["start"].append(value(problem, x))
            for name, run in runs.items():
                cells[name].append(run(problem, x, seed))
        row = [f"{dl}", f"{np.mean(cells['start']):.2f}"]
        row += [f"{mean:.3f} ± {spread:.3f}" for mean, spread in PUBLISHED[dl]]
        row += [f"{np.mean(cells[n]):.3f} ± {np.std(cells[n]):.3f}" for n in runs]
        lines.append("| " + " | ".join(row) + " |")
        print(lines[-1], f"{time.perf_counter() - began:.0f} s", flush=True)
        for name, losses in cells.items():
            print("  ", name, np.round(losses[:3], 4), flush=True)
        with open(out, "w") as file:
            file.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--sizes", type=int, nargs="+", default=SIZES, help="entries of y"
    )
    parser.add_argument("--instances", help="file that --dump has written")
    parser.add_argument("--dump", help="write the published instances there (torch)")
    parser.add_argument("--out", default="kornowski.md", help="for the table")
    arguments = parser.parse_args()
    if arguments.instances and not os.path.exists(arguments.instances):
        parser.error(f"{arguments.instances} does not exist; write it with --dump.")
    if arguments.dump:
        dump(arguments.dump)
    else:
        main(arguments.sizes, arguments.instances, arguments.out)
