"""Slacks of a support vector machine by bilevel optimisation, on Pima diabetes.

    python -m benchmarks.svm --data diabetes.csv --json ROWS.jsonl [--seeds 10]

The lower level trains a linear machine on features of degree two, with one slack per
training row; the upper level chooses the slacks `C` by the loss on a validation set:

    min_C  sum_val exp(1 - label (w z + c))
    s.t.   w, c = argmin |w|^2 / 2 + c^2 / 2  s.t.  1 - C_i - label_i (w z_i + c) <= 0

500 rows train, 150 validate, 118 test. The row `start` is the machine at the first `C`,
the slacks of a least-squares classifier. Published test accuracies stand beside ours;
they come from runs with other stopping rules, and that of GAM from plain implicit
gradient descent. Finished runs are kept in ROWS and not run again.
"""

import argparse
import json
import pathlib
import time

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np

import bilevax as bx

PUBLISHED = {"BLOCC": 0.7568, "LVHBA": 0.7593, "GAM": 0.7212}
# `gamma` and the numbers of inner steps are those of the published runs.
METHODS = {
    "BLOCC": bx.BLOCC(gamma=12.0, inner="first-order", rounds=20, primal_steps=20),
    "LVHBA": bx.LVHBA(),
    "GAM": bx.GAM(),
}
SPLIT = (500, 150, 118)
MISSING = (
    "{path} does not exist. Get the Pima Indians Diabetes data (768 rows, 8 features "
    "and a label; UCI or Kaggle, usually called diabetes.csv) and pass it as --data."
)


def load(path):
    """Features and labels in {-1, 1}, with or without a header line."""
    path = pathlib.Path(path)
    if not path.exists():
        raise SystemExit(MISSING.format(path=path))
    lines = [line for line in path.read_text().splitlines() if line.strip()]
    try:
        float(lines[0].split(",")[0])
    except ValueError:
        lines = lines[1:]
    rows = np.array([[float(v) for v in line.split(",")] for line in lines])
    if rows.shape != (sum(SPLIT), 9):
        raise SystemExit(
            f"{path} must hold {sum(SPLIT)} rows of 9 numbers; got {rows.shape}."
        )
    return rows[:, :8], np.where(rows[:, 8] > 0, 1.0, -1.0)


def expanded(features):
    """The features, their squares and products: 44 columns; the bias is the 45th."""
    mean, deviation = features.mean(axis=0), features.std(axis=0)
    z = (features - mean) / deviation
    i, j = np.triu_indices(z.shape[1])
    products = z[:, i] * z[:, j]
    products = (products - products.mean(axis=0)) / products.std(axis=0)
    return np.concatenate([z, products], axis=1)


class Validation(eqx.Module):
    z: jax.Array
    label: jax.Array

    def __call__(self, C, y):
        margin = self.label * (self.z @ y[:-1] + y[-1])
        return jnp.sum(jnp.exp(1 - margin))


def machine(C, y):
    return 0.5 * jnp.sum(y**2)


def problem(z, label, train, validate):
    signed = label[train, None] * np.column_stack([z[train], np.ones(len(train))])
    rows = bx.Polyhedron(A=-signed, B=-np.eye(len(train)), b=-np.ones(len(train)))
    upper = Validation(jnp.asarray(z[validate]), jnp.asarray(label[validate]))
    low, high = np.full(len(train), 1e-4), np.full(len(train), 10.0)
    return bx.Problem(upper, machine, rows, domain=bx.Box(low, high))


def slacks(z, label):
    """What a least-squares classifier needs: a start with a non-empty lower level."""
    design = np.column_stack([z, np.ones(len(z))])
    ridge = design.T @ design + 10 * np.eye(design.shape[1])
    y = np.linalg.solve(ridge, design.T @ label)
    return np.maximum(1 - label * (design @ y), 0) + 0.05


def accuracy(z, label, y):
    return float(np.mean(np.sign(z @ y[:-1] + y[-1]) == label))


def one_run(z, label, name, seed, steps):
    """A row: losses on the validation part, accuracies on all three."""
    order = np.random.default_rng(seed).permutation(len(label))
    train, validate, test = np.split(order, np.cumsum(SPLIT)[:-1])
    task, start = problem(z, label, train, validate), slacks(z[train], label[train])
    began = time.perf_counter()
    if name == "start":
        e = bx.hypergradient(task, jnp.asarray(start), throw=False)
        value, y, status = float(e.value), e.lower.y, bx.status_name(e.status)
        steps, stopped = 0, "no step"
    else:
        s = bx.solve(
            task,
            METHODS[name],
            start,
            key=jr.key(seed),
            num_steps=steps,
            chunk=20,
            polish=False,
            throw=False,
        )
        value, y, status, stopped = s.value, s.y, s.status_name, s.stopped
    parts = dict(train=train, validation=validate, test=test)
    scores = {k: accuracy(z[i], label[i], np.asarray(y)) for k, i in parts.items()}
    return dict(
        method=name, seed=seed, steps=steps, validation_loss=value, **scores,
        status=status, stopped=stopped, seconds=time.perf_counter() - began,
    )  # fmt: skip


def table(rows):
    yield "| method | seeds | test accuracy | published | validation | train | loss |"
    yield "|---|---:|---|---|---|---|---|"
    for name in dict.fromkeys(row["method"] for row in rows):
        mine = [row for row in rows if row["method"] == name]
        column = lambda part, mine=mine: np.array([row[part] for row in mine])
        # One run has no spread.
        text = [
            f"{np.mean(column(part)):.4f}"
            + (f" ± {np.std(column(part)):.4f}" if len(mine) > 1 else "")
            for part in ("test", "validation", "train")
        ]
        published = f"{PUBLISHED[name]:.4f}" if name in PUBLISHED else "–"
        loss = f"{np.mean(column('validation_loss')):.1f}"
        cells = [name, str(len(mine)), text[0], published, *text[1:], loss]
        yield f"| {' | '.join(cells)} |"


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", required=True)
    parser.add_argument("--json", required=True, help="file of rows, read and extended")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--only", nargs="*", default=["start", *METHODS])
    arguments = parser.parse_args()
    jax.config.update("jax_enable_x64", True)
    features, label = load(arguments.data)
    z = expanded(features)
    path = pathlib.Path(arguments.json)
    text = path.read_text() if path.exists() else ""
    rows = [json.loads(line) for line in text.splitlines()]
    done = {(row["method"], row["seed"]) for row in rows}
    for name in arguments.only:
        for seed in range(arguments.seeds):
            if (name, seed) in done:
                continue
            rows.append(one_run(z, label, name, seed, arguments.steps))
            with path.open("a") as file:
                file.write(json.dumps(rows[-1]) + "\n")
    print("\n".join(table(rows)))


if __name__ == "__main__":
    main()
