"""A time-of-use tariff: one summer day of three consumer groups is one follower.

    python -m benchmarks.applications.tariff_pjm --data FOLDER [--only 3b]

FOLDER holds pjm_summer2016.csv: date, hour, price and load forecast of 92 days. The
retailer posts prices for three blocks of hours, or for every hour, between 20 and 140
with a mean of at most 60; on each day the groups shift load around what they would use,
meet their daily need and share a feeder. F is minus the profit in thousand dollars.

F is checked by DAQP, day by day (`pip install daqp`).
"""

import csv
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import bilevax as bx

from .measured import measured, parsed, reference

jax.config.update("jax_enable_x64", True)

HOURS, FLAT, FEEDER, DELIVERY = 24, 60.0, 1250.0, 10.0
SHARES = np.array([0.40, 0.35, 0.25])
ELASTICITIES = np.array([0.15, 0.10, 0.30])
NEED = 1 - np.array([0.02, 0.01, 0.05])
BLOCKS = np.array([0] * 7 + [1] * 7 + [2] * 7 + [1] * 2 + [0])
GROUPS = len(SHARES)


def days(folder: Path) -> dict[str, np.ndarray]:
    """Wholesale prices and what the groups would use, day by day."""
    with open(folder / "pjm_summer2016.csv") as file:
        rows = sorted(csv.DictReader(file), key=lambda r: (r["date"], int(r["hour"])))
    column = lambda name: np.array([float(row[name]) for row in rows])
    price = column("day_ahead_price_usd_per_MWh").reshape(-1, HOURS)
    load = column("load_forecast_MW").reshape(-1, HOURS)
    base = SHARES[:, None] * (1000 * load / load.mean())[:, None, :]
    return dict(price=price, base=base)


def one_day(hourly, d) -> bx.Problem:
    """One follower; `hourly(x)` are the 24 prices of a tariff."""
    base = d["base"]
    curvature = FLAT / (ELASTICITIES[:, None] * base)

    def upper(x, y):
        margin = hourly(x) - d["price"] - DELIVERY
        return -jnp.sum(margin * y) / 1000

    def lower(x, y):
        return jnp.sum((hourly(x) - FLAT) * y + curvature / 2 * (y - base) ** 2)

    eye = np.eye(GROUPS * HOURS)
    of_group = np.repeat(np.eye(GROUPS), HOURS, axis=1)
    of_hour = np.tile(np.eye(HOURS), GROUPS)
    flat = base.reshape(-1)
    rows = bx.Polyhedron(
        A=np.concatenate([-of_group, of_hour, -eye, eye]),
        b=jnp.concatenate(
            [
                -NEED * jnp.sum(base, axis=1),
                jnp.full(HOURS, FEEDER),
                -0.75 * flat,
                1.25 * flat,
            ]
        ),
    )
    return bx.Problem(upper, lower, rows, y0=base)


def by_blocks(x):
    return x[BLOCKS]


def by_hours(x):
    return x


def block_day(d):
    return one_day(by_blocks, d)


def hourly_day(d):
    return one_day(by_hours, d)


def domain(weights) -> bx.Polyhedron:
    """20 <= x <= 140, and a mean over the hours of at most 60."""
    eye = np.eye(len(weights))
    return bx.Polyhedron(
        A=np.concatenate([-eye, eye, [weights]]),
        b=np.concatenate([np.full(len(eye), -20.0), np.full(len(eye), 140.0), [FLAT]]),
    )


def blocks(data) -> tuple[bx.Followers, np.ndarray]:
    """Three prices, from the flat tariff."""
    weights = np.bincount(BLOCKS) / HOURS
    return bx.Followers(block_day, data, domain=domain(weights)), np.full(3, FLAT)


def hours(data) -> tuple[bx.Followers, np.ndarray]:
    """24 prices, from the flat tariff."""
    weights = np.full(HOURS, 1 / HOURS)
    return bx.Followers(hourly_day, data, domain=domain(weights)), np.full(HOURS, FLAT)


MODELS = dict(blocks=(blocks, by_blocks), hourly=(hours, by_hours))


def checked(model: str, followers: bx.Followers, x) -> float:
    """F by DAQP, which is exact at kinks."""
    import daqp  # pyright: ignore[reportMissingImports]

    prices = np.array(MODELS[model][1](jnp.asarray(x)))
    values = []
    for i in range(len(followers)):
        one = followers[i]
        base = np.array(followers.data["base"][i])
        bend = FLAT / (ELASTICITIES[:, None] * base)
        pull = (prices - FLAT) - bend * base
        rows = one.constraints
        A, b = np.array(rows.A), np.array(rows.b)  # DAQP wants to own them
        low, sense = np.full(len(b), -1e30), np.zeros(len(b), np.int32)
        y, _, flag, _ = daqp.solve(
            np.diag(bend.ravel()), pull.ravel(), A, b, low, sense
        )
        assert flag == 1
        values.append(float(one.upper_value(x, y.reshape(base.shape))[0]))
    return float(np.mean(values))


def main() -> None:
    options = parsed(__doc__, lambda p: p.add_argument("--only", choices=("3a", "3b")))
    known, data = reference(options), days(options.data)
    for label, model, best in (
        ("3a", "blocks", known["F"]),
        ("3b", "hourly", known["hourly"]["F"]),
    ):
        if options.only in (None, label):
            run(label, model, data, best, options)


def run(label: str, model: str, data, best: float, options) -> None:
    followers, x0 = MODELS[model][0](data)
    measured(
        f"{label} tariff, {model}",
        lambda: bx.solve(followers, bx.DSBLO(), x0, key=0),
        lambda x: checked(model, followers, x),
        options,
        best=best,
        bar=1e-6,
        starts=1,
    )


if __name__ == "__main__":
    main()
