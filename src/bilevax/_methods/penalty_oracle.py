"""A hypergradient without second derivatives: the penalty-Lagrangian oracle."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float, PyTree

from .._implicit.adjoint import largest_curvature
from .._implicit.hypergradient import Evaluation
from .._lower.active_set import ActiveSet
from .._lower.base import AbstractLowerSolver, LowerSolution, all_finite
from .._lower.choose import check_warm, checked_solver
from .._lower.dense import flatten, probe
from .._problem.checks import check_functions, checked_point
from .._problem.problem import Problem
from .._programs.modules import Plain
from .._programs.quick import quick_jit
from .._status import Status, first_failure, is_traced, raise_on_failure

# The default weight of the penalty in natural units; its inverse is the relative bias.
DEFAULT_PENALTY = 1e4


class FirstOrderEvaluation(Evaluation):
    """`F` at one `x` with a gradient from a second solve in `y`, here `inner`.

    `value` and `lower` are those of the true lower level; the gradient alone is biased.
    """

    inner: LowerSolution


class Weights(NamedTuple):
    """The weights of a penalty Lagrangian; `a2` is a number or one per row."""

    a1: Any
    a2: Any


def penalty_gradient(
    problem: Problem,
    x: PyTree,
    *,
    a1: float | Array | None = None,
    a2: float | Array | None = None,
    solver: AbstractLowerSolver | None = None,
    warm: LowerSolution | None = None,
    throw: bool = True,
) -> FirstOrderEvaluation:
    """`F(x)` and a gradient of it from first derivatives of `f` and `g` alone.

    With `y*`, its multipliers `lam` and its active rows `S` (all exact, then frozen)
    and `h = A y + B x - b`, minimise over all `y`

        L(y) = f + a1 (g + <lam, h>) + (a2 / 2) sum_{i in S} h_i^2

    and return `grad_x f(x, yL) + a1 (grad_x g(x, yL) - grad_x g(x, y*)) + a2 B_S^T h_S`
    with `h` at the minimiser `yL`.

    Bias: proportional to `1 / a1` as long as `a2 >= a1^2` (in units where the Hessian
    of `g`, the pull of `f` on `y` and the rows are of size one), and to `a1 / a2` for a
    smaller `a2`. Rounding adds `a1` times the error of the lower level: in float64 all
    is lost beyond a relative `a1` of some 1e7.

    - `a1`: weight of the lower level; by default 1e4 in natural units, which are
      measured at `x`.
    - `a2`: weight of the squared rows, one number or one per row (inequality rows
      first); by default the square of `a1` in natural units, or `a1**2` where that was
      given.

    `L` is strongly convex once `a1` outweighs what `f` lacks in convexity. Where it is
    not, the status is `not_strongly_convex` and the gradient NaN. Equality rows are
    always in `S`.
    """
    x, solver = checked_call(problem, x, solver, warm, "penalty_gradient")
    for name, weight in (("a1", a1), ("a2", a2)):
        check_positive(weight, name)
    if a1 is None and a2 is not None:
        raise ValueError("`a2` needs `a1`: give both, `a1` alone or none.")
    if a1 is not None:
        a2 = jnp.asarray(a1, float) ** 2 if a2 is None else jnp.asarray(a2, float)
    weights = None if a1 is None else Weights(jnp.asarray(a1, float), a2)
    evaluation = _evaluate(problem, x, weights, solver, warm)
    if throw:
        raise_on_failure(evaluation, failed_part(evaluation, "penalty gradient"))
    return evaluation


@quick_jit
def _evaluate(problem, x, weights, solver, warm):
    check_functions(problem, x)
    return penalty_evaluation(problem, x, weights, warm, solver)


def penalty_evaluation(
    problem: Problem,
    x: PyTree[Array],
    weights: Weights | None,
    warm: LowerSolution | None,
    solver: AbstractLowerSolver | None = None,
) -> FirstOrderEvaluation:
    """`penalty_gradient` for traced code; no weights means the natural ones."""
    solver = checked_solver(problem, solver, False)
    lower = solver(problem, x, warm)
    if weights is None:
        weights = natural_weights(problem, x, lower.y)
    a1, a2 = weights
    row_weights = jnp.where(lower.active, a2, 0)
    lagrangian = _PenaltyLagrangian(problem, lower, a1, row_weights)
    penalised = Problem(problem.upper, lagrangian, y0=lower.y)
    inner = ActiveSet(diagnose=False)(penalised, x)

    value, aux = problem.upper_value(x, lower.y)
    near = inner.y
    # The rows pull on `x` like multipliers do: a2 h_S through B.
    force = row_weights * lagrangian.rows(x, near)
    first = jax.grad(
        lambda x: (
            problem.upper_value(x, near)[0] + problem.constraints.coupling(x, force)
        )
    )(x)
    g_x = jax.grad(problem.lower_value)
    grad = jax.tree.map(
        lambda f, a, b: f + a1 * (a - b), first, g_x(x, near), g_x(x, lower.y)
    )
    return first_order_evaluation(value, aux, grad, lower, inner)


class _PenaltyLagrangian(Plain):
    """`L / a1`, which is the lower level with small additions."""

    problem: Problem
    lower: LowerSolution
    a1: Any
    row_weights: Float[Array, " k"]

    def rows(self, x, y):
        """`h` on the active rows; infinite bounds are never among them."""
        constraints = self.problem.constraints
        if constraints.num_rows == 0:
            return jnp.zeros_like(self.row_weights)
        h = constraints.push(ravel_pytree(y)[0])
        rhs = jnp.where(self.lower.active, constraints.rhs(x), 0)
        return jnp.where(self.lower.active, h - rhs, 0)

    def __call__(self, x, y):
        f, g = self.problem.upper_value(x, y)[0], self.problem.lower_value(x, y)
        h = self.rows(x, y)
        held = jnp.where(self.lower.active, self.lower.multipliers, 0)
        penalty = 0.5 * jnp.sum(self.row_weights / self.a1 * h**2)
        return f / self.a1 + g + held @ h + penalty


def first_order_evaluation(
    value, aux, grad, lower: LowerSolution, inner: LowerSolution
) -> FirstOrderEvaluation:
    """The result of an oracle with two solves; NaN where either has failed."""
    sane = all_finite((value, grad))
    status = first_failure(
        lower.status,
        inner.status,
        Status.where(lower.shared_dependence, Status.successful, Status.dependent_rows),
        Status.where(jnp.any(lower.weak), Status.kink, Status.successful),
        Status.where(sane, Status.successful, Status.non_finite),
    )
    void = ~(lower.success & inner.success)
    grad = jax.tree.map(lambda leaf: jnp.where(void, jnp.nan, leaf), grad)
    return FirstOrderEvaluation(
        value=jnp.where(lower.success, value, jnp.nan),
        aux=aux,
        grad=grad,
        lower=lower,
        status=status,
        quality=None,
        inner=inner,
    )


def natural_weights(
    problem: Problem,
    x: PyTree[Array],
    y: PyTree[Array],
    penalty=DEFAULT_PENALTY,
    force=None,
) -> Weights:
    """`penalty` in units of the problem, and the weight of rows that goes with it.

    `a1` is `penalty` times the pull of `f` on `y` over that of `g`; the rows, at unit
    norm, weigh `a1 * penalty` times the largest curvature of `g`. Multiplying `f`, `g`
    or a row by a constant leaves the gradient as it is. `force` replaces the pull of
    `g` measured at this point.
    """
    lower, _ = flatten(problem, x)
    flat = ravel_pytree(y)[0]
    upper_gradient = jax.grad(
        lambda flat: problem.upper_value(x, lower.unravel(flat))[0]
    )
    wave = probe(flat)
    pull, _, upper_bend = _pull(upper_gradient, flat, wave)
    own, turned, lower_bend = _pull(lower.gradient, flat, wave)
    if force is None:
        g_y = lambda x: jax.grad(problem.lower_value, argnums=1)(x, y)
        along = ravel_pytree(jax.jvp(g_y, (x,), (x,))[1])[0]
        force = own + jnp.linalg.norm(along)
    unit = _ratio(pull, force) + _ratio(upper_bend, lower_bend)
    a1 = unit * jnp.minimum(penalty, jnp.finfo(flat.dtype).eps ** -0.5)
    a1 = jnp.where(unit > 0, a1, penalty)
    stiffness = largest_curvature(lambda d: lower.hessian_product(flat, d), flat)
    stiffness = jnp.where(turned, stiffness, 1)
    A = problem.constraints.matrix(flat.size, flat.dtype)
    squares = jnp.sum(A**2, axis=1)
    return Weights(a1, a1 * penalty * stiffness / jnp.where(squares > 0, squares, 1))


def _pull(gradient, y, wave):
    """How hard a function pulls on `y`, whether it bends, and how much."""
    force, along = jax.jvp(gradient, (y,), (y,))
    bend = jnp.linalg.norm(jax.jvp(gradient, (y,), (wave,))[1])
    pull = jnp.linalg.norm(along) + jnp.linalg.norm(force - along)
    return pull, bend > 0, bend


def _ratio(a, b):
    fine = (b > 0) & jnp.isfinite(a)
    return jnp.where(fine, a / jnp.where(fine, b, 1), 0)


def checked_call(problem, x, solver, warm, name: str):
    """`x` and the solver of a call to an oracle, or a `ValueError`."""
    if not isinstance(problem, Problem):
        raise ValueError(
            f"`problem` must be a Problem; got {type(problem).__name__}. Call "
            f"`.draw(key)` on a StochasticProblem before `{name}`."
        )
    if problem.prices:
        raise ValueError(
            f"`{name}` moves `y` apart from its multipliers, and `upper` takes prices "
            "here: use `hypergradient`."
        )
    if problem.constraints.moving is not None:
        raise ValueError(
            f"`{name}` needs rows that are linear in `x`, and parts of the constraints "
            "are functions of it here: use `hypergradient`."
        )
    x = checked_point(problem, x)
    solver = checked_solver(problem, solver, False)
    check_warm(problem, warm)
    return x, solver


def check_positive(value, name: str) -> None:
    """Raise a `ValueError` unless `value` is None, traced, or positive throughout."""
    if value is None or is_traced(value):
        return
    if not np.all(np.asarray(value) > 0):
        raise ValueError(f"`{name}` must be positive; got {value}.")


def failed_part(evaluation: FirstOrderEvaluation, name: str) -> str:
    """Which of the two solves to blame, as the subject of a sentence."""
    inner = evaluation.inner.status
    if is_traced(inner) or not bool(jnp.all(evaluation.lower.success)):
        return f"The {name}"
    if bool(jnp.all(evaluation.inner.success)):
        return f"The {name}"
    return (
        f"The second solve of the {name}, in which `lower` has a share of `upper` "
        "added (the smaller, the larger `a1`, or the smaller `delta`),"
    )
