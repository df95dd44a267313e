"""Natural units of a problem at its start, so that defaults carry no units."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from ._constraints import Box
from ._feasible import onto_domain
from ._implicit import Evaluation, hypergradient
from ._methods.base import Scales
from ._problem import Problem

# Rungs of the ladder that looks for the length of `x`.
_RUNGS = 4.0 ** np.arange(-8, 5)


def measure_scales(problem: Problem, x, e: Evaluation) -> Scales:
    """Scales at `x`, where `e` was evaluated.

    The length is the diagonal of a bounded domain; for free coordinates it is four
    times the largest rung of a ladder along the negative gradient at which `F` is still
    lower than at `x`. Multiplying `x`, `f` or `g` by a constant multiplies the scales.
    """
    flat, unravel = ravel_pytree(x)
    grad = ravel_pytree(e.grad)[0]
    slope = jnp.linalg.norm(grad)
    direction = grad / jnp.where(slope > 0, slope, 1)
    ranges, free = _ranges(problem, flat)
    length = jnp.linalg.norm(ranges)
    if free:
        unit = _unit(problem, x, e.lower.y, unravel(direction), slope)
        rung = _largest_rung(problem, flat, unravel, direction, unit, e)
        length = jnp.hypot(length, 4 * rung)
    force = _force(problem, x, e.lower.y, unravel(length * direction))
    return Scales(length, slope, force)


def _ranges(problem: Problem, flat):
    """Widths of the bounded coordinates, and whether others exist."""
    if not isinstance(problem.domain, Box):
        return jnp.zeros_like(flat), True
    low = ravel_pytree(problem.domain.lower)[0]
    high = ravel_pytree(problem.domain.upper)[0]
    bounded = jnp.isfinite(low) & jnp.isfinite(high)
    width = jnp.where(bounded, high - low, 0)
    return width, bool(jnp.any(~bounded))


@eqx.filter_jit
def _units(problem: Problem, x, y, direction, slope):
    """Lengths at which `x`, the slope of `f`, or the linear part of `g` change."""
    f_x = lambda x: jax.grad(lambda x: problem.upper_value(x, y)[0])(x)
    g_y = lambda x: jax.grad(problem.lower_value, argnums=1)(x, y)
    bend = jax.jvp(f_x, (x,), (direction,))[1]
    pull, turn = jax.jvp(g_y, (x,), (direction,))
    norm = lambda tree: jnp.linalg.norm(ravel_pytree(tree)[0])
    return jnp.stack([norm(x), slope / norm(bend), norm(pull) / norm(turn)])


def _unit(problem: Problem, x, y, direction, slope) -> float:
    """The first length that is neither zero nor infinite; one if there is none."""
    units = np.asarray(_units(problem, x, y, direction, slope), float)
    usable = units[np.isfinite(units) & (units > 0)]
    return float(usable[0]) if usable.size else 1.0


def _largest_rung(problem: Problem, flat, unravel, direction, unit, e):
    best = 0.0
    for rung in unit * _RUNGS:
        point = onto_domain(problem, unravel(flat - rung * direction))
        value = hypergradient(problem, point, throw=False).value
        if value < e.value:
            best = rung
    return best or unit


@eqx.filter_jit
def _force(problem: Problem, x, y, move):
    """Sizes of `H y`, of the linear part of `g`, and of its change along `move`."""
    g_y = jax.grad(problem.lower_value, argnums=1)
    gradient, curvature = jax.jvp(lambda y: g_y(x, y), (y,), (y,))
    turn = jax.jvp(lambda x: g_y(x, y), (x,), (move,))[1]
    norm = lambda tree: jnp.linalg.norm(ravel_pytree(tree)[0])
    linear = jax.tree.map(jnp.subtract, gradient, curvature)
    return norm(curvature) + norm(linear) + norm(turn)
