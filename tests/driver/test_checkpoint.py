"""Interrupted runs end as if they had not been; foreign files are left alone."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

import bilevax as bx

from ..methods.test_ds_blo import kink

SCRIPT = """
import sys
import jax
jax.config.update("jax_enable_x64", True)
import jax.random as jr, numpy as np
import bilevax as bx
from bilevax.experiments.families import Member

s = bx.solve(
    Member("tight", 10, 0).problem, bx.DSBLO(), np.ones(10), key=jr.key(7),
    num_steps=12000, chunk=20, checkpoint=sys.argv[1] or None,
)
history = {name: column for name, column in s.history.steps.items()}
np.savez(
    sys.argv[2], x=s.x, y=s.y, end=s.value, F=s.history.value,
    at=s.history.evaluated_at, **history,
)
"""


def launch(tmp_path, checkpoint, out):
    # Compiled once for all: otherwise every process would spend its life compiling.
    env = os.environ | {
        "JAX_ENABLE_COMPILATION_CACHE": "true",
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "cache"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.2",
    }
    command = [sys.executable, "-c", SCRIPT, str(checkpoint), str(out)]
    return subprocess.Popen(command, env=env)


def test_a_run_killed_ten_times_ends_bitwise_the_same(tmp_path):
    whole = launch(tmp_path, "", tmp_path / "whole.npz")
    assert whole.wait(timeout=600) == 0
    checkpoint, out = tmp_path / "run.npz", tmp_path / "killed.npz"
    dice, kills = random.Random(0), 0
    stamp = lambda: checkpoint.stat().st_mtime_ns if checkpoint.exists() else 0
    while kills < 10:
        process, before = launch(tmp_path, checkpoint, out), stamp()
        # Let it get somewhere, then strike at a random moment, writes included.
        while stamp() == before and process.poll() is None:
            time.sleep(0.002)
        time.sleep(dice.uniform(0, 0.05))
        if process.poll() is not None:
            pytest.fail("the run ended before it could be killed ten times")
        process.send_signal(signal.SIGKILL)
        process.wait()
        kills += 1
    assert launch(tmp_path, checkpoint, out).wait(timeout=600) == 0
    with np.load(tmp_path / "whole.npz") as a, np.load(out) as b:
        assert set(a.files) == set(b.files)
        for name in a.files:
            np.testing.assert_array_equal(a[name], b[name], err_msg=name)
    assert not list(tmp_path.glob("run.npz*.tmp.npz"))


def run(checkpoint, **changes):
    options: dict[str, Any] = dict(num_steps=60, chunk=20, polish=False)
    options |= changes
    return bx.solve(
        kink(), bx.DSBLO(), jnp.array([2.0]), key=jr.key(0), checkpoint=checkpoint,
        **options,
    )  # fmt: skip


def test_a_finished_run_is_not_repeated(tmp_path):
    path = tmp_path / "run.npz"
    first = run(path)
    calls = []
    again = run(path, callback=lambda *a: calls.append(a))
    assert not calls
    np.testing.assert_array_equal(first.x, again.x)
    np.testing.assert_array_equal(first.history["value"], again.history["value"])


def test_a_run_that_ended_early_is_found_again_or_goes_on_under_other_rules(tmp_path):
    path = tmp_path / "run.npz"
    first = run(path, callback=lambda step, *a: step >= 40)
    assert first.stopped == "the callback asked"
    assert len(first.history) == 40
    again = run(path)
    assert again.stopped == first.stopped
    np.testing.assert_array_equal(first.x, again.x)
    onwards = run(path, stop=bx.Stop(0, 0, seconds=1e6))
    assert onwards.stopped == "all steps taken"
    assert len(onwards.history) == 60
    # A limit on time is a pause.
    path = tmp_path / "paused.npz"
    paused = run(path, stop=bx.Stop(0, 0, seconds=0.0))
    assert len(paused.history) == 20
    assert len(run(path, stop=bx.Stop(0, 0, seconds=0.0)).history) == 40


@pytest.mark.parametrize("damage", ["truncated", "foreign", "other format"])
def test_a_damaged_file_is_told_and_left_alone(tmp_path, damage):
    path = tmp_path / "run.npz"
    run(path)
    if damage == "truncated":
        path.write_bytes(path.read_bytes()[:-200])
    elif damage == "foreign":
        path.write_bytes(b"not at all a checkpoint")
    else:
        np.savez(path, meta=np.array('{"format": "something else"}'))
    content = path.read_bytes()
    with pytest.raises(bx.CheckpointError, match="left alone"):
        run(path)
    assert path.read_bytes() == content


@pytest.mark.parametrize("change", [dict(num_steps=80), dict(chunk=30)])
def test_a_file_of_another_run_is_refused(tmp_path, change):
    path = tmp_path / "run.npz"
    run(path)
    with pytest.raises(bx.CheckpointError, match="another run"):
        run(path, **change)


def test_a_checkpoint_holds_no_code(tmp_path):
    path = tmp_path / "run.npz"
    run(path)
    with np.load(path, allow_pickle=False) as file:
        assert all(file[name].dtype != object for name in file.files)
        assert '"jax"' in str(file["meta"])


def test_ctrl_c_leaves_a_checkpoint_and_says_how_to_go_on(tmp_path):
    checkpoint = tmp_path / "run.npz"
    problem = Path(__file__).parent.parent.parent / "examples" / "tolls.py"
    command = [
        sys.executable, "-m", "bilevax", "solve", str(problem), "--steps", "1000000",
        "--chunk", "50", "--checkpoint", str(checkpoint),
    ]  # fmt: skip
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    while not checkpoint.exists() and process.poll() is None:
        time.sleep(0.01)
    # A person would press it once more.
    for _ in range(6):
        process.send_signal(signal.SIGINT)
        try:
            _, told = process.communicate(timeout=30)
            break
        except subprocess.TimeoutExpired:
            pass
    assert process.returncode == 130
    assert str(checkpoint) in told
    assert "goes on from there" in told
    assert "Traceback" not in told
    with np.load(checkpoint, allow_pickle=False) as file:
        assert 0 < len(file["history_value"]) < 20001
