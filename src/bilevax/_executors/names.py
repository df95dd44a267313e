"""Names by which another process finds a function, a class or a module again."""

import hashlib
import importlib
import inspect
import os
import sys
import types
from pathlib import Path
from typing import Any

# Folders of installed packages, which every process looks into by itself.
_INSTALLED = ("site-packages", "dist-packages")
# How many files are being run for what they define.
_running = 0


def name_of(thing: Any) -> list | None:
    """What `found` needs to give `thing` back in another process; None if nothing does.

    `["name", module, qualname, folder]`, with the folder from which the module came
    where it is not installed; or `["file", path, digest, qualname]` for a program that
    runs as a script, which has no name to be imported by.
    """
    qualname = getattr(thing, "__qualname__", getattr(thing, "__name__", None))
    if not isinstance(qualname, str) or "<" in qualname:
        return None
    known = getattr(thing, "__globals__", {}).get("__name__")
    for name in (getattr(thing, "__module__", None), known):
        module = sys.modules.get(name) if isinstance(name, str) else None
        if module is not None and _part(module, qualname) is thing:
            return _with_place(module, qualname)
    return None


def module_name(module: types.ModuleType) -> list | None:
    """The same for a module itself."""
    return _with_place(module, "")


def found(name: list) -> Any:
    """What `name_of` has named."""
    kind, *rest = name
    if kind == "file":
        path, digest, qualname = rest
        return _part(_module_of_file(path, digest), qualname)
    module, qualname, folder = rest
    try:
        home = importlib.import_module(module)
    except ModuleNotFoundError:
        if folder is None or folder in sys.path:
            raise
        # Last: what this process finds by itself comes first.
        sys.path.append(folder)
        home = importlib.import_module(module)
    return _part(home, qualname)


def where_defined(thing: Any) -> str:
    """`file, line` of a function or an instance of a class, as far as is known."""
    function = inspect.unwrap(thing) if callable(thing) else thing
    code = getattr(function, "__code__", None)
    if code is None:
        return ""
    return f"{code.co_filename}, line {code.co_firstlineno}"


def is_running_a_file() -> bool:
    """Whether a script is being run for what it defines, in the midst of which we are.

    Work that it hands to an executor then would be handed on without end.
    """
    return _running > 0


def _part(thing: Any, qualname: str) -> Any:
    for name in filter(None, qualname.split(".")):
        thing = getattr(thing, name, None)
    return thing


def _with_place(module: types.ModuleType, qualname: str) -> list | None:
    name, spec = module.__name__, getattr(module, "__spec__", None)
    if name == "__main__" and spec is not None:
        # `python -m name`: the module has a name besides.
        name = spec.name
    elif spec is None or not _is_importable(name):
        file = getattr(module, "__file__", None)
        if file is None or not os.path.isfile(file):
            return None
        path = os.path.abspath(file)
        return ["file", path, _digest(path), qualname]
    return ["name", name, qualname, _folder(name)]


def _is_importable(name: str) -> bool:
    """Whether a module of this name is found by others, not only here, where it is."""
    root = name.partition(".")[0]
    finders = [finder for finder in sys.meta_path if hasattr(finder, "find_spec")]
    return any(finder.find_spec(root, None) is not None for finder in finders)


def _folder(name: str) -> str | None:
    root = sys.modules.get(name.partition(".")[0])
    file = getattr(root, "__file__", None)
    if file is None or root is None:
        return None
    path = Path(os.path.abspath(file)).parent
    path = path.parent if hasattr(root, "__path__") else path
    installed = set(path.parts) & set(_INSTALLED)
    return None if installed or root.__name__ in sys.stdlib_module_names else str(path)


def _digest(path: str) -> str:
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()[:16]


def _module_of_file(path: str, digest: str) -> types.ModuleType:
    """The file as a module; one that this process has run already serves."""
    global _running
    if _digest(path) != digest:
        raise ValueError(
            f"{path} is not the file that the work came from: it has changed since, or "
            "is another file on this machine."
        )
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None)
        # Modules with a specification are found by name.
        if file and getattr(module, "__spec__", None) is None:
            if os.path.abspath(file) == path:
                return module
    # Not `__main__`: what a script does when it is run is not wanted.
    module = types.ModuleType(f"__bilevax_{digest}__")
    module.__file__ = path
    # Dataclasses look up their module; `import` looks beside the file, as in a script.
    sys.modules[module.__name__] = module
    folder = os.path.dirname(path)
    if folder not in sys.path:
        sys.path.append(folder)
    _running += 1
    try:
        exec(compile(Path(path).read_bytes(), path, "exec"), vars(module))
    except BaseException:
        del sys.modules[module.__name__]
        raise
    finally:
        _running -= 1
    return module
