"""The hypergradient: `F(x)` and its gradient, with the trust they deserve."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Bool, Float, PyTree

from ._adjoint import (
    AbstractAdjoint,
    Danskin,
    DenseAdjoint,
    KKTSystem,
    default_adjoint,
    kkt_system,
)
from ._lower.active_set import ActiveSet, blank_solution
from ._lower.base import (
    AbstractLowerSolver,
    LowerSolution,
    all_finite,
    strongly_typed,
)
from ._lower.choose import check_choice, check_warm, checked_solver
from ._problem import Problem, check_functions, checked_point
from ._quality import Quality, quality_of
from ._quick import quick_jit
from ._status import Status, first_failure, message, raise_on_failure


class Evaluation(eqx.Module):
    """`F` at one `x`.

    - `value`, `grad`: NaN where the lower level has no answer.
    - `aux`: the auxiliary output of `upper`.
    - `lower`: the lower-level solution; pass it as `warm` to the next call.
    - `status`: one per batch member. At a kink the value is right and the gradient is
      that of one side.
    - `quality`: condition and bias, on demand.
    """

    value: Float[Array, ""]
    aux: Any
    grad: PyTree[Array]
    lower: LowerSolution
    status: Any
    quality: Quality | None

    @property
    def margin(self) -> Float[Array, ""]:
        """Distance to the nearest kink, in multiplier or slack of unit rows."""
        return self.lower.margin

    @property
    def weakly_active(self) -> Bool[Array, " k"]:
        """Rows that are tight with a multiplier of zero, to rounding."""
        return self.lower.weak

    @property
    def success(self) -> Bool[Array, ""]:
        return self.status == Status.successful

    @property
    def message(self) -> str:
        """What went wrong and what to do about it; empty on success."""
        return message(self.status)


def hypergradient(
    problem: Problem,
    x: PyTree,
    *,
    solver: AbstractLowerSolver | None = None,
    adjoint: AbstractAdjoint | None = None,
    warm: LowerSolution | None = None,
    quality: bool = False,
    throw: bool = True,
) -> Evaluation:
    """Value and gradient of `F(x) = f(x, y*(x))`: the closed form of `pro:diff`.

    One lower-level solve and one adjoint solve, never a full Jacobian. `warm` takes the
    `lower` of a nearby evaluation. `quality=True` adds the condition of the KKT system
    and a bound on the bias of the gradient, at the price of further solves. A failure
    raises a `BilevelError` with its cause and remedy, unless `throw=False` or the call
    is traced; then `status` tells.
    """
    if not isinstance(problem, Problem):
        raise ValueError(
            "`problem` must be a Problem; got "
            f"{type(problem).__name__}. Call `.draw(key)` on a StochasticProblem first."
        )
    x = checked_point(problem, x)
    adjoint = problem.adjoint if adjoint is None else adjoint
    check_choice(adjoint, AbstractAdjoint, "adjoint", "ConjugateGradient")
    solver = checked_solver(problem, solver, isinstance(adjoint, DenseAdjoint))
    check_warm(problem, warm)
    if warm is None and isinstance(solver, ActiveSet):
        warm = blank_solution(problem)
    evaluation = _evaluate(problem, x, solver, adjoint, warm, quality)
    if throw:
        raise_on_failure(evaluation, "The hypergradient")
    return evaluation


@quick_jit
def _evaluate(problem, x, solver, adjoint, warm, quality) -> Evaluation:
    check_functions(problem, x)
    problem = problem.localised(x)
    lower = solver(problem, x, warm)
    if adjoint is None:
        adjoint = default_adjoint(lower)
    system = kkt_system(problem, x, lower.y, lower.active)
    value, aux, grad, fine = implicit_gradient(system, x, lower, adjoint)
    sane = all_finite((value, grad)) & solver.inside(problem, x, lower)
    status = first_failure(
        lower.status,
        Status.where(lower.shared_dependence, Status.successful, Status.dependent_rows),
        Status.where(jnp.any(lower.weak), Status.kink, Status.successful),
        Status.where(sane, Status.successful, Status.non_finite),
        Status.where(fine, Status.successful, Status.adjoint_limit),
    )
    nan_where = ~lower.success
    value, grad = jax.tree.map(
        lambda leaf: jnp.where(nan_where, jnp.nan, leaf), (value, grad)
    )
    evaluation = Evaluation(
        value=value,
        aux=aux,
        grad=grad,
        lower=lower,
        status=status,
        quality=quality_of(system, x, lower, adjoint, grad) if quality else None,
    )
    return strongly_typed(evaluation)


def implicit_gradient(
    system: KKTSystem, x, lower: LowerSolution, adjoint: AbstractAdjoint
):
    """`f`, its auxiliary output, the gradient of `F`, and whether the solve is fine.

    With `A` the active rows, solve

        [H  A^T] [v]   [grad_y f]
        [A   0 ] [w] = [   0    ]

    and subtract from `grad_x f` the `x`-gradient of `<grad_y g, v> + <w, B x>`.
    """
    problem = system.problem
    y = system.lower.unravel(system.y)
    if isinstance(adjoint, Danskin):
        (value, aux), grad = jax.value_and_grad(problem.upper_value, has_aux=True)(x, y)
        return value, aux, grad, jnp.asarray(True)
    (value, aux), (f_x, f_y) = jax.value_and_grad(
        problem.upper_value, argnums=(0, 1), has_aux=True
    )(x, y)
    top, unravel = ravel_pytree(f_y)
    v, w, fine = adjoint.solve(
        system, lower, top.astype(system.y.dtype), jnp.zeros_like(lower.multipliers)
    )
    v = unravel(v.astype(top.dtype))

    def cross(x):
        # Reverse over forward: the derivative of `g` along `v`, then its x-gradient.
        along = jax.jvp(lambda y: problem.lower_value(x, y), (y,), (v,))[1]
        return along + problem.constraints.coupling(x, w)

    grad = jax.tree.map(jnp.subtract, f_x, jax.grad(cross)(x))
    return value, aux, grad, fine
