"""Which lower-level solver to use, and whether what the caller chose fits."""

from typing import Any

import jax

from .._constraints import Box, Intersection, Polyhedron, Simplex
from .._problem.checks import check_like
from .._problem.followers import Followers
from .._problem.problem import Problem
from .._programs.modules import remembered, with_fields
from .._programs.quick import is_plain
from .active_set import ActiveSet
from .base import AbstractLowerSolver, LowerSolution
from .followers import EachFollower
from .interior_point import InteriorPoint
from .projected import ProjectedGradient
from .sparse.solver import SparseActiveSet

USUAL_SOLVER = ActiveSet()
SPARSE_SOLVER = SparseActiveSet()
LARGE_SOLVER = ProjectedGradient(fallback=InteriorPoint())
# Above this many variables products beat factorisations for boxes and simplices.
_LARGE = 500
# Variables and rows from which a sparse factorisation beats a dense one, and the share
# of entries up to which rows count as sparse.
_MANY, _SPARSE = 600, 0.1


def default_solver(problem: Problem) -> AbstractLowerSolver:
    """`ActiveSet`, except for large boxes and simplices.

    What products cannot solve there, such as boxes with a kernel matrix, is left to an
    interior path.
    """
    structured = isinstance(problem.constraints, Box | Simplex)
    size = sum(leaf.size for leaf in jax.tree.leaves(problem.y0))
    return LARGE_SOLVER if structured and size > _LARGE else USUAL_SOLVER


@remembered
def has_sparse_rows(problem: Problem) -> bool:
    """Whether the lower level is large and its rows have few entries."""
    constraints = problem.constraints
    if not isinstance(constraints, Polyhedron | Intersection) or not is_plain(problem):
        return False
    if constraints.turns:
        return False
    size = sum(leaf.size for leaf in jax.tree.leaves(problem.y0))
    if size + constraints.num_rows < _MANY:
        return False
    return constraints.entries(size) <= _SPARSE * size * constraints.num_rows


def is_on_host(problem: Any) -> bool:
    """Whether calls from Python with this problem cannot be programs."""
    if not isinstance(problem, Problem):
        return False
    solver = checked_solver(problem, None, False, on_host=True)
    return isinstance(solver, SparseActiveSet)


@remembered
def with_sparse_rows(problem: Problem) -> Problem:
    """The same problem with rows as the sparse solver takes them."""
    return with_fields(problem, constraints=problem.constraints.with_sparse_rows())


def checked_solver(
    problem: Problem | Followers,
    solver: Any,
    dense_adjoint: bool,
    *,
    on_host: bool = False,
) -> AbstractLowerSolver:
    """`solver`, or the default for None, or a `ValueError`.

    `dense_adjoint`: whether the adjoint needs the factor of the solver; `on_host`:
    whether it may compute in Python.
    """
    if isinstance(problem, Followers):
        if isinstance(solver, EachFollower):
            return solver
        return EachFollower(checked_solver(problem.one, solver, dense_adjoint))
    solver = problem.solver if solver is None else solver
    check_choice(solver, AbstractLowerSolver, "solver", "ActiveSet")
    chosen = default_solver(problem) if solver is None else solver
    if solver is None and on_host and not dense_adjoint and has_sparse_rows(problem):
        return SPARSE_SOLVER
    if dense_adjoint and isinstance(chosen, ProjectedGradient | SparseActiveSet):
        by_default = " by default for a lower level this large" * (solver is None)
        name = type(chosen).__name__
        raise ValueError(
            "`adjoint=DenseAdjoint()` needs the factor of a dense solver; got "
            f"`solver={name}()`{by_default}, which forms none. Use "
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
