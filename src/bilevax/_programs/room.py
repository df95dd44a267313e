"""Room for compiled programs.

Every program on a CPU takes hundreds of memory mappings, and a process that asks Linux
for more than it may have (65 530 by default) is aborted by the compiler. Some fifty
different problems in one notebook get there.
"""

import functools
import gc
from pathlib import Path

import jax

_LIMIT = Path("/proc/sys/vm/max_map_count")
_MAPPINGS = Path("/proc/self/maps")
# From this share of the limit on programs are forgotten; those that are used again are
# compiled again.
_SHARE = 0.5


def make_room() -> bool:
    """Forget JAX's compiled programs if memory mappings run short; whether it did."""
    if mappings() <= _SHARE * limit():
        return False
    jax.clear_caches()
    gc.collect()
    return True


def mappings() -> int:
    """How many memory mappings this process has; none where no one counts them."""
    try:
        return _MAPPINGS.read_bytes().count(b"\n")
    except OSError:
        return 0


@functools.cache
def limit() -> float:
    try:
        return float(_LIMIT.read_text())
    except (OSError, ValueError):
        return float("inf")
