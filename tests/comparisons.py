"""Methods that show what a comparison does, and rows made by hand."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np

import bilevax as bx
from bilevax._methods.base import AbstractMethod, Number, draws, number, report
from bilevax._methods.oracle import gradient_at

from . import zoo

KINK = zoo.t1()
BUDGET = bx.Budget(20, look_every=5)
GRID = bx.StepGrid(2)


class State(eqx.Module):
    x: jax.Array
    lower: bx.LowerSolution


class Descent(AbstractMethod):
    """Plain implicit gradient descent with a constant step."""

    first_step: Number = number(0.1)

    def init(self, problem, x, lower, scales, *, key):
        return State(x, lower)

    def step(self, problem, state, *, step, num_steps, key):
        now = problem.draw(draws(key).sample)
        oracle = gradient_at(now, state.x, state.x, state.lower)
        x = oracle.ahead - self.first_step * oracle.e.grad
        record = report(problem, oracle.e, state.lower, state.x, x)
        return State(x, oracle.e.lower), record


class Walk(AbstractMethod):
    """Draws of all four kinds move `x`; some lines of work are left out of the count.

    `also` makes another program and another method of it with the same draws.
    """

    first_step: Number = number(0.1)
    also: int = 0
    lower_solves: int = 1
    penalty_solves: int = 0

    def init(self, problem, x, lower, scales, *, key):
        return State(x, lower)

    def step(self, problem, state, *, step, num_steps, key):
        keys = draws(key)
        extra = jr.normal(jr.fold_in(key, 7), (self.also,))
        parts = (keys.sample, keys.tilt, keys.segment, keys.direction)
        move = sum(jr.normal(part, state.x.shape) for part in parts)
        x = state.x - self.first_step * move + 0 * jnp.sum(extra)
        e = bx.Evaluation(
            jnp.zeros(()), None, x, state.lower, bx.Status.successful, None
        )
        solves = dict(
            lower_solves=self.lower_solves, penalty_solves=self.penalty_solves
        )
        return State(x, state.lower), report(
            problem, e, state.lower, state.x, x, **solves
        )


class Refuser(Walk):
    """Refuses everything."""

    def refusal(self, problem):
        return "Refuser needs a lower level without rows; this one has 1."


class Faulty(Walk):
    """Fails while it is traced."""

    def step(self, problem, state, *, step, num_steps, key):
        raise RuntimeError("nothing works here")


METHODS = {
    "descent": Descent(),
    "twin": Descent(),
    "walk": Walk(),
    "other walk": Walk(also=3),
    "refuser": Refuser(),
    "faulty": Faulty(),
}
CASES = [bx.Case("kink", KINK, lambda seed: np.array([2.0 + seed]), target=0.0)]


def run_all(folder, methods=METHODS, budget=BUDGET, tune: Any = GRID):
    return bx.compare(CASES, methods, 2, budget, tune=tune, folder=folder)


def of(comparison, method, seed=0):
    rows = [
        row
        for row in comparison.rows
        if row["method"] == method and row["seed"] == seed
    ]
    assert len(rows) == 1
    return rows[0]


OUTCOME = ("status", "message", "x0", "step", "value", "solves", "totals")


def outcome(row):
    return {name: row[name] for name in OUTCOME}


def handmade(problem, method, seed, value, cost=1, status="finished", **others):
    """Looks every 10 steps, `cost` solves and 0.1 `cost` seconds per step."""
    step = [10 * i for i in range(len(value))]
    budget = bx.Budget(30).as_dict()
    return dict(
        kind="run", problem=problem, method=method, seed=seed, status=status,
        message="" if status == "finished" else "It did not.", value=value, step=step,
        target=None, budget=budget, totals={}, tuning=None, compile_seconds=1.0,
        solves=[cost * s for s in step], seconds=[0.1 * cost * s for s in step],
        jax="0", device="cpu",
    ) | others  # fmt: skip


ROWS = [
    # F start 1, F best 0.
    handmade("p", "A", 0, [1.0, 0.5, 0.05, 0.0]),
    handmade("p", "B", 0, [1.0, 0.05, 0.06, 0.05], cost=4),
    handmade("p", "C", 0, [], status="failed"),
    # F start 11, F best 1, by the target.
    handmade("p", "A", 1, [11.0, 6.0, 6.0, 6.0], target=1.0),
    handmade("p", "B", 1, [11.0, 3.0, 1.05, 2.0], cost=4),
    handmade("p", "C", 1, [11.0, None, 1.5, 12.0], cost=2),
    handmade("q", "A", 0, [3.0, 2.0, 1.0, 1.0]),
    handmade("q", "B", 0, [3.0, 2.0, 1.0, 1.0], cost=2),
    handmade("q", "C", 0, [], status="refused"),
]
