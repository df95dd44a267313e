"""Programs that a person waits for: compile fast rather than run a little faster."""

import functools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax

# XLA's older emitters make a program of hundreds of small kernels in a third of the
# time, and the programs run as fast.
_OPTIONS = {"xla_cpu_use_fusion_emitters": False}


@functools.cache
def _options() -> dict | None:
    """The options, where this version of XLA knows them."""
    try:
        jax.jit(lambda x: x, compiler_options=_OPTIONS)(0.0)
    except Exception:  # of a kind that depends on the version
        return None
    return _OPTIONS


def quick_jit(function: Callable) -> Callable:
    """`eqx.filter_jit` with these options; not for use inside another jit."""

    @functools.cache
    def compiled():
        options = _options()
        named: dict[str, Any] = {} if options is None else {"compiler_options": options}
        return eqx.filter_jit(function, **named)

    @functools.wraps(function)
    def call(*arguments, **named):
        return compiled()(*arguments, **named)

    return call
