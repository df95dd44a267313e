"""Whether `F` goes on falling beyond the end of a run, and for how long.

A run on a function without a minimiser ends somewhere far away, with nothing wrong
there. So `F` is looked at beyond the end, along a ray whose points are twice as far
each time: by the way the run has come, and by the gradient at its end. Most runs end at
a point from which `F` rises either way; that takes two evaluations.
"""

import enum

import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from .._implicit.feasible import onto_domain
from .._implicit.hypergradient import Evaluation, looked_at
from .._problem.problem import Problem
from .._status import has_value
from .._tolerances import tolerances
from .run import plain
from .starts import is_bounded

# Points of a ray; the last is 1e12 times as far as the first.
_DOUBLINGS = 40
# A ray must have had a value for this long: to 1e8 times its first length.
_ENOUGH = 27
# A run that went further than so many lengths is looked at from there on: the end
# itself may be where numbers end.
_FAR = 1e6
# What may be lost of the gain of a doubling over the last ten, where `F` falls without
# bound: nothing for logarithms and powers, 7 % for `x ** -0.01`.
_KEPT = 0.99
# Steps down the gradient that are tried, in lengths of the problem, and the share of
# `F` that one of them must gain to be told.
_SHORT_STEPS = (1e-2, 1e-3, 1e-4)
_WORTH_TELLING = 1e-3
# Halvings of the length in which a rise before the fall is looked for.
_HALVINGS = 12


class Beyond(enum.Enum):
    """What `F` does beyond the end of a run."""

    rises = "F rises beyond the end, or has no value there"
    level = (
        "F does not rise again beyond x, however far: its infimum may not be attained, "
        "or be attained on an unbounded set"
    )
    unbounded = "F falls without bound"


def beyond(
    problem: Problem, x0, x, e: Evaluation, length: float, often: bool = True
) -> Beyond:
    """What `F` does beyond `x`, where a run from `x0` has ended.

    `e` is the evaluation at `x`, `length` the length scale of the problem; `often`: see
    `looked_at`.
    """
    if is_bounded(problem.domain):
        return Beyond.rises
    start, end = np.asarray(ravel_pytree(x0)[0]), np.asarray(ravel_pytree(x)[0])
    slope, value = np.asarray(ravel_pytree(e.grad)[0]), float(e.value)
    unravel = ravel_pytree(x)[1]

    def F(point: np.ndarray) -> float:
        if not np.all(np.isfinite(point)):
            return np.nan
        at = onto_domain(problem, unravel(jnp.asarray(point, end.dtype)))
        found = looked_at(plain(problem), at, often)
        value = float(found.value)
        return value if has_value(found.status) or value == -np.inf else np.nan

    noise = 8 * tolerances(end.dtype).eps * abs(value)
    with np.errstate(over="ignore", invalid="ignore"):
        come = end - start
        size = _norm(come)
        # By the way the run has come.
        found = Beyond.rises
        if size > _FAR * length:
            first, ahead = _FAR * length, come / size
            found = _along(F, start, ahead, first, F(start + first * ahead))
        elif size > 0:
            ahead = come / size
            found = _along(F, start, ahead, size, value)
            if found is Beyond.unbounded and _rises_first(F, end, ahead, length):
                found = Beyond.rises
        # By the gradient, where it promises more than rounding.
        steep = _norm(slope)
        if found is not Beyond.unbounded and steep * length > noise:
            ahead = -slope / steep
            down = _along(F, end, ahead, length, F(end + length * ahead), value)
            if down is Beyond.unbounded and not _rises_first(F, end, ahead, length):
                found = down
    return found


def still_falling(problem: Problem, x, e: Evaluation, length: float) -> str | None:
    """Words for a run that has ended where a short step down the gradient pays.

    Steps that fall with a plan may vanish long before `F` has reached the bottom.
    """
    slope, unravel = ravel_pytree(e.grad)
    size, value = float(jnp.linalg.norm(slope)), float(e.value)
    if not (np.isfinite(size) and size > 0):
        return None
    least = value - _WORTH_TELLING * abs(value)
    for share in _SHORT_STEPS:
        move = ravel_pytree(x)[0] - share * length * slope / size
        at = onto_domain(problem, unravel(move))
        found = looked_at(plain(problem), at, often=True)
        if has_value(found.status) and float(found.value) < least:
            return (
                f"F was still falling: one step down its gradient leads from "
                f"{value:.6g} to {float(found.value):.6g}; take more steps, or polish"
            )
    return None


def _along(F, origin, direction, first, here: float, before=np.inf) -> Beyond:
    """What `F` does from `origin + first * direction` on, where it is `here`."""
    values = [here]
    if not here < before:
        return Beyond.rises
    for k in range(1, _DOUBLINGS + 1):
        value = F(origin + 2.0**k * first * direction)
        noise = 8 * tolerances(origin.dtype).eps * abs(values[-1])
        if value == -np.inf:
            return Beyond.unbounded
        if np.isnan(value):
            break
        if value > values[-1] + noise:
            return Beyond.rises
        values.append(value)
    if len(values) <= _ENOUGH:
        return Beyond.rises
    gains = -np.diff(values)
    falls = np.all(gains[-10:] > 0) and gains[-1] >= _KEPT * gains[-10]
    return Beyond.unbounded if falls else Beyond.level


def _rises_first(F, end, direction, length: float) -> bool:
    """Whether a barrier lies between the end and the fall: a local minimiser."""
    steps = length * 2.0 ** -np.arange(_HALVINGS, -1.0, -1.0)
    values = [F(end)]
    for step in steps:
        values.append(F(end + step * direction))
        if values[-1] == -np.inf:
            return False
        if not values[-1] < values[-2]:
            return True
    return False


def _norm(v: np.ndarray) -> float:
    """The Euclidean norm, of the largest numbers as well."""
    largest = float(np.max(np.abs(v), initial=0))
    return largest * float(np.linalg.norm(v / largest)) if largest > 0 else 0.0
