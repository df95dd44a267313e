"""What the rows of a set are called.

A layout is static: numbers and names. A solution carries that of its set, and gives
multipliers, slacks and active rows by name.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

import jax
from jaxtyping import Array, PyTree


@dataclass(frozen=True)
class Part:
    """The rows of one set: how many, and the labels of those that have any.

    `bounds` tells whether the inequality rows are bounds on the entries of `y`, one
    after the other: `("lower",)`, or `("lower", "upper")`. `name` is what the set is
    called within an `Intersection`.
    """

    inequalities: int
    equalities: int
    bounds: tuple[str, ...] = ()
    labels: tuple[str, ...] | None = None
    labels_eq: tuple[str, ...] | None = None
    name: str | None = None

    def named(self, less, equal, y: PyTree[Array]) -> Any:
        """The entries of the inequality rows and of the equality rows, by name."""
        if self.bounds:
            batch, width = less.shape[:-1], less.shape[-1] // len(self.bounds)
            found: dict[str, Any] = {}
            for i, end in enumerate(self.bounds):
                found[end] = _like(less[..., i * width : (i + 1) * width], y, batch)
            return found | ({"sums": equal} if self.equalities else {})
        if self.inequalities and self.equalities:
            return {"A": less, "A_eq": equal}
        return equal if self.equalities else less

    def row_names(self, y: PyTree[Array]) -> tuple[list[str], list[str]]:
        """The names of the inequality rows and of the equality rows."""
        prefix = "" if self.name is None else self.name
        if self.bounds:
            dot = f"{prefix}." if prefix else ""
            entries = entry_names(y)
            less = [f"{dot}{end}{entry}" for end in self.bounds for entry in entries]
            return less, [f"{dot}sums[{i}]" for i in range(self.equalities)]
        both = bool(self.inequalities and self.equalities)
        return (
            _labelled(prefix, "A", self.labels, self.inequalities, both),
            _labelled(prefix, "A_eq", self.labels_eq, self.equalities, both),
        )


@dataclass(frozen=True)
class Layout:
    """The rows of a set: the inequality rows of its parts, then the equality rows.

    `by_name`: whether the set is an `Intersection`, whose parts have names.
    """

    parts: tuple[Part, ...]
    by_name: bool = False

    def named(self, values: Array, y: PyTree[Array]) -> Any:
        """`values`, one per row, by name; of a single set as they are.

        Leading axes are those of a batch, of `y` too.
        """
        if not self.by_name:
            return values
        found, less, equal = {}, 0, sum(part.inequalities for part in self.parts)
        for part in self.parts:
            ends = less + part.inequalities, equal + part.equalities
            pieces = values[..., less : ends[0]], values[..., equal : ends[1]]
            found[part.name] = part.named(*pieces, y)
            less, equal = ends
        return found

    def row_names(self, y: PyTree[Array]) -> list[str]:
        """One name per row, in their order; `y` of one lower level."""
        pairs = [part.row_names(y) for part in self.parts]
        return [n for less, _ in pairs for n in less] + [
            n for _, equal in pairs for n in equal
        ]

    @classmethod
    def joined(cls, layouts: dict[str, "Layout"]) -> "Layout":
        """That of an intersection of sets with these layouts."""
        parts = (
            replace(layout.parts[0], name=name) for name, layout in layouts.items()
        )
        return cls(tuple(parts), by_name=True)


def entry_names(y: PyTree[Array]) -> list[str]:
    """`[3]`, `['flow'][2]`: each entry of `y` in JAX order."""
    found = []
    for path, leaf in jax.tree_util.tree_flatten_with_path(y)[0]:
        prefix = jax.tree_util.keystr(path)
        for i in range(math.prod(leaf.shape)):
            found.append(prefix + _place(i, leaf.shape))
    return found


def _place(i: int, shape: tuple[int, ...]) -> str:
    if not shape:
        return ""
    at = []
    for size in reversed(shape):
        at.append(str(i % size))
        i //= size
    return f"[{', '.join(reversed(at))}]"


def _labelled(prefix: str, kind: str, labels, count: int, both: bool) -> list[str]:
    # A set of one kind of rows in an intersection needs no word for that kind.
    head = ".".join(filter(None, (prefix, kind if both or not prefix else "")))
    if labels is not None:
        return [f"{prefix}[{label}]" if prefix else label for label in labels]
    return [f"{head}[{i}]" for i in range(count)]


def _like(values, y: PyTree[Array], batch: tuple[int, ...]) -> PyTree[Array]:
    """`values` in the structure of `y`, leaf after leaf."""
    leaves, structure = jax.tree.flatten(y)
    found, start = [], 0
    for leaf in leaves:
        shape = leaf.shape[len(batch) :]
        end = start + math.prod(shape)
        found.append(values[..., start:end].reshape(*batch, *shape))
        start = end
    return structure.unflatten(found)
