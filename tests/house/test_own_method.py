"""What a method of one's own needs is public, and the worked example works."""

import numpy as np

import bilevax as bx

from .test_documentation import run


def test_a_method_of_ones_own_runs_through_compare():
    scope = run("docs/own_method.md")
    rows = scope["comparison"].rows
    assert {row["status"] for row in rows} == {"finished"}
    assert {row["method"] for row in rows} == {"heavy ball", "[S]SIGD"}
    # Inside the box y = x, so F is (x - 1)^2 + x^2 / 10.
    np.testing.assert_allclose(scope["s"].x, 1 / 1.1, atol=1e-3)
    np.testing.assert_allclose(scope["a"].x, 1 / 1.1, atol=1e-6)
    first, *_ = (row for row in rows if row["method"] == "heavy ball")
    assert first["totals"]["lower_solves"] == 100


def test_every_method_of_the_front_is_in_the_namespace_of_methods():
    base = bx.extend.AbstractMethod
    kinds = lambda module: {
        name
        for name, value in vars(module).items()
        if isinstance(value, type) and issubclass(value, base)
    }
    assert kinds(bx) == kinds(bx.methods)
    for name in kinds(bx):
        assert getattr(bx, name) is getattr(bx.methods, name)


def test_what_the_docstring_promises_is_there():
    for name in ("Method", "LowerSolver", "Adjoint", "Constraints", "Perturbation"):
        kind = getattr(bx.extend, f"Abstract{name}")
        assert kind.__abstractmethods__, name
