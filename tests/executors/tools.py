"""Executors that show what can happen, and work that workers can import."""

import json
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import Partial

import bilevax as bx

START = jnp.array([1.0, 2.0])


def pool(workers=2):
    """Workers that start afresh: forks of a process that uses JAX hang."""
    return ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"))


class Done:
    """A result that is there, and by default no way to ask whether it is."""

    done: Any

    def __init__(self, function, arguments):
        self.function, self.arguments = function, arguments

    def result(self):
        return self.function(*self.arguments)


class Here:
    """Does work in this process, when it is asked for the result; counts it."""

    def __init__(self):
        self.texts = []

    def submit(self, function, *arguments):
        self.texts.append(arguments[0])
        assert isinstance(json.loads(arguments[0]), dict)
        assert all(type(array) is np.ndarray for array in arguments[1:])
        return Done(function, arguments)


class Merging(Here):
    """Equal work is done once, as by the client of dask."""

    def __init__(self):
        super().__init__()
        self.known = {}

    def submit(self, function, *arguments):
        text = arguments[0]
        if text not in self.known:
            self.known[text] = super().submit(function, *arguments)
        return self.known[text]


class Backwards(Here):
    """What was submitted last ends first."""

    def __init__(self):
        super().__init__()
        self.open: list[Any] = []

    def submit(self, function, *arguments):
        one = super().submit(function, *arguments)
        one.done = lambda: one is self.open[-1] and self.open.pop() is one
        self.open.append(one)
        return one


class Failing(Here):
    """Loses the work with these numbers; `refuse_at` is where it takes no more."""

    def __init__(self, lose=(), refuse_at=None):
        super().__init__()
        self.lose, self.refuse_at = lose, refuse_at

    def submit(self, function, *arguments):
        number = len(self.texts)
        if self.refuse_at is not None and number >= self.refuse_at:
            raise RuntimeError("closed for today")
        one = super().submit(function, *arguments)
        if number in self.lose:
            one.function = _lose
        return one


def _lose(*arguments):
    raise ConnectionError("the worker is gone")


def squares(numbers):
    return [number * number for number in numbers]


def kinds(things):
    """The precision here, and the dtype of what came and of what is made."""
    made = str(jnp.zeros(()).dtype)
    return [[str(thing.dtype), made] for thing in things]


def picky(numbers):
    if 3 in numbers:
        raise bx.BilevelError("three is too many", bx.Status.kink)
    return numbers


class Revenue(eqx.Module):
    """Tolls times flows; it ends its worker where `folder` does not hold `times` files.

    Not while the process that runs the tests looks at it.
    """

    folder: str | None = eqx.field(static=True, default=None)
    times: int = eqx.field(static=True, default=0)

    def __call__(self, x, y):
        if self.folder is not None and multiprocessing.parent_process() is not None:
            met = len(os.listdir(self.folder))
            if met < self.times:
                Path(self.folder, str(met)).touch()
                os._exit(1)
        return -jnp.sum(x * y)


def travel(value, x, y):
    return 0.5 * jnp.sum(y**2) + jnp.sum((x - value) * y)


def tolls(value, capacity=2.0, revenue=None) -> bx.Problem:
    rows = bx.Polyhedron(
        A=jnp.array([[1.0, 1.0], [-1, 0], [0, -1]]),
        b=jnp.array([capacity, 0.0, 0.0]),
    )
    lower = Partial(travel, jnp.asarray(value))
    domain = bx.Box(jnp.zeros(2), jnp.full(2, 5.0))
    return bx.Problem(revenue or Revenue(), lower, rows, domain=domain)


def from_lambdas(seed):
    """A problem that could not travel; this function can."""
    return bx.Problem(
        lambda x, y: -jnp.sum(x * y),
        lambda x, y: 0.5 * jnp.sum((y - x + seed) ** 2),
        bx.Polyhedron(A=np.ones((1, 2)), b=np.ones(1)),
    )


def halves(u, key):
    """A batch of four."""
    rows = jax.random.randint(key, (4,), 0, len(u))
    return {"u": u[rows], "v": 1 + u[rows]}


def fitted(batch) -> bx.Problem:
    """One minibatch; its functions are made around it."""
    return bx.Problem(
        lambda x, y: jnp.mean((y[0] * batch["u"] - batch["v"]) ** 2) + 0.1 * x @ x,
        lambda x, y: 0.5 * jnp.sum((y - x) ** 2),
        bx.Polyhedron(A=np.ones((1, 1)), b=np.ones(1)),
    )


def assert_same(found, expected):
    """Two solutions agree to rounding."""
    assert found.status_name == expected.status_name
    assert found.stopped == expected.stopped
    assert isinstance(found.x, jax.Array)
    for name in ("x", "y", "value"):
        np.testing.assert_allclose(
            getattr(found, name), getattr(expected, name), rtol=1e-9, atol=1e-9
        )
    assert found.history.totals == expected.history.totals
