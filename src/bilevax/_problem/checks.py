"""Whether the parts of a problem fit each other, told before anything is solved."""

import warnings
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from .._constraints import (
    Box,
    Polyhedron,
    check_box,
    check_like as check_like,
    check_not_empty,
    is_sparse,
    tree_as_float,
)


def checked_point(problem: Any, x: PyTree) -> PyTree[Array]:
    """`x` as floating arrays that fit the problem, or a `ValueError`."""
    x = tree_as_float(x, "x")
    if not jax.tree.leaves(x):
        raise ValueError("`x` must hold at least one array; got an empty tree.")
    problem.check_x(x)
    if problem.domain is not None:
        if isinstance(problem.domain, Polyhedron):
            inside = problem.domain.start()
            size = sum(leaf.size for leaf in jax.tree.leaves(x))
            if inside is not None and inside.size != size:
                raise ValueError(
                    "`domain` must have one column per entry of `x`; expected "
                    f"{size} columns, got {inside.size}."
                )
        else:
            check_like(x, problem.domain.lower, "x", "domain")
    # Who names the solver knows what it does in the precision at hand.
    if problem.solver is None:
        leaves = jax.tree.leaves((x, problem.y0))
        if any(leaf.dtype.itemsize < 8 for leaf in leaves):
            _warn_low_precision()
    return x


def check_functions(problem: Any, x: PyTree[Array]) -> None:
    """Raise a `ValueError` if `upper` or `lower` cannot be evaluated at `(x, y)`.

    Called while tracing, so that a compiled call does not pay for it again.
    """
    named = "upper(x, y, prices)" if problem.prices else "upper(x, y)"
    prices = (problem.any_multipliers(),) if problem.prices else ()
    for function, name, more in (
        (problem.upper_value, named, prices),
        (problem.lower_value, "lower(x, y)", ()),
    ):
        called(function, name, x, problem.y0, *more)


def called(function, name: str, x, y, *more):
    """The shapes of `function(x, y, *more)`, or a `ValueError` if it has none."""
    try:
        return jax.eval_shape(function, x, y, *more)
    except ValueError:
        raise
    except (TypeError, IndexError, KeyError, AttributeError) as error:
        asks = "missing 1 required positional argument" in str(error)
        takes_no_prices = not more and not name.startswith("lower")
        hint = (
            f" Does `{name.split('(')[0]}` take prices? Then say "
            "`Problem(..., prices=True)`."
        )
        raise ValueError(
            f"`{name}` could not be evaluated with x of shape "
            f"{_shapes(x)} and y of shape {_shapes(y)}: {error}"
            + hint
            * (asks and takes_no_prices)
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


def checked_start(constraints, y0):
    like = constraints.start()
    if y0 is None:
        if like is None:
            raise ValueError(
                "`y0` is needed: the constraints have no rows, or functions of `x` in "
                "the place of arrays, so the shape of `y` is unknown."
            )
        return like
    y0 = tree_as_float(y0, "y0")
    check_not_empty(y0, "y0")
    constraints.check_y(y0)
    # One precision for all of the lower level, the higher one.
    dtype = jnp.result_type(*jax.tree.leaves((y0, like)))
    return jax.tree.map(lambda leaf: leaf.astype(dtype), y0)


def checked_function(function, name: str, meaning: str):
    """A function of `(x, y)`, or None."""
    if function is None or callable(function):
        return function
    raise ValueError(
        f"`{name}` must be a function of `(x, y)` that returns an array, with the "
        f"meaning {meaning}; got {type(function).__name__}. Constraints on `x` alone "
        "can also be a `domain`."
    )


def checked_domain(domain):
    if domain is None:
        return None
    if not isinstance(domain, Box | Polyhedron):
        raise ValueError(
            f"`domain` must be a Box or a Polyhedron; got {type(domain).__name__}."
        )
    if domain.has_functions or any(
        isinstance(getattr(domain, name, None), dict) for name in ("A", "A_eq")
    ):
        raise ValueError(
            "`domain` is a set of `x`, given by numbers: it takes no functions of `x`, "
            "and columns of one matrix rather than by name."
        )
    if isinstance(domain, Polyhedron):
        if domain.B is not None or domain.B_eq is not None:
            raise ValueError(
                "`domain` is read as {x : A x <= b, A_eq x = b_eq} and takes no `B`."
            )
        for name, part in (("A", domain.A), ("A_eq", domain.A_eq)):
            if is_sparse(part):
                raise ValueError(
                    f"`{name}` of `domain` is sparse, and projections onto a domain "
                    "take dense rows: pass `.toarray()` of SciPy's or `.todense()` of "
                    "JAX's."
                )
    else:
        check_box(domain, "x")
    return domain


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
