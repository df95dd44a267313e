"""`bilevax example [NAME]`: worked applications, listed, copied and run."""

import argparse
import ast
import contextlib
import importlib.resources
import itertools
import os
import runpy
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .text import complain, print_json

TEXT = "worked applications: list them, copy one and run it"


def add_arguments(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("name", nargs="?", metavar="NAME", help="which; without: a list")
    sub.add_argument(
        "--out", default="results/examples", metavar="FOLDER",
        help="gets the script, to be changed, and its pictures "
        "(default: results/examples)",
    )  # fmt: skip
    sub.add_argument("--all", action="store_true", help="run all, one after another")


def run(options) -> int:
    there = scripts()
    folder = Path(options.out)
    if options.all:
        names = list(there)
    elif options.name is None:
        return _listed(there, folder, options.json)
    elif options.name in there:
        names = [options.name]
    else:
        return complain(
            f"There is no example {options.name!r}; there are {', '.join(there)}."
        )
    rows = [_run(name, there[name], folder, quiet=options.json) for name in names]
    if options.json:
        print_json(rows)
    elif options.all:
        for row in rows:
            print(_line(row))
    return 1 if any(row["error"] for row in rows) else 0


def scripts() -> dict[str, str]:
    """The text of each example, by name."""
    folder = importlib.resources.files("bilevax.examples")
    files = sorted(folder.iterdir(), key=lambda file: file.name)
    return {
        file.name.removesuffix(".py"): file.read_text()
        for file in files
        if file.name.endswith(".py") and not file.name.startswith("_")
    }


def title(text: str) -> str:
    """The first line of the docstring."""
    return (ast.get_docstring(ast.parse(text)) or "").splitlines()[0]


def pictures(name: str, folder: Path) -> list[str]:
    return sorted(str(path) for path in folder.glob(f"{name}-*.svg"))


def _listed(there: dict[str, str], folder: Path, as_json: bool) -> int:
    rows = [
        dict(name=name, title=title(text), pictures=pictures(name, folder))
        for name, text in there.items()
    ]
    if as_json:
        print_json(rows)
        return 0
    for row in rows:
        print(f"{row['name']:>20}  {row['title']}")
        for picture in row["pictures"]:
            print(f"{'':>20}  {picture}")
    print(f"\nbilevax example NAME copies one to {folder} and runs it there.")
    return 0


def _run(name: str, text: str, folder: Path, quiet: bool) -> dict[str, Any]:
    """Copy the script, unless there is one, run it, and keep its pictures."""
    folder.mkdir(parents=True, exist_ok=True)
    script = folder / f"{name}.py"
    if not script.exists():
        script.write_text(text)
    if not quiet:
        print(f"== {title(text)} ({script})", flush=True)
    begun, error, names = time.perf_counter(), None, {}
    try:
        with _pictures_kept(name, folder):
            names = runpy.run_path(str(script), run_name="__main__")
    except Exception as failure:
        error = f"{type(failure).__name__}: {failure}"
        complain(f"{script}: {error}")
    seconds = time.perf_counter() - begun
    row: dict[str, Any] = dict(name=name, seconds=round(seconds, 1), error=error)
    row |= dict(pictures=pictures(name, folder))
    value, reference = names.get("F"), names.get("reference")
    if value is not None and reference is not None:
        value, reference = float(value), float(reference)
        gap = abs(value - reference) / max(1.0, abs(reference))
        row |= dict(F=value, reference=reference, gap=gap)
    if not quiet:
        for picture in row["pictures"]:
            print(picture)
    return row


@contextlib.contextmanager
def _pictures_kept(name: str, folder: Path) -> Iterator[None]:
    """Meanwhile `plt.show()` writes what is drawn to files."""
    os.environ.setdefault("MPLBACKEND", "Agg")
    try:
        import matplotlib.pyplot as plt
    except ImportError:
        raise ImportError(
            "examples draw pictures: pip install 'bilevax[plot]'"
        ) from None
    count, shown, others = itertools.count(1), plt.show, set(plt.get_fignums())

    # A function: matplotlib writes a signature into it.
    def keep(*_, **__):
        for number in set(plt.get_fignums()) - others:
            plt.figure(number).savefig(folder / f"{name}-{next(count)}.svg")
            plt.close(number)

    plt.show = keep
    try:
        yield
    finally:
        plt.show = shown


def _line(row: dict[str, Any]) -> str:
    told = f"{row['name']:>20} {row['seconds']:7.1f} s"
    if row["error"]:
        return f"{told}  {row['error']}"
    if "F" not in row:
        return told
    return (
        f"{told}  F {row['F']:.8g}, reference {row['reference']:.8g}, "
        f"gap {row['gap']:.1e}"
    )
