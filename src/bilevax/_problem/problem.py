"""Bilevel problems: deterministic and tilted.

Randomness transforms problems, not algorithms: `draw` fixes the data sample,
`perturbed` adds the tilt, and solvers see an ordinary deterministic problem.
"""

import abc
import operator
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PRNGKeyArray, PyTree

from .._arguments import check_flag, check_number
from .._constraints import (
    AbstractConstraints,
    Box,
    Polyhedron,
    tree_as_float,
)
from .._programs.modules import Plain, made, with_fields
from .checks import (
    check_like,
    checked_domain,
    checked_function,
    checked_start,
    scalar,
)
from .elastic import elastic
from .perturbation import tree_add


class AbstractProblem(Plain):
    """Anything that gives a `Problem` once a data sample is drawn."""

    @abc.abstractmethod
    def draw(self, key: PRNGKeyArray, step: Any = None) -> "Problem":
        """The problem at one sample `xi`.

        `step` is the number of the step that asks, for samples that go through the
        data in epochs; without it rows are drawn with replacement.
        """

    @property
    def is_sampled(self) -> bool:
        """Whether draws differ."""
        return False

    @property
    def is_coupled(self) -> bool:
        """Whether the leader has constraints that involve `y`."""
        return False

    @abc.abstractmethod
    def assuming_feasible(self) -> "AbstractProblem":
        """The same problem with the promise `always_feasible`."""

    def absorbed(self, x: PyTree[Array], aux: Any) -> PyTree[Array]:
        """`x` after a step whose evaluation of `f` left the auxiliary output `aux`.

        For parts of `x` that are set, not optimised: running statistics.
        """
        return x


class Problem(AbstractProblem):
    """`min_x f(x, y*(x))` with `y*(x) = argmin_y { g(x, y) : y in Y(x) }`.

    - `upper`: `f(x, y)`, a scalar, or a pair of a scalar and auxiliary output.
    - `lower`: `g(x, y)`, a scalar, strongly convex in `y`; at least convex, and
      strongly so along the directions that active constraints leave open.
    - `constraints`: the set `Y(x)`; None for no constraints.
    - `y0`: where lower solvers start. Needed only where the constraints do not fix the
      structure of `y` (no rows, or a pytree `y` in a `Polyhedron`).
    - `domain`: an optional set for `x`, a `Box` or a `Polyhedron` without `B`.
    - `upper_constraints`, `upper_equalities`: `c(x, y) <= 0` and `h(x, y) = 0`, arrays
      or pytrees of arrays, that the leader must satisfy with the follower's answer
      `y*(x)`. The follower does not know of them. `solve` observes them, `F` and
      `hypergradient` do not change.
    - `always_feasible`: a promise that the lower level has a point at every `x` that
      will be visited, so that methods need no way back from where it has none.
    - `solver`, `adjoint`: how the lower level and its derivative are computed where a
      call does not say; by default the library chooses.
    - `prices`: whether `upper` is a function `(x, y, prices)` of the multipliers of the
      lower level, too: of an array with one entry per row, inequality rows first, or,
      for an `Intersection`, of a dictionary by the names of its sets.
    - `elastic`: a price at which rows of a `Polyhedron` may be violated, so that the
      lower level is never empty. `y` then is `{"violation": ..., "y": y}`, `upper` and
      `lower` see `y` alone, and the status is `violated` where a row is.
    - `members`: where `y` is a minibatch of a larger whole, which members of it these
      are, one number per entry of the leading axis. A tilt that is drawn once for a
      run then belongs to the member, not to its place in the batch.

    `lower` may be an `AbstractLocalLower`, a model that is built around each `x`.
    `x` and `y` are any pytrees of floating arrays.
    """

    upper: Callable
    lower: Callable
    constraints: AbstractConstraints
    y0: PyTree[Array]
    domain: Box | Polyhedron | None
    always_feasible: bool = eqx.field(static=True)
    solver: Any
    adjoint: Any
    members: Int[Array, " batch"] | None
    upper_constraints: Callable | None
    upper_equalities: Callable | None
    prices: bool = eqx.field(static=True)
    elastic: bool = eqx.field(static=True)

    def __init__(
        self,
        upper,
        lower,
        constraints=None,
        *,
        y0=None,
        domain=None,
        upper_constraints=None,
        upper_equalities=None,
        always_feasible=False,
        solver=None,
        adjoint=None,
        members=None,
        prices=False,
        elastic=None,
    ):
        arguments = "(x, y, prices)" if prices else "(x, y)"
        for name, function, given in (
            ("upper", upper, arguments),
            ("lower", lower, "(x, y)"),
        ):
            if not callable(function):
                raise ValueError(
                    f"`{name}` must be a function of `{given}`; got "
                    f"{type(function).__name__}."
                )
        if not isinstance(prices, bool):
            raise ValueError(
                "`prices` tells whether `upper` takes them, True or False; got "
                f"{type(prices).__name__}."
            )
        constraints = Polyhedron() if constraints is None else constraints
        if not isinstance(constraints, AbstractConstraints):
            raise ValueError(
                "`constraints` must be a Polyhedron, a Box, a Simplex or an "
                f"Intersection of these; got {type(constraints).__name__}."
            )
        self.upper, self.lower = upper, lower
        self.y0 = checked_start(constraints, y0)
        self.constraints = constraints.fitted(self.y0)
        self.domain = checked_domain(domain)
        check_flag(always_feasible, "always_feasible")
        self.upper_constraints = checked_function(
            upper_constraints, "upper_constraints", "c(x, y) <= 0"
        )
        self.upper_equalities = checked_function(
            upper_equalities, "upper_equalities", "h(x, y) = 0"
        )
        self.always_feasible = bool(always_feasible)
        self.solver, self.adjoint, self.members = solver, adjoint, members
        self.prices = prices
        self.elastic = elastic is not None
        if self.elastic:
            self._soften(elastic)

    def _soften(self, price) -> None:
        """Rows may be violated at a price from here on."""
        check_number(price, "elastic", "a positive price", np.nextafter(0, 1))
        if self.prices:
            raise ValueError(
                "`elastic` and `prices=True` do not go together: multipliers of "
                "elastic rows end at the price. Leave one of them out."
            )
        if self.is_coupled:
            raise ValueError(
                "`elastic` and upper constraints do not go together: the price of a "
                "violation is the follower's. Leave one of them out."
            )
        parts = elastic(self.upper, self.lower, self.constraints, self.y0, price)
        self.upper, self.lower = parts.upper, parts.lower
        self.constraints, self.y0 = parts.constraints, parts.y0
        self.always_feasible = True

    def draw(self, key, step=None):
        return self

    def assuming_feasible(self):
        return with_fields(self, always_feasible=True)

    @property
    def is_coupled(self):
        return not (self.upper_constraints is None and self.upper_equalities is None)

    @property
    def rows_move(self) -> bool:
        """Whether the constraints move with `x`, so that no `y` may satisfy them."""
        return self.constraints.moves

    def check_x(self, x: PyTree[Array]) -> None:
        """Raise a `ValueError` if `x` does not fit the constraints."""
        self.constraints.check_x(x)

    def localised(self, x: PyTree[Array]) -> "Problem":
        """The same problem at `x`: its local model, and its set as one of numbers."""
        here = self.with_local_lower(x)
        if not self.constraints.has_functions:
            return here
        return with_fields(here, constraints=self.constraints.at(x))

    def with_local_lower(self, x: PyTree[Array]) -> "Problem":
        """The same problem with a lower level that was built around `x`."""
        if not isinstance(self.lower, AbstractLocalLower):
            return self
        lower = self.lower.at(jax.lax.stop_gradient(x))
        return with_fields(self, lower=lower)

    def perturbed(self, q: PyTree[Array]) -> "Problem":
        """The same problem with `<q, y>` added to the lower objective."""
        q = tree_as_float(q, "q")
        check_like(q, self.y0, "q", "y")
        lower = self.lower
        if isinstance(lower, _Tilted | _TiltedLocal):
            lower, q = lower.lower, tree_add(lower.q, q)
        local = isinstance(lower, AbstractLocalLower)
        tilted = _TiltedLocal(lower, q) if local else _Tilted(lower, q)
        return eqx.tree_at(lambda p: p.lower, self, tilted)

    def upper_value(self, x, y, multipliers=None) -> tuple[Float[Array, ""], Any]:
        """`f(x, y)`, or `f(x, y, prices)`, and its auxiliary output (or None)."""
        out = self.upper(x, y, *self.prices_for_upper(y, multipliers))
        if isinstance(out, tuple) and len(out) != 2:
            raise ValueError(
                "`upper(x, y)` must return a scalar, or a pair of a scalar and "
                f"auxiliary output; got a tuple of {len(out)}. Put all auxiliary "
                "output into one tuple."
            )
        value, aux = out if isinstance(out, tuple) else (out, None)
        return scalar(value, "upper"), aux

    def prices_for_upper(self, y, multipliers) -> tuple:
        """What `upper` takes besides `x` and `y`."""
        if not self.prices:
            return ()
        assert multipliers is not None, "this call knows no multipliers"
        return (self.constraints.layout.named(multipliers, y),)

    def multipliers_of(self, lower) -> Float[Array, " k"] | None:
        """Those of a lower-level solution where `upper` asks for them, else None."""
        return lower.multipliers if self.prices else None

    def any_multipliers(self) -> Float[Array, " k"] | None:
        """Zeros in their place, for shapes."""
        if not self.prices:
            return None
        dtype = jnp.result_type(*jax.tree.leaves(self.y0))
        return jnp.zeros(self.constraints.num_rows, dtype)

    def lower_value(self, x, y) -> Float[Array, ""]:
        """`g(x, y)`."""
        return scalar(self.lower(x, y), "lower")


def tilted(problem: Problem, q: PyTree[Array]) -> Problem:
    """`perturbed` for the steps of a run, which cannot wait: nothing is checked."""
    lower = problem.lower
    if isinstance(lower, _Tilted | _TiltedLocal):
        lower, q = lower.lower, jax.tree.map(operator.add, lower.q, q)
    return with_fields(problem, lower=made(_Tilted, lower=lower, q=q))


def bare(problem: Problem) -> Problem:
    """Both levels alone: what stages know, whatever surrounds the problem."""
    return with_fields(
        problem,
        domain=None,
        always_feasible=True,
        solver=None,
        adjoint=None,
        members=None,
        upper_constraints=None,
        upper_equalities=None,
    )


class AbstractLocalLower(Plain):
    """A lower objective that is built around each `x` at which `F` is asked for.

    `at(x)` gives the objective there. What it computes on the way, such as the point
    around which a loss is linearised, counts as constant in derivatives.
    """

    @abc.abstractmethod
    def at(self, x: PyTree[Array]) -> Callable:
        """The lower objective `(x, y) -> g` around `x`."""

    def __call__(self, x, y):
        return self.at(jax.lax.stop_gradient(x))(x, y)


class _Tilted(Plain):
    """`g(x, y) + <q, y>`; a Module, so that a new tilt does not recompile."""

    lower: Callable
    q: PyTree[Array]

    def __call__(self, x, y):
        tilt = sum(
            jnp.sum(q * y)
            for q, y in zip(jax.tree.leaves(self.q), jax.tree.leaves(y), strict=True)
        )
        return scalar(self.lower(x, y), "lower") + tilt


class _TiltedLocal(AbstractLocalLower):
    """A local model with `<q, y>` added; the tilt does not move where it is built."""

    lower: AbstractLocalLower
    q: PyTree[Array]

    def at(self, x):
        return _Tilted(self.lower.at(x), self.q)
