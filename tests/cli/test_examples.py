"""`bilevax example` and `bilevax doctor`."""

import json

import jax
import pytest

from bilevax._cli.example import scripts, title
from bilevax._cli.main import main


@pytest.fixture(autouse=True)
def no_window(monkeypatch):
    monkeypatch.setenv("MPLBACKEND", "Agg")


def test_an_example_is_copied_run_and_drawn(tmp_path, capsys):
    assert main(["example", "stackelberg", "--json", "--out", str(tmp_path)]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row["error"] is None
    assert row["gap"] < 1e-9
    assert (tmp_path / "stackelberg.py").read_text() == scripts()["stackelberg"]
    assert row["pictures"] == [str(tmp_path / "stackelberg-1.svg")]
    assert "leader's profit" in (tmp_path / "stackelberg-1.svg").read_text()
    # The list names the pictures that are there.
    assert main(["example", "--json", "--out", str(tmp_path)]) == 0
    listed = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert listed["stackelberg"]["pictures"] == row["pictures"]
    assert all(row["title"] for row in listed.values())


def test_a_copy_that_was_changed_is_what_runs(tmp_path, capsys):
    (tmp_path / "stackelberg.py").write_text("F, reference = 1.0, 2.0\n")
    assert main(["example", "stackelberg", "--json", "--out", str(tmp_path)]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["F"], row["reference"], row["gap"]) == (1.0, 2.0, 0.5)


def test_an_example_that_fails_says_so_and_an_unknown_one_what_there_is(
    tmp_path, capsys
):
    (tmp_path / "tariffs.py").write_text("raise ValueError('no data')\n")
    assert main(["example", "tariffs", "--out", str(tmp_path)]) == 1
    assert "no data" in capsys.readouterr().err
    assert main(["example", "lottery", "--out", str(tmp_path)]) == 1
    assert "stackelberg" in capsys.readouterr().err


def test_every_example_has_a_title_and_a_word_on_own_data():
    for name, text in scripts().items():
        assert title(text), name
        assert "For your own" in text, name


def test_the_doctor_solves_a_toy_and_names_what_is_installed(capsys):
    assert main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["toy"]["right"]
    assert found["packages"]["jax"] == jax.__version__
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert "devices: " in text
    assert "two tolls: F = -6.0000000000, right" in text
