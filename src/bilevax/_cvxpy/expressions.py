"""Expressions of cvxpy as functions of JAX, for what the leader wants.

Only to be evaluated and differentiated, so nothing need be convex.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import scipy.sparse as sp

from .refusals import said


def as_function(cp, upper: Any, names_x, names_y, prices: bool) -> Callable:
    """`upper` as a function `(x, y)`, or as it is where it is one."""
    if upper is None:
        return lambda x, y, *prices: jnp.zeros(())
    sign = -1.0 if isinstance(upper, cp.Maximize) else 1.0
    if isinstance(upper, (cp.Minimize, cp.Maximize)):
        upper = upper.args[0]
    if not isinstance(upper, cp.Expression):
        if callable(upper):
            return upper
        raise ValueError(
            "`upper` must be a JAX function of `(x, y)` or a scalar expression of "
            f"cvxpy; got {type(upper).__name__}."
        )
    if prices:
        raise ValueError(
            "`prices=True` needs an `upper` that is a JAX function `(x, y, prices)`; "
            "an expression of cvxpy has no name for prices."
        )
    if upper.size != 1:
        raise ValueError(
            f"`upper` must be a scalar; {said(upper)} has shape {upper.shape}. Sum it."
        )
    for leaf, known, what in (
        *((v, names_y, "variable") for v in upper.variables()),
        *((p, names_x, "parameter") for p in upper.parameters() if p.value is None),
    ):
        if leaf.name() not in known:
            place = "the follower's problem" if what == "variable" else "`leader`"
            raise ValueError(
                f"`upper` has the {what} `{leaf.name()}`, which is not in {place}."
            )
    evaluate = _compiled(cp, upper, frozenset(names_x))
    return lambda x, y: sign * jnp.reshape(evaluate(x, y), ())


def _compiled(cp, expression, leader) -> Callable:
    """The value of an expression as a function of `(x, y)`."""
    name = type(expression).__name__
    if isinstance(expression, cp.Variable):
        return lambda x, y: y[expression.name()]
    if isinstance(expression, cp.Parameter) and expression.name() in leader:
        return lambda x, y: x[expression.name()]
    if isinstance(expression, (cp.Constant, cp.Parameter)):
        value = expression.value
        value = value.toarray() if sp.issparse(value) else np.asarray(value, float)
        return lambda x, y: value
    if name not in _ATOMS:
        raise ValueError(
            f"`upper` uses {said(expression)} of the kind `{name}`, which is not known "
            "here. Write `upper` as a JAX function of `(x, y)`, dictionaries by name."
        )
    parts = [_compiled(cp, part, leader) for part in expression.args]
    atom = _ATOMS[name]
    return lambda x, y: atom(expression, *(part(x, y) for part in parts))


def _summed(e, values):
    return jnp.sum(values, axis=e.axis, keepdims=e.keepdims)


_ATOMS: dict[str, Callable] = {
    "AddExpression": lambda e, *values: sum(values[1:], values[0]),
    "NegExpression": lambda e, value: -value,
    "MulExpression": lambda e, a, b: a @ b,
    "multiply": lambda e, a, b: a * b,
    "DivExpression": lambda e, a, b: a / b,
    "Sum": _summed,
    "index": lambda e, value: value[e.key],
    "special_index": lambda e, value: value[e.key],
    "reshape": lambda e, value: jnp.reshape(value, e.shape, order=e.order),
    "transpose": lambda e, value: jnp.transpose(value, e.axes),
    "Hstack": lambda e, *values: jnp.hstack(values),
    "Vstack": lambda e, *values: jnp.vstack(values),
    "Promote": lambda e, value: jnp.broadcast_to(value, e.shape),
    "broadcast_to": lambda e, value: jnp.broadcast_to(value, e.shape),
    "power": lambda e, value: value ** float(e.p.value),
    "quad_over_lin": lambda e, value, divisor: jnp.sum(value**2) / divisor,
    "QuadForm": lambda e, value, matrix: value @ matrix @ value,
    "abs": lambda e, value: jnp.abs(value),
    "maximum": lambda e, *values: _reduced(jnp.maximum, values),
    "minimum": lambda e, *values: _reduced(jnp.minimum, values),
    "exp": lambda e, value: jnp.exp(value),
    "log": lambda e, value: jnp.log(value),
}


def _reduced(function, values):
    result = values[0]
    for value in values[1:]:
        result = function(result, value)
    return result
