"""How far `x` is from stationary, measured after the fact and independent of methods.

The Goldstein measure at radius `delta` is the distance of zero to the convex hull of
gradients of `F` in the ball of that radius around `x`. Gradients at finitely many
random points give a smaller hull, hence an upper bound. With a domain, its normal cone
at `x` is added to the hull.
"""

import warnings
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jax.flatten_util import ravel_pytree
from jaxtyping import PRNGKeyArray, PyTree

from .._arguments import check_count, check_number, checked_key
from .._constraints import Box
from .._implicit.feasible import onto_domain
from .._implicit.hypergradient import (
    Evaluation,
    check_problem,
    evaluate,
    hypergradient,
    staged,
)
from .._lower.choose import check_choice, checked_solver, is_on_host, with_sparse_rows
from .._lower.dense import Unravel
from .._methods.polish import polish
from .._problem.checks import checked_point
from .._problem.followers import Followers
from .._problem.perturbation import AbstractPerturbation
from .._problem.problem import Problem, tilted
from .._programs.arrays import ravel, xp
from .._programs.control import on_host, stage_by_stage
from .._programs.modules import Plain, with_fields
from .._programs.quick import quick_jit
from .._programs.threads import few_threads
from .._status import status_name
from .hull import normal_cone, shortest_in_hull
from .multipliers import exact_penalty

# Gradients in one program, and how many are rather taken one by one.
_BATCH, _MANY = 64, 2000
# More than so many are worth a program for one.
_RARE = 500


@dataclass(frozen=True)
class Certificate:
    """An upper bound on the distance to stationarity, and how it came about.

    - `measure`: the bound. For a perturbed objective the norm of a fixed combination,
      estimated on fresh tilts, and `interval` its 95 % confidence interval.
    - `radius`, `samples`: the ball, and how many points of it were used.
    - `undefined`: points at which `F` is not defined (empty lower level, failures).
    - `path`: pairs of a number of samples and the bound they gave.
    - `gradient_error`: the largest estimated error of a gradient in the combination.
    - `weights`: the convex combination.
    """

    measure: float
    radius: float
    samples: int
    undefined: int
    path: tuple[tuple[int, float], ...]
    gradient_error: float
    interval: tuple[float, float] | None = None
    weights: np.ndarray = field(default_factory=lambda: np.zeros(0), repr=False)

    def __str__(self):
        text = (
            f"distance of 0 to the Goldstein subdifferential at radius "
            f"{self.radius:g}: at most {self.measure:.3e} ({self.samples} samples)"
        )
        if self.interval is not None:
            text += f", 95 % interval {self.interval[0]:.2e} to {self.interval[1]:.2e}"
        if self.undefined:
            text += f"; F was undefined at {self.undefined} further points"
        return text


def certify(
    problem: Problem | Followers,
    x: PyTree,
    radius: float | None = None,
    *,
    key: PRNGKeyArray | int,
    num_samples: int | None = None,
    perturbation: AbstractPerturbation | None = None,
    num_tilts: int = 32,
    delta_bar: float | None = None,
) -> Certificate:
    """Bound the distance of zero to the Goldstein subdifferential of `F` at `x`.

    `radius` is that of the ball around `x`; the paper's `delta_bar`, by which name it
    can still be given for one version.

    With a `perturbation`, of the perturbed objective `E_q F_q`: the combination of
    points is chosen on `num_tilts` tilts and its norm estimated on as many fresh ones,
    because a hull over noisy gradients would fit the noise.

    With upper constraints, of the exact penalty with weights above the multipliers at
    `x`, whose stationary points that satisfy them are those of the problem.
    """
    check_problem(problem)
    radius = _checked_radius(radius, delta_bar)
    if num_samples is not None:
        check_count(num_samples, "num_samples")
    check_choice(perturbation, AbstractPerturbation, "perturbation", "Gaussian")
    check_number(num_tilts, "num_tilts", "a number of tilts, two or more", 2)
    check_count(num_tilts, "num_tilts")
    key = checked_key(key)
    x = checked_point(problem, x)
    problem = exact_penalty(problem, x, radius)
    flat, _ = ravel_pytree(x)
    count = max(_BATCH, 10 * flat.size) if num_samples is None else int(num_samples)
    points = _ball(problem, x, radius, count, key)
    fresh_key = key
    if perturbation is None:
        gradients, fine, _ = _gradients(problem, x, points, None, key, 1)
    else:
        choose_key, fresh_key = jr.split(key)
        gradients, fine, _ = _gradients(
            problem, x, points, perturbation, choose_key, num_tilts
        )
    usable = gradients[fine].mean(axis=1)
    cone = normal_cone(problem, np.asarray(flat))
    path = tuple(
        (part, shortest_in_hull(usable[:part], cone)[0])
        for part in sorted({max(1, len(usable) * i // 8) for i in (1, 2, 4, 8)})
        if len(usable)
    )
    measure, weights = np.inf, np.zeros(0)
    if len(usable):
        measure, weights, _ = shortest_in_hull(usable, cone)
    interval, errors = None, np.zeros(0)
    if len(usable):
        # The measure is that of the points in the combination, and so is its error.
        chosen = np.flatnonzero(weights > 0)
        again = points[np.flatnonzero(fine)[chosen]]
        fresh, still, errors = _gradients(
            problem, x, again, perturbation, fresh_key, num_tilts, quality=True
        )
        if perturbation is not None:
            weighted = np.where(still[:, None, None], fresh, 0)
            weighted = np.tensordot(weights[chosen], weighted, 1)
            measure, interval = _norm_with_interval(weighted, cone)
    return Certificate(
        measure=float(measure),
        radius=float(radius),
        samples=int(fine.sum()),
        undefined=int((~fine).sum()),
        path=path,
        gradient_error=float(np.max(errors, initial=0)),
        interval=interval,
        weights=weights,
    )


def _checked_radius(radius, delta_bar) -> float:
    if delta_bar is not None:
        if radius is not None:
            raise ValueError("`delta_bar` is the former name of `radius`; give one.")
        warnings.warn(
            "`delta_bar` of `certify` is now called `radius`.",
            DeprecationWarning,
            stacklevel=3,
        )
        radius = delta_bar
    check_number(radius, "radius", "a positive radius", np.nextafter(0, 1))
    return float(radius)


def moreau(problem: Problem | Followers, x: PyTree, smoothing: float) -> float:
    """The size of the gradient of the Moreau envelope of `F`, the measure of [S]SIGD.

    `|x - z| / smoothing` with `z` the minimiser of `F(z) + |z - x|^2 / (2 smoothing)`.
    """
    check_problem(problem)
    what = "a positive number, the weight of the proximal term"
    check_number(smoothing, "smoothing", what, np.nextafter(0, 1))
    x = checked_point(problem, x)
    problem = exact_penalty(problem, x, smoothing)
    near = with_fields(problem, upper=_Proximal(problem.upper, x, smoothing))
    if isinstance(problem, Followers):
        near = with_fields(problem, upper=_ProximalOfAll(problem, x, smoothing))
    e = hypergradient(near, x, throw=False)
    length = smoothing * jnp.linalg.norm(ravel_pytree(e.grad)[0])
    found = polish(near, x, e.lower, length)
    gap = ravel_pytree(found.x)[0] - ravel_pytree(x)[0]
    return float(jnp.linalg.norm(gap) / smoothing)


class _Proximal(Plain):
    upper: Any
    centre: PyTree
    smoothing: float

    def __call__(self, x, y, *prices):
        out = self.upper(x, y, *prices)
        return self.beside(x, _first(out))

    def beside(self, x, value):
        gap = ravel_pytree(x)[0] - ravel_pytree(self.centre)[0]
        return value + jnp.sum(gap**2) / (2 * self.smoothing)


class _ProximalOfAll(_Proximal):
    """The same for Followers, which are in the place of their `upper`."""

    def __call__(self, x, ys, *rest):
        followers = self.upper
        if followers.upper is not None:
            return super().__call__(x, ys, *rest)
        # Each one's own, with its prices where there are any.
        values = jax.vmap(
            lambda d, y, *own: _first(followers.instance(d).upper(x, y, *own))
        )(followers.data, ys, *rest[:-1])
        return self.beside(x, jnp.mean(values))


def _first(out):
    return out[0] if isinstance(out, tuple) else out


def _ball(problem: Problem | Followers, x, radius, count, key) -> np.ndarray:
    """Uniform points of the ball, moved into the domain (which brings them closer)."""
    flat, unravel = ravel_pytree(x)
    numbers = np.random.default_rng(np.asarray(jr.key_data(key)))
    direction = numbers.normal(size=(count, flat.size))
    direction /= np.linalg.norm(direction, axis=1, keepdims=True)
    share = numbers.uniform(size=(count, 1)) ** (1 / flat.size)
    points = (np.asarray(flat) + radius * share * direction).astype(flat.dtype)
    domain = problem.domain
    if domain is None:
        return points
    if isinstance(domain, Box):
        with stage_by_stage():
            low, high = on_host((domain.flat_lower(), domain.flat_upper()))
        return np.clip(points, low, high)
    inside = jax.vmap(lambda p: ravel_pytree(onto_domain(problem, unravel(p)))[0])
    return np.asarray(jax.jit(inside)(points))


def _gradients(problem: Any, x, points, law, key, num_tilts, quality=False):
    """Gradients (point, tilt, entry), which points count, and estimates of the errors.

    The last with `quality` only.
    """
    size = points.shape[1]
    num_tilts = 1 if law is None else num_tilts
    jobs = [(i, r) for i in range(len(points)) for r in range(num_tilts)]
    solver, sparse = checked_solver(problem, None, False, on_host=True), False
    if is_on_host(problem):
        problem, sparse = with_sparse_rows(problem), True
    usual = staged(problem, x, solver, problem.adjoint)
    # Sparse rows are solved on the host, however many points there are.
    take = _one_by_one if usual and (sparse or len(jobs) <= _MANY) else _in_batches
    gradients = np.zeros((len(points), num_tilts, size))
    fine = np.ones((len(points), num_tilts), bool)
    errors = np.zeros((len(points), num_tilts))
    with few_threads(problem):
        for index, found in take(problem, x, points, law, key, jobs, quality):
            gradients[index], fine[index], errors[index] = found
    counts = np.asarray(fine.all(axis=1))
    return gradients, counts, np.where(fine, errors, 0)


def _one_by_one(problem: Any, x, points, law, key, jobs, quality):
    """Stage by stage, with what was compiled for the first one."""
    keys = None if law is None else _keys(key, np.arange(len(jobs)))
    unravel, none = Unravel.like(x), jax.tree.map(np.zeros_like, problem.y0)
    with stage_by_stage(often=len(jobs) > _RARE):
        problem, x = on_host((problem, x))
        solver = checked_solver(problem, None, False, on_host=True)
        adjoint = problem.adjoint
        warm = on_host(evaluate(problem, x, solver, adjoint, None).lower)
        for number, job in enumerate(jobs):
            q = none
            if law is not None:
                assert keys is not None
                q = on_host(law.sample(problem.y0, key=keys[number]))
            # In the form that the steps and looks of a run have, whose programs exist.
            here, at = tilted(problem, q), unravel(points[job[0]])
            e = evaluate(here, at, solver, adjoint, warm, quality)
            grad = np.asarray(ravel(on_host(e.grad)))
            solved = status_name(e.lower.status) == "successful"
            yield job, (grad, solved and np.isfinite(grad).all(), _bias(e))


def _in_batches(problem: Any, x, points, law, key, jobs, quality):
    """Programs for many gradients at once."""
    unravel = ravel_pytree(x)[1]
    warm = hypergradient(problem, x, throw=False).lower
    for first in range(0, len(jobs), _BATCH):
        part = jobs[first : first + _BATCH]
        # Batches of one size compile once.
        full = part + [part[-1]] * (_BATCH - len(part))
        numbers = np.minimum(np.arange(first, first + _BATCH), len(jobs) - 1)
        keys = _keys(key, numbers)
        at = jnp.asarray(points[[i for i, _ in full]])
        columns = _batch(problem, at, keys, law, warm, unravel, quality)
        index = tuple(np.array(part).T)
        yield index, tuple(np.asarray(column)[: len(part)] for column in columns)


def _bias(e: Evaluation):
    """The estimated error of a gradient; zero where none was asked for."""
    return xp.zeros(()) if e.quality is None else e.quality.bias


@jax.jit
def _keys(key, numbers):
    return jax.vmap(lambda n: jr.fold_in(key, n))(numbers)


def _one(problem, point, key, law, warm, unravel, quality):
    here = problem
    if law is not None:
        here = problem.perturbed(law.sample(problem.y0, key=key))
    e = hypergradient(here, unravel(point), warm=warm, quality=quality, throw=False)
    grad = ravel_pytree(e.grad)[0]
    usable = jnp.all(e.lower.success) & jnp.all(jnp.isfinite(grad))
    return grad, usable, _bias(e)


@quick_jit
def _batch(problem, points, keys, law, warm, unravel, quality):
    one = lambda point, key: _one(problem, point, key, law, warm, unravel, quality)
    if isinstance(problem, Followers):
        # They are a batch themselves.
        return jax.lax.map(lambda both: one(*both), (points, keys))
    return jax.vmap(one)(points, keys)


def _norm_with_interval(draws: np.ndarray, cone: np.ndarray):
    """`|mean|` of independent vectors, up to the cone, with a 95 % interval."""
    mean = draws.mean(axis=0)
    spread = np.sqrt(draws.var(axis=0, ddof=1).sum() / len(draws))
    size = shortest_in_hull(mean[None], cone)[0]
    return size, (max(0.0, size - 1.96 * spread), size + 1.96 * spread)
