"""How the best value moves with the data of a problem.

By the envelope theorem: at a minimiser `x` the change of `x` itself adds nothing to
first order, so `dF* / d(data)` is the derivative of `F` with `x` held. Where a bound on
`x` holds, it stays. On a kink `x` moves along with the kink; there the derivatives of
all sides count, with the weights with which their gradients in `x` cancel.
"""

from dataclasses import dataclass
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from jaxtyping import PyTree

from .._constraints import Box
from .._implicit.feasible import onto_domain
from .._implicit.hypergradient import hypergradient
from .._implicit.solution_map import solution_map
from .._problem.checks import checked_point
from .._problem.followers import Followers, check_drawn
from .._problem.problem import Problem
from .._programs.modules import with_fields
from .._status import BilevelError, has_value, status_name
from .hull import normal_cone, shortest_in_hull
from .multipliers import as_given, exact_penalty

# Where sides of a kink are looked for, in widths or sizes of the coordinates.
_BESIDE = 1e-6
# Gradients whose combination is smaller than this share of them cancel.
_CANCELLED = 1e-4
# Random points beside those along the coordinates.
_RANDOM = 8


@dataclass(frozen=True)
class Sensitivity:
    """`dF* / d(data)`.

    - `data`: a tree like the problem, with derivatives in the place of its arrays:
      `data.lower.slope` for a field `slope` of the function `lower`, `data.upper.args`
      for a `Partial`, `data.constraints.b`; and `data.domain.lower`, `.upper`.
    - `value`: `F`; `sides`: how many pieces of `F` met at `x`.
    - `residual`: what is left of the gradients in `x`, as a share of their size; the
      envelope theorem wants zero.
    """

    data: Any
    value: float
    sides: int
    residual: float

    @property
    def is_stationary(self) -> bool:
        """Whether `x` is a point at which the theorem holds, as far as can be seen."""
        return self.residual <= _CANCELLED

    def __str__(self):
        lines = [f"F = {self.value:.8g}, from {self.sides} side(s) of F"]
        if not self.is_stationary:
            lines.append(
                f"x is not stationary (gradients cancel to {self.residual:.1e} of "
                "their size): these are derivatives of F at this x, not of its best "
                "value."
            )
        for path, leaf in jax.tree_util.tree_flatten_with_path(self.data)[0]:
            shown = np.array2string(np.asarray(leaf), precision=6, threshold=12)
            lines.append(f"{jax.tree_util.keystr(path)}: {shown}")
        return "\n".join(lines)


def sensitivity(problem: Problem | Followers, x: PyTree) -> Sensitivity:
    """The derivative of the best value with respect to every array in `problem`.

    `x` is a minimiser, such as `solution.x`. Data that are to count are arrays inside
    the problem: of the constraints, bound by `jax.tree_util.Partial`, or fields of an
    `equinox.Module`; numbers a lambda found around it are none.
    """
    check_drawn(problem)
    x = checked_point(problem, x)
    e = hypergradient(problem, x, throw=False)
    if not has_value(e.status):
        raise BilevelError(
            f"The sensitivity failed: F has no value at x. {e.message}", e.status, e
        )
    flat, unravel = ravel_pytree(x)
    # Upper constraints count as the exact penalty, which has kinks where they hold.
    given, problem = problem, exact_penalty(problem, x, _BESIDE)
    points = _points(problem, flat, unravel)
    cone = normal_cone(problem, np.asarray(flat))
    slopes, changes = [], []
    for point in points:
        found = hypergradient(problem, unravel(point), throw=False)
        fine = status_name(found.status) in ("successful", "violated")
        if fine and not _is_known(slopes, found.grad):
            slopes.append(np.asarray(ravel_pytree(found.grad)[0]))
            changes.append(point)
    if not slopes:
        slopes, changes = [np.asarray(ravel_pytree(e.grad)[0])], [flat]
    size = max(np.linalg.norm(slope) for slope in slopes)
    measure, weights, _ = shortest_in_hull(np.array(slopes), cone)
    used = np.flatnonzero(weights > 1e-9)
    total = None
    for i in used:
        part = _with_x_held(problem, unravel(jnp.asarray(changes[i], flat.dtype)))
        part = jax.tree.map(lambda leaf, w=weights[i]: w * leaf, part)
        total = part if total is None else jax.tree.map(jnp.add, total, part)
    mean = weights @ np.array(slopes)
    total = _with_bounds(problem, total, x, mean)
    return Sensitivity(
        data=as_given(given, total),
        value=float(e.value),
        sides=len(used),
        residual=float(measure / size) if size > 0 else 0.0,
    )


def _points(problem, flat, unravel) -> list:
    """`x`, and points beside it on what may be other sides of a kink."""
    size = flat.size
    units = np.maximum(np.abs(np.asarray(flat)), 1e-3)
    numbers = np.random.default_rng(0)
    random = numbers.normal(size=(_RANDOM, size)) / np.sqrt(size)
    moves = np.concatenate([np.eye(size), -np.eye(size), random, -random])
    beside = np.asarray(flat) + _BESIDE * units * moves
    inside = [
        ravel_pytree(onto_domain(problem, unravel(jnp.asarray(p, flat.dtype))))[0]
        for p in beside
    ]
    return [flat, *inside]


def _is_known(slopes: list[np.ndarray], grad) -> bool:
    """Whether a point of the same piece of `F` was met before."""
    new = np.asarray(ravel_pytree(grad)[0])
    near = lambda old: np.linalg.norm(new - old) <= _CANCELLED * np.linalg.norm(old)
    return any(near(old) for old in slopes)


def _with_x_held(problem, x):
    """`dF / d(data)` at this `x`."""
    free, fixed = eqx.partition(_plain(problem), eqx.is_inexact_array)

    def F(free):
        here = eqx.combine(free, fixed)
        answer = lambda problem: solution_map(problem, x, multipliers=True)
        if isinstance(here, Followers):
            one = lambda d, q: answer(here.follower(d, q))
            y, prices = jax.vmap(one)(here.data, here.tilt)
        else:
            y, prices = answer(here)
        return here.upper_value(x, y, prices)[0]

    return jax.grad(F)(free)


def _plain(problem):
    """The problem without what is no data: where solvers start, and bounds on `x`."""
    still = jax.tree.map(jax.lax.stop_gradient, problem.y0)
    return with_fields(problem, y0=still)


def _with_bounds(problem, total, x, slope):
    """With what it would be worth to move a bound on `x` that holds."""
    domain = problem.domain
    if not isinstance(domain, Box):
        return total
    unravel = ravel_pytree(x)[1]
    flat = np.asarray(ravel_pytree(x)[0])
    low, high = (np.asarray(ravel_pytree(b)[0]) for b in (domain.lower, domain.upper))
    at = lambda bound: np.abs(flat - bound) <= 1e-9 * (1 + np.abs(bound))
    as_tree = lambda v: unravel(jnp.asarray(v, flat.dtype))
    lower = as_tree(np.where(at(low) & (slope > 0), slope, 0.0))
    upper = as_tree(np.where(at(high) & (slope < 0), slope, 0.0))
    moved = with_fields(total.domain, lower=lower, upper=upper)
    return with_fields(total, domain=moved)
