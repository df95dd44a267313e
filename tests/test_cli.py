"""The command line: what a user types, what a user sees."""

import json
import textwrap

import pytest

from bilevax._cli.main import main

GOOD = """
import jax.numpy as jnp
import bilevax as bx

problem = bx.Problem(
    lambda x, y: x[0] ** 2 / 4 + x[0] / 2 - y[0],
    lambda x, y: 0.5 * (y[0] - x[0]) ** 2,
    bx.Polyhedron(A=[[1.0]], b=[0.0]),
)
x0 = jnp.array([2.0])
"""


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    path = tmp_path_factory.mktemp("cli") / "toy.py"
    path.write_text(GOOD)
    return str(path)


def test_solve_prints_and_speaks_json(good, capsys, tmp_path):
    checkpoint = str(tmp_path / "run.npz")
    assert main(["solve", good, "--json", "--checkpoint", checkpoint]) == 0
    out = json.loads(capsys.readouterr().out)
    assert out["success"]
    assert abs(out["x"][0][0]) < 1e-6
    assert out["work"]["lower_solves"] == 300
    # The second call finds the finished run.
    assert main(["solve", good, "--checkpoint", checkpoint]) == 0
    text = capsys.readouterr().out
    assert "F = " in text
    assert "before the polish" in text


def test_explain_and_certify(good, capsys):
    assert main(["explain", good]) == 0
    assert "strong convexity" in capsys.readouterr().out
    assert main(["explain", good, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["status"] == "successful"
    assert main(["certify", good, "--radius", "0.01", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["measure"] == pytest.approx(
        1.5, abs=0.01
    )


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("x0 = 1 +\nproblem = 3\n", ["line 1", "SyntaxError"]),
        ("import nothing_of_this_name\n", ["line 1", "nothing_of_this_name"]),
        ("x0 = 1.0\nproblem = 3\n", ["`problem` must be", "int"]),
        ("x0 = 1.0\n", ["must define `problem`"]),
        (
            GOOD.replace("b=[0.0]", "b=[0.0, 1.0]"),
            ["toy.py, line", "agree on the number of rows"],
        ),
        (GOOD.replace("y[0] - x[0]", "y[0] - x[0] + undefined_name"), ["line 7"]),
    ],
)
def test_a_mistake_in_the_file_shows_the_line_of_the_file(
    source, expected, tmp_path, capsys
):
    path = tmp_path / "toy.py"
    path.write_text(textwrap.dedent(source))
    assert main(["solve", str(path)]) == 1
    error = capsys.readouterr().err
    for part in expected:
        assert part in error
    assert "site-packages" not in error


def test_a_missing_file_is_told(capsys):
    assert main(["solve", "no/such/file.py"]) == 1
    assert "no such file" in capsys.readouterr().err
