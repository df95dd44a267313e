"""How good one hypergradient is: conditioning, and bias from an inexact lower level."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Bool, Float

from .._lower.base import LowerSolution
from .._lower.dense import largest
from .._lower.free import free_subspace
from .._problem.problem import Problem
from .._tolerances import tolerances
from .adjoint import AbstractAdjoint, KKTSystem, largest_curvature


class Quality(eqx.Module):
    """Error estimates of a hypergradient.

    - `condition`: condition number of the Hessian on the free subspace (the reduced KKT
      system), estimated by power iteration.
    - `bias`: size of the error of the gradient caused by the remaining residual of the
      lower level and by rounding.
    - `bias_is_bound`: true where `f` and `g` were found to be quadratic in `y` at this
      `x`, so that `bias` bounds the error on this active set; elsewhere it is a
      first-order estimate.
    """

    condition: Float[Array, ""]
    bias: Float[Array, ""]
    bias_is_bound: Bool[Array, ""]


def quality_of(
    problem: Problem,
    system: KKTSystem,
    x,
    lower: LowerSolution,
    adjoint: AbstractAdjoint,
    grad,
) -> Quality:
    """Estimate the quality of `grad`, a handful of solves and products."""
    condition = _condition(system, lower, adjoint)
    y_error = _lower_error(system, x, lower, adjoint)
    change = _gradient_change(problem, system, x, lower, adjoint, y_error)
    noise = tolerances(system.y.dtype).eps * condition
    bias = jnp.linalg.norm(change) + noise * jnp.linalg.norm(ravel_pytree(grad)[0])
    return Quality(condition, bias, _is_quadratic(problem, system, x))


def _condition(system: KKTSystem, lower, adjoint):
    free = free_subspace(
        system.constraints, system.active, system.y.size, system.y.dtype
    )

    def forward(d):
        inside = free.project(d)
        return free.project(system.lower.hessian_product(system.y, inside))

    def inverse(d):
        zeros = jnp.zeros_like(lower.multipliers)
        return adjoint.solve(system, lower, free.project(d), zeros)[0]

    top, bottom = (largest_curvature(op, system.y) for op in (forward, inverse))
    # A vertex leaves no free direction: nothing to be ill-conditioned.
    return jnp.maximum(top * bottom, 1)


def _lower_error(system: KKTSystem, x, lower: LowerSolution, adjoint):
    """`y* - y` to first order: one KKT solve with the residual."""
    constraints = system.constraints
    gradient = system.lower.gradient(system.y)
    if lower.multipliers.size:
        gradient = gradient + constraints.pull(
            jnp.where(system.active, lower.multipliers, 0)
        )
        bottom = constraints.rhs(x).astype(system.y.dtype) - constraints.push(system.y)
        bottom = jnp.where(system.active, bottom, 0)
    else:
        bottom = lower.multipliers
    return adjoint.solve(system, lower, -gradient, bottom)[0]


def _gradient_change(problem: Problem, system: KKTSystem, x, lower, adjoint, y_error):
    """The derivative of the implicit gradient in `y`, along `y_error`.

    With `K` the KKT matrix and `K (v, w) = (grad_y f, 0)`, moving `y` by `e` moves `v`
    by the solution of `K (dv, dw) = (f_yy e - (dH e) v, 0)`.
    """
    unravel = system.lower.unravel
    zeros = jnp.zeros_like(lower.multipliers)

    def f_y(y):
        return jax.grad(lambda y: problem.upper_value(x, unravel(y))[0])(y)

    def assembled(y, v, w):
        def lagrangian(x):
            value = problem.upper_value(x, unravel(y))[0]
            along = jax.jvp(lambda y: problem.lower_value(x, unravel(y)), (y,), (v,))[1]
            return value - along - problem.constraints.coupling(x, w)

        return ravel_pytree(jax.grad(lagrangian)(x))[0]

    v, w, _ = adjoint.solve(system, lower, f_y(system.y), zeros)
    _, bent = jax.jvp(
        lambda y: f_y(y) - system.lower.hessian_product(y, v), (system.y,), (y_error,)
    )
    dv, dw, _ = adjoint.solve(system, lower, bent, zeros)
    return jax.jvp(assembled, (system.y, v, w), (y_error, dv, dw))[1]


def _is_quadratic(problem: Problem, system: KKTSystem, x):
    """Whether `f` and `g` are quadratic in `y`, by comparing derivatives far apart.

    A randomised test: second derivatives along one direction at `y` and at a point a
    unit away must agree to rounding, those mixed with `x` included.
    """
    unravel = system.lower.unravel
    tol = tolerances(system.y.dtype)
    scale = 1 + jnp.linalg.norm(system.y)
    n = system.y.size
    d = jnp.sin(1.0 + 1.7 * jnp.arange(n)).astype(system.y.dtype)
    away = scale * jnp.cos(0.3 + 2.1 * jnp.arange(n)).astype(system.y.dtype)

    def curvature(y):
        def along(function):
            return lambda x, y: jax.jvp(lambda y: function(x, unravel(y)), (y,), (d,))[
                1
            ]

        pieces = []
        for function in (
            along(lambda x, y: problem.upper_value(x, y)[0]),
            along(problem.lower_value),
        ):
            g_x, g_y = jax.grad(function, argnums=(0, 1))(x, y)
            pieces.append(ravel_pytree((g_x, g_y))[0])
        return jnp.concatenate(pieces)

    here, there = curvature(system.y), curvature(system.y + away)
    change, *size = largest(here - there, here, there)
    return change <= 100 * tol.rounding * sum(size) * scale
