"""`y*(x)` as an ordinary differentiable JAX function."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, PyTree

from .._arguments import check_flag
from .._constraints import is_function
from .._lower.base import AbstractLowerSolver
from .._lower.choose import check_choice, checked_solver
from .._problem.checks import check_functions, checked_point
from .._problem.problem import Problem
from .._programs.modules import with_fields
from .._programs.quick import quick_jit
from .._status import is_traced
from .adjoint import AbstractAdjoint, DenseAdjoint, default_adjoint, kkt_system
from .prices import ambiguous_rows


def solution_map(
    problem: Problem,
    x: PyTree,
    *,
    solver: AbstractLowerSolver | None = None,
    adjoint: AbstractAdjoint | None = None,
    multipliers: bool = False,
    prices: bool = False,
) -> PyTree[Array]:
    """`y*(x)`, for use as a layer; with `multipliers=True` the pair `(y, lambda)`.

    With `prices=True` the pair of `y` and the prices, by name where the constraints are
    an `Intersection`; those that are not unique are NaN.

    Works with grad, jvp, vmap and jit, nested in any order, and differentiates in every
    array inside `problem` (`A`, `B`, `b`, a tilt, data held by `lower`) as well as in
    `x`. Where the lower level has no answer the result is NaN and its derivative zero,
    so that one failed member does not spoil the gradient of a batch. At a kink the
    derivative is that of one side; ask `hypergradient` whether there is one.
    """
    if not isinstance(problem, Problem):
        raise ValueError(
            "`problem` must be a Problem; got "
            f"{type(problem).__name__}. Call `.draw(key)` on a StochasticProblem first."
        )
    check_flag(multipliers, "multipliers")
    x = checked_point(problem, x)
    adjoint = problem.adjoint if adjoint is None else adjoint
    check_choice(adjoint, AbstractAdjoint, "adjoint", "ConjugateGradient")
    solver = checked_solver(problem, solver, isinstance(adjoint, DenseAdjoint))
    problem = _with_open_closures(problem.with_local_lower(x), x)
    y, lam, solution = _primal_dual((problem, x), solver, adjoint)
    if prices:
        # Which they are is no number that could be differentiated.
        held = _without_derivatives((problem, x, solution))
        unclear = ambiguous_rows(*held)
        lam = jnp.where(unclear, jnp.nan, lam)
        return y, problem.constraints.layout.named(lam, y)
    return (y, lam) if multipliers else y


def _without_derivatives(tree):
    stop = lambda leaf: jax.lax.stop_gradient(leaf) if eqx.is_array(leaf) else leaf
    return jax.tree.map(stop, tree)


def _with_open_closures(problem: Problem, x) -> Problem:
    """`problem` with traced values that its functions close over made explicit.

    Calculus cannot look into a closure; as leaves of the problem these values are
    differentiated like everything else.
    """

    def opened(function, *arguments):
        if not any(is_traced(value) for value in _closed_over(function)):
            return function
        return eqx.filter_closure_convert(function, *arguments)

    lower = opened(problem.lower, x, problem.y0)
    parts = jax.tree.map(
        lambda part: opened(part, x) if is_function(part) else part,
        problem.constraints,
        is_leaf=is_function,
    )
    return with_fields(problem, lower=lower, constraints=parts)


def _closed_over(function):
    for cell in getattr(function, "__closure__", None) or ():
        yield cell.cell_contents
        yield from _closed_over(cell.cell_contents)


@eqx.filter_custom_jvp
def _primal_dual(inputs, solver, adjoint):
    problem, x = inputs
    solution = _solve(solver, problem, x)
    usable = solution.success
    y = jax.tree.map(lambda leaf: jnp.where(usable, leaf, jnp.nan), solution.y)
    return y, jnp.where(usable, solution.multipliers, jnp.nan), solution


@quick_jit
def _solve(solver, problem, x):
    check_functions(problem, x)
    return solver(problem.localised(x), x)


@_primal_dual.def_jvp
def _primal_dual_jvp(primals, tangents):
    (inputs, solver, adjoint), (inputs_dot, _, _) = primals, tangents
    y, lam, solution = _primal_dual(inputs, solver, adjoint)
    usable = solution.success
    if adjoint is None:
        adjoint = default_adjoint(solution)
    solution = jax.lax.stop_gradient(solution)

    # A failed member is replaced by harmless constants before anything is
    # differentiated, once or again.
    def safe(tree):
        def safe_leaf(leaf):
            if not eqx.is_inexact_array(leaf):
                return leaf
            harmless = jnp.nan_to_num(leaf, posinf=0, neginf=0)
            return jnp.where(usable, leaf, jax.lax.stop_gradient(harmless))

        return jax.tree.map(safe_leaf, tree)

    safe_inputs = safe(inputs)
    y_safe, lam_safe = safe(y), safe(lam)
    flat, unravel = ravel_pytree(y_safe)

    def conditions(inputs):
        problem, x = inputs
        system = kkt_system(problem, x, flat, solution.active)
        top = system.lower.gradient(flat)
        if lam_safe.size == 0:
            return top, lam_safe
        held = jnp.where(solution.active, lam_safe, 0)
        here = problem.constraints.evaluated(x)
        top = top + here.pull(held)
        bottom = here.push(flat) - here.rhs(x)
        return top, jnp.where(solution.active, bottom, 0)

    _, (top, bottom) = eqx.filter_jvp(conditions, (safe_inputs,), (inputs_dot,))
    # A tangent that nothing feeds comes back as None.
    top = jnp.zeros_like(flat) if top is None else jnp.where(usable, top, 0)
    if bottom is None:
        bottom = jnp.zeros_like(lam_safe)
    bottom = jnp.where(usable & solution.active, bottom, 0)

    problem, x = safe_inputs
    system = kkt_system(problem, x, flat, solution.active)
    frozen = jax.lax.stop_gradient(eqx.filter(system, eqx.is_array))
    frozen = eqx.combine(frozen, eqx.filter(system, eqx.is_array, inverse=True))

    # One vector, not a pair: JAX transposes a solve only if every leaf of its right
    # side depends on what is differentiated, and one half of ours may not.
    def join(v, w):
        return jnp.concatenate([v, w]).astype(flat.dtype)

    def split(z):
        return z[: flat.size], z[flat.size :]

    def solve(_, rhs):
        v, w, fine = adjoint.solve(frozen, solution, *split(rhs))
        # There is no status to carry a failure here, so it must not look like a number.
        return jnp.where(fine, join(v, w), jnp.nan)

    product = lambda z: join(*system(*split(z)))
    step = jax.lax.custom_linear_solve(
        product, -join(top, bottom), solve, symmetric=True
    )
    dy, dlam = split(jnp.where(usable, step, 0))
    # Everything else that a solution holds is a diagnosis, constant to calculus.
    still = jax.tree.map(
        lambda leaf: jnp.zeros_like(leaf) if eqx.is_inexact_array(leaf) else None,
        solution,
    )
    return (y, lam, solution), (unravel(dy), dlam.astype(lam.dtype), still)
