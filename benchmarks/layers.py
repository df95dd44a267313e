"""A batch of quadratic programs as a layer of PyTorch, beside others, in one run.

    python -m benchmarks.layers [--repeats 5] [--json benchmarks/results/layers.jsonl]

256 programs `min 0.5 y^T Q y + q^T y, A y <= b` with n = 20 and m = 10, of which `q`
and `b` differ; forward, and backward from a random linear loss to both. The first call
is counted as it comes, with all canonicalisation and compilation. The truth is a closed
form in extended precision, on an active set that is verified by the signs of
multipliers and slacks. One thread, tools take turns, the best repeat counts, CPU time.
"""

import argparse
import importlib
import importlib.metadata
import json
import os
import platform
import sys
import time
import warnings
from typing import Any

import numpy as np

MEMBERS, N, M = 256, 20, 10
ONE_THREAD = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false",
    "JAX_ENABLE_COMPILATION_CACHE": "false",
}


def draw(seed: int) -> dict:
    rng = np.random.default_rng(seed)
    root = rng.normal(size=(N, N))
    A, inside = rng.normal(size=(M, N)), rng.normal(size=(MEMBERS, N))
    return dict(
        Q=root @ root.T / N + np.eye(N),
        A=A,
        q=3 * rng.normal(size=(MEMBERS, N)),
        b=inside @ A.T + rng.uniform(0.1, 1, size=(MEMBERS, M)),
        w=rng.normal(size=(MEMBERS, N)),
    )


def truth(data: dict) -> dict:
    """`y` and the gradients of `sum(w * y)` in `q` and `b`."""
    import daqp

    Q, A = data["Q"], data["A"]
    found = {"y": [], "q": [], "b": []}
    for q, b, w in zip(data["q"], data["b"], data["w"], strict=True):
        _, _, flag, info = daqp.solve(Q, q, A, b, np.full(M, -1e30))
        assert flag == 1, flag
        S = info["lam"] > 1e-10
        rows, zero = A[S], np.zeros((S.sum(), S.sum()))
        K = np.block([[Q, rows.T], [rows, zero]])
        z = refined(K, np.concatenate([-q, b[S]]))
        assert np.all(z[N:] > 0)
        assert np.all((A @ z[:N] - b)[~S] < 0)
        v = refined(K, np.concatenate([w, np.zeros(S.sum())]))
        by_b = np.zeros(M)
        by_b[S] = v[N:]
        for name, part in (("y", z[:N]), ("q", -v[:N]), ("b", by_b)):
            found[name].append(part)
    return {name: np.stack(parts) for name, parts in found.items()}


def refined(K, right):
    """A solution of `K z = right`, refined with residuals in extended precision."""
    wide, z = K.astype(np.longdouble), np.zeros(len(K), np.longdouble)
    for _ in range(4):
        z = z + np.linalg.solve(K, (right - wide @ z).astype(float))
    return z.astype(float)


def bilevax_layer(data):
    import jax.numpy as jnp
    import torch

    import bilevax as bx
    import bilevax.torch

    Q, A = data["Q"], data["A"]

    def program(q, b):
        return lambda y: 0.5 * y @ (jnp.asarray(Q) @ y) + q @ y, bx.Polyhedron(A, b=b)

    layer = bilevax.torch.layer(program, ndim=(1, 1))
    assert torch.get_default_dtype() == torch.float32
    return lambda q, b: layer(q, b).y


def bilevax_cvxpy_layer(data):
    import bilevax.torch

    problem, parameters, variables = model(data)
    layer = bilevax.torch.cvxpy_layer(problem, parameters, variables)
    return lambda q, b: layer(q, b)[0]


def cvxpylayers(data, **options):
    from cvxpylayers.torch.cvxpylayer import CvxpyLayer

    problem, parameters, variables = model(data)
    layer = CvxpyLayer(problem, parameters=parameters, variables=variables, **options)
    return lambda q, b: layer(q, b)[0]


def cvxpylayers_clarabel(data):
    return cvxpylayers(data, solver_args={"solve_method": "Clarabel"})


def model(data):
    import cvxpy as cp

    y, q, b = (
        cp.Variable(N, name="y"),
        cp.Parameter(N, name="q"),
        cp.Parameter(M, name="b"),
    )
    root = np.linalg.cholesky(data["Q"]).T
    cost = 0.5 * cp.sum_squares(root @ y) + q @ y
    return cp.Problem(cp.Minimize(cost), [data["A"] @ y <= b]), [q, b], [y]


def qplayer(data):
    import torch
    from proxsuite.torch.qplayer import QPFunction

    Q, A = (torch.tensor(data[name]).expand(MEMBERS, -1, -1) for name in "QA")
    none = torch.zeros(0, dtype=torch.float64)
    low = torch.full((MEMBERS, M), -1e20, dtype=torch.float64)
    return lambda q, b: QPFunction()(Q, q, none, none, A, low, b)[0]


def moreau_layer(data):
    import moreau
    import torch
    from moreau import torch as its_torch

    def places(rows):
        return (
            torch.arange(0, rows * N + 1, N),
            torch.arange(N).repeat(rows),
        )

    its: Any = its_torch
    solver = its.Solver(
        N, M, *places(N), *places(M),
        cones=moreau.Cones(num_nonneg_cones=M),
        settings=moreau.Settings(device="cpu", batch_size=MEMBERS, enable_grad=True),
    )  # fmt: skip
    Q, A = (
        torch.tensor(data[name]).reshape(1, -1).expand(MEMBERS, -1) for name in "QA"
    )
    return lambda q, b: solver.solve(Q.contiguous(), A.contiguous(), q, b).x


TOOLS = {
    "bilevax.torch.layer": (bilevax_layer, ()),
    "bilevax.torch.cvxpy_layer": (bilevax_cvxpy_layer, ("cvxpy",)),
    "cvxpylayers": (cvxpylayers, ("cvxpylayers.torch",)),
    "cvxpylayers, Clarabel": (cvxpylayers_clarabel, ("cvxpylayers.torch",)),
    "proxsuite QPLayer": (qplayer, ("proxsuite.torch.qplayer",)),
    "Moreau": (moreau_layer, ("moreau",)),
}


class Entry:
    def __init__(self, make, data):
        import torch

        self.tensors = {name: torch.tensor(data[name]) for name in "qbw"}
        began = time.process_time()
        self.layer = make(data)
        self.found = self.call()
        self.first = time.process_time() - began
        self.times = []

    def call(self) -> dict[str, Any]:
        q, b = (self.tensors[name].clone().requires_grad_() for name in "qb")
        grads: Any
        y = self.layer(q, b)
        (y * self.tensors["w"]).sum().backward()
        grads = q.grad, b.grad
        found = zip("yqb", (y.detach(), *grads), strict=True)
        return {name: tensor.numpy() for name, tensor in found}

    def measure(self):
        began = time.process_time()
        self.call()
        self.times.append(time.process_time() - began)

    def errors(self, truth):
        """The worst of each, relative to the norm of the truth of that member."""
        worst = {}
        for name, right in truth.items():
            norm = np.maximum(np.linalg.norm(right, axis=1), 1e-3)
            wrong = np.linalg.norm(self.found[name] - right, axis=1) / norm
            worst[name] = float(np.max(wrong))
        return worst


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", metavar="OUT", help="append a row per tool to a file")
    options = parser.parse_args()
    if any(os.environ.get(name) != value for name, value in ONE_THREAD.items()):
        command = [sys.executable, "-m", "benchmarks.layers", *sys.argv[1:]]
        os.execve(sys.executable, command, os.environ | ONE_THREAD)
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    warnings.simplefilter("ignore")  # of other people's packages
    import torch

    torch.set_num_threads(1)
    data = draw(options.seed)
    exact, entries, rows = truth(data), {}, []
    for name, (make, modules) in TOOLS.items():
        try:
            for module in modules:
                importlib.import_module(module)
            entries[name] = Entry(make, data)
        except Exception as error:  # of any tool; the row says so
            text = f"{type(error).__name__}: {error}".splitlines()[0]
            rows.append({"tool": name, "note": text})
    for _ in range(options.repeats):
        for entry in entries.values():
            entry.measure()
    base = entries["bilevax.torch.layer"]
    for name, entry in entries.items():
        worst = entry.errors(exact)
        rows.append(
            {
                "tool": name,
                "members": MEMBERS, "n": N, "m": M, "seed": options.seed,
                "ratio": min(entry.times) / min(base.times),
                "first_ratio": entry.first / base.first,
                "first_calls": entry.first / min(entry.times),
                "worst_y": worst["y"],
                "worst_by_q": worst["q"], "worst_by_b": worst["b"],
                "version": version(name.split()[0].split(".")[0].rstrip(",")),
                "python": platform.python_version(),
            }
        )  # fmt: skip
    print(f"{'':28} {'ratio':>8} {'first':>8} {'y':>9} {'by q':>9} {'by b':>9}")
    for row in rows:
        if "note" in row:
            print(f"{row['tool']:28} {row['note'][:60]}")
            continue
        ends = (row[name] for name in ("worst_y", "worst_by_q", "worst_by_b"))
        print(
            f"{row['tool']:28} {row['ratio']:8.2f} {row['first_ratio']:8.3f} "
            + " ".join(f"{end:9.1e}" for end in ends)
        )
    if options.json:
        with open(options.json, "a") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)


def version(package: str) -> str:
    try:
        return importlib.metadata.version(package.lower())
    except importlib.metadata.PackageNotFoundError:
        return "?"


if __name__ == "__main__":
    main()
