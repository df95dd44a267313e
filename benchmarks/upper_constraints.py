"""Upper constraints that involve `y`: constructed problems with known answers.

    python -m benchmarks.upper_constraints [--only CLASS ...] [--count N] [--json ROWS]
    python -m benchmarks.upper_constraints --table ROWS

One default call of `solve` each. `F` and the violation are computed again in NumPy,
from the follower's answer in closed form. Classes:

- `pieces`: two numbers of the leader, a follower in a box, one linear and one curved
  constraint. `F` and `C` have kinks, local minima are common. The truth is the best of
  all 27 pieces on which the follower's answer is linear, each solved by SciPy's SLSQP
  from several points. Eight starts.
- `curved`: a convex problem in 5, 20 or 50 variables with 1, 4 or 10 active constraints
  among twice as many, made from its solution and its multipliers. One start.
- `equal`: the same with linear equalities.
- `kinks`: `sum max(x - s, 0) <= 0`, whose slopes are all zero inside. One start.
- `prices`: demand grows until the price of a market of plants with capacities is at its
  cap; constraints on multipliers. One start.
- `empty`: constraints that no answer satisfies.
"""

import argparse
import itertools
import json
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import Partial
from scipy.optimize import minimize

import bilevax as bx

SOLVED, FEASIBLE = 1e-6, 1e-8


def as_arrays(data):
    return {name: jnp.asarray(value) for name, value in data.items()}


# A follower in a box


def box_lower(d, x, y):
    return 0.5 * jnp.sum((y - d["K"] @ x - d["k"]) ** 2)


def box_upper(d, x, y, xp=jnp):
    wave = 0.2 * xp.sin(2 * x[0]) * x[1]
    return 0.5 * ((x - d["a"]) ** 2).sum() + d["p"] @ y + 0.3 * y @ y + wave


def box_rows(d, x, y, xp=jnp):
    ball = 0.3 * ((x - d["m"]) ** 2).sum() + y @ y - 1.2
    return xp.stack([d["q"] @ y + d["s"] @ x - d["t"], ball])


def pieces(rng):
    size = lambda *shape: rng.normal(size=shape)
    d = dict(
        a=1.2 * size(2), p=size(3), K=size(3, 2), k=0.5 * size(3), q=size(3),
        s=size(2), t=0.3 * size(), m=0.7 * size(2),
    )  # fmt: skip
    data = as_arrays(d)
    problem = bx.Problem(
        Partial(box_upper, data),
        Partial(box_lower, data),
        bx.Box(jnp.zeros(3), jnp.ones(3)),
        domain=bx.Box(-2 * jnp.ones(2), 2 * jnp.ones(2)),
        upper_constraints=Partial(box_rows, data),
    )
    answer = lambda x: np.clip(d["K"] @ x + d["k"], 0, 1)
    F = lambda x: box_upper(d, x, answer(x), np)
    c = lambda x: box_rows(d, x, answer(x), np)
    return problem, rng.uniform(-2, 2, 2), best_piece(d, rng), F, c, 8


def best_piece(d, rng):
    """The least `F` over all pieces; infinite where no point is feasible."""
    best = np.inf
    for piece in itertools.product((0, 1, 2), repeat=3):
        free = np.array(piece) == 1
        fixed = np.where(np.array(piece) == 2, 1.0, 0.0)
        z = lambda x: d["K"] @ x + d["k"]
        y = lambda x, free=free, fixed=fixed, z=z: np.where(free, z(x), fixed)
        # Below zero, between, above one.
        signs = np.concatenate([np.eye(3)[~free & (fixed == 0)] * -1, np.eye(3)[free]])
        low = np.concatenate(
            [np.zeros(np.sum(~free & (fixed == 0))), np.zeros(free.sum())]
        )
        more = np.concatenate([np.eye(3)[~free & (fixed == 1)], -np.eye(3)[free]])
        least = np.concatenate(
            [np.ones(np.sum(~free & (fixed == 1))), -np.ones(free.sum())]
        )
        G, r = np.vstack([signs, more]), np.concatenate([low, least])
        rules = [
            dict(type="ineq", fun=lambda x, G=G, r=r, z=z: G @ z(x) - r),
            dict(type="ineq", fun=lambda x, y=y: -box_rows(d, x, y(x), np)),
        ]
        for _ in range(6):
            out = minimize(
                lambda x, y=y: box_upper(d, x, y(x), np),
                rng.uniform(-2, 2, 2),
                method="SLSQP",
                bounds=[(-2, 2)] * 2,
                constraints=rules,
                options=dict(ftol=1e-14, maxiter=300),
            )
            worst = min(float(np.min(rule["fun"](out.x), initial=0)) for rule in rules)
            if worst > -1e-9:
                best = min(best, float(out.fun))
    return best


# Convex problems from their solutions


def follows(d, x, y):
    return 0.5 * jnp.sum((y - d["K"] @ x) ** 2)


def nearest(d, x, y):
    return 0.5 * jnp.sum((y - d["a"]) ** 2)


def bowls(d, x, y, xp=jnp):
    away = y - d["y"]
    return d["g"] @ away + 0.5 * d["bend"] * (away @ away) - d["slack"]


def planes(d, x, y):
    return d["h"] @ (y - d["y"])


SIZES = ((5, 1), (20, 4), (50, 10))


def curved(rng, equal=False):
    n, active = SIZES[rng.integers(len(SIZES))]
    m = 2 * active
    d = dict(
        K=np.eye(n) + 0.3 * rng.normal(size=(n, n)) / np.sqrt(n),
        y=rng.normal(size=n),
        g=rng.normal(size=(m, n)),
        bend=rng.uniform(0, 2, m),
        slack=np.where(np.arange(m) < active, 0, rng.uniform(0.1, 1, m)),
        h=rng.normal(size=(active, n)),
    )
    mu = np.where(np.arange(m) < active, rng.uniform(0.1, 2, m), 0)
    d["a"] = d["y"] + mu @ d["g"]
    if equal:
        d["a"] = d["a"] + rng.normal(size=active) @ d["h"]
    data = as_arrays(d)
    problem = bx.Problem(
        Partial(nearest, data),
        Partial(follows, data),
        y0=jnp.zeros(n),
        upper_constraints=Partial(bowls, data),
        upper_equalities=Partial(planes, data) if equal else None,
    )
    F = lambda x: 0.5 * np.sum((d["K"] @ x - d["a"]) ** 2)

    def outside(x):
        off = np.abs(d["h"] @ (d["K"] @ x - d["y"])) if equal else np.zeros(0)
        return np.concatenate([bowls(d, x, d["K"] @ x, np), off])

    start = rng.normal(size=n)
    return problem, start, 0.5 * np.sum((d["y"] - d["a"]) ** 2), F, outside, 1


def equal(rng):
    return curved(rng, equal=True)


# Slopes that vanish inside


def beyond(d, x, y):
    return 0.5 * jnp.sum((y - x + d["s"]) ** 2)


def pull(d, x, y):
    return 0.5 * jnp.sum((x - d["a"]) ** 2)


def total(d, x, y):
    return jnp.sum(y)


def kinks(rng):
    n = int(rng.integers(1, 6))
    d = dict(s=rng.normal(size=n), a=2 * rng.normal(size=n))
    data = as_arrays(d)
    problem = bx.Problem(
        Partial(pull, data),
        Partial(beyond, data),
        bx.Box(jnp.zeros(n), jnp.full(n, jnp.inf)),
        upper_constraints=Partial(total, data),
    )
    F = lambda x: 0.5 * np.sum((x - d["a"]) ** 2)
    c = lambda x: np.array([np.sum(np.maximum(x - d["s"], 0))])
    best = F(np.minimum(d["a"], d["s"]))
    return problem, d["s"] - rng.uniform(0, 1, n), best, F, c, 1


# Prices


def cost(d, x, y):
    return 0.5 * jnp.sum(d["slope"] * y**2)


def demand(d, x, y, prices):
    return -x[0] + 0 * jnp.sum(y)


def above_cap(d, x, y, prices):
    return -prices["balance"] - d["cap"]


def prices(rng):
    n = int(rng.integers(2, 8))
    d = dict(
        slope=rng.uniform(0.5, 5, n),
        most=rng.uniform(0.5, 3, n),
        cap=np.array(rng.uniform(1, 5)),
    )
    # A plant of last resort, so that every demand can be met.
    d["slope"][0], d["most"][0] = 5.0, 100.0
    data = as_arrays(d)
    problem = bx.Problem(
        Partial(demand, data),
        Partial(cost, data),
        bx.Intersection(
            balance=bx.Polyhedron(
                A_eq=np.ones((1, n)), B_eq=-np.ones((1, 1)), b_eq=np.zeros(1)
            ),
            bounds=bx.Box(np.zeros(n), d["most"]),
        ),
        prices=True,
        domain=bx.Box(np.zeros(1), np.full(1, 50.0)),
        upper_constraints=Partial(above_cap, data),
    )
    supply = lambda price: np.sum(np.minimum(price / d["slope"], d["most"]))
    # The price at which supply is the demand, by bisection.
    price = lambda x: bisect(lambda p: supply(p) - x, 0.0, 1e3)
    F = lambda x: -float(x[0])
    c = lambda x: np.array([price(float(x[0])) - d["cap"]])
    return problem, np.array([0.1]), -supply(d["cap"]), F, c, 1


def bisect(function, low, high):
    for _ in range(200):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if function(middle) < 0 else (low, middle)
    return 0.5 * (low + high)


# No answer


def too_much(d, x, y):
    return d["least"] - jnp.stack([jnp.sum(y), -jnp.sum(y) + 2 * d["least"]])


def empty(rng):
    n = int(rng.integers(1, 6))
    d = dict(s=rng.normal(size=n), a=rng.normal(size=n), least=np.array(n + 0.5))
    data = as_arrays(d)
    problem = bx.Problem(
        Partial(pull, data),
        Partial(beyond, data),
        bx.Box(jnp.zeros(n), jnp.ones(n)),
        upper_constraints=Partial(too_much, data),
    )
    nothing = lambda x: np.zeros(1)
    return problem, rng.normal(size=n), np.inf, nothing, nothing, 1


CLASSES = dict(
    pieces=pieces, curved=curved, equal=equal, kinks=kinks, prices=prices, empty=empty
)


def run(name, index):
    rng = np.random.default_rng([list(CLASSES).index(name), index])
    problem, x0, best, F, outside, starts = CLASSES[name](rng)
    began = time.perf_counter()
    found = bx.solve(problem, x0=x0, key=index, num_starts=starts, throw=False)
    seconds = time.perf_counter() - began
    x = np.asarray(found.x)
    row = dict(
        case=name, index=index, status=found.status_name, seconds=seconds,
        told=found.violation, residual=found.upper.residual if found.upper else None,
    )  # fmt: skip
    if best == np.inf:
        return row | dict(right=found.status_name == "upper_infeasible")
    gap = (float(F(x)) - best) / (1 + abs(best))
    violation = float(np.max(outside(x), initial=0))
    right = found.success and gap < SOLVED and violation <= FEASIBLE
    silent = found.success and violation > FEASIBLE
    return row | dict(
        gap=gap, violation=violation, right=bool(right), silent=bool(silent), best=best
    )


def table(rows):
    lines = [
        "| class | right | of | worst gap | worst violation | told infeasible | s |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for name in CLASSES:
        own = [row for row in rows if row["case"] == name]
        if not own:
            continue
        known = [
            row for row in own if "gap" in row and row["status"] != "upper_infeasible"
        ]
        worst = lambda key, known=known: max(
            (row[key] for row in known), default=np.nan
        )
        told = sum(row["status"] == "upper_infeasible" for row in own)
        seconds = np.median([row["seconds"] for row in own])
        lines.append(
            f"| {name} | {sum(row['right'] for row in own)} | {len(own)} | "
            f"{worst('gap'):.1e} | {worst('violation'):.1e} | {told} | {seconds:.1f} |"
        )
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", choices=list(CLASSES))
    parser.add_argument("--count", type=int, default=20, help="problems of a class")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--table", type=Path, help="of rows that are kept")
    options = parser.parse_args()
    if options.table is not None:
        print(table([json.loads(r) for r in options.table.read_text().splitlines()]))
        return
    jax.config.update("jax_enable_x64", True)
    rows = []
    for name in options.only or CLASSES:
        for index in range(options.count):
            row = run(name, index)
            rows.append(row)
            if options.json is not None:
                with options.json.open("a") as file:
                    file.write(json.dumps(row) + "\n")
            if not row["right"]:
                print(row, flush=True)
    print(table(rows))


if __name__ == "__main__":
    main()
