"""A hypergradient from two lower-level solves, for equality rows alone."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from .._lower.base import AbstractLowerSolver, LowerSolution
from .._lower.choose import checked_solver
from .._problem.checks import check_functions
from .._problem.problem import Problem
from .._programs.quick import quick_jit
from .._status import raise_on_failure
from .merged import merged
from .penalty_oracle import (
    FirstOrderEvaluation,
    check_positive,
    checked_call,
    failed_part,
    first_order_evaluation,
    natural_weights,
)


def equality_gradient(
    problem: Problem,
    x: PyTree,
    *,
    delta: float | Array | None = None,
    solver: AbstractLowerSolver | None = None,
    warm: LowerSolution | None = None,
    throw: bool = True,
) -> FirstOrderEvaluation:
    """`F(x)` and a finite difference of two lower levels as its gradient.

    For `h = A y + B x - b = 0`, let `(y0, nu0)` solve the lower level and `(yd, nud)`
    the one with `g + delta f` in place of `g`. The gradient is

        grad_x f(x, y0) + (grad_x g(x, yd) - grad_x g(x, y0) + B^T (nud - nu0)) / delta

    Bias: proportional to `delta`, plus the error of the solves over `delta`; the solves
    are exact to rounding here, so any `delta` down to a relative 1e-7 is sound.

    - `delta`: share of `f`; by default 1e-4 in natural units, measured at `x`.

    Problems with inequality rows are refused: there the difference can straddle a
    change of the active set.
    """
    x, solver = checked_call(problem, x, solver, warm, "equality_gradient")
    check_positive(delta, "delta")
    refused = only_equalities(problem, "equality_gradient")
    if refused is not None:
        raise ValueError(refused)
    delta = None if delta is None else jnp.asarray(delta, float)
    evaluation = _evaluate(problem, x, delta, solver, warm)
    if throw:
        raise_on_failure(evaluation, failed_part(evaluation, "equality gradient"))
    return evaluation


def only_equalities(problem: Problem, name: str) -> str | None:
    """Why `name` cannot run, where `problem` has inequality rows."""
    rows = problem.constraints.num_inequalities
    if rows == 0:
        return None
    return (
        f"{name} needs a lower level with equality rows only; this problem has {rows} "
        f"inequality row{'s' * (rows > 1)}."
    )


@quick_jit
def _evaluate(problem, x, delta, solver, warm):
    check_functions(problem, x)
    return equality_evaluation(problem, x, delta, warm, solver)


def equality_evaluation(
    problem: Problem,
    x: PyTree[Array],
    delta,
    warm: LowerSolution | None,
    solver: AbstractLowerSolver | None = None,
) -> FirstOrderEvaluation:
    """`equality_gradient` for traced code; no `delta` means the natural one."""
    solver = checked_solver(problem, solver, False)
    lower = solver(problem, x, warm)
    if delta is None:
        delta = 1 / natural_weights(problem, x, lower.y).a1
    inner = solver(merged(problem, delta), x, lower)
    value, aux = problem.upper_value(x, lower.y)
    f_x = jax.grad(lambda x: problem.upper_value(x, lower.y)[0])(x)
    change = (inner.multipliers - lower.multipliers) / delta
    rows = jax.grad(lambda x: problem.constraints.coupling(x, change))(x)
    g_x = jax.grad(problem.lower_value)
    grad = jax.tree.map(
        lambda f, row, a, b: f + row + (a - b) / delta,
        f_x,
        rows,
        g_x(x, inner.y),
        g_x(x, lower.y),
    )
    return first_order_evaluation(value, aux, grad, lower, inner)
