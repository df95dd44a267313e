"""Objects as a text and NumPy arrays, and back: nothing in them that could execute.

Functions and classes are names; arrays are NumPy's; a module, a dataclass or any plain
object is the name of its class and what its fields hold; what has a method `made_by` is
the call that this names.
"""

import dataclasses
import enum
import functools
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .names import found, module_name, name_of, where_defined

_PLAIN = (type(None), bool, int, float, str)
# Kinds of numbers that every way of sending NumPy arrays knows.
_KNOWN = "biufcUSMm"
_KINDS = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}
_PARTIALS = {"partial": functools.partial, "jax partial": jax.tree_util.Partial}


class NotDescribed(ValueError):
    """Something that has no name and is no data; the text is for its author."""


def described(
    things: list, names: list[str] | None = None
) -> tuple[list, list[np.ndarray]]:
    """Each thing as what JSON can hold, and arrays; `names` are for complaints."""
    describer, forms = _Describer(), []
    for i, thing in enumerate(things):
        try:
            forms.append(describer.of(thing, ""))
        except NotDescribed as error:
            name = f"{names[i]}: " if names else ""
            raise NotDescribed(f"{name}{error}") from None
    return forms, describer.arrays


def rebuilt(forms: list, arrays: list[np.ndarray]) -> list:
    """The inverse of `described`."""
    builder = _Builder(arrays)
    return [builder.of(form) for form in forms]


def refusal(thing: Any) -> str | None:
    """Why a thing cannot be described; None where it can."""
    try:
        described([thing])
    except NotDescribed as error:
        return str(error)
    return None


class _Describer:
    """One walk; what occurs twice is described once, and stays one object."""

    def __init__(self):
        self.arrays: list[np.ndarray] = []
        # With the things themselves: an address is free again when its owner is gone.
        self.known: dict[int, tuple[int, Any]] = {}
        self.open: set[int] = set()

    def of(self, thing: Any, what: str) -> Any:
        if type(thing) in _PLAIN:
            return thing
        if id(thing) in self.known:
            return ["same", self.known[id(thing)][0]]
        if id(thing) in self.open:
            raise NotDescribed(f"{_quoted(what)} holds itself, so it cannot travel.")
        self.open.add(id(thing))
        try:
            form = self._form(thing, what)
        finally:
            self.open.discard(id(thing))
        self.known[id(thing)] = len(self.known), thing
        return form

    def _form(self, thing: Any, what: str) -> list:
        if isinstance(thing, jax.Array | np.ndarray | np.generic):
            return self._array(thing, what)
        if type(thing) in _KINDS.values():
            kind = type(thing).__name__
            return [kind, [self.of(x, f"{what}[{i}]") for i, x in enumerate(thing)]]
        if type(thing) is dict:
            pairs = thing.items()
            return ["dict", [[self.of(k, what), self.of(v, _at(what, k))]
                             for k, v in pairs]]  # fmt: skip
        if isinstance(thing, bytes):
            return ["bytes", thing.hex()]
        if isinstance(thing, complex):
            return ["complex", thing.real, thing.imag]
        if isinstance(thing, range | slice):
            parts = [thing.start, thing.stop, thing.step]
            return [type(thing).__name__, parts]
        if thing is ...:
            return ["ellipsis"]
        if isinstance(thing, np.dtype):
            return ["dtype", thing.name]
        if isinstance(thing, enum.Enum):
            return ["enum", self.of(type(thing), what), thing.name]
        if isinstance(thing, types.ModuleType):
            name = module_name(thing)
            if name is not None:
                return name
        elif isinstance(thing, types.MethodType):
            return ["method", self.of(thing.__self__, what), thing.__name__]
        else:
            # Functions that something was wrapped around, too.
            name = name_of(thing) if callable(thing) else None
            if name is not None:
                return name
            for kind, partial in _PARTIALS.items():
                if type(thing) is partial:
                    return [kind, self.of(thing.func, what),
                            self.of(thing.args, what),
                            self.of(thing.keywords, what)]  # fmt: skip
            if not isinstance(thing, type | types.FunctionType) and _is_plain(thing):
                return self._object(thing, what)
        raise NotDescribed(_refusal(thing, what))

    def _object(self, thing: Any, what: str) -> list:
        made = thing.made_by() if hasattr(thing, "made_by") else None
        if made is not None:
            function, arguments = made
            return ["call", self.of(function, what),
                    [self.of(part, what) for part in arguments]]  # fmt: skip
        kind = self.of(type(thing), f"type({what})")
        if isinstance(thing, tuple):
            return ["named tuple", kind,
                    [self.of(getattr(thing, name), f"{what}.{name}")
                     for name in thing._fields]]  # pyright: ignore # fmt: skip
        held = [[name, self.of(value, f"{what}.{name}")]
                for name, value in _held(thing).items()]  # fmt: skip
        return ["object", kind, held]

    def _array(self, thing: Any, what: str) -> list:
        kind = "numpy" if isinstance(thing, np.ndarray) else "scalar"
        if isinstance(thing, jax.Array):
            kind = "weak" if getattr(thing, "weak_type", False) else "jax"
            if jnp.issubdtype(thing.dtype, jax.dtypes.prng_key):
                kind = f"key {jax.random.key_impl(thing)}"
                thing = jax.random.key_data(thing)
        array = np.asarray(thing)
        if array.dtype.hasobject:
            raise NotDescribed(
                f"{_quoted(what)} is an array of Python objects, which cannot travel "
                "to another process; make it an array of numbers."
            )
        name, shape = None, array.shape
        if array.dtype.kind not in _KNOWN:
            name = array.dtype.name
            array = np.frombuffer(np.ascontiguousarray(array).tobytes(), np.uint8)
        self.arrays.append(array)
        return ["array", kind, len(self.arrays) - 1, name, list(shape)]


class _Builder:
    """The same walk again."""

    def __init__(self, arrays: list[np.ndarray]):
        self.arrays = arrays
        self.known: list[Any] = []

    def of(self, form: Any) -> Any:
        if not isinstance(form, list):
            return form
        if form[0] == "same":
            return self.known[form[1]]
        thing = self._thing(*form)
        self.known.append(thing)
        return thing

    def _thing(self, kind: str, *parts: Any) -> Any:
        if kind == "array":
            return self._array(*parts)
        if kind in _KINDS:
            return _KINDS[kind](map(self.of, parts[0]))
        if kind == "dict":
            return {self.of(key): self.of(value) for key, value in parts[0]}
        if kind in _PARTIALS:
            function, arguments, named = map(self.of, parts)
            return _PARTIALS[kind](function, *arguments, **named)
        if kind in ("name", "file"):
            return found([kind, *parts])
        if kind == "object":
            return self._object(*parts)
        if kind == "named tuple":
            return self.of(parts[0])._make(map(self.of, parts[1]))
        if kind == "call":
            return self.of(parts[0])(*map(self.of, parts[1]))
        if kind == "method":
            return getattr(self.of(parts[0]), parts[1])
        if kind == "enum":
            return self.of(parts[0])[parts[1]]
        simple = {
            "bytes": bytes.fromhex, "complex": complex, "dtype": jnp.dtype,
            "range": lambda part: range(*part), "slice": lambda part: slice(*part),
            "ellipsis": lambda: ...,
        }  # fmt: skip
        return simple[kind](*parts)

    def _object(self, kind: Any, held: list) -> Any:
        kind = self.of(kind)
        thing = object.__new__(kind)
        for name, value in held:
            # As it was, even where its class forbids changes.
            object.__setattr__(thing, name, self.of(value))
        return thing

    def _array(self, kind: str, index: int, name: str | None, shape: list) -> Any:
        array = np.asarray(self.arrays[index])
        if name is not None:
            array = np.frombuffer(array.tobytes(), jnp.dtype(name)).reshape(shape)
        if kind == "numpy":
            return array
        if kind == "scalar":
            return array[()]
        if kind.startswith("key "):
            data = jnp.asarray(array)
            return jax.random.wrap_key_data(data, impl=kind.removeprefix("key "))
        if kind == "weak":
            # Zeros without a dtype are weak, and setting entries leaves them so.
            weak = jnp.full(array.shape, array.dtype.type(0).item())
            if weak.dtype == array.dtype:
                return weak.at[...].set(array)
        return jnp.asarray(array)


def _held(thing: Any) -> dict[str, Any]:
    """The attributes of an object, without what was computed from them and cached."""
    held = dict(getattr(thing, "__dict__", {}))
    if dataclasses.is_dataclass(thing):
        names = [field.name for field in dataclasses.fields(thing)]
        held |= {name: getattr(thing, name) for name in names if hasattr(thing, name)}
    cached = lambda name: isinstance(
        getattr(type(thing), name, None), functools.cached_property
    )
    return {name: value for name, value in held.items() if not cached(name)}


def _is_plain(thing: Any) -> bool:
    """Whether an object is what its attributes hold, and nothing besides."""
    kind = type(thing)
    if isinstance(thing, tuple):
        return hasattr(thing, "_fields") and hasattr(kind, "_make")
    if dataclasses.is_dataclass(thing):
        return True
    return kind.__new__ is object.__new__ and hasattr(thing, "__dict__")


def _at(what: str, key: Any) -> str:
    if isinstance(key, str) and key.isidentifier():
        return f"{what}.{key}" if what else key
    return f"{what}[{key!r}]"


def _quoted(what: str) -> str:
    return f"`{what}`" if what else "It"


def _refusal(thing: Any, what: str) -> str:
    place = where_defined(thing)
    place = f" (defined in {place})" if place else ""
    name = getattr(thing, "__qualname__", "")
    if isinstance(thing, types.ModuleType):
        return f"{_quoted(what)} is the module {thing.__name__}, which has no file."
    if not (isinstance(thing, type) or (callable(thing) and name)):
        return (
            f"{_quoted(what)} is {_a(type(thing).__name__)}{place}, which is neither "
            "data nor a name that another process could import. Hold arrays, numbers, "
            "dataclasses or equinox Modules instead."
        )
    kind = "class" if isinstance(thing, type) else "function"
    if "<lambda>" in name:
        told = f"a lambda{place}"
    elif "<locals>" in name:
        told = f"the local {kind} {name}{place}"
    else:
        told = f"the {kind} {name}{place}, found under this name in no module"
    return (
        f"{_quoted(what)} is {told}. Another process cannot import it, so it cannot "
        "be given to an `executor`. Write it with `def` or `class` at the top level of "
        "a file, and bind the data it needs with `jax.tree_util.Partial(function, "
        "data)` or as fields of an `equinox.Module`."
    )


def _a(name: str) -> str:
    return f"an {name}" if name[:1].lower() in "aeiou" else f"a {name}"
