"""Methods that ask for one gradient a step and are told what it is.

The driver evaluates: a long run as part of one program, a short one stage by stage. So
`ask` and `tell` compute with `xp`, and what they draw is a stage.
"""

import abc
from typing import Any, NamedTuple

from jaxtyping import Array, Int, PRNGKeyArray, PyTree

from .._problem.problem import AbstractProblem, Problem
from .base import AbstractMethod, Record, draws
from .oracle import Oracle, gradient_at


class Query(NamedTuple):
    """Where a gradient is wanted.

    - `at`: the point; `ahead`: the next iterate, with `at` on the way to it. Where the
      lower level is empty at `at`, both become the nearest allowed point to `ahead`.
    - `tilt`: of the lower level.
    - `more`: what the method wants to know again when it is told.
    """

    at: PyTree[Array]
    ahead: PyTree[Array]
    tilt: PyTree[Array]
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
        self, problem: AbstractProblem, state: Any, query: Query, oracle: Oracle
    ) -> tuple[Any, Record]:
        """The state after the step."""

    def step(self, problem, state, *, step, num_steps, key):
        now = problem.draw(draws(key).sample, step)
        query = self.ask(now, state, step=step, num_steps=num_steps, key=key)
        tilted = now.perturbed(query.tilt)
        oracle = gradient_at(tilted, query.at, query.ahead, state.lower)
        return self.tell(problem, state, query, oracle)
