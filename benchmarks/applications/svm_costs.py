"""A support vector machine with two error costs and a kernel width (5).

    python -m benchmarks.applications.svm_costs --data FOLDER

Missing a malignant tumour costs five times a false alarm; the costs of both kinds of
training errors and the width of the kernel are tuned on validation data. All three are
logarithms, and the costs bound the dual variables: `0 <= a_i <= 10^x`, written as such.
FOLDER holds breast_cancer.csv and reference.json. `F` is checked by DAQP
(`pip install daqp`).
"""

import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np

import bilevax as bx

from .case30_bidding import table
from .measured import measured, parsed, reference

STARTS = 8


class Clinic:
    """Four standardised measurements; labels are 1 (malignant) and -1."""

    def __init__(self, path: pathlib.Path):
        data = table(path)
        part, names = data["part"], list(data)[:4]
        z = np.stack([data[name] for name in names], axis=1)
        train, valid = z[part == 0], z[part == 1]
        mean, spread = train.mean(axis=0), train.std(axis=0)
        train, valid = (train - mean) / spread, (valid - mean) / spread
        self.label, self.told = data["label"][part == 0], data["label"][part == 1]
        self.near = ((train[:, None] - train) ** 2).sum(axis=2)
        self.far = ((valid[:, None] - train) ** 2).sum(axis=2)
        self.weight = np.where(self.told > 0, 5.0, 1.0)

    def problem(self) -> bx.Problem:
        label, told, weight = map(jnp.asarray, (self.label, self.told, self.weight))
        near, far = jnp.asarray(self.near), jnp.asarray(self.far)

        def kernel(x, distances):
            return jnp.exp(-(10 ** x[2]) * distances) + 1

        def lower(x, a):
            signed = label * a
            bend = signed @ kernel(x, near) @ signed + 1e-3 * a @ a
            return 0.5 * bend - jnp.sum(a)

        def upper(x, a):
            h = kernel(x, far) @ (label * a)
            return jnp.mean(weight * jnp.logaddexp(0, -told * h))

        def cost(x):
            return jnp.where(label > 0, 10 ** x[0], 10 ** x[1])

        return bx.Problem(
            upper, lower, bx.Box(np.zeros(len(self.label)), cost),
            domain=bx.Box(jnp.array([-1.0, -1, -3]), jnp.array([4.0, 4, 1])),
        )  # fmt: skip

    def checked(self, problem: bx.Problem, x) -> float:
        import daqp

        kernel = np.exp(-(10 ** x[2]) * self.near) + 1
        H = np.outer(self.label, self.label) * kernel + 1e-3 * np.eye(len(kernel))
        high = np.where(self.label > 0, 10 ** x[0], 10 ** x[1])
        rows = np.zeros((0, len(high)))
        sense = np.zeros(len(high), np.int32)
        a, _, flag, _ = daqp.solve(H, -np.ones(len(high)), rows, high, 0 * high, sense)
        assert flag == 1
        return float(problem.upper(jnp.asarray(x), jnp.asarray(a)))


def main():
    options = parsed(__doc__)
    jax.config.update("jax_enable_x64", True)
    known = reference(options)
    clinic = Clinic(options.data / "breast_cancer.csv")
    problem = clinic.problem()
    best = np.array([
        np.log10(known["C_malignant"]), np.log10(known["C_benign"]),
        known["log10_gamma"],
    ])  # fmt: skip
    e = bx.hypergradient(problem, jnp.asarray(best))
    print(json.dumps(dict(
        F_at_reference=float(e.value) - known["F"],
        slope_there=float(jnp.max(jnp.abs(e.grad))),
    )), flush=True)  # fmt: skip
    measured(
        "5 support vector machine, costs and kernel",
        lambda: bx.solve(problem, bx.DSBLO(), jnp.zeros(3), key=0, num_starts=STARTS),
        lambda x: clinic.checked(problem, x),
        options,
        best=known["F"],
        bar=1e-4,
        starts=STARTS,
    )


if __name__ == "__main__":
    main()
