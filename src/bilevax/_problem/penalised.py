"""Upper constraints that involve `y`, made part of an objective.

The leader must satisfy `c(x, y*(x)) <= 0` and `h(x, y*(x)) = 0`. The exact penalty

    P_w(x) = F(x) + sum_j w_j [c_j]_+ + sum_k w_k |h_k|

has the same local minimisers as soon as each weight exceeds the multiplier of its
constraint, and is the objective of an ordinary problem: it is another `upper`. So is
the weighted sum `s f + <w, (c, h)>`, whose gradients are those of `F` and of each
constraint. Everything else knows nothing of upper constraints.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float, PyTree

from .._programs.modules import Plain, with_fields
from .._status import is_traced
from .checks import called, scalar
from .problem import AbstractProblem, Problem
from .stochastic import StochasticProblem


class Rows(Plain):
    """The values `(c, h)` of all upper constraints in one vector, `c` first."""

    constraints: Callable | None
    equalities: Callable | None

    def __call__(self, x, y, *more) -> Float[Array, " rows"]:
        parts = self.parts(x, y, *more)
        return jnp.concatenate([ravel_pytree(part)[0] for part in parts])

    def parts(self, x, y, *more) -> tuple[PyTree[Array], PyTree[Array]]:
        """`c` and `h` as their functions return them; `()` where there is none."""
        c, h = (part.values(x, y, *more) for part in self._named)
        return c, h

    def shapes(self, problem: Problem, x) -> tuple[PyTree, PyTree]:
        """The shapes of both parts; a `ValueError` if they cannot be evaluated."""
        more = problem.prices_for_upper(problem.y0, problem.any_multipliers())
        arguments = "(x, y, prices)" if more else "(x, y)"
        c, h = (
            called(part.values, part.name + arguments, x, problem.y0, *more)
            for part in self._named
        )
        return c, h

    @property
    def _named(self):
        return (
            _Part(self.constraints, "upper_constraints"),
            _Part(self.equalities, "upper_equalities"),
        )


class _Part(NamedTuple):
    function: Callable | None
    name: str

    def values(self, x, y, *more) -> PyTree[Array]:
        if self.function is None:
            return ()
        return _checked(self.function(x, y, *more), self.name)


def rows_of(problem: Problem) -> Rows:
    """The upper constraints of a problem."""
    return Rows(problem.upper_constraints, problem.upper_equalities)


def penalised(problem: AbstractProblem, weight: Any) -> AbstractProblem:
    """The ordinary problem `min F + sum w_j [c_j]_+ + sum w_k |h_k|`.

    Its minimisers are those of `problem` with its upper constraints as soon as each
    weight exceeds the multiplier of its constraint; `solve` finds such weights by
    itself. By hand it serves `compare` and `tune`, which need one objective. `weight`
    is a number, or one for each entry of `upper_constraints` and then of
    `upper_equalities`, in their order when flattened.
    """
    weights = jnp.asarray(weight, float)
    if not eqx.is_array_like(weights) or weights.ndim > 1:
        raise ValueError("`weight` must be a number or a vector of numbers.")
    if not is_traced(weights) and not (np.asarray(weights) >= 0).all():
        raise ValueError(f"`weight` must not be negative; got {weight}.")
    return with_penalty(problem, 1.0, weights)


def with_penalty(problem: AbstractProblem, share, weights) -> Any:
    """The problem of `share F` and the penalties; nothing is checked but its kind."""
    if isinstance(problem, StochasticProblem):
        population = problem.population
        return dataclasses.replace(
            problem,
            instance=_Instance(problem.instance, jnp.asarray(share, float), weights),
            population=None
            if population is None
            else with_penalty(population, share, weights),
        )
    if not (isinstance(problem, Problem) and problem.is_coupled):
        raise ValueError(
            "`problem` has no upper constraints: give it `upper_constraints=` or "
            "`upper_equalities=`, or solve it as it is."
        )
    share = jnp.asarray(share, float)
    upper = Penalised(problem.upper, rows_of(problem), share, weights)
    return _ordinary(problem, upper)


def weighted(problem: Problem, share, weights) -> Problem:
    """The problem whose `F` is `share F + <weights, (c, h)>`."""
    return _ordinary(problem, Weighted(problem.upper, rows_of(problem), share, weights))


def _ordinary(problem: Problem, upper) -> Problem:
    return with_fields(
        problem, upper=upper, upper_constraints=None, upper_equalities=None
    )


class Penalised(Plain):
    """`share f + sum w_j [c_j]_+ + sum w_k |h_k|`, with the auxiliary output of `f`."""

    upper: Callable
    rows: Rows
    share: Float[Array, ""]
    weights: Array

    def __call__(self, x, y, *more):
        value, aux = _split(self.upper(x, y, *more))
        less, equal = (ravel_pytree(part)[0] for part in self.rows.parts(x, y, *more))
        outside = jnp.concatenate([jnp.where(less > 0, less, 0 * less), jnp.abs(equal)])
        # A NaN is not inside.
        outside = jnp.where(jnp.isnan(jnp.concatenate([less, equal])), jnp.nan, outside)
        return self.share * value + jnp.sum(self.weights * outside), aux


class Weighted(Plain):
    """`share f + <w, (c, h)>`; the auxiliary output is `f` and `(c, h)`."""

    upper: Callable
    rows: Rows
    share: Float[Array, ""]
    weights: Array

    def __call__(self, x, y, *more):
        value, _ = _split(self.upper(x, y, *more))
        values = self.rows(x, y, *more)
        # Those without weight may have no value.
        terms = jnp.where(self.weights != 0, self.weights * values, 0)
        return self.share * value + jnp.sum(terms), (value, values)


class _Instance(Plain):
    """The penalised problem of a sample."""

    instance: Callable
    share: Array
    weights: Array

    def __call__(self, batch):
        return with_penalty(self.instance(batch), self.share, self.weights)


def _split(out) -> tuple[Array, Any]:
    value, aux = out if isinstance(out, tuple) and len(out) == 2 else (out, None)
    return scalar(value, "upper"), aux


def _checked(values, name: str) -> PyTree[Array]:
    """`values` as real floating arrays, or a `ValueError`."""
    if values is None:
        raise ValueError(
            f"`{name}(x, y)` must return an array; got None. Is a `return` missing?"
        )
    leaves, structure = jax.tree.flatten(values)
    if not leaves:
        raise ValueError(f"`{name}(x, y)` must return at least one number; got none.")
    arrays = []
    for leaf in leaves:
        if not eqx.is_array_like(leaf):
            raise ValueError(
                f"`{name}(x, y)` must return an array or a pytree of arrays; got "
                f"{type(leaf).__name__}."
            )
        array = jnp.asarray(leaf)
        if array.dtype == bool:
            raise ValueError(
                f"`{name}(x, y)` must return numbers, not a comparison: for a <= b "
                "return a - b."
            )
        if not jnp.issubdtype(array.dtype, jnp.floating):
            raise ValueError(
                f"`{name}(x, y)` must return real floating numbers, for they are "
                f"differentiated; got dtype {array.dtype}. Convert them with "
                "`.astype(float)`, or look for a rounding in them."
            )
        arrays.append(array)
    return jax.tree.unflatten(structure, arrays)
