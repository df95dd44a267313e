"""The wheel and the archive of sources: what is in them, and that they work."""

import os
import pathlib
import subprocess
import sys
import tarfile
import zipfile

import pytest

import bilevax as bx

REPOSITORY = pathlib.Path(bx.__file__).parent.parent.parent

pytest.importorskip("hatchling", reason="hatchling, which builds it, is not installed")
if not (REPOSITORY / "pyproject.toml").exists():
    pytest.skip("not a checkout", allow_module_level=True)


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    out = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "hatchling", "build", "-d", str(out)]
    subprocess.run(command, cwd=REPOSITORY, check=True, capture_output=True)
    (wheel,), (sdist,) = out.glob("*.whl"), out.glob("*.tar.gz")
    return wheel, sdist


def test_the_wheel_has_the_library_its_examples_and_their_data_alone(built):
    with zipfile.ZipFile(built[0]) as archive:
        names = set(archive.namelist())
    for name in ("py.typed", "examples/stackelberg.py", "examples/data/town_net.tntp",
                 "examples/data/case30_as.m", "_cli/main.py"):  # fmt: skip
        assert f"bilevax/{name}" in names
    strangers = {name for name in names if not name.startswith("bilevax")}
    assert not strangers
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_the_archive_has_what_a_wheel_and_the_tests_are_made_of(built):
    with tarfile.open(built[1]) as archive:
        names = {name.split("/", 1)[-1] for name in archive.getnames()}
    for name in ("pyproject.toml", "README.md", "tests/house/test_package.py",
                 "src/bilevax/examples/data/case30_as.m"):  # fmt: skip
        assert name in names


def test_what_was_installed_from_the_wheel_solves_and_lists_examples(built, tmp_path):
    """Without the checkout on the path; its dependencies are those of this Python."""
    with zipfile.ZipFile(built[0]) as archive:
        archive.extractall(tmp_path)
    script = (
        "import bilevax, sys\n"
        "assert bilevax.__file__.startswith(sys.argv.pop(1)), bilevax.__file__\n"
        "from bilevax._cli.main import main\n"
        "sys.exit(main(['doctor']) or main(['example']))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)],
        cwd=tmp_path,
        env=os.environ | dict(PYTHONPATH=str(tmp_path), JAX_PLATFORMS="cpu"),
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr
    assert "two tolls: F = -6.0000000000, right" in done.stdout
    assert "road_tolls" in done.stdout
