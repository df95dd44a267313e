"""What is saved of a solution is what is loaded, and nothing else is."""

import zipfile
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bilevax as bx

from .test_worth import SHOP, still

OPTIONS: dict[str, Any] = dict(key=0, num_steps=5)


def same(a, b) -> bool:
    leaves = lambda tree: [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]
    equal = lambda x, y: np.array_equal(x, y, equal_nan=x.dtype.kind == "f")
    return jax.tree.structure(a) == jax.tree.structure(b) and all(
        map(equal, leaves(a), leaves(b))
    )


def test_a_saved_solution_is_loaded_with_all_its_digits(tmp_path):
    s = bx.solve(SHOP, certify=0.01, num_starts=2, x0=jnp.array([3.5]), **OPTIONS)
    s.save(tmp_path / "new" / "s.npz")
    t = bx.Solution.load(tmp_path / "new" / "s.npz")
    assert str(t) == str(s)
    assert (t.value, t.status_name, t.stopped) == (s.value, s.status_name, s.stopped)
    for name in ("x", "y", "stochastic", "multipliers", "average", "polish"):
        assert same(getattr(t, name), getattr(s, name)), name
    assert same(t.history.steps, s.history.steps)
    np.testing.assert_array_equal(t.history.value, s.history.value)
    assert s.certificate is not None
    assert t.certificate is not None
    assert t.certificate.measure == s.certificate.measure
    assert [a.value for a in t.starts] == [a.value for a in s.starts]
    assert t.converged == s.converged


def test_trees_and_failures_are_kept_too(tmp_path):
    problem = bx.Problem(
        lambda x, y: jnp.sum(x["a"] ** 2) + x["b"][0] * jnp.nan,
        still,
        y0={"c": jnp.zeros(1)}["c"],
    )
    x0 = {"a": jnp.ones(2), "b": (jnp.zeros(()),)}
    s = bx.solve(problem, x0=x0, throw=False, **OPTIONS)
    s.save(tmp_path / "s.npz")
    t = bx.Solution.load(tmp_path / "s.npz")
    assert same(t.x, x0)
    assert np.isnan(t.value)
    assert not t.success
    assert t.message == s.message


def test_damaged_and_strange_files_are_refused_by_name_and_cause(tmp_path):
    s = bx.solve(SHOP, num_starts=1, **OPTIONS)
    good = tmp_path / "s.npz"
    s.save(good)
    bad = tmp_path / "bad.npz"
    bad.write_bytes(good.read_bytes()[:-200])
    with pytest.raises(bx.CheckpointError, match=r"bad\.npz is damaged"):
        bx.Solution.load(bad)
    run = tmp_path / "run.npz"
    bx.solve(SHOP, checkpoint=run, **OPTIONS)
    with pytest.raises(bx.CheckpointError, match=r"run\.npz.*a run, not a solution"):
        bx.Solution.load(run)
    # The text of one file with the arrays of none.
    with zipfile.ZipFile(good) as whole, zipfile.ZipFile(bad, "w") as part:
        part.writestr("meta.npy", whole.read("meta.npy"))
    with pytest.raises(bx.CheckpointError, match=r"bad\.npz is not a solution"):
        bx.Solution.load(bad)
    with pytest.raises(FileNotFoundError):
        bx.Solution.load(tmp_path / "none.npz")


class Weights(eqx.Module):
    w: Any


def test_what_would_be_code_to_load_is_not_saved(tmp_path):
    problem = bx.Problem(
        lambda x, y: jnp.sum(x.w**2) + 0 * jnp.sum(y), still, y0=jnp.zeros(1)
    )
    s = bx.solve(problem, x0=Weights(jnp.ones(1)), **OPTIONS)
    with pytest.raises(ValueError, match=r"solution\.x.*Weights.*equinox"):
        s.save(tmp_path / "s.npz")
