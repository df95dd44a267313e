"""Tests run in float64; the library itself changes no global setting."""

import importlib.metadata
import os

# The suite compiles far more than it computes: no optimisation of kernels, older
# emitters that compile faster, one module per program, nothing hoisted out of loops.
# XLA reads its flags again for each program, so that tests marked `optimised` get the
# optimisation without which convolutions take forty times as long.
CHEAP, OPTIMISED = (
    "--xla_flags_reset=true "
    "--xla_cpu_use_fusion_emitters=false "
    "--xla_cpu_parallel_codegen_split_count=1 "
    f"--xla_backend_optimization_level={level}"
    for level in (0, 1)
)
# Each reading adds to this list and none takes away, so it is read once.
NO_HOISTING = (
    "--xla_disable_hlo_passes="
    "while-loop-invariant-code-motion,while-loop-trip-count-annotator"
)
# An unknown flag would end the process, so only where they are known to exist; and not
# over flags of the caller. Workers inherit those that were chosen before.
CHOSEN = os.environ.get("XLA_FLAGS", CHEAP) in (CHEAP, OPTIMISED)
CHOSEN &= importlib.metadata.version("jaxlib").startswith("0.10.")
if CHOSEN:
    os.environ["XLA_FLAGS"] = f"{CHEAP} {NO_HOISTING}"

import jax  # noqa: E402
import pytest  # noqa: E402

from bilevax._programs.room import make_room  # noqa: E402

jax.config.update("jax_enable_x64", True)
jax.jit(lambda: 0)()


def choose_flags(optimised: bool) -> None:
    if CHOSEN:
        os.environ["XLA_FLAGS"] = OPTIMISED if optimised else CHEAP


choose_flags(False)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    """Before fixtures, which compile too."""
    choose_flags(item.get_closest_marker("optimised") is not None)


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
