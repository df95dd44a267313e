"""Programs that a person waits for: compile fast rather than run a little faster."""

import functools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from ._room import make_room
from ._status import is_traced

# XLA's older emitters make a program of hundreds of small kernels in half of the time,
# and the programs run as fast.
_OPTIONS = {"xla_cpu_use_fusion_emitters": False}


class _Traces:
    """How often a function was traced, and how often when there was room last."""

    def __init__(self):
        self.count, self.seen = 0, 0


_traces = _Traces()


def quick_jit(function: Callable) -> Callable:
    """`eqx.filter_jit` with these options; inside another jit, without."""

    @functools.wraps(function)
    def traced(*arguments, **named):
        _traces.count += 1
        return function(*arguments, **named)

    @functools.cache
    def compiled(inside: bool):
        options = None if inside else _options()
        named: dict[str, Any] = {} if options is None else {"compiler_options": options}
        return eqx.filter_jit(traced, **named)

    @functools.wraps(function)
    def call(*arguments, **named):
        inside = _is_inside((arguments, named))
        if not inside and _traces.count > _traces.seen:
            _traces.seen = _traces.count
            make_room()
        return compiled(inside)(*arguments, **named)

    return call


@functools.cache
def _options() -> dict | None:
    """The options, where this version of XLA knows them."""
    try:
        jax.jit(lambda x: x, compiler_options=_OPTIONS)(0.0)
    except Exception:  # of a kind that depends on the version
        return None
    return _OPTIONS


def _is_inside(arguments) -> bool:
    """Whether this call is part of another program: JAX takes options only outside.

    Inside a `jit` even constants make tracers, whatever the arguments are.
    """
    return is_traced((arguments, _constant()))


@jax.jit
def _constant():
    return jnp.zeros(())
