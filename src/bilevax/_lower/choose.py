"""Which lower-level solver to use, and whether what the caller chose fits."""

from typing import Any

import jax

from .._constraints import Box, Simplex
from .._problem.checks import check_like
from .._problem.followers import Followers
from .._problem.problem import Problem
from .active_set import ActiveSet
from .base import AbstractLowerSolver, LowerSolution
from .followers import EachFollower
from .projected import ProjectedGradient

USUAL_SOLVER = ActiveSet()
# Above this many variables products beat factorisations for boxes and simplices.
_LARGE = 500


def default_solver(problem: Problem) -> AbstractLowerSolver:
    """`ActiveSet`, except for large boxes and simplices."""
    structured = isinstance(problem.constraints, Box | Simplex)
    size = sum(leaf.size for leaf in jax.tree.leaves(problem.y0))
    return ProjectedGradient() if structured and size > _LARGE else USUAL_SOLVER


def checked_solver(
    problem: Problem | Followers, solver: Any, dense_adjoint: bool
) -> AbstractLowerSolver:
    """`solver`, or the default for None, or a `ValueError`.

    `dense_adjoint`: whether the adjoint needs the factor of the solver.
    """
    if isinstance(problem, Followers):
        if isinstance(solver, EachFollower):
            return solver
        return EachFollower(checked_solver(problem.one, solver, dense_adjoint))
    solver = problem.solver if solver is None else solver
    check_choice(solver, AbstractLowerSolver, "solver", "ActiveSet")
    chosen = default_solver(problem) if solver is None else solver
    if dense_adjoint and isinstance(chosen, ProjectedGradient):
        by_default = " by default for a lower level this large" * (solver is None)
        raise ValueError(
            "`adjoint=DenseAdjoint()` needs the factor of a dense solver; got "
            f"`solver=ProjectedGradient()`{by_default}, which forms none. Use "
            "ConjugateGradient() or leave `adjoint` out, or pass `solver=ActiveSet()`."
        )
    return chosen


def check_choice(value: Any, kind: type, name: str, example: str) -> None:
    """Raise a `ValueError` unless `value` is None or an instance of `kind`."""
    if value is None or isinstance(value, kind):
        return
    if isinstance(value, type):
        got = f"the class {value.__name__}. Write `{name}={value.__name__}()`"
    else:
        got = f"{type(value).__name__}. Leave it out for the default"
    raise ValueError(f"`{name}` must be an object like `{example}()`; got {got}.")


def check_warm(problem: Problem | Followers, warm: Any) -> None:
    """Raise a `ValueError` if `warm` cannot start a solve of `problem`."""
    if warm is None:
        return
    if not isinstance(warm, LowerSolution):
        raise ValueError(
            "`warm` must be the `lower` of an evaluation, a LowerSolution; got "
            f"{type(warm).__name__}. Pass `warm=evaluation.lower`."
        )
    check_like(warm.y, problem.y0, "warm.y", "problem.y0")
    many = isinstance(problem, Followers)
    rows = (problem.one if many else problem).constraints.num_rows
    if warm.multipliers.shape[many:] != (rows,):
        raise ValueError(
            "`warm` must come from a problem with the same number of rows; expected "
            f"multipliers of shape {(rows,)}, got {warm.multipliers.shape}. Leave "
            "`warm` out where the constraints have changed."
        )
