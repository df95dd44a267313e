"""What every lower-level solver returns, and the shape of a solver."""

import abc
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PyTree

from .._arguments import check_fields
from .._constraints import Layout
from .._problem.problem import Problem
from .._programs.arrays import xp
from .._programs.modules import Plain
from .._status import Status


class Iterations(NamedTuple):
    """Work done by one lower-level solve.

    - `passes`: Newton (or first-order) passes over the KKT system.
    - `factorisations`: Hessians formed and factored.
    - `safeguard`: steps of the fall-back; zero where the fast path sufficed.
    """

    passes: Int[Array, ""]
    factorisations: Int[Array, ""]
    safeguard: Int[Array, ""]


class LowerSolution(Plain):
    """`y*(x)` with its multipliers, its active set and the trust they deserve.

    Rows are inequality rows, then equality rows. `active` holds the strongly active
    and the equality rows, `weak` the rows that are tight with a multiplier of zero to
    within the rounding of the solve; all others are inactive. `margin` is the smallest
    over inequality rows (scaled to unit norm) of max(multiplier, slack), for the best
    choice of multipliers where they are not unique. `error` estimates `|y - y*|`.
    """

    y: PyTree[Array]
    multipliers: Float[Array, " k"]
    slack: Float[Array, " k"]
    active: Bool[Array, " k"]
    weak: Bool[Array, " k"]
    shared_dependence: Bool[Array, ""]
    margin: Float[Array, ""]
    error: Float[Array, ""]
    kkt_residual: Float[Array, ""]
    iterations: Iterations
    status: Any
    factor: Any
    layout: Layout | None = eqx.field(static=True, default=None)

    @property
    def prices(self) -> PyTree[Array]:
        """The multipliers; of an `Intersection` by the names of its sets.

        What one more unit of `b` is worth to the follower: `g` falls by it.
        """
        return self.named("multipliers")

    def named(self, what: str) -> PyTree[Array]:
        """`"multipliers"`, `"slack"`, `"active"` or `"weak"`, as `prices`."""
        if what not in _BY_ROW:
            raise ValueError(
                f"`what` must be one of {', '.join(map(repr, _BY_ROW))}; got {what!r}."
            )
        values = getattr(self, what)
        return values if self.layout is None else self.layout.named(values, self.y)

    @property
    def row_names(self) -> list[str]:
        """What the rows are called, in their order."""
        if self.layout is None:
            return [f"row {i}" for i in range(self.multipliers.shape[-1])]
        # Of many followers each has the names of one.
        axes = self.multipliers.ndim - 1
        one = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape[axes:], leaf.dtype), self.y
        )
        return self.layout.row_names(one)

    @property
    def inactive(self) -> Bool[Array, " k"]:
        return ~(self.active | self.weak)

    @property
    def success(self) -> Bool[Array, ""]:
        return self.status == Status.successful


# What a solution has one number of per row.
_BY_ROW = ("multipliers", "slack", "active", "weak")


class AbstractLowerSolver(Plain):
    """`solver(problem, x, warm)` solves the lower level at `x`.

    `warm` is the `LowerSolution` of a nearby instance with the same shapes; its active
    set and its factorisation are the valuable parts.
    """

    def __check_init__(self):
        check_fields(self)

    @abc.abstractmethod
    def __call__(
        self, problem: Problem, x: PyTree[Array], warm: LowerSolution | None = None
    ) -> LowerSolution: ...

    def inside(self, problem: Problem, x, y) -> Bool[Array, ""]:
        """Whether `y` is where `g` is defined.

        A derivative can be finite outside (logarithms), the value is not.
        """
        return all_finite(problem.lower_value(x, y))


def all_finite(tree) -> Bool[Array, ""]:
    """Whether no array of `tree` holds a NaN or an infinity."""
    leaves = [xp.all(xp.isfinite(leaf)) for leaf in jax.tree.leaves(tree)]
    return xp.all(xp.stack(leaves))


def strongly_typed(tree):
    """`tree` without weak types, which would make the next call another program."""

    def strong(leaf):
        if not eqx.is_array(leaf) or jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return leaf
        return jax.lax.convert_element_type(leaf, leaf.dtype)

    return jax.tree.map(strong, tree)
