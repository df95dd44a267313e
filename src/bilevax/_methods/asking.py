"""Methods that ask for one gradient a step and are told what it is.

One place evaluates, finds the way back from an empty lower level, and records:
`answer`. A long run has it as part of one program, a short one takes it stage by stage.
So `ask` and `tell` compute with `xp`, and what they draw is a stage.
"""

import abc
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.random as jr
from jaxtyping import Array, Int, PRNGKeyArray, PyTree

from .._problem.perturbation import UniformBall
from .._problem.problem import AbstractProblem, Problem, tilted
from .._programs.control import brief_stage, in_stages
from .._programs.modules import with_fields
from .base import AbstractMethod, Record, draws, report
from .oracle import Oracle, gradient_at


class Query(NamedTuple):
    """Where a gradient is wanted.

    - `at`: the point; `ahead`: the next iterate, with `at` on the way to it. Where the
      lower level is empty at `at`, both become the nearest allowed point to `ahead`.
    - `tilt`: of the lower level, if any.
    - `more`: what the method wants to know again when it is told.
    """

    at: PyTree[Array]
    ahead: PyTree[Array]
    tilt: PyTree[Array] | None = None
    more: Any = None


class AbstractAskingMethod(AbstractMethod):
    """`ask` says where the gradient is wanted, `tell` what follows from it."""

    @abc.abstractmethod
    def ask(
        self,
        problem: Problem,
        state: Any,
        *,
        step: Int[Array, ""],
        num_steps: Int[Array, ""],
        key: PRNGKeyArray,
    ) -> Query:
        """The query of a step, on the `problem` that was drawn for it."""

    @abc.abstractmethod
    def tell(
        self, problem: Problem, state: Any, query: Query, oracle: Oracle
    ) -> tuple[Any, dict[str, Any]]:
        """The state after the step, and entries of its record: see `report`.

        Its `lower` is that of the oracle, whatever it says.
        """

    def gradient_of(self, problem: Problem, state: Any) -> Callable | None:
        """`(x, warm) -> Evaluation` in place of the exact hypergradient."""
        return None

    @property
    def takes_followers(self):
        return True

    @property
    def takes_stages(self) -> bool:
        """Whether short runs may take its steps one by one."""
        return True

    def step(self, problem, state, *, step, num_steps, key):
        now = problem.draw(draws(key).sample, step)
        query = self.ask(now, state, step=step, num_steps=num_steps, key=key)
        return self.answer(problem, now, state, query)

    def answer(
        self, problem: AbstractProblem, now: Problem, state: Any, query: Query
    ) -> tuple[Any, Record]:
        """The state after a step, and its record; `now` was drawn from `problem`."""
        there = now
        if query.tilt is not None:
            q = query.tilt
            there = tilted(now, q) if in_stages() else now.perturbed(q)
        gradient = self.gradient_of(now, state)
        oracle = gradient_at(there, query.at, query.ahead, state.lower, gradient)
        return self.told(problem, now, state, query, oracle)

    def told(
        self,
        problem: AbstractProblem,
        now: Problem,
        state: Any,
        query: Query,
        oracle: Oracle,
    ) -> tuple[Any, Record]:
        """The state after a step whose query has been answered, and its record."""
        new, entries = self.tell(now, state, query, oracle)
        new = with_fields(new, lower=oracle.e.lower)
        told = dict(recovered=oracle.recovered) | entries
        return new, report(problem, oracle.e, state.lower, state.x, new.x, **told)


@brief_stage
def share_and_direction(x: PyTree[Array], like, key: PRNGKeyArray):
    """A number in [0, 1] and a point of the unit ball, as every method draws them."""
    keys = draws(key)
    share = jr.uniform(keys.segment, (), like.dtype)
    return share, UniformBall(1.0).sample(x, key=keys.direction)
