"""How good one hypergradient is: conditioning, and bias from an inexact lower level."""

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Bool, Float

from .._lower.base import LowerSolution
from .._lower.dense import Unravel, along, hessian_operator, largest
from .._programs.arrays import ravel, xp
from .._programs.control import stage
from .._programs.modules import Plain, made
from .._tolerances import tolerances
from .adjoint import AbstractAdjoint, KKTSystem, largest_curvature


class Quality(Plain):
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
    whole, system: KKTSystem, x, lower: LowerSolution, adjoint: AbstractAdjoint, grad
) -> Quality:
    """Estimate the quality of `grad`, a handful of solves and products.

    `whole` begins with the problem, ready for stages.
    """
    condition = _condition(system, lower, adjoint)
    y_error = _lower_error(system, x, lower, adjoint)
    f_y, quadratic = _bent_upper(whole, x, system.y)
    change = _gradient_change(whole, system, x, lower, adjoint, f_y, y_error)
    noise = tolerances(system.y.dtype).eps * condition
    bias = xp.linalg.norm(change) + noise * xp.linalg.norm(ravel(grad))
    return made(Quality, condition=condition, bias=bias, bias_is_bound=quadratic)


def _condition(system: KKTSystem, lower, adjoint):
    project = adjoint.free(system, lower)
    bend = hessian_operator(system.lower, system.y)
    forward = lambda d: project(bend(project(d)))
    inverse = adjoint.inverse(system, lower)
    backward = lambda d: inverse(project(d))
    top, bottom = (largest_curvature(op, system.y) for op in (forward, backward))
    # A vertex leaves no free direction: nothing to be ill-conditioned.
    return xp.maximum(top * bottom, 1)


def _lower_error(system: KKTSystem, x, lower: LowerSolution, adjoint):
    """`y* - y` to first order: one KKT solve with the residual."""
    constraints = system.constraints
    gradient = along(system.lower, system.y, xp.zeros_like(system.y))[0]
    if lower.multipliers.size:
        gradient = gradient + constraints.pull(
            xp.where(system.active, lower.multipliers, 0)
        )
        bottom = constraints.rhs(x).astype(system.y.dtype) - constraints.push(system.y)
        bottom = xp.where(system.active, bottom, 0)
    else:
        bottom = lower.multipliers
    return adjoint.solve(system, lower, -gradient, bottom)[0]


def _gradient_change(whole, system: KKTSystem, x, lower, adjoint, f_y, y_error):
    """The derivative of the implicit gradient in `y`, along `y_error`.

    With `K` the KKT matrix and `K (v, w) = (grad_y f, 0)`, moving `y` by `e` moves `v`
    by the solution of `K (dv, dw) = (f_yy e - (dH e) v, 0)`.
    """
    zeros = xp.zeros_like(lower.multipliers)
    v, w, _ = adjoint.solve(system, lower, f_y, zeros)
    bent = _bent(whole, x, system.y, v, y_error)
    dv, dw, _ = adjoint.solve(system, lower, bent, zeros)
    return _change(whole, x, (system.y, v, w), (y_error, dv, dw))


def _flat(whole):
    """`f` and `g` as functions of `x` and of a flat `y`."""
    problem = whole[0]
    unravel = Unravel.like(problem.y0)
    f = lambda x, y: problem.upper_value(x, unravel(y))[0]
    g = lambda x, y: problem.lower_value(x, unravel(y))
    return f, g


@stage
def _bent(whole, x, y, v, y_error):
    """`f_yy e - (dH e) v`."""
    f, g = _flat(whole)

    def pull(y):
        """`grad_y f - H v`."""
        bent = jax.jvp(jax.grad(g, 1), (x, y), (_zeros(x), v))[1]
        return jax.grad(f, 1)(x, y) - bent

    return jax.jvp(pull, (y,), (y_error,))[1]


@stage
def _change(whole, x, at, direction):
    """The derivative of the implicit gradient in `y`, `v` and `w`."""
    f, g = _flat(whole)

    def assembled(y, v, w):
        def lagrangian(x):
            bent = jax.jvp(lambda y: g(x, y), (y,), (v,))[1]
            return f(x, y) - bent - whole[0].constraints.coupling(x, w)

        return ravel_pytree(jax.grad(lagrangian)(x))[0]

    return jax.jvp(assembled, at, direction)[1]


@stage
def _bent_upper(whole, x, y):
    """`grad_y f`, and whether `f` and `g` are quadratic in `y`.

    A randomised test: second derivatives along one direction at `y` and at a point a
    unit away must agree to rounding, those mixed with `x` included.
    """
    f, g = _flat(whole)
    tol = tolerances(y.dtype)
    scale = 1 + jnp.linalg.norm(y)
    n = y.size
    d = jnp.sin(1.0 + 1.7 * jnp.arange(n)).astype(y.dtype)
    away = scale * jnp.cos(0.3 + 2.1 * jnp.arange(n)).astype(y.dtype)

    def bends(y):
        pieces = []
        for function in (f, g):
            slope = lambda x, y, f=function: jax.jvp(lambda y: f(x, y), (y,), (d,))[1]
            pieces.append(ravel_pytree(jax.grad(slope, argnums=(0, 1))(x, y))[0])
        return jnp.concatenate(pieces)

    here, there = bends(y), bends(y + away)
    change, *size = largest(here - there, here, there)
    quadratic = change <= 100 * tol.rounding * sum(size) * scale
    return jax.grad(f, 1)(x, y), quadratic


def _zeros(tree):
    return jax.tree.map(jnp.zeros_like, tree)
