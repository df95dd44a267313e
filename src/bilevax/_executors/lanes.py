"""Worker processes of our own, one per run: for what a broken pool has left.

When a worker of a `ProcessPoolExecutor` dies, the pool gives up all that it was given,
whose fault that was or not, and takes nothing more. Here a process that dies takes one
run with it.
"""

import multiprocessing
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from concurrent.futures.thread import ThreadPoolExecutor
from typing import Any


class Lanes:
    """As many processes as `pool` had, each with one run at a time."""

    def __init__(self, pool: Any):
        # What the pool was made with is not public; without it, defaults serve.
        context = getattr(pool, "_mp_context", None)
        self.options: dict[str, Any] = dict(
            mp_context=context or multiprocessing.get_context("spawn"),
            initializer=getattr(pool, "_initializer", None),
            initargs=getattr(pool, "_initargs", ()),
        )
        count = getattr(pool, "_max_workers", None) or os.cpu_count() or 1
        self.threads = ThreadPoolExecutor(count, thread_name_prefix="bilevax")
        self.own = threading.local()
        self.pools: list[ProcessPoolExecutor] = []
        self.stillborn = ""

    def submit(self, function: Callable, *arguments: Any) -> Future:
        return self.threads.submit(self._one, function, *arguments)

    def _one(self, function: Callable, *arguments: Any) -> Any:
        pool = getattr(self.own, "pool", None)
        pool = self._new() if pool is None else pool
        self.own.pool = None
        answer = pool.submit(function, *arguments).result()
        # Not reached where the process died: the next run gets another one.
        self.own.pool = pool
        return answer

    def _new(self) -> ProcessPoolExecutor:
        """A process that has answered once, so that what ends it is the run."""
        if self.stillborn:
            raise BrokenProcessPool(self.stillborn)
        pool = ProcessPoolExecutor(1, **self.options)
        self.pools.append(pool)
        try:
            pool.submit(os.getpid).result()
        except Exception as error:
            self.stillborn = f"new workers end before they begin ({error})"
            raise BrokenProcessPool(self.stillborn) from error
        return pool

    def close(self) -> None:
        self.threads.shutdown(wait=False, cancel_futures=True)
        for pool in self.pools:
            pool.shutdown(wait=False, cancel_futures=True)
