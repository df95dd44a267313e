"""Sets of which some part is a function of `x`.

`b=lambda x: ...` instead of numbers. At one `x` such a set is one of numbers, `at(x)`,
which solvers see. What moves is asked of the functions: the rows

    c(x, y) = A(x) y - b(x)

enter a derivative by `<w, c(x, y)> + <v, A(x)^T mu>`, with `y`, `v`, `w` and `mu` held.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, PyTree

from .._programs.arrays import ravel, xp
from .._programs.control import once, packed, stage


def is_function(part: Any) -> bool:
    """Whether a part of a set is a function of `x`."""
    return callable(part)


def numbers_at(constraints: Any, x: PyTree[Array]) -> Any:
    """The set of numbers at `x`, found once in a call that runs stage by stage."""
    return once(_numbers, constraints, x)


def _numbers(constraints, x):
    return _evaluated(packed((constraints,)), x)


@stage
def _evaluated(constraints, x):
    return constraints[0].evaluated(x)


def at_or_told(part: Callable, x, name: str) -> Any:
    """`part(x)`, or a `ValueError` that names what cannot be evaluated."""
    try:
        return part(x)
    except (TypeError, IndexError, KeyError, AttributeError) as error:
        shapes = jax.tree.map(jnp.shape, x)
        raise ValueError(
            f"`{name}(x)` could not be evaluated with x of shape {shapes}: {error}"
        ) from error


@stage
def motion(constraints, x, y) -> Array:
    """The derivative of `A(x) y - b(x)` in the raveled `x`, one row per row."""
    (constraints,) = constraints
    flat, unravel = ravel_pytree(x)

    def rows(z):
        here = constraints.evaluated(unravel(z))
        reach = 0 if y is None else here.push(y)
        return reach - _finite(here.rhs(unravel(z)))

    return jax.jacfwd(rows)(flat)


@stage
def motion_along(constraints, x, direction) -> Array:
    """The same for fixed rows, along one direction."""
    (constraints,) = constraints
    rows = lambda x: -_finite(constraints.evaluated(x).rhs(x))
    return jax.jvp(rows, (x,), (direction,))[1]


def drift(constraints, x, y, mu, v, w) -> Array:
    """`<w, A(x) y - b(x)> + <v, A(x)^T mu>` as a function of `x`."""
    here = constraints.evaluated(x)
    held = w @ (here.push(ravel(y)) - _finite(here.rhs(x))).astype(w.dtype)
    return held + mu @ here.push(ravel(v)).astype(w.dtype)


def pull_of_rhs(constraints, x, w) -> Array:
    """The same for fixed rows, without what does not move."""
    return -(w @ _finite(constraints.evaluated(x).rhs(x)).astype(w.dtype))


def check_functions_of(constraints, x) -> None:
    """Raise a `ValueError` if the parts at `x` do not fit each other."""
    if constraints.has_functions:
        jax.eval_shape(constraints.evaluated, x)


def _finite(rhs):
    """Rows without a bound are never active; their infinity must not meet a zero."""
    return xp.where(xp.isfinite(rhs), rhs, 0)
