"""Seconds with and without compilation: compiling late is not running time."""

import functools
import threading
import time
from typing import Any

import jax.monitoring

# What JAX tells of tracing, lowering and compiling; the first of these contains others.
_EVENTS = "/jax/core/compile/"
# How much later than its end an event may be told.
_LATE = 1e-4


class Stopwatch:
    """Time since it was made; it goes on from what was `spent` before.

    - `seconds`: all of it; `running`: without what this thread has compiled meanwhile.
    """

    def __init__(self, spent: float = 0.0, running: float = 0.0):
        _listen()
        self._began = time.perf_counter() - spent
        self._compiled = _here.total - (spent - running)

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self._began

    @property
    def running(self) -> float:
        return self.seconds - (_here.total - self._compiled)


class _Compiling(threading.local):
    """What a thread has compiled: a stack of disjoint spans of time.

    Of each its beginning, and the `total` before it.
    """

    def __init__(self):
        self.total = 0.0
        self.spans: list[tuple[float, float]] = []

    def add(self, event: str, seconds: float) -> None:
        if not event.startswith(_EVENTS):
            return
        began = time.perf_counter() - seconds
        # Spans inside this one were told before it.
        while self.spans and self.spans[-1][0] >= began - _LATE:
            self.total = self.spans.pop()[1]
        self.spans.append((began, self.total))
        self.total += seconds


_here = _Compiling()


@functools.cache
def _listen() -> None:
    def told(event: str, duration: float, **_: Any) -> None:
        _here.add(event, duration)

    listener: Any = told
    jax.monitoring.register_event_duration_secs_listener(listener)
