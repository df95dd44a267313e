"""The constants of the assumptions, measured on a stated region of `x` and `y`."""

import itertools

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jax.flatten_util import ravel_pytree
from jaxtyping import Float, PRNGKeyArray

from .._constraints import Box
from .._problem.checks import check_functions
from .._problem.problem import Problem
from .._programs.quick import quick_jit
from .constants import BaseConstants, check_non_negative
from .rows import RowConstants, row_constants

_PROBES = 8
_CHUNK = 32
_MAX_VERTEX_DIMENSION = 14


def measure(
    problem: Problem,
    region_x: Box,
    region_y: Box,
    *,
    sigma_f: float = 0.0,
    num_samples: int = 256,
    key: PRNGKeyArray | None = None,
) -> BaseConstants:
    """The constants of the assumptions for `problem` on `region_x` times `region_y`.

    The regions are bounded boxes; `region_y` must hold `y*` for every `x` and tilt that
    the constants are used for. What comes back is labelled:

    - a function that is found to be quadratic (its Hessian is the same, and its third
      derivative zero, at random points of the region) has exact constants; only
      `Lbar_f`, the largest gradient over the box, is a bound in many dimensions;
    - for any other function the extreme over `num_samples` random points is an
      estimate;
    - `lambda_min` and `L_A` are exact over all sets of independent rows where these
      can be enumerated, else an estimate and a bound.

    `sigma_f` is passed on. Derivatives are formed as dense arrays.
    """
    low, high, like = _checked_region(problem, region_x, region_y)
    _check_covered(problem)
    check_non_negative("sigma_f", sigma_f)
    if num_samples < 1:
        raise ValueError(f"`num_samples` must be positive; got {num_samples}.")
    # The rows are no matter here: without them equal functions compile once.
    bare = Problem(problem.upper, problem.lower, y0=problem.y0)
    probe_key, sample_key = jr.split(jr.key(0) if key is None else key)
    probes = _points(low, high, _PROBES, probe_key)
    upper, lower = (_second_order(bare, like, probes, which) for which in (0, 1))
    upper_quadratic, lower_quadratic = upper.quadratic(), lower.quadratic()
    points = _points(low, high, num_samples, sample_key)
    split = ravel_pytree(like[0])[0].size
    bounds, estimates = set(), set()

    if upper_quadratic:
        Lbar_f, tight = _largest_gradient(upper, probes[0], low, high)
        L_f = float(np.linalg.norm(upper.hessian[0], 2))
        bounds |= set() if tight else {"Lbar_f"}
    else:
        Lbar_f, L_f = _sampled_upper(bare, like, points)
        estimates |= {"Lbar_f", "L_f"}
    if lower_quadratic:
        curvature = _curvature(lower.hessian[:1], split)
        L_gyy = L_gxy = 0.0
    else:
        curvature, L_gyy, L_gxy = _sampled_lower(bare, like, points, split)
        estimates |= {"mu_g", "L_g", "Lbar_gyy", "Lbar_gxy", "L_gyy", "L_gxy"}
    mu_g, L_g, Lbar_gyy, Lbar_gxy = curvature
    if not mu_g > 0:
        raise ValueError(
            "`lower` must be strongly convex in `y` on the region (`ass:str_cvx_h`); "
            f"got a Hessian with eigenvalue {mu_g:.3g}. Add a multiple of |y|^2 to it, "
            "or shrink the region."
        )
    rows = row_constants(problem.constraints, like[0], low.size - split)
    if not rows.exact:
        estimates.add("lambda_min")
        bounds.add("L_A")
    return BaseConstants(
        mu_g=mu_g,
        L_g=L_g,
        Lbar_gyy=Lbar_gyy,
        Lbar_gxy=Lbar_gxy,
        L_gyy=L_gyy,
        L_gxy=L_gxy,
        Lbar_f=Lbar_f,
        L_f=L_f,
        L_A=rows.L_A,
        L_B=rows.L_B,
        lambda_min=rows.lambda_min,
        sigma_f=float(sigma_f),
        region_x=region_x,
        region_y=region_y,
        bounds=frozenset(bounds),
        estimates=frozenset(estimates),
        broken=_broken(rows, upper_quadratic and L_f > 0),
    )


def _check_covered(problem: Problem) -> None:
    """Raise a `ValueError` for what the theory is not about."""
    if problem.prices:
        raise ValueError(
            "The theory is about leaders who see `y` alone, and `upper` takes prices "
            "here: its constants are not defined."
        )
    if problem.constraints.moving is not None:
        raise ValueError(
            "The theory is about rows that are linear in `x`, and parts of the "
            "constraints are functions of it here: write them with `B` and `b`."
        )


def _broken(rows: RowConstants, curved: bool) -> tuple[str, ...]:
    """What certainly fails; silence is no proof."""
    found = []
    if curved:
        found.append(
            "ass:grad_f_bound: `f` is quadratic, its gradient is bounded on the region "
            "alone."
        )
    if rows.bounded is False:
        found.append("ass:sets: the lower level's set is not bounded.")
    if rows.duplicates:
        found.append(
            "ass:rank: a row is a multiple of another, so both are active together and "
            "the multipliers are not unique."
        )
    if rows.L_B > 0 or not rows.independent:
        found.append(
            "ass: additional_LL: the set moves with `x` or the rows of `A` are "
            "dependent, so `prop:equivalence` is not proved."
        )
    return tuple(found)


class _SecondOrder(eqx.Module):
    """Derivatives of one function at some points; `third` along a fixed direction."""

    gradient: np.ndarray
    hessian: np.ndarray
    third: np.ndarray

    def quadratic(self) -> bool:
        size = np.abs(self.hessian).max()
        tol = 1e3 * np.finfo(self.hessian.dtype).eps * size
        spread = np.abs(self.hessian - self.hessian[0]).max()
        return bool(max(spread, np.abs(self.third).max()) <= tol)


def _second_order(problem, like, points, which) -> _SecondOrder:
    name = ("upper", "lower")[which]
    parts = [np.asarray(part) for part in _derivatives(problem, like, points, which)]
    # The value too: the derivatives of a logarithm are finite outside its domain.
    if not all(np.isfinite(part).all() for part in parts):
        raise ValueError(
            f"`{name}` and its derivatives must be finite on the region; got a NaN or "
            "an infinity at a sampled point. Shrink the region."
        )
    return _SecondOrder(*parts[1:])


def _flat_function(problem, like, which):
    """`f` (0) or `g` (1) as a function of the raveled pair `(x, y)`."""
    unravel = ravel_pytree(like)[1]
    if which == 0:
        return lambda z: problem.upper_value(*unravel(z))[0]
    return lambda z: problem.lower_value(*unravel(z))


@quick_jit
def _derivatives(problem, like, points, which):
    function = _flat_function(problem, like, which)
    direction = jnp.sin(1.0 + 1.7 * jnp.arange(points.shape[1])).astype(points.dtype)

    def at(z):
        hessian, third = jax.jvp(jax.hessian(function), (z,), (direction,))
        return *jax.value_and_grad(function)(z), hessian, third

    return jax.vmap(at)(points)


@quick_jit
def _third_derivatives(problem, like, points):
    function = _flat_function(problem, like, 1)
    return jax.vmap(jax.jacfwd(jax.hessian(function)))(points)


def _curvature(hessians, split):
    """`mu_g`, `L_g`, `Lbar_gyy`, `Lbar_gxy` over Hessians of `g` in `(x, y)`."""
    yy, rows = hessians[:, split:, split:], hessians[:, split:, :]
    eigenvalues = np.linalg.eigvalsh(yy)
    return (
        float(eigenvalues.min()),
        _largest_norm(rows),
        float(np.abs(eigenvalues).max()),
        _largest_norm(rows[:, :, :split]),
    )


def _largest_norm(matrices) -> float:
    return float(np.linalg.norm(matrices, 2, axis=(-2, -1)).max())


def _largest_gradient(upper: _SecondOrder, point, low, high):
    """The largest gradient of a quadratic over a box, and whether that is tight.

    A norm of an affine map is convex, so the largest is at a vertex.
    """
    hessian, middle = upper.hessian[0], (low + high) / 2
    centre = upper.gradient[0] + hessian @ (middle - point)
    reach = hessian * ((high - low) / 2)
    reach = reach[:, np.abs(reach).max(0) > 0]
    if reach.shape[1] > _MAX_VERTEX_DIMENSION:
        return float(np.linalg.norm(np.abs(centre) + np.abs(reach).sum(1))), False
    signs = np.array(list(itertools.product((-1, 1), repeat=reach.shape[1])))
    return float(np.linalg.norm(centre + signs @ reach.T, axis=1).max()), True


def _sampled_upper(problem, like, points):
    Lbar_f = L_f = 0.0
    for chunk in _chunks(points):
        found = _second_order(problem, like, chunk, 0)
        Lbar_f = max(Lbar_f, float(np.linalg.norm(found.gradient, axis=1).max()))
        L_f = max(L_f, _largest_norm(found.hessian))
    return Lbar_f, L_f


def _sampled_lower(problem, like, points, split):
    """Sampled curvature, and local Lipschitz constants of its two blocks.

    At one point, `|D_u M|_2 <= |D_u M|_F`, whose largest value over unit `u` is the
    norm of the derivative of `M` as a matrix from `u` to the entries.
    """
    curvatures, L_gyy, L_gxy = [], 0.0, 0.0
    for chunk in _chunks(points):
        found = _second_order(problem, like, chunk, 1)
        curvatures.append(_curvature(found.hessian, split))
        third = np.asarray(_third_derivatives(problem, like, chunk))
        n, d = third.shape[:2]
        yy = third[:, split:, split:].reshape(n, -1, d)
        xy = third[:, split:, :split].reshape(n, -1, d)
        L_gyy, L_gxy = max(L_gyy, _largest_norm(yy)), max(L_gxy, _largest_norm(xy))
    mu_g, *others = zip(*curvatures, strict=True)
    return (min(mu_g), *map(max, others)), L_gyy, L_gxy


def _chunks(points):
    """Chunks of one shape, so that one compilation serves all; the last is padded."""
    for i in range(0, len(points), _CHUNK):
        chunk = points[i : i + _CHUNK]
        yield np.concatenate([chunk, np.repeat(chunk[:1], _CHUNK - len(chunk), 0)])


def _points(low, high, count, key) -> Float[np.ndarray, "count d"]:
    """Random points of a box: every other one a vertex, where extremes tend to be."""
    share = np.array(jr.uniform(key, (count, low.size), low.dtype))
    share[1::2] = np.round(share[1::2])
    return low + share * (high - low)


def _checked_region(
    problem, region_x, region_y
) -> tuple[np.ndarray, np.ndarray, tuple]:
    """The bounds of the region, raveled, and a pair of trees of its structure."""
    if not isinstance(problem, Problem):
        raise ValueError(
            f"`problem` must be a Problem; got {type(problem).__name__}. Call "
            "`.draw(key)` on a StochasticProblem first."
        )
    for name, region in (("region_x", region_x), ("region_y", region_y)):
        if not isinstance(region, Box):
            raise ValueError(f"`{name}` must be a Box; got {type(region).__name__}.")
        low, high = np.asarray(region.flat_lower()), np.asarray(region.flat_upper())
        if not (np.isfinite(low).all() and np.isfinite(high).all()):
            raise ValueError(
                f"`{name}` must be bounded; got an infinite or NaN bound. The "
                "constants of a curved function are infinite on an unbounded region."
            )
        if not (low <= high).all():
            raise ValueError(f"`{name}` must have lower <= upper; it is empty.")
    shapes = lambda tree: jax.tree.map(jnp.shape, tree)
    like = (region_x.lower, region_y.lower)
    if shapes(like[1]) != shapes(problem.y0):
        raise ValueError(
            "`region_y` must have the structure and shapes of `y`; expected "
            f"{shapes(problem.y0)}, got {shapes(like[1])}."
        )
    problem.constraints.check_x(like[0])
    check_functions(problem, like[0])
    low, high = (
        np.asarray(ravel_pytree(pair)[0])
        for pair in (like, (region_x.upper, region_y.upper))
    )
    return low, high, like
