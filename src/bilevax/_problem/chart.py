"""Coordinates of `x` in units of their own: from bounds, all of them from 0 to 1.

A method takes steps of one length in all directions. Where one range is 10^4 wide and
another 1, a step that is fair to the first jumps over everything that the second could
be. And a positive coordinate whose bounds are decades apart is one of ratios: from 0.1
to 10^4, half of the decades lie in three thousandths of the range. So

    x = low + (high - low) u,  or  x = low (high / low)^u  where high / low >= 1000,

and a run is one in `u`. `F` is the same function; its kinks and minimisers stay.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Bool, Float, PyTree

from .._constraints import Box, Intersection, is_function
from .._programs.modules import Plain, with_fields
from .problem import AbstractLocalLower, Problem

# Ratios of widths, and of bounds, from which units are needed.
_WIDTHS, _DECADES = 100.0, 1000.0


class Chart(Plain):
    """`x` from `u`, and back; flat vectors inside, trees outside."""

    low: Float[Array, " d"]
    high: Float[Array, " d"]
    ratio: Bool[np.ndarray, " d"]

    def x(self, u: PyTree[Array]) -> PyTree[Array]:
        """The point that `u` stands for."""
        flat, unravel = ravel_pytree(u)
        return unravel(self._x(flat))

    def u(self, x: PyTree[Array]) -> PyTree[Array]:
        """The units of a point, moved into the bounds."""
        flat, unravel = ravel_pytree(x)
        flat = jnp.clip(flat, self.low, self.high)
        low, width = self.low, self.high - self.low
        straight = (flat - low) / jnp.where(width > 0, width, 1)
        logs = jnp.log(self._positive(flat) / self._positive(low)) / self._decades
        return unravel(jnp.where(self.ratio, logs, straight))

    def slopes(self, u: PyTree[Array]) -> np.ndarray:
        """The derivative of each coordinate of `x`."""
        flat = ravel_pytree(u)[0]
        logs = self._decades * self._x(flat)
        return np.asarray(jnp.where(self.ratio, logs, self.high - self.low))

    def _x(self, flat):
        straight = self.low + (self.high - self.low) * flat
        logs = self._positive(self.low) * jnp.exp(self._decades * flat)
        return jnp.clip(jnp.where(self.ratio, logs, straight), self.low, self.high)

    @property
    def _decades(self):
        """Of a ratio its logarithm; one elsewhere, where nothing may be infinite."""
        ratio = self._positive(self.high) / self._positive(self.low)
        return jnp.where(self.ratio, jnp.log(ratio), 1)

    def _positive(self, values):
        return jnp.where(self.ratio, values, 1)

    def applied(self, problem: Problem) -> Problem:
        """The problem in `u`."""
        domain: Any = problem.domain
        unit = lambda value: ravel_pytree(domain.lower)[1](
            jnp.full_like(self.low, value)
        )
        fixed = ravel_pytree(domain.lower)[1](
            jnp.where(self.high > self.low, jnp.ones_like(self.low), 0)
        )
        return with_fields(
            problem,
            upper=_InUnits(problem.upper, self),
            lower=_InUnits(problem.lower, self),
            upper_constraints=self._in_units(problem.upper_constraints),
            upper_equalities=self._in_units(problem.upper_equalities),
            constraints=self._rows(problem.constraints),
            domain=with_fields(domain, lower=unit(0), upper=fixed),
        )

    def _in_units(self, function):
        return None if function is None else _InUnits(function, self)

    def _rows(self, constraints: Any) -> Any:
        """`A y + B (low + W u) <= b`, and functions of `x` as functions of `u`."""
        if isinstance(constraints, Intersection):
            sets = tuple(map(self._rows, constraints.sets))
            return with_fields(constraints, sets=sets)
        changed = {}
        for name in _PARTS:
            part = getattr(constraints, name, None)
            if is_function(part):
                changed[name] = _InUnits(part, self)
        for b, B in (("b", "B"), ("b_eq", "B_eq")):
            rows = getattr(constraints, B, None)
            if rows is not None:
                changed[B] = rows * (self.high - self.low)
                changed[b] = getattr(constraints, b) - rows @ self.low
        return with_fields(constraints, **changed)


# Parts of a set that may be functions of `x`.
_PARTS = ("lower", "upper", "total", "A", "b", "A_eq", "b_eq")


class _InUnits(Plain):
    """A function of `x` and more as one of `u`."""

    function: Any
    chart: Chart

    def __call__(self, u, *more):
        return self.function(self.chart.x(u), *more)


def chart_of(problem: Any) -> Chart | None:
    """The chart that a problem needs; None where its units are alike, or not known."""
    if type(problem) is not Problem or isinstance(problem.lower, AbstractLocalLower):
        return None
    domain, rows = problem.domain, _coupling(problem.constraints)
    if type(domain) is not Box or rows is None:
        return None
    low, high = (ravel_pytree(b)[0] for b in (domain.lower, domain.upper))
    a, b = np.asarray(low), np.asarray(high)
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        return None
    # Rows are linear in `x`, and stay so in `u` along straight coordinates only.
    free = ~np.any(rows != 0, axis=0) if rows.size else np.ones(a.size, bool)
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = free & (a > 0) & (b / a >= _DECADES)
    widths = (b - a)[b > a]
    apart = widths.size > 1 and widths.max() / widths.min() >= _WIDTHS
    return Chart(low, high, ratio) if apart or ratio.any() else None


def _coupling(constraints) -> np.ndarray | None:
    """The rows `B`; None where they are not numbers in plain arrays."""
    sets = constraints.sets if isinstance(constraints, Intersection) else [constraints]
    found = [getattr(one, B, None) for one in sets for B in ("B", "B_eq")]
    parts = [B for B in found if B is not None]
    if not all(isinstance(B, jax.Array | np.ndarray) for B in parts):
        return None
    # A function beside a matrix: which of the two is moved is not ours to say.
    for one in sets:
        both = getattr(one, "B", None) is not None or (
            getattr(one, "B_eq", None) is not None
        )
        if both and one.has_functions:
            return None
    return np.concatenate([np.asarray(B) for B in parts]) if parts else np.zeros((0, 0))
