"""Bilevel problems: deterministic, sampled, and tilted.

Randomness transforms problems, not algorithms: `draw` fixes the data sample,
`perturbed` adds the tilt, and solvers see an ordinary deterministic problem.
"""

import abc
import dataclasses
import operator
import warnings
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float, Int, PRNGKeyArray, PyTree

from ._constraints import (
    AbstractConstraints,
    Box,
    Polyhedron,
    check_box,
    check_not_empty,
    tree_as_float,
)
from ._modules import made, plain_method, with_fields
from ._perturbation import tree_add
from ._samplers import AbstractSampler, Epochs, WithReplacement


class AbstractProblem(eqx.Module):
    """Anything that gives a `Problem` once a data sample is drawn."""

    @abc.abstractmethod
    def draw(self, key: PRNGKeyArray, step: Any = None) -> "Problem":
        """The problem at one sample `xi`.

        `step` is the number of the step that asks, for samples that go through the
        data in epochs; without it rows are drawn with replacement.
        """

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
    - `always_feasible`: a promise that the lower level has a point at every `x` that
      will be visited, so that methods need no way back from where it has none.
    - `solver`, `adjoint`: how the lower level and its derivative are computed where a
      call does not say; by default the library chooses.
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

    def __init__(
        self,
        upper,
        lower,
        constraints=None,
        *,
        y0=None,
        domain=None,
        always_feasible=False,
        solver=None,
        adjoint=None,
        members=None,
    ):
        for name, function in (("upper", upper), ("lower", lower)):
            if not callable(function):
                raise ValueError(
                    f"`{name}` must be a function of `(x, y)`; got "
                    f"{type(function).__name__}."
                )
        constraints = Polyhedron() if constraints is None else constraints
        if not isinstance(constraints, AbstractConstraints):
            raise ValueError(
                "`constraints` must be a Polyhedron, a Box or a Simplex; got "
                f"{type(constraints).__name__}."
            )
        self.upper, self.lower, self.constraints = upper, lower, constraints
        self.y0 = _checked_start(constraints, y0)
        self.domain = _checked_domain(domain)
        self.always_feasible = bool(always_feasible)
        self.solver, self.adjoint, self.members = solver, adjoint, members

    def draw(self, key, step=None):
        return self

    def assuming_feasible(self):
        return Problem(
            self.upper,
            self.lower,
            self.constraints,
            y0=self.y0,
            domain=self.domain,
            always_feasible=True,
            solver=self.solver,
            adjoint=self.adjoint,
            members=self.members,
        )

    @plain_method
    def localised(self, x: PyTree[Array]) -> "Problem":
        """The same problem with a lower level that was built around `x`."""
        if not isinstance(self.lower, AbstractLocalLower):
            return self
        lower = self.lower.at(jax.lax.stop_gradient(x))
        return eqx.tree_at(lambda p: p.lower, self, lower)

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

    @plain_method
    def upper_value(self, x, y) -> tuple[Float[Array, ""], Any]:
        """`f(x, y)` and its auxiliary output (None where there is none)."""
        out = self.upper(x, y)
        if isinstance(out, tuple) and len(out) != 2:
            raise ValueError(
                "`upper(x, y)` must return a scalar, or a pair of a scalar and "
                f"auxiliary output; got a tuple of {len(out)}. Put all auxiliary "
                "output into one tuple."
            )
        value, aux = out if isinstance(out, tuple) else (out, None)
        return scalar(value, "upper"), aux

    @plain_method
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
    )


class StochasticProblem(AbstractProblem):
    """`min_x E_xi f(x, y*(x); xi)`, given by how a sample becomes a `Problem`.

    - `sample`: `key -> batch`.
    - `instance`: `batch -> Problem`. The batch may enter the upper level alone or the
      lower level too (one box per image of a minibatch).
    - `population`: the problem by which runs are judged and results evaluated. Given
      by `from_data`; without it, one draw stands for all.
    - `absorb`: `(x, aux) -> x` after every step, with the auxiliary output of `upper`:
      for parts of `x` that are set and not optimised, such as running statistics.

    `sample` may be an `AbstractSampler`, which is also told the number of the step.
    """

    sample: Callable
    instance: Callable
    population: Problem | None = None
    always_feasible: bool = eqx.field(static=True, default=False)
    absorb: Callable | None = None

    @classmethod
    def from_data(
        cls,
        data: PyTree[Array],
        batch_size: int,
        instance: Callable,
        *,
        epochs: bool = False,
    ):
        """Minibatches of `batch_size` rows of device data.

        Rows are drawn with replacement; with `epochs=True` the steps of a run go
        through all rows in a new order each time (what is left of an epoch after the
        last whole batch is skipped). The population is the instance of all rows at
        once, so `instance` should take means over its batch, not sums.
        """
        try:
            data = jax.tree.map(jnp.asarray, data)
        except (TypeError, ValueError) as error:
            raise ValueError(f"`data` must be arrays of numbers; {error}") from None
        lengths = {leaf.shape[:1] for leaf in jax.tree.leaves(data)}
        if len(lengths) != 1 or () in lengths:
            raise ValueError(
                "`data` must be arrays that share their leading axis; got leading "
                f"axes {sorted(lengths)}."
            )
        if (0,) in lengths:
            raise ValueError(
                "`data` must have at least one row to draw from; got leading axis 0."
            )
        if not isinstance(batch_size, int | np.integer) or batch_size < 1:
            raise ValueError(
                f"`batch_size` must be a positive integer; got {batch_size!r}."
            )
        if not callable(instance):
            raise ValueError(
                "`instance` must be a function from a batch to a Problem; got "
                f"{type(instance).__name__}."
            )
        sampler = Epochs if epochs else WithReplacement
        return cls(sampler(data, batch_size), instance, instance(data))

    def draw(self, key, step=None):
        if isinstance(self.sample, AbstractSampler):
            batch = self.sample(key, step)
        else:
            batch = self.sample(key)
        problem = self.instance(batch)
        return problem.assuming_feasible() if self.always_feasible else problem

    def assuming_feasible(self):
        return dataclasses.replace(self, always_feasible=True)

    def absorbed(self, x, aux):
        return x if self.absorb is None else self.absorb(x, aux)


class AbstractLocalLower(eqx.Module):
    """A lower objective that is built around each `x` at which `F` is asked for.

    `at(x)` gives the objective there. What it computes on the way, such as the point
    around which a loss is linearised, counts as constant in derivatives.
    """

    @abc.abstractmethod
    def at(self, x: PyTree[Array]) -> Callable:
        """The lower objective `(x, y) -> g` around `x`."""

    def __call__(self, x, y):
        return self.at(jax.lax.stop_gradient(x))(x, y)


class _Tilted(eqx.Module):
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


def representative(problem: AbstractProblem, key: PRNGKeyArray) -> Problem:
    """The deterministic problem by which runs on `problem` are judged."""
    population = getattr(problem, "population", None)
    return problem.draw(key) if population is None else population


def checked_point(problem: Problem, x: PyTree) -> PyTree[Array]:
    """`x` as floating arrays that fit the problem, or a `ValueError`."""
    x = tree_as_float(x, "x")
    if not jax.tree.leaves(x):
        raise ValueError("`x` must hold at least one array; got an empty tree.")
    problem.constraints.check_x(x)
    if problem.domain is not None:
        inside = problem.domain.start()
        if isinstance(problem.domain, Polyhedron):
            size = ravel_pytree(x)[0].size
            if inside is not None and inside.size != size:
                raise ValueError(
                    "`domain` must have one column per entry of `x`; expected "
                    f"{size} columns, got {inside.size}."
                )
        else:
            check_like(x, inside, "x", "domain")
    dtypes = {leaf.dtype for leaf in jax.tree.leaves((x, problem.y0))}
    # Who names the solver knows what it does in the precision at hand.
    low = any(jnp.finfo(dtype).bits < 64 for dtype in dtypes)
    if low and problem.solver is None:
        _warn_low_precision()
    return x


def check_functions(problem: Problem, x: PyTree[Array]) -> None:
    """Raise a `ValueError` if `upper` or `lower` cannot be evaluated at `(x, y)`.

    Called while tracing, so that a compiled call does not pay for it again.
    """
    for function, name in (
        (problem.upper_value, "upper"),
        (problem.lower_value, "lower"),
    ):
        try:
            jax.eval_shape(function, x, problem.y0)
        except ValueError:
            raise
        except (TypeError, IndexError, KeyError, AttributeError) as error:
            raise ValueError(
                f"`{name}(x, y)` could not be evaluated with x of shape "
                f"{_shapes(x)} and y of shape {_shapes(problem.y0)}: {error}"
            ) from error


_low_precision_warned = False


def _warn_low_precision():
    global _low_precision_warned
    if not _low_precision_warned:
        _low_precision_warned = True
        warnings.warn(
            "bilevax runs below float64: tolerances are loosened to what the dtype "
            "can reach and kinks closer than that are flagged. For exact active sets "
            'call jax.config.update("jax_enable_x64", True) at the start of your '
            "program.",
            stacklevel=4,
        )


def _checked_start(constraints, y0):
    like = constraints.start()
    if y0 is None:
        if like is None:
            raise ValueError(
                "`y0` is needed: the constraints have no rows, so the shape of `y` is "
                "unknown."
            )
        return like
    y0 = tree_as_float(y0, "y0")
    check_not_empty(y0, "y0")
    if isinstance(constraints, Polyhedron):
        size = sum(leaf.size for leaf in jax.tree.leaves(y0))
        if like is not None and like.size != size:
            raise ValueError(
                "`A` must have one column per entry of `y0`; expected "
                f"{size} columns, got {like.size}."
            )
    else:
        check_like(y0, like, "y0", "constraints")
    # One precision for all of the lower level, the higher one.
    dtype = jnp.result_type(*jax.tree.leaves((y0, like)))
    return jax.tree.map(lambda leaf: leaf.astype(dtype), y0)


def _checked_domain(domain):
    if domain is None:
        return None
    if not isinstance(domain, Box | Polyhedron):
        raise ValueError(
            f"`domain` must be a Box or a Polyhedron; got {type(domain).__name__}."
        )
    if isinstance(domain, Polyhedron):
        if domain.B is not None or domain.B_eq is not None:
            raise ValueError(
                "`domain` is read as {x : A x <= b, A_eq x = b_eq} and takes no `B`."
            )
    else:
        check_box(domain, "x")
    return domain


def check_like(tree, like, name: str, like_name: str) -> None:
    """Raise a `ValueError` if `tree` differs from `like` in structure or shapes."""
    if jax.tree.structure(tree) != jax.tree.structure(like):
        raise ValueError(
            f"`{name}` must have the tree structure of `{like_name}`; expected "
            f"{jax.tree.structure(like)}, got {jax.tree.structure(tree)}."
        )
    if _shapes(tree) != _shapes(like):
        raise ValueError(
            f"`{name}` must have the shapes of `{like_name}`; expected "
            f"{_shapes(like)}, got {_shapes(tree)}."
        )


def _shapes(tree):
    shapes = jax.tree.map(jnp.shape, tree)
    return shapes


def scalar(value, name: str) -> Array:
    if value is None:
        raise ValueError(
            f"`{name}(x, y)` must return a scalar; got None. Is a `return` missing?"
        )
    if not eqx.is_array_like(value):
        raise ValueError(
            f"`{name}(x, y)` must return a scalar; got {type(value).__name__}. Only "
            "`upper` may return a pair, of its value and auxiliary output."
        )
    value = jnp.asarray(value)
    if value.shape != ():
        raise ValueError(f"`{name}(x, y)` must return a scalar; got {value.shape}.")
    if not jnp.issubdtype(value.dtype, jnp.floating):
        raise ValueError(
            f"`{name}(x, y)` must return a real floating number, for it is "
            f"differentiated; got dtype {value.dtype}. Convert it with `jnp.real` or "
            "`.astype(float)`, or look for a comparison or a rounding in it."
        )
    return value
