"""How good one hypergradient is: conditioning, and bias from an inexact lower level."""

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Bool, Float

from .._lower.base import LowerSolution
from .._lower.dense import Unravel, along, hessian_operator, largest
from .._programs.arrays import ravel, xp
from .._programs.control import opened, stage
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
    error = _lower_error(system, x, lower, adjoint)
    problem = opened(whole)[0]
    # Where rows turn the gradient depends on multipliers, too.
    mu = lower.multipliers if problem.prices or problem.constraints.turns else None
    push, quadratic = _bent_upper(whole, x, (system.y, mu))
    change = _gradient_change(whole, system, x, lower, adjoint, (mu, push, error))
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
    """`y* - y`, and the same of multipliers, to first order: one KKT solve."""
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
    return adjoint.solve(system, lower, -gradient, bottom)[:2]


def _gradient_change(whole, system: KKTSystem, x, lower, adjoint, known):
    """The derivative of the implicit gradient in the answer, along its error.

    With `K` the KKT matrix, `L = f - <grad_y g, v>` and `K (v, w) = (f_y, f_mu)`, an
    answer that moves by `(e, d)` moves `(v, w)` by the solution of `K (dv, dw) = r`,
    with `r` the derivative of `(L_y, L_mu)` along `(e, d)`. There is no `mu` where
    `upper` takes no prices.
    """
    mu, (f_y, f_mu), (y_error, mu_error) = known
    zeros = xp.zeros_like(lower.multipliers)
    answer = (system.y, mu), (y_error, None if mu is None else mu_error)
    only = lambda part: zeros if part is None else xp.where(system.active, part, 0)
    v, w, _ = adjoint.solve(system, lower, f_y, only(f_mu))
    bent, turned = _bent(whole, x, v, *answer)
    dv, dw, _ = adjoint.solve(system, lower, bent, only(turned))
    (at, along), direction = answer, (dv, dw)
    return _change(whole, x, (*at, v, w), (*along, *direction))


def _flat(whole):
    """`f` and `g` as functions of `x` and of a flat answer, `y` and multipliers."""
    problem = whole[0]
    unravel = Unravel.like(problem.y0)
    f = lambda x, answer: problem.upper_value(x, unravel(answer[0]), answer[1])[0]
    g = lambda x, y: problem.lower_value(x, unravel(y))
    return f, g


@stage
def _bent(whole, x, v, answer, error):
    """`f_yy e - (dH e) v`, and what there is beside it for multipliers."""
    f, g = _flat(whole)

    def pull(answer):
        """`grad_y f - H v`, and `f_mu`."""
        bent = jax.jvp(jax.grad(g, 1), (x, answer[0]), (_zeros(x), v))[1]
        f_y, f_mu = jax.grad(f, 1)(x, answer)
        return f_y - bent, f_mu

    return jax.jvp(pull, (answer,), (error,))[1]


@stage
def _change(whole, x, at, direction):
    """The derivative of the implicit gradient in the answer, `v` and `w`."""
    f, g = _flat(whole)

    def assembled(y, mu, v, w):
        def lagrangian(x):
            bent = jax.jvp(lambda y: g(x, y), (y,), (v,))[1]
            held = w if mu is None else jnp.where(w != 0, mu, 0)
            tree = Unravel.like(whole[0].y0)
            moved = whole[0].constraints.drift(x, tree(y), held, tree(v), w)
            return f(x, (y, mu)) - bent - moved

        return ravel_pytree(jax.grad(lagrangian)(x))[0]

    return jax.jvp(assembled, at, direction)[1]


@stage
def _bent_upper(whole, x, answer):
    """The gradient of `f` in the answer, and whether `f` and `g` are quadratic in it.

    A randomised test: second derivatives along one direction here and at a point a unit
    away must agree to rounding, those mixed with `x` included.
    """
    f, g = _flat(whole)
    tol = tolerances(answer[0].dtype)
    wave = lambda part, a, b: a(b + 1.7 * jnp.arange(part.size)).astype(part.dtype)
    lengths = jax.tree.map(lambda part: 1 + jnp.linalg.norm(part), answer)
    d = jax.tree.map(lambda part: wave(part, jnp.sin, 1.0), answer)
    away = jax.tree.map(
        lambda part, length: part + length * wave(part, jnp.cos, 0.3), answer, lengths
    )
    scale = sum(jax.tree.leaves(lengths))

    def bends(answer):
        pieces = []
        for function, take in ((f, lambda pair: pair), (g, lambda pair: pair[0])):

            def slope(x, at, function=function, take=take):
                return jax.jvp(lambda at: function(x, at), (at,), (take(d),))[1]

            both = jax.grad(slope, argnums=(0, 1))(x, take(answer))
            pieces.append(ravel_pytree(both)[0])
        return jnp.concatenate(pieces)

    here, there = bends(answer), bends(away)
    change, *size = largest(here - there, here, there)
    quadratic = change <= 100 * tol.rounding * sum(size) * scale
    return jax.grad(f, 1)(x, answer), quadratic


def _zeros(tree):
    return jax.tree.map(jnp.zeros_like, tree)
