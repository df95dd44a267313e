"""`bilevax profile FILE.py --along ... --out picture.svg`."""

import argparse

import jax
import numpy as np

from .._judge.profile import profile
from .arguments import count
from .problem_file import add_file, load, names_of
from .text import complain, print_json

TEXT = "F along a coordinate of x, or over two, as numbers and a picture"


def add_arguments(sub: argparse.ArgumentParser) -> None:
    add_file(sub)
    sub.add_argument(
        "--along", action="append", metavar="NAME", type=_coordinate,
        help="a coordinate, by name or number (default: 0); twice for a grid",
    )  # fmt: skip
    sub.add_argument(
        "--span", action="append", nargs=2, type=float, metavar=("FROM", "TO"),
        help="of the coordinate (default: its bounds); twice for a grid",
    )  # fmt: skip
    sub.add_argument("--points", type=count, help="how many, on each side of a grid")
    sub.add_argument("--out", metavar="FILE", help="a picture, .svg, .png or .pdf")


def _coordinate(text: str) -> str | int:
    return int(text) if text.isdigit() else text


def run(options) -> int:
    names = load(options.file)
    problem = names["problem"].draw(jax.random.key(0))
    along = options.along or [0]
    if len(along) > 2:
        return complain("--along is given once, or twice for a grid.")
    if options.span and len(options.span) != len(along):
        return complain("--span is given as often as --along.")
    spans = None if options.span is None else [tuple(span) for span in options.span]
    pair = len(along) == 2
    found = profile(
        problem,
        names["x0"],
        tuple(along) if pair else along[0],
        span=spans if spans is None or pair else spans[0],
        points=options.points,
        names=names_of(options.file, names, "x"),
    )
    if options.out:
        found.plot(options.out, names_of(options.file, names, "rows"))
    if options.json:
        where, value = found.lowest
        print_json(
            dict(
                names=found.names,
                at=[t.tolist() for t in found.at],
                values=found.values.tolist(),
                statuses=found.statuses.tolist(),
                lowest=dict(at=where, value=value),
            )
        )
    else:
        print(found)
    if np.isnan(found.values).all():
        return complain("F has no value at any of these points.")
    return 0
