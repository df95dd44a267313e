"""Work handed to an executor, and what comes back, in whatever order it ends."""

import multiprocessing
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from typing import Any, NamedTuple

from .lanes import Lanes
from .names import is_running_a_file
from .orders import WorkFailed, order, perform, results_of

# A run that was lost is tried once more.
_TRIES = 2
# Seconds between two looks at what has ended; the longer nothing ends, the more.
_SHORTEST, _LONGEST = 0.005, 0.5


class Job(NamedTuple):
    """One run: its name in messages, and what the function is called with."""

    name: str
    arguments: Any


class Lost(NamedTuple):
    """A run without a result, and why."""

    reason: str


def check_executor(executor: Any) -> None:
    """Raise a `ValueError` unless runs can be handed to it."""
    if not callable(getattr(executor, "submit", None)):
        raise ValueError(
            "`executor` must have `submit(function, *arguments)`, as those of "
            "concurrent.futures, mpi4py.futures and submitit and the client of dask "
            f"have; got {executor!r}."
        )
    context = getattr(executor, "_mp_context", None)
    if context is not None and context.get_start_method() == "fork":
        raise ValueError(
            "`executor` forks this process, and JAX hangs in the copies: its threads "
            "are not copied. Pass ProcessPoolExecutor(workers, "
            'mp_context=multiprocessing.get_context("spawn")).'
        )
    if is_running_a_file() or _is_starting():
        raise RuntimeError(
            "A worker imports the file of your program for the functions in it, and "
            "this file starts its work when it is imported. Put the work under "
            '`if __name__ == "__main__":`.'
        )


def gathered(
    executor: Any, function: Callable, jobs: Sequence[Job], size: int = 1
) -> Iterator[tuple[int, Any]]:
    """The number of each job and its result, or `Lost`, as they end.

    `function` takes a list of the arguments of up to `size` jobs and returns a list of
    their results; it must be found by name. What cannot travel is refused before
    anything is submitted.
    """
    check_executor(executor)
    return _Gathering(executor, function, jobs).run(size)


class _Gathering:
    def __init__(self, executor: Any, function: Callable, jobs: Sequence[Job]):
        self.executor, self.function, self.jobs = executor, function, jobs
        self.lost = [0] * len(jobs)
        # In a list: futures of dask are equal where their work is.
        self.waiting: list[tuple[Any, list[int]]] = []
        self.ready: list[tuple[int, Any]] = []
        self.lanes: Lanes | None = None

    def run(self, size: int) -> Iterator[tuple[int, Any]]:
        count = len(self.jobs)
        pieces = [list(range(i, min(i + size, count))) for i in range(0, count, size)]
        orders = [self._order(piece) for piece in pieces]
        return self._run(pieces, orders)

    def _run(self, pieces, orders) -> Iterator[tuple[int, Any]]:
        try:
            for piece, one in zip(pieces, orders, strict=True):
                self._submit(piece, one)
                yield from self._taken()
            while self.waiting:
                future, members = self._next()
                self._receive(members, future.result)
                yield from self._taken()
        finally:
            for future, _ in self.waiting:
                if hasattr(future, "cancel"):
                    future.cancel()
            if self.lanes is not None:
                self.lanes.close()

    def _taken(self) -> Iterator[tuple[int, Any]]:
        ready, self.ready = self.ready, []
        yield from ready

    def _order(self, members: list[int]) -> tuple:
        jobs = [self.jobs[i] for i in members]
        arguments, names = [job.arguments for job in jobs], [job.name for job in jobs]
        return order(self.function, arguments, names)

    def _submit(self, members: list[int], one: tuple) -> None:
        executor: Any = self.executor
        if executor is None:
            return self._here(members, one)
        try:
            self.waiting.append((executor.submit(perform, *one), members))
        except Exception as error:
            self._refused(error)
            if self.lanes is None:
                return self._here(members, one)
            for i in members:
                self._submit([i], self._order([i]))

    def _refused(self, error: Exception) -> None:
        """Decide who goes on where an executor takes no more work; say so once."""
        words = f"{type(error).__name__}: {error}"
        if isinstance(error, BrokenProcessPool) and self.lanes is None:
            self.executor = self.lanes = Lanes(self.executor)
            warnings.warn(
                f"A worker died and its pool takes no more work ({words}). What is "
                "left is done by new processes, one for each run at a time.",
                stacklevel=2,
            )
            return
        self.executor = None
        if self.lanes is not None:
            self.lanes.close()
            self.lanes = None
        warnings.warn(
            f"The executor takes no more work ({words}). What is left is done in this "
            "process; runs whose worker died before are not tried again.",
            stacklevel=2,
        )

    def _here(self, members: list[int], one: tuple) -> None:
        """Do it in this process, which a run that ended another might end as well."""
        suspects = [i for i in members if self.lost[i]]
        if suspects:
            reason = "its worker died, and the executor takes no more work"
            self.ready += [(i, Lost(reason)) for i in suspects]
        else:
            for i in members:
                self.lost[i] = _TRIES - 1
            self._receive(members, lambda: perform(*one))

    def _receive(self, members: list[int], answer: Callable) -> None:
        """Keep what came back; lost runs are tried again, each alone."""
        try:
            results = results_of(answer())
            self.ready += list(zip(members, results, strict=True))
            return
        except WorkFailed as error:
            reason = str(error)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
        for i in members:
            self.lost[i] += 1
            if self.lost[i] < _TRIES:
                self._submit([i], self._order([i]))
            else:
                self.ready.append((i, Lost(reason)))

    def _next(self) -> tuple[Any, list[int]]:
        """One that has ended, taken from those that are waited for."""
        pause = _SHORTEST
        while True:
            began = time.perf_counter()
            for k, (future, _) in enumerate(self.waiting):
                # Without a way to ask, the oldest is waited for.
                if not hasattr(future, "done") or future.done():
                    return self.waiting.pop(k)
            # Where asking takes long, as with a queue of a cluster, ask seldom.
            took = time.perf_counter() - began
            time.sleep(max(pause, took))
            pause = min(2 * pause, _LONGEST)


def _is_starting() -> bool:
    """Whether this process is a worker that is being started right now."""
    return bool(getattr(multiprocessing.current_process(), "_inheriting", False))
