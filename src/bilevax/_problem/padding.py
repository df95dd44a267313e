"""Followers of different sizes, filled up to one size.

Entries of `y` that are added have a curvature of one and no influence, so that they are
zero; rows that are added bound nothing. Arrays of the data are filled up with zeros.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Bool, PyTree

from .._constraints import Box, Polyhedron
from .._programs.modules import Plain
from .problem import Problem


def padded(instance: Callable, data: Sequence[PyTree]) -> tuple[Callable, PyTree]:
    """An instance for all of `data`, one entry per follower, and data of one shape."""
    problems = [instance(d) for d in data]
    for i, problem in enumerate(problems):
        if not isinstance(problem, Problem):
            raise ValueError(
                f"`instance(d)` must return a Problem; that of follower {i} is "
                f"{type(problem).__name__}."
            )
    _check_prices(problems)
    if any(_is_no_array(problem.constraints) for problem in problems):
        raise ValueError(
            "Followers of different sizes need constraints given by numbers; a part is "
            "a function of `x`, or a dictionary of columns by name. Pass arrays."
        )
    y0, own = _filled([problem.y0 for problem in problems], "y0 of follower {}")
    kinds = {type(problem.constraints) for problem in problems}
    if len(kinds) != 1 or not kinds <= {Box, Polyhedron}:
        raise ValueError(
            "Followers of different sizes need constraints of one kind, a Box or a "
            f"Polyhedron; got {', '.join(sorted(kind.__name__ for kind in kinds))}."
        )
    if kinds == {Box}:
        sets = _boxes([problem.constraints for problem in problems])
    else:
        sets = _polyhedra([problem.constraints for problem in problems], own)
    parts = dict(data=_filled(data, "data[{}]")[0], y0=y0, own=own, sets=sets)
    return _Padded(instance), parts


def _is_no_array(constraints) -> bool:
    parts = (getattr(constraints, name, None) for name in ("B", "B_eq"))
    return constraints.has_functions or any(isinstance(part, dict) for part in parts)


def _check_prices(problems) -> None:
    """Rows are added behind those of their kind, which moves the equality rows."""
    for problem in problems:
        rows = problem.constraints
        if problem.prices and rows.num_inequalities and rows.num_equalities:
            raise ValueError(
                "Followers of different sizes whose `upper` takes prices need "
                "constraints with rows of one kind; got inequality rows and equality "
                "rows."
            )


class _Padded(Plain):
    """The problem of one follower in the common size."""

    instance: Callable

    def __call__(self, parts) -> Problem:
        problem, own = self.instance(parts["data"]), parts["own"]
        return Problem(
            _OwnUpper(problem.upper, own),
            _OwnLower(problem.lower, own),
            type(problem.constraints)(**parts["sets"]),
            y0=parts["y0"],
            domain=problem.domain,
            always_feasible=problem.always_feasible,
            solver=problem.solver,
            adjoint=problem.adjoint,
            prices=problem.prices,
        )


class _OwnUpper(Plain):
    """`f` of the follower's own entries."""

    function: Callable
    own: PyTree[Bool[Array, "..."]]

    def __call__(self, x, y, *prices):
        return self.function(x, jax.tree.map(_only, self.own, y), *prices)


class _OwnLower(Plain):
    """`g` of the follower's own entries, and curvature for the others."""

    function: Callable
    own: PyTree[Bool[Array, "..."]]

    def __call__(self, x, y):
        more = jax.tree.map(lambda own, y: jnp.sum(_only(~own, y) ** 2), self.own, y)
        value = self.function(x, jax.tree.map(_only, self.own, y))
        return value + 0.5 * sum(jax.tree.leaves(more))


def _only(own, y):
    return jnp.where(own, y, 0)


def _filled(trees: Sequence[PyTree], name: str) -> tuple[PyTree, PyTree]:
    """The trees stacked, filled up with zeros, and which entries are their own."""
    structures = [jax.tree.structure(tree) for tree in trees]
    columns = []
    for i, tree in enumerate(trees):
        leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]
        axes = [leaf.ndim for leaf in leaves]
        if i == 0:
            first = axes
        if structures[i] != structures[0] or axes != first:
            raise ValueError(
                f"`{name.format(i)}` must have the tree structure and the numbers of "
                f"axes of `{name.format(0)}`; expected {structures[0]} with {first}, "
                f"got {structures[i]} with {axes}."
            )
        columns.append(leaves)
    filled = [_stacked(column) for column in zip(*columns, strict=True)]
    both = zip(*filled, strict=True) if filled else ((), ())
    values, own = (structures[0].unflatten(part) for part in both)
    return values, own


def _stacked(arrays: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    shape = np.max([array.shape for array in arrays], axis=0).astype(int)
    values = np.zeros((len(arrays), *shape), np.result_type(*arrays))
    own = np.zeros(values.shape, bool)
    for i, array in enumerate(arrays):
        place = (i, *map(slice, array.shape))
        values[place], own[place] = array, True
    return values, own


def _boxes(boxes: Sequence[Any]) -> dict[str, PyTree]:
    """Bounds for all; entries that are added have none."""

    def bounds(side, nothing):
        values, own = _filled([getattr(box, side) for box in boxes], side + " of {}")
        return jax.tree.map(lambda v, own: np.where(own, v, nothing), values, own)

    return dict(lower=bounds("lower", -np.inf), upper=bounds("upper", np.inf))


def _polyhedra(sets: Sequence[Any], own) -> dict[str, np.ndarray]:
    """Rows for all; rows that are added are zero, and columns stand where `y` does."""
    places = [
        np.flatnonzero(ravel_pytree(jax.tree.map(lambda leaf, i=i: leaf[i], own))[0])
        for i in range(len(sets))
    ]
    size = ravel_pytree(jax.tree.map(lambda leaf: leaf[0], own))[0].size
    found = {}
    for end, nothing in (("", np.inf), ("_eq", 0.0)):
        A, B, b = ([getattr(one, name + end) for one in sets] for name in "ABb")
        if all(part is None for part in A):
            continue
        wide = []
        for part, place in zip(A, places, strict=True):
            rows = np.zeros((0 if part is None else len(part), size))
            if part is not None:
                rows[:, place] = part
            wide.append(rows)
        found["A" + end] = _stacked(wide)[0]
        bounds = [np.zeros(0) if v is None else np.asarray(v) for v in b]
        values, mine = _stacked(bounds)
        found["b" + end] = np.where(mine, values, nothing)
        if any(part is not None for part in B):
            width = next(part.shape[1] for part in B if part is not None)
            given = [
                np.zeros((len(rows), width)) if part is None else np.asarray(part)
                for part, rows in zip(B, wide, strict=True)
            ]
            found["B" + end] = _stacked(given)[0]
    return found
