"""When runs reach a target, and performance profiles made from that."""

from dataclasses import dataclass

import numpy as np

from .curves import gaps, grouped, in_order, read_looks, references

# Targets as shares of the way from the start to the best known value that are left.
TARGETS = (1e-1, 1e-2, 1e-4)
# Less than this is as good as nothing: ratios of zeros have no meaning.
_LEAST = {"step": 1.0, "solves": 1.0, "seconds": 1e-9}


@dataclass(frozen=True)
class Profile:
    """How often a method is within a factor of the best one (Dolan and More, 2002).

    - `ratios`: its cost over that of the cheapest method, for every problem and seed
      where it reached the target, sorted.
    - `instances`: how many problems and seeds there are, reached or not.
    """

    method: str
    ratios: np.ndarray
    instances: int

    def share(self, factor: float) -> float:
        """The share of instances on which the ratio is at most `factor`."""
        return float(np.sum(self.ratios <= factor)) / self.instances


def cost_to_target(row: dict, axis: str, target: float, known: dict) -> float:
    """Where on `axis` the gap of a run first is at most `target`; infinite if never."""
    reached = np.flatnonzero(gaps(row, known) <= target)
    if not len(reached):
        return np.inf
    cost = float(getattr(read_looks(row), axis)[reached[0]])
    return max(cost, _LEAST[axis])


def profiles(rows: list[dict], axis: str, target: float) -> list[Profile]:
    """The profile of every method by its cost on `axis` to reach `target`.

    A run that failed, never came there, or whose method refused the problem, costs
    infinitely much.
    """
    known = references(rows)
    methods = in_order(rows, "method")
    ratios = {method: [] for method in methods}
    instances = grouped(rows, "problem", "seed").values()
    for group in instances:
        costs = {
            row["method"]: cost_to_target(row, axis, target, known) for row in group
        }
        best = min(costs.values())
        for method, cost in costs.items():
            if np.isfinite(cost):
                ratios[method].append(cost / best)
    count = len(instances)
    return [Profile(m, np.sort(np.array(ratios[m])), count) for m in methods]


def target_table(rows: list[dict], targets=TARGETS) -> list[dict]:
    """For every problem, target and method: how many runs came there, and when.

    Costs are medians over all runs, those that never came there being infinite.
    """
    known, table = references(rows), []
    for (problem,), group in grouped(rows, "problem").items():
        for target in targets:
            for (method,), runs in grouped(group, "method").items():
                if all(row["status"] == "refused" for row in runs):
                    continue
                cost = {
                    axis: [cost_to_target(row, axis, target, known) for row in runs]
                    for axis in _LEAST
                }
                table.append(
                    {
                        "problem": problem,
                        "gap": target,
                        "method": method,
                        "runs": len(runs),
                        "reached": int(np.sum(np.isfinite(cost["step"]))),
                        "iterations": _median(cost["step"]),
                        "solves": _median(cost["solves"]),
                        "seconds": _median(cost["seconds"]),
                    }
                )
    return table


def _median(costs: list[float]) -> float:
    """The median; infinite where half of the costs or more are."""
    ordered = sorted(costs)
    middle = len(ordered) // 2
    pair = ordered[middle - 1 + len(ordered) % 2 : middle + 1]
    return sum(pair) / len(pair)
