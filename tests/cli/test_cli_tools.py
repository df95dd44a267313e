"""`bilevax check` and `bilevax profile`, and names that a problem file gives."""

import json

import pytest

from bilevax._cli.main import main

TOLLS = """
import jax.numpy as jnp
import bilevax as bx

problem = bx.Problem(
    lambda x, y: -jnp.sum(x * y),
    lambda x, y: 0.5 * jnp.sum(y**2) + jnp.sum((x - 4) * y),
    bx.Polyhedron(A=jnp.array([[1.0, 1], [-1, 0], [0, -1]]), b=jnp.array([2.0, 0, 0])),
    domain=bx.Box(jnp.zeros(2), jnp.full(2, 5.0)),
)
x0 = jnp.array([2.5, 3.0])
names = dict(x=["north", "south"], rows=["capacity", "north >= 0", "south >= 0"])
"""


def written(tmp_path, text=TOLLS) -> str:
    path = tmp_path / "tolls.py"
    path.write_text(text)
    return str(path)


def test_check_agrees_and_exits_with_zero_and_names_what_it_finds(tmp_path, capsys):
    path = written(tmp_path)
    assert main(["check", path]) == 0
    assert "agrees" in capsys.readouterr().out
    at_the_kink = written(tmp_path, TOLLS.replace("[2.5, 3.0]", "[3.0, 3.0]"))
    assert main(["check", at_the_kink, "--json"]) == 0
    assert {"north", "south"} <= set(json.loads(capsys.readouterr().out)["kinks"])


def test_check_disagrees_and_exits_with_one(tmp_path, capsys):
    # A part of the derivative is left out; and F jumps where a toll is rounded.
    held = TOLLS.replace("-jnp.sum(x * y)", "-jnp.sum(jax.lax.stop_gradient(x) * y)")
    held = "import jax\n" + held
    jumps = TOLLS.replace("-jnp.sum(x * y)", "-jnp.sum(x.round() * y)")
    for text, words in ((held, "DISAGREES along north"), (jumps, "do not settle")):
        assert main(["check", written(tmp_path, text)]) == 1
        assert words in capsys.readouterr().out


def test_a_profile_is_drawn_with_the_names_of_the_file(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    path, out = written(tmp_path), tmp_path / "north.svg"
    command = ["profile", path, "--along", "north", "--points", "11", "--out", str(out)]
    assert main(command) == 0
    assert "lowest: -6 at north = 3" in capsys.readouterr().out
    assert "capacity" in out.read_text()
    grid = ["profile", path, "--along", "0", "--along", "south", "--points", "3"]
    assert main([*grid, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["names"] == ["north", "south"]
    assert len(told["values"]) == 3


def test_solve_needs_no_x0_in_a_bounded_box_and_speaks_of_names(tmp_path, capsys):
    text = TOLLS.replace("x0 =", "somewhere =").replace(
        "-jnp.sum(x * y)", "(x[0] - 9) ** 2 + (x[1] - 1) ** 2 + 0 * jnp.sum(y)"
    )
    assert main(["solve", written(tmp_path, text), "--steps", "20"]) == 0
    assert "north at its upper bound 5" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("names = dict(x=", "names = dict(y="), ["`names`", "rows"]),
        (('["north", "south"]', '["north"]'), ["`names`", "2 different texts"]),
        (('["north", "south"]', '["a", "a"]'), ["`names`", "2 different texts"]),
    ],
)
def test_names_that_do_not_fit_are_told(tmp_path, capsys, change, words):
    assert main(["check", written(tmp_path, TOLLS.replace(*change))]) == 1
    told = capsys.readouterr().err
    for word in words:
        assert word in told


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--along", "west"], ["`along`", "north, south", "'west'"]),
        (["--along", "7"], ["`along`", "0 to 1", "7"]),
        (["--span", "2", "1"], ["`span`", "upwards"]),
        (["--span", "1", "2", "--span", "1", "2"], ["--span", "as often"]),
        (["--along", "0", "--along", "1", "--along", "0"], ["--along", "twice"]),
    ],
)
def test_mistakes_of_profile_are_told(tmp_path, capsys, arguments, words):
    assert main(["profile", written(tmp_path), *arguments]) == 1
    told = capsys.readouterr().err
    for word in words:
        assert word in told
