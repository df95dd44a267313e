"""Load scheduling through a forecast: one day is one follower.

    python -m benchmarks.applications.pjm_scheduling --data FOLDER [--only 6b]

FOLDER holds pjm_days.npz: `date` (yyyymmdd), `weekday`, `load` and `temp` (days by 24
hours). A forecaster with parameters `x` predicts the 24 loads of a day; the operator
plans the generation nearest to that forecast under ramp limits; shortfall costs 50 a
unit, surplus 0.5. 6a shifts and stretches a ridge regression hour by hour (48
parameters) in 300 steps, 6b is linear in all 81 features (1944 parameters) and sees
the days 100 times. A step sees 50 days.

F is checked by DAQP, day by day (`pip install daqp`).
"""

import datetime
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import bilevax as bx

from .measured import measured, parsed, reference

jax.config.update("jax_enable_x64", True)

HOURS, RAMP, SMOOTH, KAPPA = 24, 0.08, 0.02, 1.0
UNDER, OVER, RIDGE = 50.0, 0.5, 1e-4
WEIGHT = 1e-3
FIRST_TEST_DAY = datetime.date(2015, 1, 1)
DIFFERENCES = np.diff(np.eye(HOURS), axis=0)
BATCH, EPOCHS = 50, 100
RAMPS = bx.Polyhedron(
    A=np.concatenate([DIFFERENCES, -DIFFERENCES]), b=np.full(2 * (HOURS - 1), RAMP)
)


def training_days(folder: Path) -> tuple[np.ndarray, np.ndarray]:
    """Standardised features and loads of the days before 2015."""
    with np.load(folder / "pjm_days.npz") as stored:
        date, weekday, load, temp = (
            stored[name] for name in ("date", "weekday", "load", "temp")
        )
    days = [datetime.date(d // 10000, d // 100 % 100, d % 100) for d in date.tolist()]
    place = {day: i for i, day in enumerate(days)}
    rows, loads = [], []
    for i, day in enumerate(days):
        before = place.get(day - datetime.timedelta(days=1))
        if before is None or day >= FIRST_TEST_DAY:
            continue
        week = (weekday[i] == np.arange(6)).astype(float)
        angle = 2 * np.pi * (day.toordinal() % 365.25) / 365.25
        season = [np.sin(angle), np.cos(angle)]
        warm = (temp[i] - 60) ** 2 / 100
        rows.append(np.concatenate([load[before], temp[i], warm, week, season]))
        loads.append(load[i])
    features = np.array(rows)
    features = (features - features.mean(0)) / features.std(0)
    return np.c_[features, np.ones(len(features))], np.array(loads)


def day_cost(load, plan, forecast):
    """What a day costs: shortfall, surplus, and both squares."""
    softplus = lambda u: SMOOTH * jax.nn.softplus(u / SMOOTH)
    missing = UNDER * softplus(load - plan) + OVER * softplus(plan - load)
    squares = (load - plan) ** 2 + KAPPA * (forecast - load) ** 2
    return jnp.sum(missing + squares / 2)


def small_forecast(x, d):
    return d["ridge"] + x[:HOURS] * d["stretch"] + x[HOURS:]


def full_forecast(x, d):
    return d["features"] @ x.reshape(-1, HOURS)


def day(forecast, weight: float, d) -> bx.Problem:
    """One follower: the plan of a day."""

    def upper(x, plan):
        return day_cost(d["load"], plan, forecast(x, d)) + weight * jnp.sum(x**2) / 2

    def lower(x, plan):
        return jnp.sum((plan - forecast(x, d)) ** 2) / 2

    return bx.Problem(upper, lower, RAMPS)


def small_day(d):
    return day(small_forecast, 0.0, d)


def full_day(d):
    return day(full_forecast, WEIGHT, d)


def ridge(features, loads):
    count, size = features.shape
    matrix = features.T @ features + RIDGE * count * np.eye(size)
    return np.linalg.solve(matrix, features.T @ loads)


def small(features, loads) -> tuple[bx.Followers, np.ndarray]:
    """Followers and x0 = 0."""
    guess = features @ ridge(features, loads)
    data = dict(load=loads, ridge=guess, stretch=guess - guess.mean(0))
    return bx.Followers(small_day, data), np.zeros(2 * HOURS)


def full(features, loads) -> tuple[bx.Followers, np.ndarray]:
    """Followers and x0 = 0."""
    data = dict(load=loads, features=features)
    return bx.Followers(full_day, data), np.zeros(features.shape[1] * HOURS)


MODELS = dict(small=(small, small_forecast, 0.0), full=(full, full_forecast, WEIGHT))


def checked(model: str, followers: bx.Followers, x) -> float:
    """F by DAQP, which is exact at kinks."""
    import daqp  # pyright: ignore[reportMissingImports]

    _, forecast, weight = MODELS[model]
    A, b = np.array(RAMPS.A), np.array(RAMPS.b)  # DAQP wants to own them
    total = 0.0
    for i in range(len(followers)):
        d = jax.tree.map(lambda leaf, i=i: leaf[i], followers.data)
        aim = np.array(forecast(x, d))
        low = np.full(len(b), -1e30)
        plan, _, flag, _ = daqp.solve(
            np.eye(HOURS), -aim, A, b, low, np.zeros(len(b), np.int32)
        )
        assert flag == 1
        total += float(day_cost(d["load"], plan, aim))
    return total / len(followers) + weight * float(np.sum(np.asarray(x) ** 2)) / 2


def main() -> None:
    options = parsed(__doc__, lambda p: p.add_argument("--only", choices=("6a", "6b")))
    known = reference(options)
    days = training_days(options.data)
    # Of 6b the bar is an F of 4.40.
    best = known["full"]["F"]
    for label, model, bar, epochs in (
        ("6a", "small", 1e-3, None),
        ("6b", "full", 4.40 / best - 1, EPOCHS),
    ):
        if options.only in (None, label):
            run(label, model, days, known[model]["F"], bar, epochs, options)


def run(label, model, days, best, bar, epochs, options) -> None:
    followers, x0 = MODELS[model][0](*days)
    steps = None if epochs is None else epochs * (len(followers) // BATCH)
    sampled = followers.minibatch(BATCH)
    measured(
        f"{label} scheduling, {model}",
        lambda: bx.solve(sampled, bx.DSBLO(), x0, key=0, num_steps=steps),
        lambda x: checked(model, followers, x),
        options,
        best=best,
        bar=bar,
        starts=1,
    )


if __name__ == "__main__":
    main()
