"""What the pages on cvxpy and PyTorch show runs; what is missing is told."""

import subprocess
import sys

import numpy as np
import pytest

from ..house.test_documentation import run

MISSING = """
import sys
sys.modules[{module!r}] = None
import bilevax as bx
try:
    {call}
except ImportError as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("module", "call"),
    [("torch", "import bilevax.torch"), ("cvxpy", "bx.from_cvxpy(None, [])")],
)
def test_a_missing_package_is_told_with_the_way_to_it(module, call):
    command = [sys.executable, "-c", MISSING.format(module=module, call=call)]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert f"pip install 'bilevax[{module}]'" in told


def test_neither_is_imported_by_the_library():
    code = "import sys, bilevax; print({'torch', 'cvxpy'} & set(sys.modules))"
    command = [sys.executable, "-c", code]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert told.strip() == "set()"


def test_the_page_on_cvxpy_runs():
    pytest.importorskip("cvxpy", reason="needs the extra `cvxpy`")
    scope = run("docs/cvxpy.md")
    np.testing.assert_allclose(scope["s"].x["toll"], [3, 3], atol=1e-5)
    np.testing.assert_allclose(scope["e"].lower.y["road"], [1.25, 0.75], atol=1e-12)
    np.testing.assert_allclose(scope["e"].lower.prices["capacity"], 0.25, atol=1e-12)


def test_the_page_on_torch_runs():
    pytest.importorskip("cvxpy", reason="needs the extra `cvxpy`")
    torch = pytest.importorskip("torch", reason="needs the extra `torch`")
    scope = run("docs/torch.md")
    assert scope["losses"][-1] < 0.1 * scope["losses"][0]
    torch.testing.assert_close(scope["x"].grad, torch.tensor([-1.5, -0.5]))
    assert scope["answer"].success.tolist() == [True, False]
    assert scope["solution"].shape == (5, 2)
