"""A progress bar where `rich` is installed, silence elsewhere."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress_bar(
    total: int, *, enabled: bool, description: str = "steps"
) -> Iterator[Callable]:
    """Yields `advance(count, text)`; a text replaces the description."""
    if not enabled:
        yield lambda count, text=None: None
        return
    try:
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
        )
    except ImportError as error:
        raise ImportError(
            "`progress=True` draws with rich: install bilevax[cli], or leave it out."
        ) from error
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(),
        TimeRemainingColumn(),
    )  # fmt: skip
    with Progress(*columns, transient=True) as bar:
        task = bar.add_task(description, total=total)
        yield lambda count, text=None: bar.update(
            task, advance=count, description=description if text is None else text
        )
