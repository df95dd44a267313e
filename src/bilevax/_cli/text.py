"""Points and results as text."""

import contextlib
import sys
from collections.abc import Iterator
from contextvars import ContextVar
from typing import IO, Any

import jax
import numpy as np

from ..adversarial.training.run_folder import strict_json


def short(tree: Any) -> str:
    leaves = jax.tree.leaves(tree)
    shown = [
        np.array2string(np.asarray(leaf), precision=6, threshold=20) for leaf in leaves
    ]
    return shown[0] if len(shown) == 1 else ", ".join(shown)


def as_lists(tree: Any) -> list:
    return [np.asarray(leaf).tolist() for leaf in jax.tree.leaves(tree)]


# Where results go while prints of a problem file go elsewhere; None is standard output.
_results: ContextVar[IO[str] | None] = ContextVar("results", default=None)


@contextlib.contextmanager
def results_alone(wanted: bool) -> Iterator[None]:
    """Meanwhile `print_json` alone writes to standard output, if that is wanted.

    What the functions of a problem file print, when they are traced, is no JSON.
    """
    if not wanted:
        yield
        return
    token = _results.set(sys.stdout)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        _results.reset(token)


def print_json(record: Any) -> None:
    """As JSON, in which there is no NaN and no infinity: null instead."""
    print(strict_json(record), file=_results.get())


def complain(text: str) -> int:
    """Say on standard error what went wrong; the exit status."""
    print(text, file=sys.stderr)
    return 1
