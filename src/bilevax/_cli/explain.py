"""`bilevax explain FILE.py`."""

import argparse
import json

import jax

from .._explain import explain
from .._status import status_name
from .problem_file import add_file, load

TEXT = "which assumptions hold at x0"


def add_arguments(sub: argparse.ArgumentParser) -> None:
    add_file(sub)


def run(options) -> int:
    names = load(options.file)
    found = explain(names["problem"].draw(jax.random.key(0)), names["x0"])
    if options.json:
        rows = [vars(finding) for finding in found.findings]
        status = status_name(found.evaluation.status)
        print(json.dumps(dict(holds=found.holds, status=status, findings=rows)))
    else:
        print(found)
    return 0
