"""Where runs start, and how many of them where the caller does not say."""

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, PyTree

from .._constraints import Box
from .._problem.checks import checked_point
from .._problem.problem import AbstractProblem, Problem

# Starts of a problem whose solves are cheap, and how often the best of them must have
# come before the rest is left out.
_SEVERAL, _AGREE = 8, 3
# What counts as cheap: numbers in `x`, and numbers and rows of the lower level.
_MOST_X, _MOST_LOWER = 20, 200
# Ends that agree to this share of their size are one.
_SAME = 1e-6


def usual_count(problem: AbstractProblem, view: Problem, x) -> int:
    """How many starts: several where `x` is in a bounded box and solves are cheap.

    By sizes alone, so that the answer does not depend on the machine.
    """
    if problem.is_sampled or not is_bounded(view.domain):
        return 1
    lower = jax.tree.leaves(view.y0)
    numbers = sum(leaf.size for leaf in lower) + _rows(view)
    small = ravel_pytree(x)[0].size <= _MOST_X and numbers <= _MOST_LOWER
    return _SEVERAL if small else 1


def _rows(view) -> int:
    """Rows of the lower level, of all followers where there are many."""
    each = view.constraints if isinstance(view, Problem) else view.one.constraints
    return each.num_rows * (1 if isinstance(view, Problem) else len(view))


def enough(ends: list) -> bool:
    """Whether the best of these ends has come so often that others may be left out."""
    values = [float(end.value) for end in ends if end.success]
    best = min(values, default=np.inf)
    return sum(value - best <= _SAME * abs(best) for value in values) >= _AGREE


def is_bounded(domain) -> bool:
    """Whether `x` is in a box with finite bounds."""
    if not isinstance(domain, Box):
        return False
    bounds = jax.tree.leaves((domain.lower, domain.upper))
    return all(np.isfinite(bound).all() for bound in bounds)


def first_start(problem: Problem, x0: PyTree | None) -> PyTree[Array]:
    """`x0`; without one the middle of a bounded box."""
    if x0 is None:
        domain = problem.domain
        if not is_bounded(domain):
            raise ValueError(
                "`x0` is needed, the point to start from: it may be left out only "
                "where `domain` is a Box with finite bounds, whose middle is taken "
                "then."
            )
        assert isinstance(domain, Box)
        x0 = jax.tree.map(lambda a, b: a + 0.5 * (b - a), domain.lower, domain.upper)
    return checked_point(problem, x0)


def starting_points(problem: Problem, first, starts, count: int, key) -> list[PyTree]:
    """The first start, those given, and others drawn until there are `count`."""
    points = [first, *(_checked_start(problem, *pair) for pair in enumerate(starts))]
    flat, unravel = ravel_pytree(first)
    for i in range(count - len(points)):
        points.append(unravel(_random_start(problem, flat, jr.fold_in(key, i))))
    return points


def _checked_start(problem: Problem, i: int, point) -> PyTree:
    try:
        return checked_point(problem, point)
    except ValueError as error:
        raise ValueError(f"`starts[{i}]` is no start: {error}") from None


def _random_start(problem: Problem, flat, key):
    """Uniform in a bounded box; along free coordinates normal around `x0`."""
    spread = jnp.maximum(jnp.linalg.norm(flat) / np.sqrt(flat.size), 1.0)
    point = flat + spread * jr.normal(key, flat.shape, flat.dtype)
    domain = problem.domain
    if not isinstance(domain, Box):
        return point
    low, high = ravel_pytree(domain.lower)[0], ravel_pytree(domain.upper)[0]
    bounded = jnp.isfinite(low) & jnp.isfinite(high)
    share = jr.uniform(jr.fold_in(key, 0), flat.shape, flat.dtype)
    inside = jnp.where(bounded, low, 0) + share * jnp.where(bounded, high - low, 0)
    return jnp.where(bounded, inside, jnp.clip(point, low, high))
