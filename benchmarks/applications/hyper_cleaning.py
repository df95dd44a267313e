"""A weight for each of 160 training images, 48 of them with the wrong label (7).

    python -m benchmarks.applications.hyper_cleaning --data FOLDER

The follower is a logistic regression with weights in a box, the leader looks at 60
clean images. FOLDER holds digits_3_8.npz and reference.json. `F` is checked by a
bounded quasi-Newton method of SciPy, followed by Newton steps on the free weights.
"""

import jax
import jax.numpy as jnp
import numpy as np

import bilevax as bx

from .measured import measured, parsed, reference

STARTS = 1


def main():
    options = parsed(__doc__)
    jax.config.update("jax_enable_x64", True)
    data = np.load(options.data / "digits_3_8.npz")
    Z = np.concatenate([data["pixels"] / 16.0, np.ones((len(data["digit"]), 1))], 1)
    label = np.where(data["digit"] == 8, 1.0, -1.0)
    train, clean = data["part"] == 0, data["part"] == 1
    seen = np.where(data["flipped"][train] == 1, -label[train], label[train])
    rows, others = seen[:, None] * Z[train], label[clean][:, None] * Z[clean]

    def lower(x, w):
        return x @ jnp.logaddexp(0, -(rows @ w)) / len(seen) + 0.005 * jnp.sum(w**2)

    def upper(x, w):
        return jnp.mean(jnp.logaddexp(0, -(others @ w)))

    size, count = Z.shape[1], len(seen)
    problem = bx.Problem(
        upper, lower, bx.Box(jnp.full(size, -0.5), 0.5),
        domain=bx.Box(jnp.zeros(count), 1.0),
    )  # fmt: skip

    def checked(x) -> float:
        from scipy.optimize import minimize

        def g(w):
            margin = rows @ w
            weight = x / (1 + np.exp(margin)) / count
            value = x @ np.logaddexp(0, -margin) / count + 0.005 * w @ w
            return value, 0.01 * w - weight @ rows

        tight = dict(maxiter=10_000, maxfun=100_000, ftol=0, gtol=1e-12, maxcor=60)
        bounds = [(-0.5, 0.5)] * size
        w = minimize(g, np.zeros(size), jac=True, bounds=bounds, options=tight).x
        for _ in range(5):
            slope = g(w)[1]
            held = (np.abs(w) == 0.5) & (slope * w < 0)
            share = 1 / (1 + np.exp(rows @ w))
            bend = (rows.T * (x * share * (1 - share) / count)) @ rows
            bend = (bend + 0.01 * np.eye(size))[~held][:, ~held]
            w[~held] = np.clip(
                w[~held] - np.linalg.solve(bend, slope[~held]), -0.5, 0.5
            )
        return float(upper(x, jnp.asarray(w)))

    measured(
        "7 hyper-cleaning",
        lambda: bx.solve(
            problem, bx.DSBLO(), jnp.full(count, 0.5), key=0, num_starts=STARTS
        ),
        checked,
        options,
        best=reference(options)["F"],
        bar=1e-4,
        starts=STARTS,
    )


if __name__ == "__main__":
    main()
