"""The same steps on one device, on several, and in several processes."""

import os
import pathlib
import socket
import subprocess
import sys

import numpy as np
import pytest

SCRIPT = pathlib.Path(__file__).parent.parent / "five_steps.py"


def start(*arguments, devices=1, script=SCRIPT):
    flags = os.environ.get("XLA_FLAGS", "")
    flags += f" --xla_force_host_platform_device_count={devices}"
    environment = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, str(script), *map(str, arguments)]
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


def finish(*processes):
    for process in processes:
        output = process.communicate(timeout=600)[0].decode()
        assert process.returncode == 0, output


def free_port():
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    path = tmp_path_factory.mktemp("alone") / "alone.npz"
    finish(start(path))
    return np.load(path)


def check_same(found, alone, devices):
    assert int(found["devices"]) == devices
    assert len(alone["loss"]) == 5
    for name in alone.files:
        if name != "devices":
            scale = np.max(np.abs(alone[name]))
            np.testing.assert_allclose(
                found[name], alone[name], rtol=1e-8, atol=1e-8 * scale
            )


def test_four_devices_take_the_same_steps(alone, tmp_path):
    path = tmp_path / "four.npz"
    finish(start(path, devices=4))
    check_same(np.load(path), alone, 4)


def test_two_processes_take_the_same_steps(alone, tmp_path):
    path, address = tmp_path / "two.npz", f"localhost:{free_port()}"
    finish(*(start(path, address, 2, process) for process in (0, 1)))
    check_same(np.load(path), alone, 2)


FOLLOWERS = SCRIPT.parent / "followers_on_devices.py"


@pytest.fixture(scope="module")
def followers_alone(tmp_path_factory):
    path = tmp_path_factory.mktemp("followers") / "alone.npz"
    finish(start(path, script=FOLLOWERS))
    return np.load(path)


def check_followers(found, alone, devices):
    assert int(found["devices"]) == devices
    np.testing.assert_allclose(found["value"], alone["value"], rtol=1e-8)
    np.testing.assert_allclose(found["grad"], alone["grad"], rtol=1e-8)


def test_followers_spread_over_four_devices_are_the_same(followers_alone, tmp_path):
    path = tmp_path / "four.npz"
    finish(start(path, devices=4, script=FOLLOWERS))
    check_followers(np.load(path), followers_alone, 4)


def test_followers_spread_over_two_processes_are_the_same(followers_alone, tmp_path):
    path, address = tmp_path / "two.npz", f"localhost:{free_port()}"
    processes = (0, 1)
    finish(*(start(path, address, 2, i, script=FOLLOWERS) for i in processes))
    check_followers(np.load(path), followers_alone, 2)
