"""The settings of JAX under which work is done, wherever that is."""

import contextlib
from typing import Any

import jax

# Those that decide what is computed, and that hold for one thread while a context does.
_NAMES = (
    "enable_x64", "default_matmul_precision", "numpy_dtype_promotion",
    "numpy_rank_promotion", "default_prng_impl", "threefry_partitionable",
    "debug_nans", "debug_infs", "disable_jit",
)  # fmt: skip


def settings_here() -> dict[str, Any]:
    """What holds in this thread."""
    return {name: getattr(jax.config, f"jax_{name}") for name in _NAMES}


def under(settings: dict[str, Any]) -> contextlib.ExitStack:
    """A context in which these hold in this thread, and no longer."""
    stack = contextlib.ExitStack()
    for name, value in settings.items():
        # One that is as it should be is left alone, so that programs are found again.
        if getattr(jax.config, f"jax_{name}") != value:
            stack.enter_context(getattr(jax, name)(value))
    return stack
