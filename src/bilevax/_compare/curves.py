"""Medians and quantiles over seeds, on grids that all methods share."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from .budget import Budget

# What a curve can be drawn against: a name in rows, and how to call it.
AXES = {"step": "iterations", "solves": "lower-level solves", "seconds": "seconds"}
QUANTILES = (0.25, 0.75)
# Most points of a grid.
_POINTS = 121
# Stands for infinity in quantiles, which would be NaN between two infinities.
_HUGE = 1e300


@dataclass(frozen=True)
class Looks:
    """The looks of one run at `F` that lie within its budget."""

    step: np.ndarray
    solves: np.ndarray
    seconds: np.ndarray
    value: np.ndarray


@dataclass(frozen=True)
class Curve:
    """The median over the seeds of one method on one problem, between two quantiles."""

    problem: str
    method: str
    at: np.ndarray
    median: np.ndarray
    low: np.ndarray
    high: np.ndarray


def read_looks(row: dict) -> Looks:
    """The looks of a row; where `F` has no value it is NaN."""
    solves, seconds = np.array(row["solves"], float), np.array(row["seconds"], float)
    inside = Budget(**row["budget"]).within(solves, seconds)
    step, value = np.array(row["step"], float), np.array(row["value"], float)
    return Looks(step[inside], solves[inside], seconds[inside], value[inside])


def in_order(rows: Iterable[dict], name: str) -> list[str]:
    """The different entries of a column, in the order of the rows."""
    return list(dict.fromkeys(row[name] for row in rows))


def grouped(rows: Iterable[dict], *names: str) -> dict[tuple, list[dict]]:
    """Rows by the entries of some columns, in the order of the rows."""
    groups = defaultdict(list)
    for row in rows:
        groups[tuple(row[name] for name in names)].append(row)
    return dict(groups)


def references(rows: list[dict]) -> dict[tuple, tuple[float, float]]:
    """For each problem and seed the first value of `F` and the best that is known.

    The best is the lowest value of any run, or the target if that is lower still.
    """
    found = {}
    for instance, group in grouped(rows, "problem", "seed").items():
        values = [read_looks(row).value for row in group]
        starts = [value[0] for value in values if len(value) and np.isfinite(value[0])]
        targets = [row["target"] for row in group if row["target"] is not None]
        best = [v for v in np.concatenate([*values, targets]) if np.isfinite(v)]
        if starts and best:
            found[instance] = (float(starts[0]), float(min(best)))
    return found


def gaps(row: dict, known: dict[tuple, tuple[float, float]]) -> np.ndarray:
    """`(F - F best) / (F start - F best)` at the looks of a run; infinite without F."""
    value = read_looks(row).value
    start, best = known.get((row["problem"], row["seed"]), (np.nan, np.nan))
    scale = start - best if start > best else 1.0
    gap = (value - best) / scale
    return np.where(np.isfinite(gap), gap, np.inf)


def curves(rows: list[dict], axis: str, quantity: str = "gap") -> list[Curve]:
    """One curve for each problem and method that ran there.

    `axis` is one of `AXES`; `quantity` is "gap", or "value" for `F` itself. Between two
    looks the earlier one counts. A run that failed counts as infinite; one that ended
    keeps its last value until the longest run of its method has ended.
    """
    known = references(rows)
    ran = [row for row in rows if row["status"] != "refused"]
    found = []
    for (problem,), group in grouped(ran, "problem").items():
        grid = _grid([getattr(read_looks(row), axis) for row in group], axis)
        for (method,), runs in grouped(group, "method").items():
            ends = [getattr(read_looks(row), axis)[-1:] for row in runs]
            end = max(np.concatenate(ends), default=0.0)
            # The last look exactly: rarely is it on a grid that all methods share.
            own = np.append(grid[grid < end], end)
            lines = []
            for row in runs:
                looks = read_looks(row)
                y = gaps(row, known) if quantity == "gap" else looks.value
                lines.append(_at(own, getattr(looks, axis), y))
            low, median, high = _quantiles(np.array(lines))
            found.append(Curve(problem, method, own, median, low, high))
    return found


def _grid(looks: list[np.ndarray], axis: str) -> np.ndarray:
    """All looks, or where these are many even steps; for seconds even ratios."""
    points = np.unique(np.concatenate([*looks, [0.0]]))
    if axis != "seconds" and len(points) <= _POINTS or len(points) < 2:
        return points
    if axis != "seconds":
        return np.linspace(0, points[-1], _POINTS)
    # From the first look of the fastest run to the last of the slowest; the ends
    # exactly, or rounding would leave the last look out.
    inner = np.geomspace(points[1], points[-1], _POINTS)
    return np.concatenate([[0.0, points[1]], inner[1:-1], points[-1:]])


def _at(grid: np.ndarray, at: np.ndarray, y: np.ndarray) -> np.ndarray:
    """`y` at the last look not after each point of the grid."""
    if not len(at):
        return np.full(grid.shape, np.inf)
    index = np.searchsorted(at, grid * (1 + 1e-12), side="right") - 1
    return np.where(np.isfinite(y), y, np.inf)[np.maximum(index, 0)]


def _quantiles(lines: np.ndarray) -> np.ndarray:
    levels = (QUANTILES[0], 0.5, QUANTILES[1])
    found = np.quantile(np.minimum(lines, _HUGE), levels, axis=0)
    return np.where(found > 1e-3 * _HUGE, np.inf, found)
