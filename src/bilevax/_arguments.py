"""Checks of arguments that several functions take."""

import numbers
from fractions import Fraction
from typing import Any

import jax
import jax.random as jr
import numpy as np
from jaxtyping import PRNGKeyArray


def checked_key(key: Any) -> PRNGKeyArray:
    """A key of JAX; an integer is the seed of one."""
    if isinstance(key, int | np.integer) and not isinstance(key, bool):
        return jr.key(int(key))
    if isinstance(key, jax.Array):
        typed = jax.numpy.issubdtype(key.dtype, jax.dtypes.prng_key)
        if key.shape == () and typed:
            return key
        # Keys as `jax.random.PRNGKey` makes them.
        if key.shape == (2,) and key.dtype == np.uint32:
            return key
        got = f"an array of {key.dtype} and shape {key.shape}"
    else:
        got = repr(key)
    raise ValueError(
        f"`key` must be one key, such as `jax.random.key(0)`, or an integer; got {got}."
    )


def check_count(value: Any, name: str) -> None:
    """Raise a `ValueError` unless `value` is a positive whole number."""
    number = isinstance(value, int | float | np.number) and not isinstance(value, bool)
    if not (number and 1 <= value < np.inf and value == int(value)):
        raise ValueError(f"`{name}` must be a positive integer; got {value!r}.")


def check_number(value: Any, name: str, what: str, low=-np.inf, high=np.inf) -> None:
    """Raise a `ValueError` unless `value` is a number with `low <= value < high`."""
    fine = isinstance(value, numbers.Real) or getattr(value, "shape", None) == ()
    if not (fine and low <= float(value) < high):
        raise ValueError(f"`{name}` is {what}; got {value!r}.")


def fraction(text: str) -> float:
    """A number such as `0.03` or `8/255`."""
    try:
        return float(Fraction(text))
    except ZeroDivisionError:
        raise ValueError(f"{text} divides by zero.") from None
    except (ValueError, OverflowError):
        raise ValueError(f"{text!r} is no number; write it as 0.03 or 8/255.") from None
