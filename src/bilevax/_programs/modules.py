"""Equinox modules at the price of plain objects, for what every step of a call does.

A method of a module is a module of its own when it is looked up, and a new module runs
its checks; both take as long as a small linear solve. Where steps are taken from Python
that is most of the time, and nothing there needs either.
"""

import functools
import weakref
from collections.abc import Callable
from typing import Any

import equinox as eqx


class Plain(eqx.Module):
    """A module whose attributes are those of any object; its methods are no pytrees."""

    __getattribute__ = object.__getattribute__


def made(kind: type, **fields) -> Any:
    """An instance of `kind` with these fields, all of them, and nothing checked."""
    module = object.__new__(kind)
    for name, value in fields.items():
        object.__setattr__(module, name, value)
    return module


def with_fields(module: Any, **fields) -> Any:
    """A copy of `module` with other fields."""
    return made(type(module), **{**vars(module), **fields})


def remembered(function: Callable) -> Callable:
    """`function(module)`, computed once for each module, as long as that lives.

    Modules never change. What is computed must not hold the module itself.
    """
    known: dict = {}

    @functools.wraps(function)
    def call(module):
        entry = known.get(id(module))
        if entry is None or entry[0]() is not module:
            forget = functools.partial(known.pop, id(module), None)
            entry = weakref.ref(module, lambda _: forget()), function(module)
            known[id(module)] = entry
        return entry[1]

    return call
