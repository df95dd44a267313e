"""Models of cvxpy as layers of PyTorch, called as those of cvxpylayers are."""

import os
import subprocess
import sys

import numpy as np
import pytest

from ..zoo import EXACT
from .test_cvxpy import AGREE, by_clarabel, cp, labelled

torch = pytest.importorskip("torch", reason="needs the extra `torch`")
import bilevax.torch as bt  # noqa: E402


def double(values):
    return torch.tensor(np.asarray(values), dtype=torch.float64, requires_grad=True)


def turning():
    """Rows that turn with a parameter, an equation, and a matrix of variables."""
    A, b = cp.Parameter((2, 3), name="A"), cp.Parameter(2, name="b")
    y, t = cp.Variable(3, name="y"), cp.Variable((2, 2), name="t", nonneg=True)
    rows, names = labelled(
        turning=A @ y <= b, tied=t.T @ np.ones(2) == y[:2], least=y >= -1
    )
    cost = cp.sum_squares(A @ y - b) + cp.sum_squares(y - 1) + cp.sum_squares(t)
    follower = cp.Problem(cp.Minimize(cost), rows)
    rng = np.random.default_rng(0)
    x = dict(A=rng.normal(size=(2, 3)), b=rng.uniform(0.2, 1, 2))
    return follower, [A, b], [t, y], x, names


def test_variables_and_prices_are_clarabels_and_derivatives_those_of_differences():
    follower, parameters, variables, x, names = turning()
    layer = bt.cvxpy_layer(follower, parameters, variables)
    tensors = [double(x[p.name()]) for p in parameters]
    found = layer(*tensors)
    by_clarabel(follower, parameters, x)
    for value, variable in zip(found, variables, strict=True):
        np.testing.assert_allclose(value.detach(), variable.value, atol=AGREE)
    for name, row in names.items():
        np.testing.assert_allclose(
            found.prices[name].detach(), row.dual_value, atol=AGREE
        )
    assert found.success
    assert found.message == ""
    batch = [torch.stack([t, 1.1 * t]).detach().requires_grad_() for t in tensors]
    numbers = lambda *p: (*(out := layer(*p)), *out.prices.values())
    assert torch.autograd.gradcheck(numbers, batch)


def test_a_batch_shares_what_has_no_axis_of_members():
    follower, parameters, variables, x, _ = turning()
    layer = bt.cvxpy_layer(follower, parameters, variables, throw=False)
    A, b = double(x["A"]), double([x["b"], 0.5 * x["b"]])
    t, y = layer(A, b)
    assert t.shape == (2, 2, 2)
    assert y.shape == (2, 3)
    torch.testing.assert_close(layer(A, b[1])[1], y[1])
    assert "['A', 'b'] -> ['t', 'y']" in repr(layer)


WITHOUT_X64 = """
import cvxpy as cp, torch
import bilevax.torch as bt

y, p = cp.Variable(name="y"), cp.Parameter(name="p")
follower = cp.Problem(cp.Minimize(cp.square(3 * y - p)), [y <= 1 / 3])
batch = torch.tensor([0.1, 9.0], dtype=torch.float64)
(found,) = bt.cvxpy_layer(follower, [p], [y])(batch)
print(abs(found[0].item() - 0.1 / 3) + abs(found[1].item() - 1 / 3))
"""


def test_numbers_of_the_model_are_double_whatever_jax_is_set_to():
    command = [sys.executable, "-c", WITHOUT_X64]
    environment = os.environ | {"JAX_ENABLE_X64": "0"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < EXACT


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda f, p, v: bt.cvxpy_layer(f, p, []), ("`variables`", "at least one")),
        (
            lambda f, p, v: bt.cvxpy_layer(f, p, [cp.Variable(name="z")]),
            ("`variables[0]`", "not a variable"),
        ),
        (lambda f, p, v: bt.cvxpy_layer(f, p[:1], v), ("`b` has no value",)),
        (lambda f, p, v: bt.cvxpy_layer(f, p, v)(double([1.0])), ("2 tensors", "A, b")),
        (
            lambda f, p, v: bt.cvxpy_layer(f, p, v)(
                double(np.ones((3, 2))), double([1, 1])
            ),
            ("`A`", "(2, 3)", "(3, 2)"),
        ),
        (
            lambda f, p, v: bt.cvxpy_layer(f, p, v)(np.ones((2, 3)), double([1, 1])),
            ("torch.as_tensor",),
        ),
    ],
)
def test_mistakes_are_told_with_their_remedy(call, words):
    follower, parameters, variables, _, _ = turning()
    for parameter in parameters:
        parameter.value = None
    with pytest.raises(ValueError, match=".") as info:
        call(follower, parameters, variables)
    for word in words:
        assert word in str(info.value)
