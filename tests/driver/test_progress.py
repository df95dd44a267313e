"""Progress where there is no terminal, and a reader that goes away."""

import subprocess
import sys

from bilevax._files import progress as _progress
from bilevax._files.progress import progress_bar


def test_lines_for_a_file_are_rare_unless_there_is_news(capsys, monkeypatch):
    clock = iter([0.0, 1.0, 20.0, 21.0, 22.0])
    monkeypatch.setattr(_progress.time, "monotonic", lambda: next(clock))
    with progress_bar(10, enabled=True, description="runs") as advance:
        advance(2)  # at 1 s: too early for a line
        advance(2)  # at 20 s: 2 runs in 19 s, 6 to go
        advance(1)  # at 21 s: too early
        advance(1, "loss 0.5")  # at 22 s: 4 runs in 21 s, 4 to go
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.splitlines() == [
        "4 of 10 runs, about 57 s left",
        "6 of 10: loss 0.5, about 21 s left",
    ]


def test_without_rich_there_are_lines(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "rich.console", None)
    with progress_bar(2, enabled=True) as advance:
        advance(1, "half")
    assert capsys.readouterr().err == "1 of 2: half\n"


def test_silent_unless_asked(capsys):
    with progress_bar(2, enabled=False) as advance:
        advance(1, "half")
    assert capsys.readouterr().err == ""


def test_a_reader_that_goes_away_leaves_no_traceback(tmp_path):
    problem = tmp_path / "toy.py"
    problem.write_text(
        "import jax.numpy as jnp, bilevax as bx\n"
        "problem = bx.Problem(lambda x, y: x[0] - y[0],\n"
        "    lambda x, y: 0.5 * (y[0] - x[0]) ** 2,\n"
        "    bx.Polyhedron(A=[[1.0]], b=[0.0]))\n"
        "x0 = jnp.array([2.0])\n"
    )
    run = subprocess.Popen(
        [sys.executable, "-m", "bilevax", "explain", str(problem)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert run.stdout is not None
    assert run.stderr is not None
    run.stdout.close()
    assert run.stderr.read() == ""
    run.stderr.close()
    assert run.wait() == 141
