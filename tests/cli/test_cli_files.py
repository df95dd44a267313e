"""Problem files are programs like any other; what commands print is theirs alone."""

import json

import pytest

from bilevax._cli import compare
from bilevax._cli.main import main
from bilevax._cli.problem_file import FileError, InFile

BODY = """
problem = bx.Problem(
    lambda x, y: jnp.sum((x - 1) ** 2) + UPPER,
    lambda x, y: 0.5 * jnp.sum((y - x) ** 2),
    bx.Polyhedron(A=[[1.0]], b=[0.0]),
)
x0 = jnp.array([2.0])
"""
GOOD = "import jax.numpy as jnp\nimport bilevax as bx\n" + BODY
EMPTY = """
import jax.numpy as jnp
import bilevax as bx

rows = bx.Polyhedron(A=[[1.0], [-1.0]], b=[-1.0, -1.0])
problem = bx.Problem(lambda x, y: jnp.sum(y), lambda x, y: 0.5 * jnp.sum(y**2), rows)
x0 = jnp.array([2.0])
"""


def strict(text: str):
    """JSON as the standard has it: without NaN and Infinity."""

    def refuse(name):
        raise AssertionError(f"{name} is no JSON")

    return json.loads(text, parse_constant=refuse)


def write(tmp_path, source: str) -> str:
    path = tmp_path / "toy.py"
    path.write_text(source.replace("UPPER", "0 * jnp.sum(y)"))
    return str(path)


@pytest.mark.parametrize(
    "head",
    [
        "import dataclasses\n\n@dataclasses.dataclass\nclass Road:\n    toll: float\n",
        "import equinox as eqx\n\nclass Road(eqx.Module):\n    toll: float\n",
        "from typing import NamedTuple\n\nclass Road(NamedTuple):\n    toll: float\n",
    ],
)
def test_annotations_may_be_strings(head, tmp_path, capsys):
    source = "from __future__ import annotations\n" + head + GOOD + "Road(1.0)\n"
    assert main(["explain", write(tmp_path, source)]) == 0
    assert "strong convexity" in capsys.readouterr().out


def test_a_file_imports_what_lies_beside_it(tmp_path, capsys):
    (tmp_path / "beside_the_toy.py").write_text("def help(x):\n    return 0 * x\n")
    source = "from beside_the_toy import help\n" + GOOD.replace(
        "UPPER", "help(jnp.sum(y))"
    )
    assert main(["explain", write(tmp_path, source)]) == 0
    assert "strong convexity" in capsys.readouterr().out


def test_a_mistake_in_a_module_beside_the_file_is_told(tmp_path, capsys):
    (tmp_path / "broken_beside.py").write_text("def help(x:\n    return 0 * x\n")
    source = "import broken_beside\n" + GOOD
    assert main(["explain", write(tmp_path, source)]) == 1
    error = capsys.readouterr().err
    assert "toy.py, line 1" in error
    assert "broken_beside.py" in error


def test_prints_of_a_file_do_not_land_in_the_json(tmp_path, capsys):
    source = "print('hello')\n" + GOOD.replace(
        "+ UPPER", "+ 0 * (print('traced') or jnp.sum(y))"
    )
    path = write(tmp_path, source)
    assert main(["explain", path, "--json"]) == 0
    out = capsys.readouterr()
    assert strict(out.out)["status"] == "successful"
    assert "hello" in out.err
    assert "traced" in out.err
    assert main(["explain", path]) == 0
    assert "hello" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["explain", "certify", "solve"])
def test_json_has_no_nan_and_a_problem_without_a_value_exits_with_1(
    command, tmp_path, capsys
):
    path = write(tmp_path, EMPTY)
    assert main([command, path, "--json"]) == 1
    out = capsys.readouterr()
    assert strict(out.out)
    assert main([command, path]) == 1
    out = capsys.readouterr()
    assert "No `y` satisfies" in out.out + out.err


def test_workers_load_the_file_themselves(tmp_path, capfd):
    """Lambdas have no names, and what workers print is no JSON."""
    path = write(tmp_path, "print('hello')\n" + GOOD)
    common = [
        "compare", "--problems", path, "--methods", "ssigd", "--seeds", "2",
        "--steps", "4", "--look-every", "2", "--json", "--out",
    ]  # fmt: skip
    assert main([*common, str(tmp_path / "there"), "--workers", "2"]) == 0
    there = strict(capfd.readouterr().out)
    assert main([*common, str(tmp_path / "here")]) == 0
    here = strict(capfd.readouterr().out)
    assert there["trouble"] == here["trouble"] == []
    (one,), (other,) = there["results"], here["results"]
    assert one["runs"] == 2
    assert one["F (median)"] == pytest.approx(other["F (median)"], rel=1e-12)


def test_a_file_that_changed_is_not_run_by_workers(tmp_path):
    path = write(tmp_path, GOOD)
    made = compare.case(path).problem
    assert isinstance(made, InFile)
    assert made(0) is made(1)
    elsewhere = InFile(made.path, "another digest")
    with pytest.raises(FileError, match="has changed since the work began"):
        elsewhere(0)
