"""Road networks in the TNTP format of the Transportation Networks collection.

A `_net` file has a link a line, a `_trips` file the trips between zones, a `_node`
file, if there is one, where to draw them. Lines end with `;`, comments begin with `~`.
"""

import os
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int

from .lines import Lines, ReaderError

_COLUMNS = ("tail", "head", "capacity", "length", "free_time", "b", "power")
_HEADER = "<END OF METADATA>"
# A damaged count must not ask for all memory.
_MOST_NODES, _MOST_ZONES = 10**8, 30_000


@dataclass(frozen=True)
class RoadNetwork:
    """Links, zones and trips; nodes are numbered from 1, as in the files.

    A link with flow `v` takes `free_time (1 + b (v / capacity)^power)`.

    - `tail`, `head`, `capacity`, `length`, `free_time`, `b`, `power`: one per link.
    - `trips`: from zone (row) to zone (column); zones are the nodes 1, 2, ...
    - `nodes`: how many there are. `first_through`: the first node that through traffic
      may pass; zones before it only begin and end trips.
    - `places`: coordinates of the nodes, or None.
    """

    tail: Int[np.ndarray, " links"]
    head: Int[np.ndarray, " links"]
    capacity: Float[np.ndarray, " links"]
    length: Float[np.ndarray, " links"]
    free_time: Float[np.ndarray, " links"]
    b: Float[np.ndarray, " links"]
    power: Float[np.ndarray, " links"]
    trips: Float[np.ndarray, "zones zones"]
    nodes: int
    first_through: int = 1
    places: Float[np.ndarray, "nodes 2"] | None = None

    @property
    def links(self) -> int:
        return len(self.tail)

    @property
    def zones(self) -> int:
        return len(self.trips)

    def time(self, flow):
        """The time that each link takes at these flows; NumPy's or JAX's arrays."""
        return self.free_time * (1 + self.b * (flow / self.capacity) ** self.power)

    def total_delay(self, flow):
        """`sum_a integral_0^v time_a`, which drivers without tolls minimise."""
        power = self.power + 1
        load = (flow / self.capacity) ** self.power
        return (self.free_time * flow * (1 + self.b * load / power)).sum()

    def incidence(self):
        """Nodes by links, sparse: 1 where a link leaves a node, -1 where it arrives."""
        import scipy.sparse as sp

        at = np.arange(self.links)
        ends = np.concatenate([self.tail, self.head]) - 1
        signs = np.repeat([1.0, -1.0], self.links)
        shape = (self.nodes, self.links)
        return sp.csr_array((signs, (ends, np.concatenate([at, at]))), shape=shape)


def read_tntp(
    net: str | os.PathLike,
    trips: str | os.PathLike,
    nodes: str | os.PathLike | None = None,
) -> RoadNetwork:
    """The road network of a `_net`, a `_trips` and perhaps a `_node` file."""
    facts, links = _links(net)
    count = facts.get("NUMBER OF NODES", int(max(links[:, :2].max(), 1)))
    ends = links[:, :2].astype(int)
    if ends.max() > count:
        raise ReaderError(
            f"{net}: a link ends at node {ends.max()}, and there are {count} nodes by "
            "its first lines."
        )
    if count > _MOST_NODES:
        raise ReaderError(f"{net}: {count} nodes are more than can be held.")
    zones = facts.get("NUMBER OF ZONES")
    return RoadNetwork(
        tail=ends[:, 0],
        head=ends[:, 1],
        **{name: links[:, i] for i, name in enumerate(_COLUMNS) if i > 1},
        trips=_trips(trips, zones),
        nodes=count,
        first_through=facts.get("FIRST THRU NODE", 1),
        places=None if nodes is None else _places(nodes, count),
    )


def _links(path) -> tuple[dict[str, int], np.ndarray]:
    lines = Lines(path, "~")
    facts, rows, begun = {}, [], False
    for line in lines:
        if not begun:
            begun = line.upper().startswith(_HEADER)
            if line.startswith("<") and not begun:
                _note(lines, line, facts)
            continue
        words = line.replace(";", " ").split()
        if len(words) < len(_COLUMNS):
            lines.refuse(
                f"a link has {', '.join(_COLUMNS)}, at least {len(_COLUMNS)} numbers; "
                f"got {len(words)}."
            )
        row = [lines.index(words[i], _COLUMNS[i]) for i in (0, 1)]
        row += [lines.float(words[i], _COLUMNS[i]) for i in range(2, len(_COLUMNS))]
        if not row[2] > 0:
            lines.refuse(f"the capacity must be positive; got {row[2]:g}.")
        if min(row[4:]) < 0:
            lines.refuse("times, `b` and `power` cannot be negative.")
        rows.append(row)
    if not rows:
        raise ReaderError(
            f"{path} has no links after a line {_HEADER}. Is it a `_net` file?"
        )
    said = facts.get("NUMBER OF LINKS", len(rows))
    if said != len(rows):
        raise ReaderError(
            f"{path} has {len(rows)} links, and {said} by its first lines: it may have "
            "been cut off."
        )
    return facts, np.array(rows)


def _note(lines: Lines, line: str, facts: dict[str, int]) -> None:
    """Keep `<NAME> number`."""
    name, _, value = line[1:].partition(">")
    if value.strip() and name.upper().startswith(("NUMBER", "FIRST")):
        facts[name.strip().upper()] = lines.index(value.split()[0], name.strip())


def _trips(path, zones: int | None) -> np.ndarray:
    lines = Lines(path, "~")
    found: dict[tuple[int, int], float] = {}
    origin, facts = None, {}
    for line in lines:
        if line.startswith("<"):
            _note(lines, line, facts)
        elif line.lower().startswith("origin"):
            origin = lines.index(line[6:].strip() or "nothing", "origin")
        else:
            if origin is None:
                lines.refuse("trips come before any `Origin`. Is it a `_trips` file?")
            for pair in filter(str.strip, line.split(";")):
                goal, colon, count = pair.partition(":")
                if not colon:
                    lines.refuse(f"expected `zone : trips`; got {pair.strip()[:40]!r}.")
                value = lines.float(count.strip(), "trips")
                if not 0 <= value < np.inf:
                    lines.refuse(f"trips cannot be {value:g}.")
                key = origin, lines.index(goal.strip(), "zone")
                found[key] = found.get(key, 0.0) + value
    if not found:
        raise ReaderError(f"{path} has no trips. Is it a `_trips` file?")
    most = max(max(pair) for pair in found)
    zones = facts.get("NUMBER OF ZONES", most) if zones is None else zones
    if most > zones:
        raise ReaderError(f"{path}: there are trips of zone {most}, and {zones} zones.")
    if zones > _MOST_ZONES:
        raise ReaderError(f"{path}: {zones} zones are more than can be held.")
    table = np.zeros((zones, zones))
    for (start, goal), value in found.items():
        table[start - 1, goal - 1] = value
    return table


def _places(path, count: int) -> np.ndarray:
    lines = Lines(path, "~")
    places = np.full((count, 2), np.nan)
    for line in lines:
        words = line.replace(";", " ").split()
        if not words or words[0].lower() == "node":
            continue
        if len(words) < 3:
            lines.refuse("a node has a number and two coordinates.")
        node = lines.index(words[0], "node")
        if node > count:
            lines.refuse(f"node {node} is not in the network, which has {count}.")
        places[node - 1] = [lines.float(words[i], "coordinate") for i in (1, 2)]
    missing = np.flatnonzero(np.isnan(places[:, 0]))
    if len(missing):
        raise ReaderError(f"{path} does not say where node {missing[0] + 1} is.")
    return places
