"""`bilevax certify FILE.py`."""

import argparse

import jax

from .._implicit.hypergradient import hypergradient
from .._judge.certificate import Certificate, certify
from .._status import has_value
from .arguments import count, positive
from .problem_file import add_file, load
from .text import as_lists, complain, print_json, short

TEXT = "how far x0 is from stationary"


def add_arguments(sub: argparse.ArgumentParser) -> None:
    add_file(sub)
    sub.add_argument(
        "--radius", type=positive, default=1e-3,
        help="of the ball around x0 in which gradients are sampled (default: 0.001)",
    )  # fmt: skip
    sub.add_argument(
        "--samples", type=count,
        help="how many gradients (default: ten for each entry of x, and more for few)",
    )  # fmt: skip
    sub.add_argument("--seed", type=int, default=0, help="of the draws (default: 0)")


def run(options) -> int:
    names = load(options.file)
    problem = names["problem"].draw(jax.random.key(0))
    found = certify(
        problem,
        names["x0"],
        options.radius,
        key=jax.random.key(options.seed),
        num_samples=options.samples,
    )
    if options.json:
        print_json(dict(x=as_lists(names["x0"])) | certificate_as_json(found))
    else:
        print(f"x = {short(names['x0'])}")
        print(found)
    if found.samples == 0:
        return complain(_why_nothing_was_measured(problem, names["x0"]))
    return 0


def _why_nothing_was_measured(problem, x0) -> str:
    e = hypergradient(problem, x0, throw=False)
    text = "F has no gradient at any point of the ball around x0."
    return text if has_value(e.status) else f"{text} {e.message}"


def certificate_as_json(c: Certificate) -> dict:
    return dict(
        measure=c.measure,
        radius=c.radius,
        samples=c.samples,
        undefined=c.undefined,
        path=[list(pair) for pair in c.path],
        gradient_error=c.gradient_error,
        interval=c.interval,
    )
