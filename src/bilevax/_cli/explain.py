"""`bilevax explain FILE.py`."""

import argparse

import jax

from .._judge.explain import explain
from .._status import has_value, status_name
from .problem_file import add_file, load
from .text import complain, print_json

TEXT = "which assumptions hold at x0"


def add_arguments(sub: argparse.ArgumentParser) -> None:
    add_file(sub)


def run(options) -> int:
    names = load(options.file)
    found = explain(names["problem"].draw(jax.random.key(0)), names["x0"])
    if options.json:
        rows = [vars(finding) for finding in found.findings]
        status = status_name(found.evaluation.status)
        print_json(dict(holds=found.holds, status=status, findings=rows))
    else:
        print(found)
    if not has_value(found.evaluation.status):
        return complain(f"F has no value at x0. {found.evaluation.message}")
    return 0
