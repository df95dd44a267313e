"""One row per instance: how good the answer of one default call is, and what it cost.

The gap is that of `F` at the returned `x`, with the follower's answer from another
solver; `first` and `second` are the seconds of the same call made twice.
"""

import json
import resource
import time
from collections.abc import Callable
from typing import Any

import numpy as np


def measured(
    name: str,
    solve: Callable[[], Any],
    checked: Callable[[np.ndarray], float],
    best: float,
    bar: float,
    starts: int,
    twice: bool = True,
) -> dict[str, Any]:
    """The row of an instance, printed as JSON.

    `solve()` is the call, `checked(x)` is `F` by another solver, `best` the best known
    value and `bar` the largest accepted gap.
    """
    began = time.perf_counter()
    found = solve()
    first = time.perf_counter() - began
    second = None
    if twice:
        began = time.perf_counter()
        again = solve()
        second = round(time.perf_counter() - began, 2)
        assert again.value == found.value
    x = np.concatenate([np.ravel(found.x)])
    value = checked(x)
    gap = (value - best) / abs(best)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    row = dict(
        instance=name,
        value=value,
        claimed=found.value,
        best=best,
        gap=gap,
        bar=bar,
        reached=bool(gap <= bar),
        status=found.status_name,
        starts=starts,
        first=round(first, 2),
        second=second,
        memory=round(memory),
        x=np.round(x, 6).tolist(),
    )
    print(json.dumps(row), flush=True)
    return row
