"""Programs that a person waits for: compile fast rather than run a little faster."""

import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.extend.core import get_opaque_trace_state

from .._status import is_traced
from .control import alone, compiler_options
from .room import make_room


class _Traces:
    """How often a function was traced, and how often when there was room last."""

    def __init__(self):
        self.count, self.seen = 0, 0


_traces = _Traces()


def quick_jit(function: Callable, optimise: bool = True) -> Callable:
    """`eqx.filter_jit` with these options; inside another program, a part of it.

    Without `optimise` it compiles in half of the time: for what runs briefly.
    """

    @functools.wraps(function)
    def traced(*arguments, **named):
        _traces.count += 1
        return function(*arguments, **named)

    @functools.cache
    def compiled(transformed: bool):
        # JAX takes options outside of transformations only.
        options = None if transformed else compiler_options(optimise)
        named: dict[str, Any] = {} if options is None else {"compiler_options": options}
        return eqx.filter_jit(traced, **named)

    @functools.wraps(function)
    def call(*arguments, **named):
        if in_program():
            # Part of another program, and of its branches.
            return traced(*arguments, **named)
        transformed = in_transform() or is_traced((arguments, named))
        if not transformed and _traces.count > _traces.seen:
            _traces.seen = _traces.count
            make_room()
        with alone():
            return compiled(transformed)(*arguments, **named)

    return call


def in_program() -> bool:
    """Whether this call is part of a program that is being compiled."""
    return is_traced(_constant())


def _outside():
    """The state of calls that no transformation surrounds: that of a new thread.

    This module may itself be imported inside a `jit`.
    """
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(get_opaque_trace_state).result()


_OUTSIDE = _outside()


def in_transform() -> bool:
    """Whether this call is inside `vmap`, `grad` or `jvp`, whatever its arguments.

    What is mapped or differentiated may be something that functions close over.
    """
    return get_opaque_trace_state() != _OUTSIDE


@jax.jit
def _constant():
    """A tracer inside a `jit`, whatever the arguments of the call are."""
    return jnp.zeros(())


def once_jit(function: Callable) -> Callable:
    """`quick_jit` for what runs once or briefly."""
    return quick_jit(function, optimise=False)


def is_plain(tree) -> bool:
    """Whether all arrays are concrete and on one CPU."""
    for leaf in jax.tree.leaves(tree):
        if isinstance(leaf, Tracer):
            return False
        if isinstance(leaf, jax.Array) and not _on_one_cpu(leaf.sharding):
            return False
    return True


def _on_one_cpu(sharding) -> bool:
    # Results of one program share their shardings; comparing them takes longer.
    entry = _met.get(id(sharding))
    if entry is None or entry[0] is not sharding:
        if len(_met) >= _MOST:
            _met.clear()
        devices = sharding.device_set
        on_cpu = len(devices) == 1 and next(iter(devices)).platform == "cpu"
        entry = _met[id(sharding)] = (sharding, on_cpu)
    return entry[1]


_met: dict = {}
_MOST = 4096
