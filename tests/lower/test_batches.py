"""Members of a batch are answered as each would be alone, and the batch ends."""

import subprocess
import sys

import numpy as np
import pytest

from .. import batches, zoo

# Far more than the batches take, compilation included; only loops without end do not.
PATIENCE = 200


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """The answers of those batches that came back."""
    folder = tmp_path_factory.mktemp("batches")
    command = [sys.executable, "-m", "tests.batches", str(folder)]
    try:
        subprocess.run(command, check=True, timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        pass
    out = {}
    for path in folder.glob("*.npz"):
        with np.load(path) as found:
            out[path.stem] = dict(found)
    return out


@pytest.mark.parametrize("name", batches.BATCHES)
def test_a_batch_comes_back_with_the_answer_of_every_member(name, answers):
    assert name in answers, "the batch does not come back"
    z, status = answers[name]["z"], answers[name]["status"]
    expected = batches.roots(batches.members())[batches.BATCHES[name]]
    # Nearly all are solved; what is not says so.
    assert np.mean(status == "successful") > 0.97
    error = np.abs(z - expected).max(1) / (1 + np.abs(expected).max(1))
    wrong = np.flatnonzero((status != "iteration_limit") & (error > zoo.DIFFERENCES))
    assert not len(wrong), f"{wrong} are {error[wrong]} off and {status[wrong]}"
