"""A file that defines `problem` and `x0`; its errors are told in its own lines."""

import argparse
import hashlib
import os
import sys
import traceback
import types
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .._problem.problem import AbstractProblem


class FileError(Exception):
    """Something is wrong with the file; the text is for its author."""


def add_file(sub: argparse.ArgumentParser) -> None:
    """The argument that names the file."""
    sub.add_argument(
        "file", metavar="FILE.py",
        help="defines `problem` and `x0`; may define `names`: a list for x, or a "
        "dictionary with lists for `x` and `rows`",
    )  # fmt: skip


def load(path: str, needed: tuple[str, ...] = ("problem", "x0")) -> dict[str, Any]:
    """The names that the file defines, those that are `needed` among them."""
    file = Path(path)
    if not file.exists():
        raise FileError(f"{path}: there is no such file.")
    names = _run(file)
    for name in needed:
        if name not in names:
            found = ", ".join(n for n in names if not n.startswith("__"))
            raise FileError(
                f"{path} must define `{name}`; it defines {found or 'nothing'}."
            )
    if not isinstance(names["problem"], AbstractProblem):
        raise FileError(
            f"{path}: `problem` must be a bilevax Problem, Followers or "
            f"StochasticProblem; it is {type(names['problem']).__name__}."
        )
    return names


def names_of(path: str, defined: dict[str, Any], what: str) -> list[str] | None:
    """The names that the file gives to `what`, "x" or "rows"; None if it does not."""
    names = defined.get("names")
    if isinstance(names, list | tuple):
        names = {"x": names}
    if names is None:
        return None
    if not isinstance(names, dict) or not set(names) <= {"x", "rows"}:
        raise FileError(
            f"{path}: `names` must be a list of names for the numbers in x, or a "
            f"dictionary with such lists for `x` and `rows`; it is {names!r}."
        )
    return None if what not in names else list(map(str, names[what]))


@dataclass(frozen=True)
class InFile:
    """The problem of a file, by which other processes make it: for every seed the same.

    What a file defines need not have a name, so that it could not travel by itself.
    """

    path: str
    digest: str

    @classmethod
    def kept(cls, path: str, problem: AbstractProblem) -> "InFile":
        """That of a file that has been loaded."""
        found = cls(os.path.abspath(path), _digest(path))
        _problems[found] = problem
        return found

    def __call__(self, seed: int) -> AbstractProblem:
        if self not in _problems:
            if _digest(self.path) != self.digest:
                raise FileError(f"{self.path} has changed since the work began.")
            _problems[self] = load(self.path)["problem"]
        return _problems[self]


_problems: dict[InFile, AbstractProblem] = {}


def _digest(path: str) -> str:
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()[:16]


def _run(file: Path) -> dict[str, Any]:
    """Run the file as a module of its own, beside which it finds others."""
    module = types.ModuleType("__bilevax__")
    module.__file__ = str(file)
    # Dataclasses look up their module; `import` looks beside the file, as in a script.
    sys.modules[module.__name__] = module
    folder = str(file.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        exec(compile(file.read_bytes(), str(file), "exec"), vars(module))
    except SyntaxError as error:
        if error.filename != str(file):  # in a module that it imports
            raise FileError(in_user_lines(error, file)) from error
        raise FileError(
            f"{file}, line {error.lineno}: {error.text or ''}".rstrip()
            + f"\nSyntaxError: {error.msg}"
        ) from None
    except Exception as error:
        raise FileError(in_user_lines(error, file)) from error
    return vars(module)


def in_user_lines(error: BaseException, file: Path | str) -> str:
    """The error with those frames of its traceback that lie in the user's file."""
    name = str(file)
    lines = [
        f"{name}, line {frame.lineno}: {frame.line}"
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename == name
    ]
    return "\n".join([*lines, f"{type(error).__name__}: {error}"])
