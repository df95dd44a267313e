"""One run of a comparison, from a problem and a method to a row."""

from typing import Any

import jax
import jax.random as jr
import numpy as np

from .._driver.solve import solve
from .._files import checkpoint as checkpoints
from .._methods.base import AbstractMethod, refused as refused_class
from .._programs.stopwatch import Stopwatch
from .budget import Budget, at_looks, solves_at_looks
from .cases import Instance


class Bench:
    """Runs methods, and knows what it has compiled."""

    def __init__(self, budget: Budget):
        self.budget = budget
        self.compiled: dict[Any, float] = {}

    def row(
        self,
        kind: str,
        problem: str,
        name: str,
        seed: int,
        instance: Instance,
        method: AbstractMethod,
    ) -> dict:
        """The row of one run; `problem`, `name`: what case and method are called."""
        row = blank_row(kind, problem, name, seed, instance, self.budget)
        refusal = refused(method, instance)
        if refusal is not None:
            return row | dict(status="refused", message=refusal)
        try:
            compiled = self._warm_up(instance, method)
            solution = self._solve(instance, method, seed, self.budget.steps)
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            return row | dict(status="failed", message=text)
        history = solution.history
        return row | dict(
            status="finished" if solution.success else "failed",
            message=solution.message,
            ended=solution.stopped,
            step=history.evaluated_at.tolist(),
            value=history.value.tolist(),
            seconds=history.working.tolist(),
            solves=solves_at_looks(history).tolist(),
            lower_solves=at_looks(history, "lower_solves").tolist(),
            totals=history.totals,
            compile_seconds=compiled,
        )

    def _solve(self, instance: Instance, method, seed: int, steps: int):
        return solve(
            instance.problem,
            method,
            instance.x0,
            key=jr.key(seed),
            num_steps=steps,
            polish=False,
            throw=False,
            chunk=self.budget.chunk,
            callback=lambda step, x, value, history: self.budget.is_spent(history),
        )

    def _warm_up(self, instance: Instance, method) -> float:
        """Seconds to compile; nothing is compiled again for shapes seen before."""
        shapes = _shapes((instance.problem, method, instance.x0))
        if shapes not in self.compiled:
            watch = Stopwatch()
            self._solve(instance, method, 0, self.budget.chunk)
            self.compiled[shapes] = watch.seconds - watch.running
        return self.compiled[shapes]


def blank_row(
    kind: str, problem: str, name: str, seed: int, instance: Instance, budget: Budget
) -> dict:
    """A row of a run that has not begun."""
    return dict(
        kind=kind,
        problem=problem,
        method=name,
        seed=seed,
        status="finished",
        message="",
        x0=checkpoints.fingerprint(instance.x0),
        target=instance.target,
        budget=budget.as_dict(),
        step=[],
        value=[],
        seconds=[],
        solves=[],
        lower_solves=[],
        totals={},
        compile_seconds=None,
        jax=jax.__version__,
        device=str(jax.devices()[0].device_kind),
    )


def refused(method: AbstractMethod, instance: Instance) -> str | None:
    """Why a method does not take a problem; None where it does."""
    if getattr(instance.problem, "is_coupled", False):
        return (
            "Methods are compared by one objective, and this problem has upper "
            "constraints: compare on `bx.penalised(problem, weight)`."
        )
    try:
        return refused_class(method, instance.problem)
    except Exception:  # the run itself will say what went wrong
        return None


def _shapes(tree) -> Any:
    """What decides whether a compiled program can be used again."""
    leaves, structure = jax.tree.flatten(tree)
    parts = [
        (np.shape(leaf), str(leaf.dtype)) if hasattr(leaf, "dtype") else leaf
        for leaf in leaves
    ]
    key = (structure, *parts)
    try:
        hash(key)
    except TypeError:
        return object()
    return key
