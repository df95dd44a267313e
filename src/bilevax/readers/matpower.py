"""Cases of MATPOWER (version 2): matrices out of an m-file, of which nothing is run."""

import os
import re
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from .lines import Lines, ReaderError

# Columns by their names in the manual of MATPOWER, as far as they are used.
_BUS = dict(bus=0, kind=1, load=2)
_GENERATOR = dict(bus=0, most=8, least=9, status=7)
_BRANCH = dict(start=0, end=1, reactance=3, limit=5, ratio=8, shift=9, status=10)
_NEEDED = dict(bus=3, gen=10, branch=11)
_NUMBER = re.compile(r"[-+]?(\d+\.?\d*([eE][-+]?\d+)?|\.\d+([eE][-+]?\d+)?|inf)", re.I)
_ASSIGNED = re.compile(r"mpc\.(\w+)\s*=\s*(.*)", re.S)


@dataclass(frozen=True)
class PowerCase:
    """Buses, generators and branches in service, for direct-current models.

    Powers are in MW, reactances per unit of `base`.

    - `buses`: their numbers; `load`: MW at each; `reference`: where the slack is.
    - `generator_bus`, `least`, `most`: of each generator: the position of its bus, and
      its limits. `cost`: `(c2, c1, c0)` of `c2 p^2 + c1 p + c0`, a row each, or None.
    - `start`, `end`: positions of the buses of each branch; `reactance`, taps included;
      `limit`: MW, infinite where there is none.
    """

    base: float
    buses: Int[np.ndarray, " buses"]
    load: Float[np.ndarray, " buses"]
    reference: int
    generator_bus: Int[np.ndarray, " generators"]
    least: Float[np.ndarray, " generators"]
    most: Float[np.ndarray, " generators"]
    cost: Float[np.ndarray, "generators 3"] | None
    start: Int[np.ndarray, " branches"]
    end: Int[np.ndarray, " branches"]
    reactance: Float[np.ndarray, " branches"]
    limit: Float[np.ndarray, " branches"]

    def shift_factors(self) -> Float[np.ndarray, "branches buses"]:
        """MW on each branch for one more MW put in at each bus, out at the slack."""
        count, branches = len(self.buses), len(self.start)
        incidence = np.zeros((branches, count))
        incidence[np.arange(branches), self.start] = 1
        incidence[np.arange(branches), self.end] -= 1
        flows = incidence / self.reactance[:, None]
        others = np.arange(count) != self.reference
        factors = np.zeros((branches, count))
        laplacian = (incidence.T @ flows)[np.ix_(others, others)]
        try:
            factors[:, others] = np.linalg.solve(laplacian, flows[:, others].T).T
        except np.linalg.LinAlgError:
            raise ReaderError(
                "the network is not connected: some buses have no path of branches in "
                "service to the slack."
            ) from None
        return factors


def read_matpower(path: str | os.PathLike) -> PowerCase:
    """The case in an m-file of MATPOWER, as far as a direct-current model needs it."""
    found = _assignments(path)
    for name, width in _NEEDED.items():
        if name not in found:
            raise ReaderError(f"{path} has no `mpc.{name}`. Is it a case of MATPOWER?")
        if found[name].shape[1] < width:
            raise ReaderError(
                f"{path}: `mpc.{name}` must have at least {width} columns; got "
                f"{found[name].shape[1]}."
            )
    base = found.get("baseMVA", np.array([[100.0]]))
    bus, generators, branches = (found[name] for name in _NEEDED)
    named = bus[:, _BUS["bus"]]
    if not np.all((named >= 1) & (named < 2**31) & (named == np.round(named))):
        raise ReaderError(f"{path}: buses must have whole numbers from 1 on.")
    numbers = named.astype(int)
    if len(set(numbers)) != len(numbers):
        raise ReaderError(f"{path}: a bus is listed twice.")
    positions = {number: i for i, number in enumerate(numbers)}

    def position(values, what):
        for value in values:
            if value not in positions:
                raise ReaderError(f"{path}: {what} is at bus {value:g}, which is none.")
        return np.array([positions[value] for value in values], int)

    slack = np.flatnonzero(bus[:, _BUS["kind"]] == 3)
    if len(slack) == 0:
        raise ReaderError(f"{path} has no reference bus (type 3).")
    on = generators[:, _GENERATOR["status"]] > 0
    lines = branches[branches[:, _BRANCH["status"]] > 0]
    ratio = lines[:, _BRANCH["ratio"]]
    reactance = lines[:, _BRANCH["reactance"]] * np.where(ratio == 0, 1, ratio)
    if np.any(reactance == 0):
        raise ReaderError(f"{path}: a branch in service has no reactance.")
    if np.any(lines[:, _BRANCH["shift"]] != 0):
        raise ReaderError(f"{path}: phase shifters are not supported.")
    limit = lines[:, _BRANCH["limit"]]
    return PowerCase(
        base=float(base[0, 0]),
        buses=numbers,
        load=bus[:, _BUS["load"]],
        reference=int(slack[0]),
        generator_bus=position(generators[on, _GENERATOR["bus"]], "a generator"),
        least=generators[on, _GENERATOR["least"]],
        most=generators[on, _GENERATOR["most"]],
        cost=_costs(path, found.get("gencost"), on),
        start=position(lines[:, _BRANCH["start"]], "a branch"),
        end=position(lines[:, _BRANCH["end"]], "a branch"),
        reactance=reactance,
        limit=np.where(limit == 0, np.inf, limit),
    )


def _costs(path, rows: Any, on) -> np.ndarray | None:
    """`(c2, c1, c0)` of the generators in service, from polynomials."""
    if rows is None:
        return None
    # A second half is for reactive power.
    rows = rows[: len(on)]
    if len(rows) < len(on):
        raise ReaderError(f"{path}: `mpc.gencost` has fewer rows than `mpc.gen`.")
    costs = np.zeros((len(rows), 3))
    for i, row in enumerate(rows):
        known = len(row) > 3 and row[0] == 2 and row[3] in (0, 1, 2, 3)
        degree = int(row[3]) if known else 0
        if not known or len(row) < 4 + degree:
            raise ReaderError(
                f"{path}: generator {i + 1} has a cost that is no polynomial of degree "
                "two or less (`mpc.gencost`, model 2). Piecewise linear costs are not "
                "read."
            )
        costs[i, 3 - degree :] = row[4 : 4 + degree]
    return costs[on]


def _assignments(path) -> dict[str, np.ndarray]:
    """Every `mpc.name = [numbers]` or `= number`, as a matrix."""
    lines = Lines(path, "%")
    found: dict[str, np.ndarray] = {}
    name, rows, begun = None, [], 0
    for line in lines:
        if name is None:
            match = _ASSIGNED.match(line)
            if match is None:
                if line.startswith("mpc."):
                    lines.refuse(
                        "this changes the case after it was listed, which would have "
                        f"to be run: {line[:60]!r}. Save the changed case with "
                        "`savecase` and read that."
                    )
                continue
            name, rest = match.groups()
            if not rest.startswith("["):
                value = rest.rstrip("; ")
                if _NUMBER.fullmatch(value):
                    found[name] = np.array([[lines.float(value, name)]])
                elif name in _NEEDED or name in ("baseMVA", "gencost"):
                    lines.refuse(f"`mpc.{name}` must be numbers; got {value[:40]!r}.")
                name = None
                continue
            line, rows, begun = rest[1:], [], lines.number
        body, closed, _ = line.partition("]")
        for row in filter(str.strip, body.split(";")):
            if name in _NEEDED or name == "gencost":
                words = row.replace(",", " ").split()
                rows.append([lines.float(word, f"mpc.{name}") for word in words])
        if closed:
            if len({len(row) for row in rows}) > 1:
                lines.refuse(f"rows of `mpc.{name}` differ in length.")
            if rows:
                found[name] = np.array(rows)
            name = None
    if name is not None:
        raise ReaderError(
            f"{path}: `mpc.{name}`, which begins in line {begun}, has no end."
        )
    return found
