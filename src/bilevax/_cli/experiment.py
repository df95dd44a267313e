"""`bilevax experiment`: what the paper ran."""

import argparse

from ..experiments import numerical
from .arguments import count
from .compare import kept as kept, show

TEXT = "an experiment of the paper"


def add_arguments(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("name", choices=("numerical",))
    default = "(default: %(default)s)"
    sub.add_argument(
        "--out", default="results/numerical", metavar="FOLDER",
        help=f"where rows and the report go {default}",
    )  # fmt: skip
    sub.add_argument(
        "--seeds", type=count, default=5, help=f"runs per problem and method {default}"
    )
    sub.add_argument(
        "--steps", type=count, default=100, help=f"most steps of a run {default}"
    )
    sub.add_argument(
        "--tune", type=count, default=7, metavar="N",
        help=f"trials per method for its step {default}",
    )  # fmt: skip
    sub.add_argument(
        "--sizes", default="10,50", help=f"dimensions of both levels {default}"
    )


def run(options) -> int:
    comparison, paths = numerical.run(
        options.out,
        sizes=tuple(int(part) for part in options.sizes.split(",")),
        num_seeds=options.seeds,
        num_steps=options.steps,
        trials=options.tune,
        progress=not options.json,
    )
    return show(comparison, paths, options.json)
