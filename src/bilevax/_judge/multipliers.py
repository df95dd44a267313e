"""Multipliers of upper constraints at a point, also where `F` or `C` has a kink.

Of gradients in a small ball around `x`, the shortest vector of

    conv { F'(z) } + sum_j mu_j C_j'(z) + normal cone of the domain,   mu >= 0,

with those `j` whose constraint is tight at `x` to the radius. Its length is an upper
bound on the distance from stationarity, as in `certificate.py`.
"""

from typing import Any, NamedTuple

import jax
import numpy as np

from .._implicit.upper_constraints import size_of
from .._methods.sequential import Oracle, Point
from .._problem.penalised import rows_of, with_penalty
from .._programs.modules import with_fields
from .hull import normal_cone, shortest_in_hull

# Points of the ball, for each entry of `x` and at least.
_POINTS, _LEAST, _MOST = 4, 16, 200
# Slopes below this share of the size of a constraint over the length of `x` are zero.
_NOISE = 1e-10


class Multipliers(NamedTuple):
    """One for each row, signed for equalities; and the length that is left."""

    values: np.ndarray
    residual: float


def multipliers_at(oracle: Oracle, p: Point, radius: float) -> Multipliers:
    """Multipliers from gradients at `p`; in the ball where those leave something."""
    alone = _fitted(oracle, p, [p], 0.0)
    slope = np.linalg.norm(p.slope)
    if alone.residual <= 1e-7 * slope:
        return alone
    numbers = np.random.default_rng(0)
    count = min(_MOST, max(_LEAST, _POINTS * p.x.size))
    points = [p]
    for _ in range(count):
        ahead = numbers.normal(size=p.x.size)
        ahead *= numbers.uniform() ** (1 / p.x.size) / np.linalg.norm(ahead)
        near = oracle(oracle.inside(p.x + radius * ahead), p.lower)
        if near.fine:
            points.append(near)
    around = _fitted(oracle, p, points, radius)
    return around if around.residual < alone.residual else alone


def _fitted(oracle: Oracle, p: Point, points: list[Point], radius: float):
    m, less = len(p.rows), oracle.less
    reach = 1e-7 * oracle.sizes + radius * np.linalg.norm(p.jacobian, axis=1)
    tight = np.flatnonzero((p.rows >= -reach) | (np.arange(m) >= less))
    rows, signs, owners = [], [], []
    for q in points:
        for j in tight:
            for sign in (1.0,) if j < less else (1.0, -1.0):
                rows.append(sign * q.jacobian[j])
                signs.append(sign)
                owners.append(j)
    cone = np.array(rows).reshape(-1, p.x.size)
    sizes = np.linalg.norm(cone, axis=1)
    # What rounding leaves of a slope of zero is none.
    owners = np.array(owners, int)
    used = sizes > _NOISE * oracle.sizes[owners] / oracle.length
    cone, signs, owners = cone[used], np.array(signs)[used], owners[used]
    unit = cone / sizes[used][:, None]
    normals = normal_cone(oracle.problem, p.x)
    gradients = np.array([q.slope for q in points])
    residual, _, weights = shortest_in_hull(gradients, np.concatenate([unit, normals]))
    shares = weights[: len(unit)] / sizes[used]
    return Multipliers(np.bincount(owners, signs * shares, m).astype(float), residual)


def exact_penalty(problem: Any, x, radius: float) -> Any:
    """The exact penalty with weights above the multipliers at `x`.

    A problem without upper constraints is its own.
    """
    if not problem.is_coupled:
        return problem
    shapes = rows_of(problem).shapes(problem, x)
    sizes = np.zeros(size_of(shapes))
    length = np.sqrt(sum(np.sum(np.square(leaf)) for leaf in jax.tree.leaves(x)))
    length = max(float(length), radius)
    oracle = Oracle(problem, x, size_of(shapes[0]), sizes, length)
    p = oracle.at(x)
    oracle.seen(p)
    oracle.sizes[oracle.sizes == 0] = 1.0
    norms = np.linalg.norm(p.jacobian, axis=1)
    if not p.fine:
        return with_penalty(problem, 1.0, np.ones(len(norms)))
    mu = np.abs(multipliers_at(oracle, p, radius).values)
    weights = np.linalg.norm(p.slope) / np.where(norms > 0, norms, 1)
    return with_penalty(problem, 1.0, 2 * np.maximum(mu, weights))


def as_given(problem: Any, penalty: Any) -> Any:
    """A tree like the exact penalty as one like the problem."""
    if not problem.is_coupled:
        return penalty
    upper = penalty.upper
    return with_fields(
        penalty,
        upper=upper.upper,
        upper_constraints=upper.rows.constraints,
        upper_equalities=upper.rows.equalities,
    )
