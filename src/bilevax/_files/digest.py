"""A digest of what decides a run: numbers, choices, and what functions compute.

Functions count by what they do: their code with its constants, defaults, what they
close over and carry, and the globals they name, which are followed in turn. Of a module
the parts count that the code names; all of it, where the code hands it on or looks
names up while it runs. What comes with Python or an installed package counts by name
alone, objects of such classes by what is plain to see or by what copies are made from.
The digest is the same in every
process: it depends on no address, no order of a set, no line number and no name of a
module that is run as a script today and imported tomorrow.
"""

import contextlib
import dataclasses
import dis
import enum
import functools
import hashlib
import importlib.util
import sys
import types
from typing import Any, NamedTuple

import equinox as eqx
import jax
import numpy as np

_PLAIN = (type(None), bool, int, float, complex, str, bytes, type(...), range, slice)
_CONTAINERS = (tuple, list, set, frozenset, dict, types.MappingProxyType)
_BUILT_IN = (
    types.BuiltinFunctionType, types.WrapperDescriptorType,
    types.MethodDescriptorType, types.MethodWrapperType, np.ufunc,
)  # fmt: skip
# The flag of classes that were made while Python ran.
_ON_HEAP = 1 << 9
# Functions that look a name up while they run.
_BY_NAME = {"globals", "eval", "exec", "vars", "import_module", "__import__"}
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
        self.modules: set[str] = set()

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
            return self._array(thing)
        if isinstance(thing, np.dtype):
            return _hash("dtype", str(thing))
        if isinstance(thing, types.ModuleType):
            return self._module(thing, None)
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
        if isinstance(thing, _CONTAINERS):
            return self._container(thing)
        return self._object(thing)

    def _container(self, thing: Any) -> bytes:
        parts = [] if type(thing) in _CONTAINERS else [self._object(thing)]
        if isinstance(thing, tuple | list):
            return _hash(type(thing).__name__, *parts, *map(self.of, thing))
        if isinstance(thing, set | frozenset):
            return _hash("set", *parts, *sorted(map(self.of, thing)))
        pairs = (self.of(key) + self.of(value) for key, value in thing.items())
        return _hash("dict", *parts, *sorted(pairs))

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
        if module is None or not _is_installed(module):
            parts.append(self.of(vars(function)))
        names = _Names.of(function.__code__)
        for name, cell in zip(
            function.__code__.co_freevars, function.__closure__ or (), strict=True
        ):
            parts.append(self._cell(cell, names.inside(name)))
        return _hash(*parts)

    def _globals(self, function: types.FunctionType) -> list[bytes]:
        """The globals that the code of `function` names, and what it imports."""
        known, names = function.__globals__, _Names.of(function.__code__)
        loaded = known.keys() if names.by_name else names.loaded & known.keys()
        parts = []
        for name in sorted(loaded):
            if not _is_dunder(name):
                value = self._named(known[name], names.inside(name))
                parts.append(_hash("global", name, value))
        for name in sorted(names.imported):
            with contextlib.suppress(ImportError, ValueError):
                name = importlib.util.resolve_name(name, known.get("__package__"))
            found = sys.modules.get(name)
            if found is not None:
                parts.append(_hash("import", self._named(found, names.inside(name))))
        return parts

    def _named(self, value: Any, inside: set[str] | None) -> bytes:
        """What a name stands for; of a module the parts whose names are `inside`."""
        if isinstance(value, types.ModuleType):
            return self._module(value, inside)
        return self.of(value)

    def _module(self, module: types.ModuleType, inside: set[str] | None) -> bytes:
        """By its name; one of the user's own by its parts, for None by all of them."""
        name, parts = module.__name__, []
        if _is_installed(name):
            return _hash("module", name, getattr(module, "__version__", ""))
        if name in self.modules:
            return _hash("cycle", name)
        self.modules.add(name)
        try:
            held = vars(module)
            for part in sorted(held if inside is None else inside & held.keys()):
                if not _is_dunder(part):
                    parts.append(_hash("part", part, self._named(held[part], inside)))
        finally:
            self.modules.discard(name)
        return _hash("module", *parts)

    def _cell(self, cell: types.CellType, inside: set[str] | None = None) -> bytes:
        try:
            content = cell.cell_contents
        except ValueError:  # a name that was not bound yet
            return _hash("empty cell")
        return _hash("cell", self._named(content, inside))

    def _array(self, array: Any) -> bytes:
        if eqx.is_array(array) and jax.numpy.issubdtype(
            array.dtype, jax.dtypes.prng_key
        ):
            array = jax.random.key_data(array)
        mask = getattr(array, "mask", None) if np.ma.isMaskedArray(array) else None
        array = np.asarray(array)
        content = self.of(array.tolist()) if array.dtype.hasobject else array.tobytes()
        form = str(array.dtype), repr(array.shape)
        return _hash("array", *form, content, self.of(mask))

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
        parts.append(self.of(type(kind)))
        for name, member in sorted(vars(kind).items()):
            # Of functions with two underscores those that dataclasses write, too: they
            # follow from the fields.
            member = getattr(member, "__func__", getattr(member, "fget", member))
            member = getattr(member, "method", member)
            code = isinstance(member, types.FunctionType)
            if code or not _is_dunder(name):
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
                values |= _reduced(thing)
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
    if isinstance(value, dict):
        return all(map(_is_visible, value.values()))
    seen = (
        *_PLAIN,
        types.SimpleNamespace,
        types.FunctionType,
        types.MethodType,
        functools.partial,
        np.ndarray,
    )
    return isinstance(value, (*seen, eqx.Module)) or eqx.is_array(value)


def _reduced(thing: Any) -> dict[str, Any]:
    """What copies of an object are made from, where its class says so."""
    kind = type(thing)
    says = any(
        getattr(kind, name, None) is not getattr(object, name, None)
        for name in ("__reduce__", "__reduce_ex__", "__getstate__")
    )
    if not says or hasattr(thing, "__wrapped__"):
        return {}
    try:
        found = thing.__reduce_ex__(4)
    except Exception:  # of a kind that depends on the class
        return {}
    if isinstance(found, str):
        return {"__reduce__": found}
    # The function that makes a copy is one of the package.
    _, *made_from = found
    return {"__reduce__": [list(p) if hasattr(p, "__next__") else p for p in made_from]}


def _is_dunder(name: str) -> bool:
    return name.startswith("__") and name.endswith("__")


class _Names(NamedTuple):
    """Names in a code, and in the code inside it.

    - `loaded`: variables that are not local; `imported`: modules.
    - `named`: all names; `handed_on`: variables used as they are, not for a part.
    - `by_name`: whether names may be looked up while it runs.
    """

    loaded: frozenset[str]
    imported: frozenset[str]
    named: frozenset[str]
    handed_on: frozenset[str]
    by_name: bool

    @classmethod
    def of(cls, code: types.CodeType) -> "_Names":
        loaded, imported, handed_on = set(), set(), set()
        named = set(code.co_names)
        instructions = list(dis.get_instructions(code))
        after = [*(i.opname for i in instructions[1:]), ""]
        for i, then in zip(instructions, after, strict=True):
            if i.opname in _LOADS:
                loaded.add(i.argval)
                if then not in ("LOAD_ATTR", "LOAD_METHOD"):
                    handed_on.add(i.argval)
            if i.opname == "IMPORT_NAME":
                imported.add(i.argval)
        for constant in code.co_consts:
            if isinstance(constant, types.CodeType):
                more = cls.of(constant)
                loaded, imported = loaded | more.loaded, imported | more.imported
                named, handed_on = named | more.named, handed_on | more.handed_on
        sets = map(frozenset, (loaded, imported, named, handed_on))
        return cls(*sets, by_name=not named.isdisjoint(_BY_NAME))

    def inside(self, name: str) -> set[str] | None:
        """Names that may be parts of what `name` stands for; None for all."""
        if self.by_name or name in self.handed_on:
            return None
        return set(self.named)


_LOADS = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF", "LOAD_CLASSDEREF")


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


def _hash(*parts: str | bytes) -> bytes:
    """Of parts with their lengths: no two lists of parts read alike."""
    total = hashlib.sha256()
    for part in parts:
        part = part.encode() if isinstance(part, str) else part
        total.update(len(part).to_bytes(8, "little"))
        total.update(part)
    return total.digest()
