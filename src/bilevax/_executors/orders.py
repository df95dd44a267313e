"""One piece of work as a text and arrays, and what a worker does with it."""

import json
import sys
import uuid
from collections.abc import Callable
from typing import Any

import numpy as np

from .description import described, rebuilt
from .settings import settings_here, under

FORMAT = "bilevax-work-1"


class WorkFailed(RuntimeError):
    """What a worker has to say of work that it could not do."""


def order(function: Callable, arguments: list, names: list[str]) -> tuple:
    """What to call `perform` with for `function(arguments)`.

    `names` of the arguments are for complaints.
    """
    form, arrays = described(arguments, names)
    text = json.dumps(
        dict(
            format=FORMAT,
            version=_version(),
            # Executors that know work by its content would do equal work once only.
            ticket=uuid.uuid4().hex,
            settings=settings_here(),
            function=described([function])[0],
            arguments=form,
        )
    )
    return text, *arrays


def perform(text: str, *arrays: np.ndarray) -> tuple[str, list[np.ndarray]]:
    """Do a piece of work in the process that this is called in.

    Errors come back as words: an executor would have to send the error itself, and not
    all of them can be sent.
    """
    try:
        content = json.loads(text)
        met = content.get("format"), content.get("version")
        if met != (FORMAT, _version()):
            raise ValueError(
                f"the work was written by bilevax {met[1]} ({met[0]}), this worker has "
                f"{_version()} ({FORMAT}); install the same version"
            )
        with under(content["settings"]):
            function = rebuilt(content["function"], [])[0]
            result = function(rebuilt(content["arguments"], list(arrays)))
            form, found = described(list(result))
        return json.dumps(dict(format=FORMAT, result=form)), found
    except Exception as error:
        words = f"{type(error).__name__}: {error}"
        return json.dumps(dict(format=FORMAT, error=words)), []


def results_of(answer: Any) -> list:
    """The results in the answer of a worker, or a `WorkFailed`."""
    try:
        text, arrays = answer
        content = json.loads(text)
        fine = content["format"] == FORMAT
    except (TypeError, ValueError, KeyError):
        fine = False
    if not fine:
        raise WorkFailed(f"the executor gave back {_short(answer)}, which is no answer")
    if "error" in content:
        raise WorkFailed(content["error"])
    return rebuilt(content["result"], list(arrays))


def _short(thing: Any) -> str:
    return f"{type(thing).__name__} {str(thing)[:60]!r}"


def _version() -> str:
    return sys.modules[__name__.partition(".")[0]].__version__
