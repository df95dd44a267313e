"""What a run wants computed, one at a time: for this run alone, or for many at once.

A run is a generator. It yields a `Request` wherever something is worth a program, and
is sent the result. Nothing in it knows how many other runs there are.
"""

import functools
from collections import defaultdict
from collections.abc import Callable, Generator
from typing import Any, NamedTuple, TypeVar

import equinox as eqx
import jax
import numpy as np

from .._lower.choose import is_on_host
from .._problem.host import is_in_host_memory
from .._programs.control import Packed, on_device, on_host
from .._programs.quick import quick_jit

# Members up to which single evaluations are rather taken one by one, stage by stage:
# compiling a program for all would take longer.
_FEW = 200

Result = TypeVar("Result")
Asking = Generator["Request", Any, Result]


class Request(NamedTuple):
    """`function(*arguments)`, all of it traceable.

    Of requests of several runs those that are `late` wait until no other is left, so
    that runs which have come further do not go on alone.
    """

    function: Callable
    arguments: tuple
    late: int = 0

    def __call__(self) -> Any:
        return self.function(*self.arguments)


def alone(run: Asking[Result]) -> Result:
    """The result of one run, whose requests are computed one by one."""
    answer: Any = None
    while True:
        try:
            answer = run.send(answer)()
        except StopIteration as end:
            return end.value


def together(runs: list[Asking[Result]], batch: int) -> list[Result]:
    """The results of many runs; requests of one form are computed as one batch."""
    results: list[Any] = [None] * len(runs)
    waiting: dict[int, Request] = {}
    sizes: dict[Any, int] = {}

    def send(i: int, answer) -> None:
        try:
            waiting[i] = runs[i].send(answer)
        except StopIteration as end:
            waiting.pop(i, None)
            results[i] = end.value

    for i in range(len(runs)):
        send(i, None)
    while waiting:
        least = min(request.late for request in waiting.values())
        groups = defaultdict(list)
        for i, request in waiting.items():
            if request.late == least:
                groups[_form(request)].append(i)
        for form, members in groups.items():
            for first in range(0, len(members), batch):
                part = members[first : first + batch]
                # Batches of one size compile once.
                size = sizes[form] = max(sizes.get(form, 1), len(part))
                answers = _answers([waiting[i] for i in part], size)
                for i, answer in zip(part, answers, strict=True):
                    send(i, answer)
    return results


def _form(request: Request):
    """What requests must share to be members of a batch."""
    packed = Packed(request.arguments)
    shapes = tuple((array.shape, array.dtype) for array in packed.arrays)
    return request.function, packed.form, shapes


def _answers(requests: list[Request], size: int) -> list[Any]:
    by_itself = size <= _FEW and not requests[0].late
    first = requests[0].arguments
    fed = any(map(is_in_host_memory, first))
    if size == 1 or by_itself or fed or is_on_host(first[0]):
        return [request() for request in requests]
    members = [Packed(request.arguments) for request in requests]
    members += [members[-1]] * (size - len(members))
    columns = list(zip(*(member.arrays for member in members), strict=True))
    # The same array in all members stays one array.
    shared = tuple(all(a is column[0] for a in column) for column in columns)
    if all(shared):
        return [requests[0]()] * len(requests)
    arrays = [
        column[0] if one else _stacked(column)
        for column, one in zip(columns, shared, strict=True)
    ]
    program = _program(requests[0].function, members[0].form, shared)
    found = on_host(program(tuple(on_device(arrays))))
    member = lambda i: lambda leaf: leaf[i] if eqx.is_array(leaf) else leaf
    return [jax.tree.map(member(i), found) for i in range(len(requests))]


def _stacked(column):
    if any(jax.numpy.issubdtype(a.dtype, jax.dtypes.prng_key) for a in column):
        return jax.numpy.stack(column)
    return np.stack([np.asarray(array) for array in column])


@functools.lru_cache(maxsize=64)
def _program(function: Callable, form, shared: tuple[bool, ...]) -> Callable:
    axes = tuple(None if one else 0 for one in shared)

    def one(arrays):
        return function(*Packed.of(form, arrays).open())

    return quick_jit(lambda arrays: eqx.filter_vmap(one, in_axes=(axes,))(arrays))
