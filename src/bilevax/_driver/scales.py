"""Natural units of a problem at its start, so that defaults carry no units."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from .._constraints import Box
from .._implicit.feasible import onto_domain
from .._implicit.hypergradient import Evaluation, looked_at
from .._methods.base import Scales
from .._problem.problem import Problem
from .._programs.quick import once_jit
from .requests import Asking, Request

# Rungs of the ladder that looks for the length of `x`.
_RUNGS = 4.0 ** np.arange(-8, 5)


def measure_scales(
    problem: Problem, x, e: Evaluation, sampled: bool = False, often: bool = True
) -> Asking[Scales]:
    """Scales at `x`, where `e` was evaluated; `often`: see `looked_at`.

    The length is the diagonal of a bounded domain; for free coordinates it is four
    times the rung of a ladder along the negative gradient at which `F` is lowest (the
    shortest such one, since `F` may be flat from somewhere on). Multiplying `x`, `f` or
    `g` by a constant multiplies the scales. `sampled`: whether steps see samples.
    """
    slope, direction, units = yield Request(_first_look, (problem, x, e))
    ranges, free = _ranges(problem, x)
    rung = 0.0
    if free:
        rung = yield from _best_rung(problem, x, direction, _unit(units), e, often)
    sizes = problem, x, e.lower.y, direction, *map(np.asarray, (ranges, rung))
    length, force = yield Request(_length_and_force, sizes)
    return Scales(length, slope, force, sampled)


def _ranges(problem: Problem, x):
    """Widths of the bounded coordinates, and whether others exist."""
    if not isinstance(problem.domain, Box):
        return np.zeros(1), True
    low, high = (
        np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(bound)])
        for bound in (problem.domain.lower, problem.domain.upper)
    )
    bounded = np.isfinite(low) & np.isfinite(high)
    width = np.zeros_like(low)
    width[bounded] = high[bounded] - low[bounded]
    return width, not bounded.all()


# Few programs instead of many operations: each of these would be loaded on its own
# before the first step.
@once_jit
def _first_look(problem: Problem, x, e: Evaluation):
    """The slope, its direction, and natural lengths along it.

    Lengths at which `x`, the slope of `f`, or the linear part of `g` change.
    """
    flat, unravel = ravel_pytree(e.grad)
    slope = jnp.linalg.norm(flat)
    direction = unravel(flat / jnp.where(slope > 0, slope, 1))
    y = e.lower.y
    answer = y, problem.multipliers_of(e.lower)
    f_x = lambda x: jax.grad(lambda x: problem.upper_value(x, *answer)[0])(x)
    g_y = lambda x: jax.grad(problem.lower_value, argnums=1)(x, y)
    bend = jax.jvp(f_x, (x,), (direction,))[1]
    pull, turn = jax.jvp(g_y, (x,), (direction,))
    norm = lambda tree: jnp.linalg.norm(ravel_pytree(tree)[0])
    units = jnp.stack([norm(x), slope / norm(bend), norm(pull) / norm(turn)])
    return slope, direction, units


def _unit(units) -> float:
    """The first length that is neither zero nor infinite; one if there is none."""
    units = np.asarray(units, float)
    usable = units[np.isfinite(units) & (units > 0)]
    return float(usable[0]) if usable.size else 1.0


def _best_rung(
    problem: Problem, x, direction, unit: float, e, often: bool
) -> Asking[float]:
    best, lowest = 0.0, float(e.value)
    for rung in unit * _RUNGS:
        ahead = (problem, x, direction, rung, e.lower, often)
        value = float((yield Request(_value_downhill, ahead)))
        if value < lowest:
            best, lowest = float(rung), value
    return best or unit


def _value_downhill(problem: Problem, x, direction, rung, warm, often: bool):
    point = _downhill(problem, x, direction, jnp.asarray(rung))
    return looked_at(problem, point, often, warm).value


@once_jit
def _downhill(problem: Problem, x, direction, rung):
    move = lambda a, b: (a - rung * b).astype(a.dtype)
    return onto_domain(problem, jax.tree.map(move, x, direction))


@once_jit
def _length_and_force(problem: Problem, x, y, direction, ranges, rung):
    """The length scale; and the sizes of `H y`, of the linear part of `g`, and of its
    change over that length."""
    dtype = ravel_pytree(x)[0].dtype
    length = jnp.hypot(jnp.linalg.norm(jnp.asarray(ranges, dtype)), 4 * rung)
    length = length.astype(dtype)
    move = jax.tree.map(lambda leaf: (length * leaf).astype(leaf.dtype), direction)
    g_y = jax.grad(problem.lower_value, argnums=1)
    gradient, curvature = jax.jvp(lambda y: g_y(x, y), (y,), (y,))
    turn = jax.jvp(lambda x: g_y(x, y), (x,), (move,))[1]
    norm = lambda tree: jnp.linalg.norm(ravel_pytree(tree)[0])
    linear = jax.tree.map(jnp.subtract, gradient, curvature)
    return length, norm(curvature) + norm(linear) + norm(turn)
