"""A budget and two ridges for a sparse regression (4), judged on validation rows.

    python -m benchmarks.applications.sparse_regression --data FOLDER

The follower fits weights under `sum |w| <= x1`, with ridges `10**x2` on the ten
measurements and `10**x3` on their squares and products. FOLDER holds diabetes.csv,
split.csv and reference.json. `F` is checked by DAQP (`pip install daqp`).
"""

import csv
import pathlib

import jax
import jax.numpy as jnp
import numpy as np

import bilevax as bx

from .measured import measured, parsed, reference

STARTS = 8


def features(folder: pathlib.Path):
    """Rows of features and targets: for training, and for validation."""
    rows = list(csv.DictReader((folder / "diabetes.csv").open()))
    names = [name for name in rows[0] if name != "progression"]
    main = np.array([[float(row[name]) for name in names] for row in rows])
    target = np.array([float(row["progression"]) for row in rows])
    parts = np.zeros(len(rows), int)
    for row in csv.DictReader((folder / "split.csv").open()):
        parts[int(row["row"])] = int(row["part"])
    train = parts == 0
    unit = lambda Z: (Z - Z[train].mean(0)) / Z[train].std(0)
    main, sex = unit(main), names.index("sex")
    pairs = [(i, j) for i in range(10) for j in range(i, 10) if (i, j) != (sex, sex)]
    products = np.stack([main[:, i] * main[:, j] for i, j in pairs], axis=1)
    Z, t = unit(np.concatenate([main, products], axis=1)), unit(target[:, None])[:, 0]
    return (Z[train], t[train]), (Z[parts == 1], t[parts == 1])


def main():
    options = parsed(__doc__)
    jax.config.update("jax_enable_x64", True)
    (Z, t), (V, v) = features(options.data)
    n = Z.shape[1]
    ridges = lambda x, np: np.concatenate(
        [np.full(10, 10 ** x[1]), np.full(n - 10, 10 ** x[2])]
    )

    def lower(x, y):
        w = y[:n] - y[n:]
        ridge = ridges(x, jnp)
        fit = jnp.sum((Z @ w - t) ** 2) / (2 * len(t))
        return fit + 0.5 * jnp.sum(ridge * (y[:n] ** 2 + y[n:] ** 2))

    def upper(x, y):
        return jnp.mean((V @ (y[:n] - y[n:]) - v) ** 2)

    rows = bx.Polyhedron(
        A=np.concatenate([-np.eye(2 * n), np.ones((1, 2 * n))]),
        B=np.concatenate([np.zeros((2 * n, 3)), [[-1.0, 0, 0]]]),
        b=np.zeros(2 * n + 1),
    )
    low, high = jnp.array([0.01, -3, -3]), jnp.array([4.0, 2, 2])
    problem = bx.Problem(upper, lower, rows, domain=bx.Box(low, high))

    def checked(x) -> float:
        import daqp

        M = np.concatenate([Z, -Z], axis=1)
        H = M.T @ M / len(t) + np.diag(np.tile(ridges(x, np), 2))
        most = np.append(np.full(2 * n, 1e30), x[0])
        least = np.append(np.zeros(2 * n), -1e30)
        y, _, flag, _ = daqp.solve(
            H, -M.T @ t / len(t), np.ones((1, 2 * n)), most, least,
            np.zeros(2 * n + 1, np.int32),
        )  # fmt: skip
        assert flag == 1
        return float(upper(x, jnp.asarray(y)))

    measured(
        "4 sparse regression",
        lambda: bx.solve(
            problem, bx.DSBLO(), (low + high) / 2, key=0, num_starts=STARTS
        ),
        checked,
        options,
        best=reference(options)["F"],
        bar=1e-6,
        starts=STARTS,
    )


if __name__ == "__main__":
    main()
