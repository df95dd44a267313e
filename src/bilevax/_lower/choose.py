"""Which lower-level solver to use when the caller does not say."""

from .._constraints import Box, Simplex
from .._problem import Problem
from .active_set import ActiveSet
from .base import AbstractLowerSolver
from .projected import ProjectedGradient

# Above this many variables products beat factorisations for boxes and simplices.
_LARGE = 200


def default_solver(problem: Problem) -> AbstractLowerSolver:
    """`ActiveSet`, except for large boxes and simplices."""
    structured = isinstance(problem.constraints, Box | Simplex)
    if structured and problem.constraints.num_inequalities > _LARGE:
        return ProjectedGradient()
    return ActiveSet()
