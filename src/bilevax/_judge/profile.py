"""`F` along a line or over two coordinates, with multipliers and active rows."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from jaxtyping import PyTree

from .._arguments import check_count, check_number
from .._constraints import Box
from .._implicit.hypergradient import hypergradient
from .._lower.base import LowerSolution
from .._problem.checks import check_like, checked_point
from .._problem.coordinates import checked_names, coordinate_index
from .._problem.followers import Followers, check_drawn
from .._problem.problem import Problem
from .._status import has_value, status_name

# Points along a line, and along each side of a grid.
_LINE, _GRID = 201, 41
# Multipliers that a picture shows.
_CURVES = 6
# Readable on white and on black, and told apart by colour-blind readers.
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")


@dataclass(frozen=True)
class Profile:
    """`F` along a line, or over a grid of two coordinates.

    - `names`: of what varies; `at`: its values, one array for each name.
    - `values`: `F`, NaN where it has none; `statuses`: the names of how evaluations
      ended. Both have one axis for each name.
    - `multipliers`, `active`: of the lower-level rows, in a last axis (those of all
      followers after each other).
    - `centre`: where `x` itself is; `rows`: what the lower-level rows are called.
    """

    names: tuple[str, ...]
    at: tuple[np.ndarray, ...]
    values: np.ndarray
    statuses: np.ndarray
    multipliers: np.ndarray
    active: np.ndarray
    centre: tuple[float, ...]
    rows: tuple[str, ...]

    @property
    def lowest(self) -> tuple[tuple[float, ...], float]:
        """Where `F` is lowest among these points, and what it is there."""
        if np.isnan(self.values).all():
            return tuple(np.nan for _ in self.names), np.nan
        index = np.unravel_index(np.nanargmin(self.values), self.values.shape)
        where = tuple(float(t[i]) for t, i in zip(self.at, index, strict=True))
        return where, float(self.values[index])

    @property
    def pieces(self) -> np.ndarray:
        """The number of the active set at each point; -1 where `F` has no value."""
        flat = self.active.reshape(-1, self.active.shape[-1])
        numbers = np.unique(flat, axis=0, return_inverse=True)[1].reshape(-1)
        return np.where(np.isnan(self.values), -1, numbers.reshape(self.values.shape))

    def __str__(self):
        where, value = self.lowest
        shown = ", ".join(
            f"{name} = {at:.6g}" for name, at in zip(self.names, where, strict=True)
        )
        ranges = ", ".join(
            f"{name} from {t[0]:.6g} to {t[-1]:.6g}"
            for name, t in zip(self.names, self.at, strict=True)
        )
        missing = int(np.isnan(self.values).sum())
        count = len(set(self.pieces.ravel().tolist()) - {-1})
        lines = [
            f"F at {self.values.size} points, {ranges}",
            f"lowest: {value:.8g} at {shown}",
            f"active sets: {count}",
        ]
        if missing:
            kinds = sorted(set(self.statuses[np.isnan(self.values)].tolist()))
            lines.append(f"no value at {missing} points ({', '.join(kinds)})")
        return "\n".join(lines)

    def plot(self, to: Any = None, rows: Sequence[str] | None = None) -> Any:
        """Draw it, into axes of matplotlib or a file; returns the figure.

        `rows` are names of the lower-level rows, in place of their own.
        """
        count = len(self.rows)
        rows = list(self.rows if rows is None else rows)
        if len(rows) != count:
            raise ValueError(
                f"`rows` must have one name for each of {count} rows; got {len(rows)}."
            )
        return _drawn(self, to, rows)


def profile(
    problem: Problem | Followers,
    x: PyTree,
    along: Any = 0,
    *,
    span: Any = None,
    points: int | None = None,
    names: Sequence[str] | None = None,
) -> Profile:
    """Evaluate `F` around `x`: the picture to look at when a result surprises.

    - `along`: a coordinate, by name ("x[1]", "tolls[0]") or number; a pair of these for
      a grid; or a direction, a tree like `x`.
    - `span`: from where to where: values of the coordinate, or steps along a direction
      (by default -1 to 1). Without it, the bounds of the domain; where there are none,
      as far to both sides as the coordinate is large, at least 1. Of a pair: two spans.
    - `points`: how many, on each side of a grid.
    - `names`: of the coordinates, where "x[1]" will not do.
    """
    check_drawn(problem)
    x = checked_point(problem, x)
    names = checked_names(x, names)
    flat, unravel = ravel_pytree(x)
    flat = np.asarray(flat)
    pair = isinstance(along, tuple) and len(along) == 2
    if points is None:
        points = _GRID if pair else _LINE
    check_count(points, "points")
    spans: Any = span if pair and span is not None else (span,) * (2 if pair else 1)
    if len(spans) != (2 if pair else 1):
        raise ValueError(f"`span` of two coordinates is a pair of spans; got {span!r}.")
    axes = [
        _axis(problem.domain, x, flat, names, one, part, points)
        for one, part in zip(along if pair else (along,), spans, strict=True)
    ]
    shown, ranges, moves, centres = zip(*axes, strict=True)
    shape = tuple(len(t) for t in ranges)
    values, statuses = np.full(shape, np.nan), np.full(shape, "", dtype=object)
    multipliers, active, warm = [], [], None
    e: Any = None
    for index in np.ndindex(*shape):
        point = flat.copy()
        for t, i, move, centre in zip(ranges, index, moves, centres, strict=True):
            point = point + (t[i] - centre) * move
        at = unravel(jnp.asarray(point, flat.dtype))
        e = hypergradient(problem, at, warm=warm, throw=False)
        statuses[index] = status_name(e.status)
        fine = has_value(e.status)
        if fine:
            values[index], warm = float(e.value), e.lower
        held = np.ravel(e.lower.multipliers)
        multipliers.append(held if fine else np.full(held.shape, np.nan))
        active.append(np.ravel(e.lower.active) & fine)
    return Profile(
        names=shown,
        at=ranges,
        values=values,
        statuses=statuses.astype(str),
        multipliers=np.array(multipliers).reshape(*shape, -1),
        active=np.array(active).reshape(*shape, -1),
        centre=centres,
        rows=_row_names(e.lower),
    )


def _row_names(lower: LowerSolution) -> tuple[str, ...]:
    """Of many followers those of each, after each other."""
    names = lower.row_names
    if lower.multipliers.ndim == 1:
        return tuple(names)
    count = len(lower.multipliers)
    return tuple(f"{name} of follower {i}" for i in range(count) for name in names)


def _axis(domain, x, flat, names, along, span, points):
    """Name, values, the move of one unit, and the value at `x`."""
    if not isinstance(along, str | int | np.integer):
        check_like(along, x, "along", "x")
        move = np.asarray(ravel_pytree(along)[0], flat.dtype)
        if not np.isfinite(move).all() or not move.any():
            raise ValueError("`along` must be a direction: finite, and not zero.")
        low, high = _checked_span((-1.0, 1.0) if span is None else span)
        return "step", np.linspace(low, high, points), move, 0.0
    k = coordinate_index(names, along, "along")
    if span is None:
        span = _usual_span(domain, flat, k)
    low, high = _checked_span(span)
    move = np.eye(1, flat.size, k)[0].astype(flat.dtype)
    return names[k], np.linspace(low, high, points), move, float(flat[k])


def _usual_span(domain, flat, k: int) -> tuple[float, float]:
    around = max(abs(float(flat[k])), 1.0)
    low, high = float(flat[k]) - around, float(flat[k]) + around
    if isinstance(domain, Box):
        bounds = [float(ravel_pytree(b)[0][k]) for b in (domain.lower, domain.upper)]
        low = bounds[0] if np.isfinite(bounds[0]) else low
        high = bounds[1] if np.isfinite(bounds[1]) else high
    return low, high


def _checked_span(span) -> tuple[float, float]:
    if not (isinstance(span, tuple | list) and len(span) == 2):
        raise ValueError(f"`span` is a pair (from, to); got {span!r}.")
    for end in span:
        check_number(end, "span", "a pair of finite numbers")
    low, high = map(float, span)
    if not low < high:
        raise ValueError(f"`span` must go upwards; got {span!r}.")
    return low, high


def _drawn(found: Profile, to: Any, rows: list[str]) -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "Pictures are drawn with matplotlib: install bilevax[plot]. The numbers "
            "are in `.at`, `.values`, `.multipliers` and `.active` without it."
        ) from error
    axes = to if hasattr(to, "plot") else None
    line = len(found.names) == 1
    shows_rows = line and axes is None and bool(found.active.any())
    if axes is None:
        # Without pyplot: nothing stays open, and no window is needed.
        size = (5.6, 5.0 if shows_rows else 3.6)
        figure = Figure(figsize=size, layout="constrained")
        grid = figure.subplots(2 if shows_rows else 1, 1, sharex=True, squeeze=False)
        axes = grid[0, 0]
        if shows_rows:
            _draw_rows(found, grid[1, 0], rows)
            grid[1, 0].set_xlabel(found.names[0])
    else:
        figure = axes.figure
    if line:
        _draw_line(found, axes)
        if not shows_rows:
            axes.set_xlabel(found.names[0])
    else:
        _draw_grid(found, axes)
    if isinstance(to, str | Path):
        Path(to).parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(to, dpi=150)
    return figure


def _draw_line(found: Profile, axes) -> None:
    """`F`, in shades that change with the active set; `x` and the lowest point."""
    (t,), values, pieces = found.at, found.values, found.pieces
    edges = np.flatnonzero(np.diff(pieces)) + 1
    middle = np.concatenate([t[:1], 0.5 * (t[edges - 1] + t[edges]), t[-1:]])
    for i, (a, b) in enumerate(zip(middle[:-1], middle[1:], strict=True)):
        if i % 2:
            axes.axvspan(a, b, color="#808080", alpha=0.12, linewidth=0)
    axes.plot(t, values, color=_COLOURS[0], linewidth=1.6)
    (best,), lowest = found.lowest
    axes.plot([best], [lowest], "o", color=_COLOURS[1], markersize=5, label="lowest")
    if t[0] <= found.centre[0] <= t[-1]:
        axes.axvline(
            found.centre[0], color="#606060", linestyle="--", linewidth=1, label="x"
        )
    axes.set_ylabel("F")
    axes.margins(x=0)
    axes.legend(frameon=False)


def _draw_rows(found: Profile, axes, rows: list[str]) -> None:
    """The largest multipliers of rows that are active somewhere."""
    used = np.flatnonzero(found.active.any(axis=0))
    size = np.nanmax(np.abs(found.multipliers[:, used]), axis=0)
    shown = used[np.argsort(-size, kind="stable")[:_CURVES]]
    for colour, row in zip(_COLOURS, sorted(shown.tolist()), strict=False):
        axes.plot(
            found.at[0], found.multipliers[:, row], color=colour, linewidth=1.3,
            label=rows[row],
        )  # fmt: skip
    axes.set_ylabel("multipliers")
    axes.legend(
        frameon=False, fontsize="small", loc="center left", bbox_to_anchor=(1, 0.5)
    )


def _draw_grid(found: Profile, axes) -> None:
    """`F` in colour, borders between active sets, `x` and the lowest point."""
    a, b = found.at
    mesh = axes.pcolormesh(a, b, found.values.T, shading="nearest", cmap="viridis")
    axes.figure.colorbar(mesh, ax=axes, label="F")
    axes.plot(*_borders(a, b, found.pieces), color="white", linewidth=0.6)
    axes.plot(*found.lowest[0], "o", color=_COLOURS[1], label="lowest")
    inside = all(
        t[0] <= c <= t[-1] for t, c in zip(found.at, found.centre, strict=True)
    )
    if inside:
        axes.plot(*found.centre, "x", color="white", markersize=8, label="x")
    axes.set_xlabel(found.names[0])
    axes.set_ylabel(found.names[1])
    axes.legend(facecolor="#c0c0c0", framealpha=0.8)


def _borders(a, b, pieces: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Edges of cells whose neighbour has another active set, as one broken line."""
    left, right = _edges(a), _edges(b)
    lines = [
        ((left[i + 1], left[i + 1]), (right[j], right[j + 1]))
        for i, j in np.argwhere(pieces[1:] != pieces[:-1])
    ]
    lines += [
        ((left[i], left[i + 1]), (right[j + 1], right[j + 1]))
        for i, j in np.argwhere(pieces[:, 1:] != pieces[:, :-1])
    ]
    ends = np.array(lines).reshape(-1, 2, 2)
    broken = np.concatenate([ends, np.full((len(ends), 2, 1), np.nan)], axis=2)
    return broken[:, 0].ravel(), broken[:, 1].ravel()


def _edges(t: np.ndarray) -> np.ndarray:
    """Of cells around the values."""
    if len(t) == 1:
        return np.array([t[0], t[0]])
    middle = 0.5 * (t[:-1] + t[1:])
    return np.concatenate([[2 * t[0] - middle[0]], middle, [2 * t[-1] - middle[-1]]])
