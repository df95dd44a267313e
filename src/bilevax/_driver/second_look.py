"""A second look around the end of a run: probes at radii that no gradient sees.

A gradient that vanishes says nothing where `F` is flat: a follower who does not react,
a price above every bid. Better points may be a few steps away. So `F` is probed along
the coordinates and some random directions, nearest first. A probe that is lower is a
point to go on from; if none is, the gradients at the nearest ones bound how far the end
is from stationary, and the values tell in which coordinates `F` is flat.
"""

from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from .._constraints import Box
from .._implicit.hypergradient import Evaluation
from .._judge.hull import shortest_in_hull
from .._problem.problem import Problem
from .._status import has_value
from .._tolerances import tolerances
from .requests import Asking
from .run import evaluate_allowed

# Radii of the probes, in widths of the coordinates; and further ones along coordinates
# in which `F` has been flat so far.
_SHARES = (1e-3, 1e-2, 5e-2, 0.25)
_FARTHER = (0.375, 0.5, 0.625, 0.75, 0.875, 1.0)
# Coordinates up to which each is probed; random directions there, and where not.
_EACH, _BESIDE, _INSTEAD = 20, 2, 4
# What a probe must gain to be gone on from, and a first-order gain that counts as none:
# shares of what `F` is and of how it changed over the run.
_GAIN, _NO_GAIN = 1e-8, 1e-6


@dataclass(frozen=True)
class SecondLook:
    """What was seen around the end of a run.

    - `radius`: the largest distance of the probes whose `gradients` are kept.
    - `cone`: directions out of the set of allowed `x`, one a row.
    - `size`: what `F` is, or how much it changed over the run: the larger.
    - `flat`: for each coordinate how far `F` stays the same along it, both ways; zero
      where it does not.
    - `rounds`: how often a probe led on, and `gained`: by how much `F` fell then.
    - `open`: whether the last round still found a lower point.
    """

    radius: float
    gradients: np.ndarray
    cone: np.ndarray
    size: float
    flat: np.ndarray
    rounds: int = 0
    gained: float = 0.0
    open: bool = False
    _measured: list = field(default_factory=list, repr=False, compare=False)

    @property
    def measure(self) -> float:
        """A bound on the distance of zero to the gradients within `radius`."""
        # Late: it takes SciPy's optimisers, which take long to import.
        if not self._measured:
            found = np.inf
            if len(self.gradients):
                found = shortest_in_hull(self.gradients, self.cone)[0]
            self._measured.append(found)
        return self._measured[0]

    @property
    def is_stationary(self) -> bool:
        """Whether gradients promise nothing that counts within the radius."""
        return self.counts_as_zero(self.measure, self.radius)

    def counts_as_zero(self, measure: float, radius: float) -> bool:
        """Whether a combination of gradients of this length promises nothing."""
        steepest = np.linalg.norm(self.gradients, axis=1).max(initial=0)
        little = _NO_GAIN * self.size
        return bool(measure * radius <= little or measure <= _NO_GAIN * steepest)

    def after(self, before: "SecondLook | None") -> "SecondLook":
        """This look, with what the ones before it had led to."""
        if before is None:
            return self
        return replace(self, rounds=before.rounds, gained=before.gained)

    def in_units(self, slopes: np.ndarray) -> "SecondLook":
        """The same of `x(u)`, where this is of `u`: `slopes` are `dx / du`."""
        # A coordinate that cannot move has no gradient either.
        by = np.where(slopes > 0, slopes, 1)
        cone = self.cone / by
        lengths = np.linalg.norm(cone, axis=1, keepdims=True)
        return replace(
            self,
            radius=self.radius * float(slopes.max(initial=0)),
            gradients=np.where(slopes > 0, self.gradients / by, 0),
            cone=cone / np.where(lengths > 0, lengths, 1),
            flat=self.flat * slopes,
            _measured=[],
        )

    def led_on(self, gained: float) -> "SecondLook":
        """This look, after which `F` fell by `gained`."""
        return replace(self, rounds=self.rounds + 1, gained=self.gained + gained)


def second_look(
    problem: Problem, x, e: Evaluation, length: float, change: float, key
) -> Asking[tuple[SecondLook, Any, Evaluation]]:
    """What there is around `x`, and the lowest of the nearest probes that are lower.

    That is `x` itself where none is. `change` is how much `F` changed over the run.
    """
    flat, unravel = ravel_pytree(x)
    flat = np.asarray(flat)
    value, tol = float(e.value), tolerances(flat.dtype)
    size = max(abs(value), change)
    least = value - max(_GAIN, 64 * tol.eps) * size
    widths = _widths(problem.domain, x, length)
    directions, along = _directions(flat.size, key)
    gradients = [np.asarray(ravel_pytree(e.grad)[0])]
    out, seen, radius = [], np.full((2, flat.size), True), 0.0
    reach = np.zeros(flat.size)
    noise = 64 * tol.eps * size
    best: tuple[float, Any, Evaluation] = (least, x, e)
    for share in _SHARES + _FARTHER:
        for direction, k in zip(directions, along, strict=True):
            if share in _FARTHER and (k is None or not reach[k]):
                continue
            probe = flat + share * widths * direction
            begin = unravel(jnp.asarray(probe, flat.dtype))
            there, found = yield from evaluate_allowed(problem, begin)
            at = np.asarray(ravel_pytree(there)[0])
            if not has_value(found.status) or not np.isfinite(found.value):
                if k is not None:
                    seen[:, k] = False
                continue
            if share == _SHARES[0]:
                radius = max(radius, float(np.linalg.norm(at - flat)))
                gradients.append(np.asarray(ravel_pytree(found.grad)[0]))
                out.append(probe - at)
            if k is not None and abs(float(found.value) - value) > noise:
                seen[int(direction[k] < 0), k] = False
            if float(found.value) < best[0]:
                best = float(found.value), there, found
        reach = np.where(seen.all(axis=0), share * widths, reach)
        if best[1] is not x:
            break
    if not any(k is not None for k in along):
        reach = np.zeros(flat.size)
    usable = np.array([g for g in gradients if np.isfinite(g).all()])
    look = SecondLook(
        radius=radius,
        gradients=usable.reshape(-1, flat.size),
        cone=_unit_rows(np.array(out).reshape(-1, flat.size), flat),
        size=size,
        flat=reach,
        open=best[1] is not x,
    )
    return look, best[1], best[2]


def _widths(domain, x, length: float) -> np.ndarray:
    """What a coordinate ranges over: the width of its bounds, else the length scale."""
    size = ravel_pytree(x)[0].size
    widths = np.full(size, length)
    if isinstance(domain, Box):
        low, high = (
            np.asarray(ravel_pytree(b)[0]) for b in (domain.lower, domain.upper)
        )
        bounded = np.isfinite(low) & np.isfinite(high)
        widths[bounded] = (high - low)[bounded]
    return widths


def _directions(size: int, key) -> tuple[np.ndarray, list[int | None]]:
    """Both ways along coordinates and random directions; which coordinate it is."""
    numbers = np.random.default_rng(np.asarray(jax.random.key_data(key)))
    along: list[int | None] = []
    rows = np.zeros((0, size))
    if size <= _EACH:
        rows = np.repeat(np.eye(size), 2, axis=0)
        rows[1::2] *= -1
        along = [k for k in range(size) for _ in range(2)]
    count = 0 if size == 1 else _BESIDE if size <= _EACH else _INSTEAD
    random = numbers.normal(size=(count, size))
    random /= np.abs(random).max(axis=1, keepdims=True, initial=1e-300)
    random = np.repeat(random, 2, axis=0)
    random[1::2] *= -1
    return np.concatenate([rows, random]), along + [None] * len(random)


def _unit_rows(out: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Of what projections took away, the directions; rounding is none."""
    lengths = np.linalg.norm(out, axis=1)
    noise = tolerances(x.dtype).rounding * (1 + np.linalg.norm(x))
    real = lengths > noise
    return out[real] / lengths[real, None]
