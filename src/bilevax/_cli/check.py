"""`bilevax check FILE.py`."""

import argparse

import jax

from .._judge.check import check
from .problem_file import add_file, load, names_of
from .text import print_json

TEXT = "whether the gradient at x0 is that of F"


def add_arguments(sub: argparse.ArgumentParser) -> None:
    add_file(sub)
    sub.add_argument("--seed", type=int, default=0, help="of the draws (default: 0)")


def run(options) -> int:
    names = load(options.file)
    problem = names["problem"].draw(jax.random.key(0))
    called = names_of(options.file, names, "x")
    found = check(problem, names["x0"], key=options.seed, names=called)
    if options.json:
        slopes = [vars(slope) for slope in found.slopes]
        print_json(
            dict(
                agrees=found.agrees,
                kinks=found.kinks,
                error=found.error,
                reasons=found.reasons,
                slopes=slopes,
            )
        )
    else:
        print(found)
    return 0 if found.agrees else 1
