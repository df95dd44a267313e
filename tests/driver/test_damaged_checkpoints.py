"""A damaged checkpoint is refused by name and cause, or read to the same result."""

import json
import os
import random
import subprocess
import sys
import time

import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

import bilevax as bx
from bilevax._files import checkpoint as checkpoints

from ..methods.test_ds_blo import kink


def run(path):
    return bx.solve(
        kink(), bx.DSBLO(), jnp.array([2.0]), key=jr.key(0), num_steps=6, chunk=3,
        polish=False, checkpoint=path,
    )  # fmt: skip


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The bytes of a checkpoint and what its run has found."""
    path = tmp_path_factory.mktemp("whole") / "run.npz"
    found = run(path)
    return path.read_bytes(), found


def same(a: bx.Solution, b: bx.Solution):
    np.testing.assert_array_equal(a.x, b.x)
    assert a.value == b.value
    assert a.stopped == b.stopped
    for name, column in a.history.steps.items():
        np.testing.assert_array_equal(column, b.history[name])


def refused_or_same(path, content: bytes, found: bx.Solution) -> bool:
    """Whether it was refused; then the file is as it was."""
    path.write_bytes(content)
    again, told = attempt(path)
    if again is None:
        assert str(path) in told
        assert "left alone" in told
        assert path.read_bytes() == content
        return True
    same(again, found)
    return False


def attempt(path):
    try:
        return run(path), ""
    except bx.CheckpointError as error:
        return None, str(error)


def damaged(content: bytes, dice: random.Random) -> bytes:
    """Bytes changed, lost, doubled, filled with zeros, or cut off."""
    at = dice.randrange(len(content))
    length = dice.choice([1, 1, 1, 2, 16, 300])
    part = content[at : at + length]
    kind = dice.randrange(5)
    if kind == 0:
        part = bytes(byte ^ (1 << dice.randrange(8)) for byte in part)
    elif kind == 1:
        part = b""
    elif kind == 2:
        part = 2 * part
    elif kind == 3:
        part = bytes(len(part))
    else:
        return content[:at]
    return content[:at] + part + content[at + length :]


def test_hundreds_of_damaged_files(whole, tmp_path):
    content, found = whole
    assert not refused_or_same(tmp_path / "run.npz", content, found)
    dice = random.Random(0)
    refused = 0
    for _ in range(300):
        refused += refused_or_same(tmp_path / "run.npz", damaged(content, dice), found)
    assert 200 < refused < 300


def rewritten(whole, path, change) -> bytes:
    """A whole archive whose description or arrays were changed by `change`."""
    path.write_bytes(whole[0])
    with np.load(path) as file:
        arrays = {name: file[name] for name in file.files}
    meta = json.loads(str(arrays.pop("meta")))
    change(arrays, meta)
    np.savez(path, allow_pickle=False, meta=np.array(json.dumps(meta)), **arrays)
    return path.read_bytes()


OTHER = (None, "text", [], {}, -1, 1e300, float("nan"), True)


def test_every_entry_of_the_description_may_be_missing_or_of_another_kind(
    whole, tmp_path
):
    path = tmp_path / "run.npz"
    path.write_bytes(whole[0])
    _, meta = checkpoints.load(path)

    def without(name):
        return lambda arrays, meta: meta.pop(name)

    def with_value(name, value):
        return lambda arrays, meta: meta.update({name: value})

    for name in meta:
        assert refused_or_same(path, rewritten(whole, path, without(name)), whole[1])
        for value in OTHER:
            content = rewritten(whole, path, with_value(name, value))
            if name in (
                "ended",
                "stop",
                "spent",
                "running",
                "recovering",
                "average",
                "looks",
            ):
                # Some of these are possible; none may end in another kind of error.
                path.write_bytes(content)
                again, told = attempt(path)
                assert again is not None or str(path) in told
            elif value != meta[name]:
                assert refused_or_same(path, content, whole[1])


def test_every_array_may_be_missing_or_of_another_shape_or_kind(whole, tmp_path):
    path = tmp_path / "run.npz"
    path.write_bytes(whole[0])
    names = list(checkpoints.load(path)[0])
    changes = [
        lambda arrays, name: arrays.pop(name),
        lambda arrays, name: arrays.update({name: np.zeros((3, 5, 7))}),
        lambda arrays, name: arrays.update({name: np.full(arrays[name].shape, "a")}),
    ]
    for name in names:
        for change in changes:
            content = rewritten(whole, path, lambda a, meta: change(a, name))  # noqa: B023
            assert refused_or_same(path, content, whole[1]), name


@pytest.mark.parametrize("meta", ["[]", "3", "null", '"text"', "{}", "{", ""])
def test_a_description_that_is_none(meta, whole, tmp_path):
    path = tmp_path / "run.npz"
    path.write_bytes(whole[0])
    with np.load(path) as file:
        arrays = {name: file[name] for name in file.files}
    arrays["meta"] = np.array(meta)
    np.savez(path, allow_pickle=False, **arrays)
    assert refused_or_same(path, path.read_bytes(), whole[1])


SAVING = """
import sys
import numpy as np
from bilevax._files import checkpoint as checkpoints

print("ready", flush=True)
while True:
    checkpoints.save(sys.argv[1], {"a": np.arange(2_000_000)}, {})
"""


def test_a_kill_during_a_save_leaves_nothing_for_good(tmp_path):
    path = tmp_path / "run.npz"
    leftovers = lambda: sorted(tmp_path.glob("*.tmp"))
    left = 0
    for _ in range(4):
        process = subprocess.Popen(
            [sys.executable, "-c", SAVING, str(path)], stdout=subprocess.PIPE
        )
        assert process.stdout is not None
        process.stdout.readline()
        # In the middle of a save.
        own = lambda: [p for p in leftovers() if f".{process.pid}." in p.name]  # noqa: B023
        while not own():
            assert process.poll() is None
            time.sleep(0.0005)
        process.kill()
        process.wait()
        process.stdout.close()
        left += bool(own())
        assert len(leftovers()) <= 1
    assert left
    # Somebody who is alive is still writing.
    other = path.with_name(f"{path.name}.{os.uname().nodename}.{os.getppid()}.tmp")
    other.write_bytes(b"half")
    foreign = path.with_name(f"{path.name}.another-machine.1.tmp")
    foreign.write_bytes(b"half")
    checkpoints.save(path, {"a": np.arange(3)}, {})
    assert leftovers() == sorted([other, foreign])
    np.testing.assert_array_equal(checkpoints.load(path)[0]["a"], np.arange(3))


def test_a_file_that_cannot_be_written_is_told_before_anything_runs(tmp_path):
    (tmp_path / "file").write_text("")
    calls = []
    for path in (tmp_path / "file" / "run.npz", tmp_path, "/proc/nothing/run.npz"):
        with pytest.raises(bx.CheckpointError, match=r"cannot be written|is a folder"):
            bx.solve(
                kink(), bx.DSBLO(), jnp.array([2.0]), key=jr.key(0), num_steps=2,
                checkpoint=path, callback=lambda *a: calls.append(a),
            )  # fmt: skip
    assert not calls


def test_a_finished_run_is_read_where_nothing_can_be_written(
    whole, tmp_path, monkeypatch
):
    path = tmp_path / "run.npz"
    path.write_bytes(whole[0])

    def refuse(path):
        raise AssertionError("nothing is to be written")

    monkeypatch.setattr(checkpoints, "check_writable", refuse)
    same(run(path), whole[1])
