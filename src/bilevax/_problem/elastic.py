"""Elastic lower levels: rows that may be violated at a price, instead of an empty set.

Rows `A y + B x <= b` become `A y - s + B x <= b` with `s >= 0`, equality rows get one
slack for each side, and `lower` pays `price` for every unit of `s`. The penalty is
exact: where the rows can be met, and no multiplier of theirs exceeds the price, `s` is
zero and the answer that of the hard rows. Boxes and simplices stay as they are.

`y` becomes `{"violation": ..., "y": y}`; `upper` and `lower` go on seeing `y` alone.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PyTree

from .._constraints import (
    AbstractConstraints,
    Intersection,
    Polyhedron,
    is_function,
    is_sparse,
)
from .._programs.arrays import xp
from .._programs.modules import Plain
from .._tolerances import tolerances

_SLACK, _ANSWER = "violation", "y"


class Elastic(NamedTuple):
    """The parts of an elastic problem."""

    upper: Any
    lower: Any
    constraints: Intersection
    y0: dict


class _OfAnswer(Plain):
    """An objective that sees `y` alone, and what violations cost."""

    function: Any
    price: Float[Array, ""] | None

    def __call__(self, x, y):
        out = self.function(x, y[_ANSWER])
        if self.price is None:
            return out
        return out + self.price * sum(map(jnp.sum, y[_SLACK].values()))


def elastic(upper, lower, constraints: AbstractConstraints, y0, price) -> Elastic:
    """The same problem with rows that may be violated at a price."""
    sets = _by_name(constraints)
    sizes = {name: one for name, one in sets.items() if isinstance(one, Polyhedron)}
    if not sizes:
        raise ValueError(
            "`elastic` is about the rows of a Polyhedron, and `constraints` has none: "
            "a Box and a Simplex are not empty, and stay as they are."
        )
    dtype = jnp.result_type(*jax.tree.leaves(y0))
    # One slack for each inequality row, two for each equality row.
    slack = {
        name: jnp.zeros(one.num_inequalities + 2 * one.num_equalities, dtype)
        for name, one in sizes.items()
    }
    count = sum(part.size for part in slack.values())
    # JAX sorts names, so "violation" comes before "y", and its parts are in order.
    starts, at = {}, 0
    for name in sorted(slack):
        starts[name], at = at, at + slack[name].size
    n = sum(leaf.size for leaf in jax.tree.leaves(y0))
    soft = {
        name: _softened(one, starts[name], count, name)
        if name in sizes
        else _beside(one, count, n, dtype, y0, name)
        for name, one in sets.items()
    }
    bounds = np.concatenate([-np.eye(count), np.zeros((count, n))], axis=1)
    soft["violations"] = Polyhedron(A=jnp.asarray(bounds, dtype), b=jnp.zeros(count))
    return Elastic(
        upper=_OfAnswer(upper, None),
        lower=_OfAnswer(lower, jnp.asarray(price, dtype)),
        constraints=Intersection(**soft),
        y0={_SLACK: slack, _ANSWER: y0},
    )


def _by_name(constraints) -> dict[str, Any]:
    if isinstance(constraints, Intersection):
        if "violations" in constraints.names:
            raise ValueError(
                '`elastic` adds a set called "violations", and the Intersection has '
                "one: give that another name."
            )
        return dict(zip(constraints.names, constraints.sets, strict=True))
    return {"rows": constraints}


def _softened(one: Polyhedron, start: int, count: int, name: str) -> Polyhedron:
    """Rows with their slacks, the columns of which come first."""
    m, pairs = one.num_inequalities, one.num_equalities
    place = lambda rows, columns: (
        np.eye(count)[columns : columns + rows] if rows else np.zeros((0, count))
    )
    less = -place(m, start)
    equal = place(pairs, start + m + pairs) - place(pairs, start + m)
    return Polyhedron(
        A=_wider(one.A, less, name),
        B=one.B,
        b=one.b,
        A_eq=_wider(one.A_eq, equal, name),
        B_eq=one.B_eq,
        b_eq=one.b_eq,
        names=one.names,
        names_eq=one.names_eq,
    )


def _wider(A: Any, slack: np.ndarray, name: str) -> Any:
    if A is None:
        return None
    if is_function(A):
        return _WiderAt(A, slack)
    if is_sparse(A) or isinstance(A, dict):
        raise ValueError(
            f"`elastic` takes dense rows in one matrix, and those of `{name}` are "
            "sparse or by name: pass `.toarray()`, or one matrix over all of `y`."
        )
    return jnp.concatenate([jnp.asarray(slack, A.dtype), A], axis=1)


class _WiderAt(Plain):
    """Rows that are a function of `x`, with their slacks."""

    A: Any
    slack: np.ndarray

    def __call__(self, x):
        A = jnp.asarray(self.A(x))
        return jnp.concatenate([jnp.asarray(self.slack, A.dtype), A], axis=1)


def _beside(one, count: int, n: int, dtype, y0, name: str) -> Polyhedron:
    """A set that stays hard, as rows over slacks and `y`."""
    if one.has_functions:
        raise ValueError(
            f"`elastic` takes boxes and simplices of numbers, and a bound of `{name}` "
            "is a function of `x`: write it as rows of a Polyhedron."
        )
    k, rhs = one.num_inequalities, np.asarray(one.rhs(jnp.zeros(0)))
    A = np.asarray(one.matrix(n, dtype))
    A = np.concatenate([np.zeros((len(A), count)), A], axis=1)
    less, equal = one.layout.parts[0].row_names(y0)
    keep = np.isfinite(rhs[:k])
    rows: dict[str, Any] = {}
    if keep.any():
        labels = [label for label, kept in zip(less, keep, strict=True) if kept]
        rows |= dict(A=A[:k][keep], b=rhs[:k][keep], names=labels)
    if len(rhs) > k:
        rows |= dict(A_eq=A[k:], b_eq=rhs[k:], names_eq=equal)
    if not rows:
        # A box without a bound: one row that always holds.
        rows = dict(A=np.zeros((1, count + n)), b=np.ones(1))
    return Polyhedron(**rows)


def is_violated(y: PyTree[Array]):
    """Whether an answer of an elastic problem breaks a row by more than rounding."""
    largest = largest_violation(y)
    leaves = [xp.max(xp.abs(leaf)) for leaf in jax.tree.leaves(y[_ANSWER])]
    size = 1 + xp.max(xp.stack(leaves))
    return largest > tolerances(largest.dtype).accept * size


def largest_violation(y: PyTree[Array]):
    """By how much the worst row is broken."""
    return xp.max(xp.concatenate([y[_SLACK][name] for name in sorted(y[_SLACK])]))


def told(y: PyTree[Array]) -> str:
    """The worst violation of each set, for a person."""
    parts = {name: np.asarray(s) for name, s in y[_SLACK].items() if s.size}
    worst = {name: float(s.max()) for name, s in parts.items() if s.max() > 0}
    shown = ", ".join(f"{name} by up to {size:.3g}" for name, size in worst.items())
    return f"Violated: {shown}." if shown else ""
