"""One thread for small matrices.

The libraries behind NumPy, SciPy and XLA's factorisations each bring threads of their
own. Below some hundred rows these wait for each other much longer than they compute.
"""

import contextlib
import functools
import threading
from typing import Any

import jax
from threadpoolctl import ThreadpoolController

# Sizes from which a factorisation gains from threads.
_LARGE = 600


class _Limit:
    """One thread as long as somebody asks for it; calls may overlap."""

    def __init__(self):
        self.lock, self.count = threading.Lock(), 0
        self.before: list[int] = []

    def __enter__(self):
        with self.lock:
            self.count += 1
            if self.count == 1:
                self.before = [library.get_num_threads() for library in _libraries()]
                self.set([1] * len(self.before))

    def __exit__(self, *_):
        with self.lock:
            self.count -= 1
            if self.count == 0:
                self.set(self.before)

    def set(self, counts: list[int]):
        for library, count in zip(_libraries(), counts, strict=True):
            library.set_num_threads(count)


_limit = _Limit()


def few_threads(problem) -> contextlib.AbstractContextManager:
    """A context in which one thread computes, unless the lower level is large."""
    size = sum(leaf.size for leaf in jax.tree.leaves(problem.y0))
    return contextlib.nullcontext() if size >= _LARGE else _limit


@functools.cache
def _libraries() -> list[Any]:
    """Found once; a limit of threadpoolctl looks at all of them each time."""
    return ThreadpoolController().select(user_api="blas").lib_controllers
