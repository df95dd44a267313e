"""One row per instance: how good the answer of one default call is, and what it cost.

The gap is that of `F` at the returned `x`, with the follower's answer from another
solver; `first` and `second` are CPU seconds of the same call made twice (the machine is
shared), `memory` the largest resident megabytes of the process so far.
"""

import argparse
import json
import pathlib
import resource
import time
from collections.abc import Callable
from typing import Any

import numpy as np


def parsed(doc: str | None, add: Callable[[Any], Any] = lambda parser: None) -> Any:
    """The options that all scripts share, and what `add(parser)` adds to them."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=pathlib.Path, required=True, metavar="FOLDER")
    parser.add_argument("--rows", type=pathlib.Path, help="a file to append rows to")
    parser.add_argument("--once", action="store_true", help="no second call")
    add(parser)
    return parser.parse_args()


def reference(options) -> dict[str, Any]:
    return json.loads((options.data / "reference.json").read_text())


def measured(
    name: str,
    solve: Callable[[], Any],
    checked: Callable[[np.ndarray], float],
    options,
    *,
    best: float,
    bar: float,
    starts: int,
    **more: Any,
) -> dict[str, Any]:
    """The row of an instance, printed as JSON and appended to `options.rows`.

    `solve()` is the call, `checked(x)` is `F` by another solver, `best` the best known
    value and `bar` the largest accepted gap; `more` goes into the row as it is.
    """
    began = time.process_time()
    found = solve()
    first = time.process_time() - began
    second = None
    if not options.once:
        began = time.process_time()
        again = solve()
        second = round(time.process_time() - began, 2)
        assert again.value == found.value
    x = np.concatenate([np.ravel(found.x)])
    value = checked(x)
    gap = (value - best) / abs(best)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    row = dict(
        instance=name,
        value=value,
        claimed=found.value,
        before_the_polish=found.stochastic[1],
        best=best,
        gap=gap,
        bar=bar,
        reached=bool(gap <= bar),
        status=found.status_name,
        stopped=found.stopped,
        starts=starts,
        first=round(first, 2),
        second=second,
        memory=round(memory),
        x=np.round(x, 6).tolist() if x.size <= 100 else None,
    )
    row |= more
    print(json.dumps(row), flush=True)
    if options.rows is not None:
        with options.rows.open("a") as file:
            print(json.dumps(row), file=file)
    return row
