"""A solution on disk: arrays and a text, nothing that could execute.

The text says of each part what it is: a dictionary, a list, a tuple, nothing, or which
array. Whatever else a file says is refused.
"""

import os
from dataclasses import asdict, fields
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._constraints import Layout
from .._constraints.layout import Part
from .._files import checkpoint as files
from .._judge.certificate import Certificate
from .._lower.base import Iterations, LowerSolution
from .._methods.polish import Polish
from .._programs.modules import made
from .._status import Status, as_status, status_code
from .history import History
from .second_look import SecondLook
from .upper_report import UpperReport

_KIND = "solution"
# Parts of a solution that are trees of arrays, and those that are plain.
_TREES = ("x", "y", "average", "value", "stochastic")
_PLAIN: dict[str, Any] = dict(success=bool, message=str, stopped=str, bounds=dict)
# Objects among the parts, with their classes.
_OBJECTS = dict(history=History, polish=Polish, certificate=Certificate,
                lower=LowerSolution, around=SecondLook, upper=UpperReport)  # fmt: skip
# A LowerSolution is kept without these as they are: a status, names, a large factor.
_LEFT_OUT = ("status", "factor", "layout", "_measured")


def write(path: str | os.PathLike, solution: Any) -> None:
    """All parts of a solution, in one file."""
    arrays: list[np.ndarray] = []
    form = _solution_form(solution, arrays)
    named = {f"part_{i}": array for i, array in enumerate(arrays)}
    files.save(path, named, dict(kind=_KIND, solution=form))


def read(path: str | os.PathLike, kind: type) -> Any:
    """A solution of class `kind`, or a `CheckpointError`."""
    named, meta = files.load(path)
    try:
        if meta.get("kind") != _KIND:
            raise ValueError("it holds a run, not a solution: give it to `checkpoint`")
        arrays = [named[f"part_{i}"] for i in range(len(named))]
        return _solution(meta["solution"], arrays, kind)
    except (KeyError, ValueError, TypeError, IndexError, AttributeError) as error:
        raise files.CheckpointError(
            f"{path} is not a solution that `save` has written ({error})."
        ) from error


def _solution_form(s: Any, arrays: list) -> dict:
    form: dict[str, Any] = {name: getattr(s, name) for name in _PLAIN}
    form |= {name: _form(getattr(s, name), arrays, name) for name in _TREES}
    form["status"] = status_code(s.status)
    for name in _OBJECTS:
        held = getattr(s, name)
        form[name] = None if held is None else _object_form(held, arrays, name)
    form["starts"] = [
        None if one.x is s.x else _solution_form(one, arrays) for one in s.starts
    ]
    return form


def _solution(form: dict, arrays: list, kind: type) -> Any:
    parts: dict[str, Any] = {}
    for name, plain in _PLAIN.items():
        if not isinstance(form[name], plain):
            raise ValueError(f"its {name} is {form[name]!r}")
        parts[name] = form[name]
    parts |= {name: _tree(form[name], arrays) for name in _TREES}
    parts["status"] = _status(form["status"])
    for name, wanted in _OBJECTS.items():
        held = form[name]
        parts[name] = None if held is None else _object(held, arrays, wanted)
    found = kind(**parts)
    starts = [
        None if one is None else _solution(one, arrays, kind) for one in form["starts"]
    ]
    # The best of the starts is the solution itself.
    alone = kind(**parts)
    found.starts = [alone if one is None else one for one in starts]
    return found


def _object_form(held: Any, arrays: list, what: str) -> dict:
    names = [f.name for f in fields(held) if f.name not in _LEFT_OUT]
    form = {
        name: _form(getattr(held, name), arrays, f"{what}.{name}") for name in names
    }
    if hasattr(held, "status"):
        form["status"] = _form(np.asarray(held.status._value), arrays, what)
        form["layout"] = _form(_layout_form(held.layout), arrays, what)
    return form


def _layout_form(layout: Layout | None) -> dict | None:
    return None if layout is None else asdict(layout)


def _layout(form: dict | None) -> Layout | None:
    """Names of rows, as tuples again."""
    if form is None:
        return None
    parts = tuple(Part(**part) for part in form["parts"])
    return Layout(parts, by_name=form["by_name"])


def _object(form: dict, arrays: list, kind: type) -> Any:
    parts = {name: _tree(part, arrays) for name, part in form.items()}
    if kind is LowerSolution:
        parts["iterations"] = Iterations(*parts["iterations"])
        parts["status"] = as_status(jnp.asarray(parts["status"]))
        parts["layout"] = _layout(parts["layout"])
        parts["factor"] = None
    names = {f.name for f in fields(kind) if f.name != "_measured"}
    if set(parts) != names:
        raise ValueError(f"its {kind.__name__} has other parts than this version")
    return made(kind, **parts) if kind in (LowerSolution, Polish) else kind(**parts)


def _form(tree: Any, arrays: list, what: str) -> Any:
    """A tree of dictionaries, lists, tuples and arrays as what JSON can hold."""
    if tree is None or isinstance(tree, bool | int | float | str):
        # As text, numbers keep all their digits, and infinity and NaN.
        number = isinstance(tree, float)
        return ["number", tree.hex()] if number else ["plain", tree]
    if isinstance(tree, jax.Array | np.ndarray | np.generic):
        arrays.append(np.asarray(tree))
        return ["jax" if isinstance(tree, jax.Array) else "numpy", len(arrays) - 1]
    if isinstance(tree, dict):
        if not all(isinstance(key, str) for key in tree):
            raise ValueError(_refusal(what, "a dictionary whose keys are not all text"))
        return ["dict", {k: _form(v, arrays, f"{what}.{k}") for k, v in tree.items()}]
    if isinstance(tree, list | tuple):
        kind = "list" if isinstance(tree, list) else "tuple"
        return [kind, [_form(v, arrays, f"{what}[{i}]") for i, v in enumerate(tree)]]
    raise ValueError(_refusal(what, f"of type {type(tree).__name__}"))


def _refusal(what: str, kind: str) -> str:
    return (
        f"`solution.{what}` is {kind}, and a file holds dictionaries, lists, tuples "
        "and arrays only, since anything else would be code to load. Write such parts "
        "with the tool they come from (`equinox.tree_serialise_leaves`)."
    )


def _tree(form: Any, arrays: list) -> Any:
    kind, part = form
    if kind == "plain":
        return part
    if kind == "number":
        return float.fromhex(part)
    if kind == "jax":
        return jnp.asarray(arrays[part])
    if kind == "numpy":
        return arrays[part]
    if kind == "dict":
        return {key: _tree(value, arrays) for key, value in part.items()}
    if kind in ("list", "tuple"):
        return {"list": list, "tuple": tuple}[kind](_tree(one, arrays) for one in part)
    raise ValueError(f"a part is of kind {kind!r}")


def _status(code: Any) -> Any:
    if not (isinstance(code, int) and 0 <= code < len(Status._name_to_item)):
        raise ValueError(f"its status is {code!r}")
    return as_status(jnp.asarray(code))
