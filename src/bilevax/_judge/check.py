"""Whether the hypergradient is that of `F`: one-sided differences, kinks in mind.

At a kink `F` has two slopes along a direction, and a gradient that agrees with one of
them is right. So each direction is looked at from both sides. With a step `h`

    D(h) = (-3 F(x) + 4 F(x + h) - F(x + 2h)) / 2h

is off by `h^2 F''' / 3` and by what rounding makes of `F`, some `4 noise / h`. Of a
ladder of steps the one counts at which the two, the first read off the change from the
step before, are least together. A kink within `2h` spoils long steps only.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from jaxtyping import PRNGKeyArray, PyTree

from .._arguments import checked_key
from .._constraints import Box
from .._implicit.adjoint import Danskin
from .._implicit.hypergradient import hypergradient
from .._problem.checks import checked_point
from .._problem.coordinates import checked_names
from .._problem.followers import Followers, check_drawn
from .._problem.problem import AbstractLocalLower, Problem
from .._status import has_value, status_name
from .._tolerances import tolerances

# Steps, in units of a coordinate.
_STEPS = (1e-2, 1e-3, 1e-4, 1e-5, 1e-6)
# Roundings of F that its value may be off.
_ROUNDINGS = 64
# Coordinates that are looked at, at most.
_MOST = 20
# What a slope may be off: so many estimated errors, and this share of the gradient.
_SURE, _SHARE = 10.0, 1e-5
_AGREES, _KINK, _DISAGREES = "agrees", "kink", "disagrees"
_UNSETTLED, _UNKNOWN = "unsettled", "not known"


@dataclass(frozen=True)
class Slope:
    """One direction: what the gradient says, and `F` to the left and to the right.

    `error` is what the differences may be off; NaN stands for a side on which `F` has
    no value. `verdict` is one of agrees, kink, disagrees, unsettled (differences of
    several steps contradict each other), not known.
    """

    direction: str
    gradient: float
    left: float
    right: float
    error: float
    verdict: str


@dataclass(frozen=True)
class Check:
    """What differences say of a gradient; printing gives the verdict and its reasons.

    `agrees` is false where some direction disagrees or does not settle, and where `F`
    is not the same when it is evaluated twice; a kink is no disagreement.
    """

    slopes: tuple[Slope, ...]
    scale: float
    status: str
    reasons: tuple[str, ...] = ()
    repeats: bool = True

    @property
    def agrees(self) -> bool:
        """Whether nothing speaks against the gradient."""
        wrong = any(s.verdict in (_DISAGREES, _UNSETTLED) for s in self.slopes)
        known = any(s.verdict != _UNKNOWN for s in self.slopes)
        return known and self.repeats and not wrong

    @property
    def kinks(self) -> tuple[str, ...]:
        """Directions along which `F` has a kink at `x`."""
        return tuple(s.direction for s in self.slopes if s.verdict == _KINK)

    @property
    def error(self) -> float:
        """The largest gap between gradient and differences, as a share of the gradient.

        Along directions without a kink that have differences.
        """
        gaps = [
            np.nanmin([abs(s.gradient - s.left), abs(s.gradient - s.right)])
            for s in self.slopes
            if s.verdict in (_AGREES, _DISAGREES)
        ]
        return max(gaps, default=np.nan) / self.scale

    def __str__(self):
        lines = []
        wrong = [s for s in self.slopes if s.verdict == _DISAGREES]
        unknown = [s.direction for s in self.slopes if s.verdict == _UNKNOWN]
        agree = [s for s in self.slopes if s.verdict == _AGREES]
        if not self.repeats:
            lines.append(
                "F is not the same when it is evaluated twice at x: something in "
                "`upper` or `lower` is drawn anew or kept between calls."
            )
        if agree:
            lines.append(
                "The gradient agrees with differences of F to "
                f"{self._worst(agree):.1e} of its size along {len(agree)} of "
                f"{len(self.slopes)} directions."
            )
        if self.kinks:
            lines.append(
                f"F has a kink at x along {_some(self.kinks)}; the gradient is that of "
                "one side."
            )
        for s in wrong:
            lines.append(
                f"The gradient DISAGREES along {s.direction}: it says "
                f"{s.gradient:.6g}, differences {s.left:.6g} to the left and "
                f"{s.right:.6g} to the right (+- {s.error:.1g})."
            )
        lines += self.reasons
        unsettled = [s.direction for s in self.slopes if s.verdict == _UNSETTLED]
        if unsettled:
            lines.append(
                f"Differences of F along {_some(unsettled)} do not settle: F jumps at "
                "x (a rounding, a comparison), or its values are noisy (a loop with a "
                "tolerance, float32)."
            )
        if unknown:
            lines.append(
                f"Along {_some(unknown)} nothing is known: F has no value beside x."
            )
        return "\n".join(lines)

    def _worst(self, slopes) -> float:
        nearest = lambda s: np.nanmin(
            [abs(s.gradient - s.left), abs(s.gradient - s.right)]
        )
        return max(map(nearest, slopes)) / self.scale


def check(
    problem: Problem | Followers,
    x: PyTree,
    *,
    key: PRNGKeyArray | int = 0,
    names: Sequence[str] | None = None,
) -> Check:
    """Compare the hypergradient at `x` with one-sided differences of `F`.

    Along each coordinate (20 drawn ones, where there are more) and one random
    direction. `print(bx.check(problem, x))` gives the verdict, and where it disagrees
    the derivative that is wrong and what to look for. `names` are those of the
    coordinates, where "x[2]" or "tolls[2]" will not do.
    """
    key = checked_key(key)
    check_drawn(problem)
    x = checked_point(problem, x)
    names = checked_names(x, names)
    e = hypergradient(problem, x, throw=False)
    status = status_name(e.status)
    if not has_value(e.status):
        return Check((), 1.0, status, (f"F has no value at x ({status}). {e.message}",))
    again = hypergradient(problem, x, throw=False)
    flat, unravel = (lambda pair: (np.asarray(pair[0]), pair[1]))(ravel_pytree(x))
    grad = np.asarray(ravel_pytree(e.grad)[0])
    scale = float(np.linalg.norm(grad)) or 1.0
    units = _units(problem.domain, x, flat)
    noise = _ROUNDINGS * tolerances(flat.dtype).eps * max(abs(float(e.value)), 1e-300)

    def F(point: np.ndarray) -> float:
        at = unravel(jnp.asarray(point, flat.dtype))
        found = hypergradient(problem, at, warm=e.lower, throw=False)
        return float(found.value) if has_value(found.status) else np.nan

    numbers = np.random.default_rng(np.asarray(jax.random.key_data(key)))
    chosen = np.arange(flat.size)
    if flat.size > _MOST:
        chosen = np.sort(numbers.choice(flat.size, _MOST, replace=False))
    random = numbers.normal(size=flat.size)
    directions = [
        (names[k], units[k] * np.eye(1, flat.size, k)[0]) for k in chosen.tolist()
    ]
    if flat.size > 1:
        directions.append(
            ("a random direction", units * random / np.linalg.norm(random))
        )
    slopes = tuple(
        _slope(F, name, flat, float(e.value), grad, move, noise, scale)
        for name, move in directions
    )
    # As for the eye: NaN is the same as NaN.
    repeats = bool(np.array_equal(np.asarray(e.value), np.asarray(again.value)))
    wrong = any(s.verdict == _DISAGREES for s in slopes)
    reasons = tuple(_reasons(problem, x, e, numbers)) if wrong else ()
    return Check(slopes, scale, status, reasons, repeats)


def _slope(F, name, x, value, grad, move, noise, scale) -> Slope:
    size = float(np.linalg.norm(move))
    unit = move / size
    told = float(grad @ unit)
    right, right_error = _one_sided(F, x, value, unit, size, noise)
    left, left_error = _one_sided(F, x, value, -unit, size, noise)
    left = -left
    error = float(np.nanmax([left_error, right_error, 0.0]))
    allowed = _SURE * error + _SHARE * scale
    sides = np.array([left, right])
    known = np.isfinite(sides)
    near = np.abs(sides - told) <= allowed
    if not known.any():
        verdict = _UNKNOWN
    elif allowed > 0.1 * max(scale, np.nanmax(np.abs(sides))):
        verdict = _UNSETTLED
    elif np.all(near[known]):
        verdict = _AGREES
    elif known.all() and abs(left - right) > allowed and _between(told, sides, allowed):
        verdict = _KINK
    else:
        verdict = _DISAGREES
    return Slope(name, told, float(left), float(right), error, verdict)


def _between(told: float, sides, allowed: float) -> bool:
    """At a kink along several rows the gradient is of a side that none of both is."""
    return bool(min(sides) - allowed <= told <= max(sides) + allowed)


def _one_sided(F, x, value, unit, size, noise) -> tuple[float, float]:
    """The slope along `unit` and what it may be off."""
    best, least, before = np.nan, np.inf, np.nan
    for share in _STEPS:
        h = share * size
        # The step that is taken, not the one that was meant.
        h = float(np.linalg.norm((x + h * unit) - x)) or h
        slope = (-3 * value + 4 * F(x + h * unit) - F(x + 2 * h * unit)) / (2 * h)
        error = abs(slope - before) + 4 * noise / h
        if error < least:
            best, least = slope, error
        before = slope
    return best, least if np.isfinite(least) else np.nan


def _units(domain, x, flat: np.ndarray) -> np.ndarray:
    """What a coordinate may move by: the width of its bounds, or its own size."""
    typical = np.mean(np.abs(flat)) or 1.0
    units = np.maximum(np.abs(flat), 1e-3 * typical)
    if isinstance(domain, Box):
        low, high = (
            np.asarray(ravel_pytree(b)[0]) for b in (domain.lower, domain.upper)
        )
        width = high - low
        units = np.where(np.isfinite(width) & (width > 0), width, units)
    return units


def _reasons(problem: Any, x, e, numbers):
    """What is wrong: one of the derivatives that make the gradient, or a choice."""
    lower, adjoint = getattr(problem, "lower", None), problem.adjoint
    if isinstance(adjoint, Danskin):
        yield (
            "`adjoint=Danskin()` is right only where `lower` is minus `upper`, up to "
            "what does not depend on x."
        )
    if isinstance(lower, AbstractLocalLower):
        yield (
            "`lower` is a model that is built around each x; what it computes there "
            "counts as constant in derivatives."
        )
    y, found = e.lower.y, False
    prices = problem.multipliers_of(e.lower)
    upper = lambda x, y: problem.upper_value(x, y, prices)[0]
    for name, function, argument in (
        ("`upper` with respect to x", upper, 0),
        ("`upper` with respect to y", upper, 1),
        ("`lower` with respect to x", problem.lower_value, 0),
        ("`lower` with respect to y", problem.lower_value, 1),
    ):
        if _derivative_is_wrong(function, (x, y), argument, numbers):
            found = True
            yield (
                f"JAX's derivative of {name} is not that of its values. Look for "
                "`stop_gradient`, for a comparison, a rounding or a cast to integers, "
                "for a custom derivative, and for numbers that NumPy computed from x "
                "when the function was traced."
            )
    if not found:
        yield (
            "First derivatives of `upper` and `lower` are right at (x, y). Look for "
            "`stop_gradient` or a custom derivative in the gradient of `lower`, whose "
            "second derivatives count, for a `lower` that is not smooth, and for a "
            "lower level that is not solved: `bx.explain(problem, x)`."
        )
    if ravel_pytree(x)[0].dtype == np.float32:
        yield (
            "This is float32, in which differences have three digits at best: "
            'jax.config.update("jax_enable_x64", True).'
        )


def _derivative_is_wrong(function, both, argument: int, numbers) -> bool:
    """Along one random direction, by central differences of two steps."""
    flat, unravel = ravel_pytree(both[argument])
    flat = np.asarray(flat, float)
    size = np.linalg.norm(flat) / np.sqrt(max(flat.size, 1)) or 1.0
    u = numbers.normal(size=flat.size)
    dtype = ravel_pytree(both[argument])[0].dtype

    def value(shift: float) -> float:
        point = unravel(jnp.asarray(flat + shift * size * u, dtype))
        parts = list(both)
        parts[argument] = point
        return float(function(*parts))

    grad = np.asarray(ravel_pytree(jax.grad(function, argument)(*both))[0])
    told = float(grad @ u)
    slopes = [(value(h) - value(-h)) / (2 * h * size) for h in (1e-3, 1e-4)]
    gap = min(abs(slope - told) for slope in slopes)
    allowed = abs(slopes[0] - slopes[1]) + 1e-3 * max(abs(told), abs(slopes[1]))
    noise = 64 * tolerances(dtype).eps * abs(value(0.0)) / (1e-4 * size)
    return bool(np.isfinite(gap) and gap > allowed + noise)


def _some(names) -> str:
    names = list(names)
    return ", ".join(names[:6]) + (f" and {len(names) - 6} more" * (len(names) > 6))
