"""The lower level with a share of the upper one: `g + weight f`."""

import equinox as eqx
from jaxtyping import Array, Float

from .._problem.problem import Problem
from .._programs.modules import Plain


class _Merged(Plain):
    problem: Problem
    weight: Float[Array, ""]

    def __call__(self, x, y):
        f = self.problem.upper_value(x, y)[0]
        return self.problem.lower_value(x, y) + self.weight * f


def merged(problem: Problem, weight: Float[Array, ""]) -> Problem:
    """`problem` with `g + weight f` as its lower objective."""
    return eqx.tree_at(lambda p: p.lower, problem, _Merged(problem, weight))
