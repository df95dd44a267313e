"""`from_cvxpy`: a follower that was written in cvxpy, and its leader."""

import math
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import numpy as np
import scipy.sparse as sp
from jaxtyping import Array, PyTree

from .._constraints import Box, Intersection, Polyhedron
from .._problem.problem import Problem
from .._programs.modules import Plain
from .canonical import Canonical, canonical
from .expressions import as_function
from .model import SPARSE, Objective
from .names import (
    AUXILIARY,
    check_names,
    check_values,
    checked_leader,
    constraint_names,
    domain_of,
)
from .refusals import check_class, said

# Entries up to which matrices are dense.
_SMALL = 100_000


def from_cvxpy(
    follower: Any,
    leader: Any,
    upper: Any = None,
    *,
    domain: Box | Polyhedron | None = None,
    prices: bool = False,
    **options: Any,
) -> Problem:
    """A `Problem` whose follower is a quadratic program written in cvxpy.

    - `follower`: a `cvxpy.Problem` that minimises a convex or maximises a concave
      quadratic (or piecewise linear) function under linear constraints, by the rules of
      DPP.
    - `leader`: the `cvxpy.Parameter`s that the leader sets. All others keep the values
      that they have now.
    - `upper`: what the leader minimises: a JAX function `(x, y)`, or a scalar
      expression of cvxpy in the leader's parameters and the follower's variables (or a
      `cvxpy.Minimize` or `cvxpy.Maximize` of one). Without it `F` is zero.
    - `domain`: where `x` may be; without it what the parameters were made with
      (`nonneg=True`, `bounds=...`).
    - `prices`: whether `upper` is `(x, y, prices)`.
    - `options`: further ones of `Problem`.

    `x` is a dictionary of the leader's parameters by name, `y` one of the variables by
    name, in cvxpy's shapes. Prices go by the labels of constraints
    (`constraint.set_label("balance")`), or by their places: `"constraints[0]"`. Their
    signs are those of `constraint.dual_value`, and `upper` gets them in its shapes.
    What a follower maximises is minimised with the other sign, as cvxpy does.
    """
    cp = cvxpy_itself()
    leader, form, y0, order = read(cp, follower, leader, upper)
    _check_matrix(follower, form)
    x = {p.name(): np.zeros(p.shape) for p in leader}
    function = as_function(cp, upper, tuple(x), tuple(form.variables), prices)
    return CvxpyProblem(
        _Upper(
            function,
            tuple((g.name, g.shape) for g in form.groups[: form.num_named]),
        ),
        Objective(form, order, x),
        _sets(form, order),
        y0=y0,
        domain=domain_of(leader) if domain is None else domain,
        prices=prices,
        **options,
    )


class CvxpyProblem(Problem):
    """A problem whose `x` goes by the names of cvxpy."""

    def check_x(self, x: PyTree[Array]) -> None:
        lower: Any = self.lower
        shapes = getattr(getattr(lower, "lower", lower), "x", None)
        if shapes is not None:
            check_leader(x, dict(shapes))
        super().check_x(x)


def check_leader(x, shapes: dict[str, tuple[int, ...]]) -> None:
    """Raise a `ValueError` unless `x` holds the leader's parameters."""
    names = ", ".join(f"'{name}'" for name in shapes)
    if not isinstance(x, dict) or set(x) != set(shapes):
        got = (
            f"the keys {sorted(map(str, x))}"
            if isinstance(x, dict)
            else type(x).__name__
        )
        raise ValueError(
            f"`x` must be a dictionary of the leader's parameters by name, {names}; "
            f"got {got}."
        )
    for name, shape in shapes.items():
        if jnp.shape(x[name]) != shape:
            raise ValueError(
                f"`x['{name}']` must have the shape of the parameter `{name}`, "
                f"{shape}; got {jnp.shape(x[name])}."
            )


def read(cp, follower, leader, upper=None):
    """A model after all checks: its leader, its arrays, `y`, and where `z` is in it."""
    check_class(cp, follower)
    leader = checked_leader(cp, follower, leader, upper)
    check_values(follower, leader)
    check_names(follower)
    form = canonical(cp, follower, leader, constraint_names(follower))
    y0: dict[str, Any] = {
        name: np.zeros(places.shape) for name, places in form.variables.items()
    }
    if form.rest.size:
        y0[AUXILIARY] = np.zeros(form.rest.size)
    return leader, form, y0, _order(form, y0)


def cvxpy_itself() -> Any:
    try:
        import cvxpy
    except ImportError as error:
        raise ImportError(
            "`from_cvxpy` needs cvxpy, which is not installed here: "
            "`pip install 'bilevax[cvxpy]'`."
        ) from error
    return cvxpy


def _check_matrix(follower, form: Canonical) -> None:
    if not form.A.moves:
        return
    moving = np.unique(form.A_places[0][np.diff(form.A.slope.indptr) > 0])
    for group in form.groups[: form.num_named]:
        if np.isin(group.rows, moving).any():
            names = constraint_names(follower)
            of = {names[c.id]: c for c in follower.constraints}
            what = f"{group.name}, {said(of[group.name])},"
            break
    else:
        what = f"The objective, {said(follower.objective.expr)},"
    raise ValueError(
        f"{what} multiplies a variable by a parameter of the leader's in its linear "
        "part, and rows may move with the leader but not turn. Make the parameter a "
        "number of the follower's, or write the follower with JAX."
    )


def _order(form: Canonical, y0: dict) -> np.ndarray:
    """Where in the raveled `y` each entry of `z` is."""
    places = form.variables | {AUXILIARY: form.rest}
    flat = np.concatenate([places[name].ravel() for name in sorted(y0)])
    order = np.empty(form.n, int)
    # What is defined by the rest comes behind.
    order[np.concatenate([flat, form.defined.entries])] = np.arange(form.n)
    return order


def _sets(form: Canonical, order) -> Any:
    """Constraints by name: `A z + b >= 0` as `-A y <= b`, with the slopes in `B`."""
    row, column = form.A_places
    shape = len(form.equations), form.n - len(form.defined.entries)
    whole = sp.csr_array((form.A.constant, (row, order[column])), shape=shape)
    sets = {}
    for group in form.groups:
        parts = {}
        equal = form.equations[group.rows]
        for rows, sign, suffix in (
            (group.rows[~equal], -1.0, ""),
            (group.rows[equal], 1.0, "_eq"),
        ):
            if not len(rows):
                continue
            b = form.b.rows(rows)
            parts["A" + suffix] = _matrix(sign * whole[rows])
            parts["b" + suffix] = -sign * b.constant
            if b.moves:
                parts["B" + suffix] = _matrix(sign * b.slope)
        sets[group.name] = Polyhedron(**parts)
    return Intersection(**sets) if sets else None


def _matrix(matrix) -> Any:
    size = math.prod(matrix.shape)
    sparse = size > _SMALL and matrix.nnz <= SPARSE * size
    return matrix if sparse else matrix.toarray()


class _Upper(Plain):
    """The leader's function, which sees the user's variables and prices alone."""

    function: Callable
    groups: tuple = eqx.field(static=True)

    def __call__(self, x, y, *prices):
        y = {name: value for name, value in y.items() if name != AUXILIARY}
        if not prices:
            return self.function(x, y)
        named = {name: prices[0][name].reshape(shape) for name, shape in self.groups}
        return self.function(x, y, named)
