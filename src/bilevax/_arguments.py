"""Checks of arguments that several functions take."""

import dataclasses
import numbers
import os
from collections.abc import Iterable, Mapping
from fractions import Fraction
from typing import Any

import jax
import jax.random as jr
import numpy as np
from jax.core import Tracer
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
    if not (_is_number(value) and low <= float(value) < high):
        raise ValueError(f"`{name}` is {what}; got {value!r}.")


def _is_number(value: Any) -> bool:
    """Whether `value` is one real number, and no truth value."""
    if isinstance(value, np.ndarray | np.generic | jax.Array):
        return value.shape == () and value.dtype.kind in "iuf"
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def as_number(value: Any) -> Any:
    """`value` as an array, so that another one does not recompile.

    None stays None, a function (a schedule) a function; what is no number is left to
    `check_fields`, which knows its name.
    """
    if value is None or callable(value) or isinstance(value, bool):
        return value
    try:
        return jax.numpy.asarray(value, float)
    except (TypeError, ValueError):
        return value


def check_flag(value: Any, name: str) -> None:
    """Raise a `ValueError` unless `value` is True or False."""
    if not isinstance(value, bool | np.bool_):
        raise ValueError(f"`{name}` must be True or False; got {value!r}.")


def check_path(value: Any, name: str) -> None:
    """Raise a `ValueError` unless `value` is None or names a file or a folder."""
    if not (value is None or isinstance(value, str | os.PathLike)):
        raise ValueError(
            f"`{name}` must be a path, as a text or a `pathlib.Path`; got {value!r}."
        )


def listed(values: Any, name: str, what: str) -> list:
    """`values` as a list, from a list, an array or a generator; else a `ValueError`."""
    one = isinstance(values, str | bytes | Mapping) or getattr(values, "ndim", 1) == 0
    if one or not isinstance(values, Iterable):
        raise ValueError(
            f"`{name}` must be {what} in a list; got {values!r}. Put a single one into "
            "brackets."
        )
    return list(values)


def check_fields(thing: Any) -> None:
    """Raise a `ValueError` unless the fields of a module are what they are said to be.

    Numbers, truth values and objects of the named classes are told apart; what is
    annotated otherwise is left alone. Fields that `as_number` converts say so in their
    metadata: `number`, "constant" where it cannot be a schedule.
    """
    for field in dataclasses.fields(thing):
        value, kind = getattr(thing, field.name, None), field.type
        none_is_fine = field.default is None
        if field.name.startswith("_") or (value is None and none_is_fine):
            continue
        what = _misfit(value, kind, field.metadata.get("number", False))
        if what is not None:
            raise ValueError(
                f"`{field.name}` of {type(thing).__name__} must be {what}; got "
                f"{value!r}."
            )


def _misfit(value: Any, kind: Any, is_number: Any) -> str | None:
    """What `value` should be and is not; None where it fits."""
    if is_number:
        # Which values a constant may have its class says, NaN included.
        constant = is_number == "constant"
        fits = (callable(value) and not constant) or _is_number(value)
        return None if fits and (constant or not _is_nan(value)) else "one number"
    if kind is bool:
        return None if isinstance(value, bool | np.bool_) else "True or False"
    if kind is int:
        whole = _is_number(value) and (_is_traced(value) or value >= 0)
        whole = whole and (_is_traced(value) or value == np.floor(value) < np.inf)
        return None if whole else "a whole number, zero or more"
    if kind in (float, float | None):
        return None if _is_number(value) and not _is_nan(value) else "one number"
    try:
        fits = _is_traced(value) or isinstance(value, kind)
    except TypeError:
        return None
    if fits:
        return None
    names = [getattr(k, "__name__", "None") for k in getattr(kind, "__args__", (kind,))]
    return f"of the kind {' or '.join(names)}".replace("NoneType", "None")


def _is_traced(value: Any) -> bool:
    return isinstance(value, Tracer)


def _is_nan(value: Any) -> bool:
    return not (callable(value) or _is_traced(value)) and bool(np.isnan(value))


def fraction(text: str) -> float:
    """A number such as `0.03` or `8/255`."""
    try:
        return float(Fraction(text))
    except ZeroDivisionError:
        raise ValueError(f"{text} divides by zero.") from None
    except (ValueError, OverflowError):
        raise ValueError(f"{text!r} is no number; write it as 0.03 or 8/255.") from None
