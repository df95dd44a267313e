"""A digest of what decides a run: numbers, choices, and what functions compute.

Functions count by what they do: their code with its constants, defaults, what they
close over, and the globals they name, which are followed in turn. What comes with
Python or an installed package counts by name alone. The digest is the same in every
process: it depends on no address, no order of a set, no line number and no name of a
module that is run as a script today and imported tomorrow.
"""

import dataclasses
import dis
import enum
import functools
import hashlib
import sys
import types
from typing import Any

import equinox as eqx
import jax
import numpy as np

_PLAIN = (type(None), bool, int, float, complex, str, bytes, type(...), range, slice)
_BUILT_IN = (
    types.BuiltinFunctionType, types.WrapperDescriptorType,
    types.MethodDescriptorType, types.MethodWrapperType, np.ufunc,
)  # fmt: skip
# The flag of classes that were made while Python ran.
_ON_HEAP = 1 << 9
# Folders of installed packages.
_INSTALLED = ("site-packages", "dist-packages")


def digest(thing: Any) -> str:
    """Sixteen hexadecimal digits; equal for things that compute the same."""
    return _Digester().of(thing).hex()[:16]


class _Digester:
    """One walk: what was met before is not walked again, and cycles end."""

    def __init__(self):
        # With the things themselves: an address is free again when its owner is gone.
        self.known: dict[int, tuple[bytes, Any]] = {}
        self.open: set[int] = set()

    def of(self, thing: Any) -> bytes:
        if isinstance(thing, _PLAIN):
            return _hash(type(thing).__name__, repr(thing))
        if id(thing) in self.known:
            return self.known[id(thing)][0]
        if id(thing) in self.open:
            return _hash("cycle", getattr(thing, "__qualname__", type(thing).__name__))
        self.open.add(id(thing))
        try:
            found = self._walk(thing)
        finally:
            self.open.discard(id(thing))
        self.known[id(thing)] = found, thing
        return found

    def _walk(self, thing: Any) -> bytes:
        if eqx.is_array(thing) or isinstance(thing, np.ndarray | np.generic):
            return _array(thing)
        if isinstance(thing, np.dtype):
            return _hash("dtype", str(thing))
        if isinstance(thing, types.ModuleType):
            return _hash("module", thing.__name__, getattr(thing, "__version__", ""))
        if isinstance(thing, types.CodeType):
            return self._code(thing)
        if isinstance(thing, types.FunctionType):
            return self._function(thing)
        if isinstance(thing, type):
            return self._class(thing)
        if isinstance(thing, enum.Enum):
            return _hash("enum", type(thing).__qualname__, thing.name)
        if isinstance(thing, types.MethodType):
            return _hash("method", self.of(thing.__func__), self.of(thing.__self__))
        if isinstance(thing, functools.partial):
            parts = thing.func, thing.args, thing.keywords
            return _hash("partial", type(thing).__name__, *map(self.of, parts))
        if isinstance(thing, _BUILT_IN):
            return self._built_in(thing)
        if isinstance(thing, types.CellType):
            return self._cell(thing)
        if isinstance(thing, tuple | list):
            return _hash(type(thing).__name__, *map(self.of, thing))
        if isinstance(thing, set | frozenset):
            return _hash("set", *sorted(map(self.of, thing)))
        if isinstance(thing, dict):
            pairs = (self.of(key) + self.of(value) for key, value in thing.items())
            return _hash("dict", *sorted(pairs))
        return self._object(thing)

    def _code(self, code: types.CodeType) -> bytes:
        constants = map(self.of, code.co_consts)
        exceptions = getattr(code, "co_exceptiontable", b"")
        return _hash("code", code.co_code, exceptions, *code.co_names, *constants)

    def _function(self, function: types.FunctionType) -> bytes:
        name = function.__qualname__
        local = "<" in name
        parts = [_hash("function", name)]
        # Not `__module__`, which packages set to where a function should be found.
        module = function.__globals__.get("__name__")
        if module is not None and _is_installed(module):
            parts.append(_hash(module))
            if not local:
                return _hash(*parts)
        else:
            parts += self._globals(function)
        parts.append(self.of(function.__code__))
        parts.append(self.of(function.__defaults__))
        parts.append(self.of(function.__kwdefaults__))
        return _hash(*parts, *map(self.of, function.__closure__ or ()))

    def _globals(self, function: types.FunctionType) -> list[bytes]:
        """The globals that the code of `function` names, and parts of own modules."""
        known, parts = function.__globals__, []
        loaded, named = _names(function.__code__)
        for name in sorted(loaded & known.keys()):
            value = known[name]
            parts.append(_hash("global", name, self.of(value)))
            own = isinstance(value, types.ModuleType) and not _is_installed(
                value.__name__
            )
            if own:
                inside = vars(value)
                for part in sorted(named & inside.keys()):
                    parts.append(_hash("part", part, self.of(inside[part])))
        return parts

    def _cell(self, cell: types.CellType) -> bytes:
        try:
            content = cell.cell_contents
        except ValueError:  # a name that was not bound yet
            return _hash("empty cell")
        return _hash("cell", self.of(content))

    def _built_in(self, thing: Any) -> bytes:
        owner = getattr(thing, "__self__", None)
        name = getattr(thing, "__qualname__", thing.__name__)
        if owner is None or isinstance(owner, types.ModuleType):
            return _hash("built-in", getattr(thing, "__module__", None) or "", name)
        return _hash("built-in", name, self.of(owner))

    def _class(self, kind: type) -> bytes:
        if _is_installed_class(kind):
            return _hash("class", kind.__module__, kind.__qualname__)
        parts = [_hash("class", kind.__qualname__), *map(self.of, kind.__bases__)]
        for name, member in sorted(vars(kind).items()):
            # Of functions with two underscores those that dataclasses write, too: they
            # follow from the fields.
            member = getattr(member, "__func__", getattr(member, "fget", member))
            member = getattr(member, "method", member)
            code = isinstance(member, types.FunctionType)
            if code or not name.startswith("_"):
                parts.append(_hash("member", name, self.of(member)))
        return _hash(*parts)

    def _object(self, thing: Any) -> bytes:
        """An instance of any class: its kind and what it holds."""
        kind = type(thing)
        parts = [_hash("object"), self.of(kind)]
        if dataclasses.is_dataclass(thing):
            held = {field.name: None for field in dataclasses.fields(thing)}
            values = {name: getattr(thing, name, None) for name in held}
        else:
            values = _held(thing)
            if _is_installed_class(kind):
                # Of objects of packages what is plain to see: the rest may be caches.
                values = {name: v for name, v in values.items() if _is_visible(v)}
        wrapped = getattr(thing, "__wrapped__", None)
        if wrapped is not None:
            values["__wrapped__"] = wrapped
        for name, value in sorted(values.items()):
            parts.append(_hash("holds", name, self.of(value)))
        return _hash(*parts)


def _held(thing: Any) -> dict[str, Any]:
    """The attributes of an instance, without what was computed from them and cached."""
    names = list(getattr(thing, "__dict__", ()))
    for base in type(thing).__mro__:
        slots = vars(base).get("__slots__", ())
        names += [slots] if isinstance(slots, str) else list(slots)
    cached = lambda name: isinstance(
        getattr(type(thing), name, None), functools.cached_property
    )
    return {
        name: getattr(thing, name)
        for name in names
        if hasattr(thing, name) and not name.startswith("__") and not cached(name)
    }


def _is_visible(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return all(map(_is_visible, value))
    seen = (
        *_PLAIN,
        types.FunctionType,
        types.MethodType,
        functools.partial,
        np.ndarray,
    )
    return isinstance(value, (*seen, eqx.Module)) or eqx.is_array(value)


def _names(code: types.CodeType) -> tuple[set[str], set[str]]:
    """Names of globals that the code loads, and all names in it, inner code as well."""
    loads = ("LOAD_GLOBAL", "LOAD_NAME")
    loaded = {i.argval for i in dis.get_instructions(code) if i.opname in loads}
    named = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            more = _names(constant)
            loaded, named = loaded | more[0], named | more[1]
    return loaded, named


@functools.cache
def _is_installed(module: str) -> bool:
    """Whether a module is Python's, this library's or of an installed package."""
    if module == "__main__":
        return False
    root = module.partition(".")[0]
    if root in sys.stdlib_module_names or root == __name__.partition(".")[0]:
        return True
    found = sys.modules.get(module) or sys.modules.get(root)
    file = getattr(found, "__file__", None) or ""
    return any(folder in file for folder in _INSTALLED)


def _is_installed_class(kind: type) -> bool:
    # Classes made by `exec` say that they are built in, and those that are do not live
    # on the heap.
    made = kind.__module__ == "builtins" and kind.__flags__ & _ON_HEAP
    return not made and _is_installed(kind.__module__)


def _array(array: Any) -> bytes:
    if eqx.is_array(array) and jax.numpy.issubdtype(array.dtype, jax.dtypes.prng_key):
        array = jax.random.key_data(array)
    array = np.asarray(array)
    if array.dtype == object:
        return _hash("objects", repr(array.shape))
    return _hash("array", str(array.dtype), repr(array.shape), array.tobytes())


def _hash(*parts: str | bytes) -> bytes:
    """Of parts with their lengths: no two lists of parts read alike."""
    total = hashlib.sha256()
    for part in parts:
        part = part.encode() if isinstance(part, str) else part
        total.update(len(part).to_bytes(8, "little"))
        total.update(part)
    return total.digest()
