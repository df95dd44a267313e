"""Tests run in float64; the library itself changes no global setting."""

import importlib.metadata
import os

# The suite compiles far more than it computes, and these emitters compile faster. An
# unknown flag would end the process, so only where it is known to exist.
if importlib.metadata.version("jaxlib").startswith("0.10."):
    os.environ.setdefault("XLA_FLAGS", "--xla_cpu_use_fusion_emitters=false")

import jax  # noqa: E402
import pytest  # noqa: E402

from bilevax._room import make_room  # noqa: E402

jax.config.update("jax_enable_x64", True)


@pytest.fixture(autouse=True)
def room_for_programs():
    """Tests compile programs of their own, of which the library does not know."""
    yield
    make_room()


@pytest.fixture(scope="session")
def finished(tmp_path_factory):
    """A small comparison with everything that can happen in one."""
    from .comparisons import run_all

    return run_all(tmp_path_factory.mktemp("compare"))
