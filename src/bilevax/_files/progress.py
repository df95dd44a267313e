"""How far long work has come: a bar on a terminal with `rich`, lines elsewhere."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

# Lines without news of their own are at least this far apart.
SECONDS_BETWEEN_LINES = 15.0


@contextmanager
def progress_bar(
    total: int, *, enabled: bool, description: str = "steps"
) -> Iterator[Callable]:
    """Yields `advance(count, text)`; a text replaces the description.

    Both the bar and the lines go to standard error. Without a bar there is a line for
    every text, and otherwise one now and then.
    """
    if not enabled:
        yield lambda count, text=None: None
        return
    console = _terminal()
    if console is None:
        yield _Lines(total, description).advance
        return
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(),
        TimeRemainingColumn(),
    )  # fmt: skip
    with Progress(*columns, transient=True, console=console) as bar:
        task = bar.add_task(description, total=total)
        yield lambda count, text=None: bar.update(
            task, advance=count, description=description if text is None else text
        )


def _terminal():
    """Where a bar can be drawn, or None."""
    try:
        from rich.console import Console
    except ImportError:
        return None
    console = Console(stderr=True)
    return console if console.is_terminal or console.is_jupyter else None


class _Lines:
    """Progress for files, pipes and terminals without `rich`."""

    def __init__(self, total: int, description: str):
        self.total, self.description, self.done = total, description, 0
        self.last = time.monotonic()
        self.first: tuple[float, int] | None = None

    def advance(self, count: int, text: str | None = None) -> None:
        self.done += count
        now = time.monotonic()
        # The first call is left out of the speed: it compiled, or counted earlier work.
        self.first = self.first or (now, self.done)
        if text is None and now - self.last < SECONDS_BETWEEN_LINES:
            return
        self.last = now
        line = f"{self.done} of {self.total}"
        line += f" {self.description}" if text is None else f": {text}"
        print(line + self._left(now), file=sys.stderr, flush=True)

    def _left(self, now: float) -> str:
        began, before = self.first or (now, self.done)
        if self.done == before:
            return ""
        left = (now - began) / (self.done - before) * (self.total - self.done)
        return f", about {left:.0f} s left" if left >= 1 else ""
