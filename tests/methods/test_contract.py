"""Every method on every problem it accepts: the same contract for all.

One helper, compiled once for a method and a problem, runs a batch of four short runs:
twice the same, one with another key, one from a point that is not a number.
"""

import functools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

import bilevax as bx
from bilevax._methods.base import WORK, Scales
from bilevax._methods.catalogue import CATALOGUE

STEPS = 3


class Upper(eqx.Module):
    """Smooth in both levels; `x` is a pytree of two leaves."""

    shift: jax.Array

    def __call__(self, x, y):
        flat = jnp.concatenate([x["a"], x["b"]])
        return (
            jnp.sum((flat - 1) ** 2)
            + jnp.sum(flat * y)
            + jnp.sum((y - self.shift) ** 2)
        )


class Lower(eqx.Module):
    def __call__(self, x, y):
        flat = jnp.concatenate([x["a"], x["b"]])
        return 0.5 * jnp.sum(y**2) + 0.3 * y[0] * y[1] - flat @ y


ROWS = bx.Polyhedron(
    A=np.array([[1.0, 1.0], [-1.0, 0.5]]), B=np.array([[0.2, 0.0], [0.0, 0.1]]),
    b=np.array([1.0, 2.0]),
)  # fmt: skip
EQUAL = bx.Polyhedron(
    A_eq=np.array([[1.0, 1.0]]), B_eq=np.array([[0.5, -0.2]]), b_eq=np.array([0.7])
)
BOX = bx.Box(np.array([-0.4, -0.4]), np.array([0.4, 0.4]))
DOMAIN = bx.Box(
    {"a": np.array([-2.0]), "b": np.array([-2.0])},
    {"a": np.array([2.0]), "b": np.array([2.0])},
)


def deterministic(rows, domain=None) -> bx.Problem:
    return bx.Problem(Upper(jnp.array([0.3, -0.2])), Lower(), rows, domain=domain)


def instance(batch):
    return bx.Problem(Upper(jnp.mean(batch, axis=0)), Lower(), BOX, domain=DOMAIN)


SAMPLED = bx.StochasticProblem.from_data(
    np.random.default_rng(0).normal(size=(32, 2)), 4, instance
)
# The way back from an empty lower level, long to compile, is part of one problem.
PROBLEMS: dict[str, Any] = {
    "inequality rows": deterministic(ROWS).assuming_feasible(),
    "equality rows": deterministic(EQUAL),
    "box, domain, sampled": SAMPLED,
}
X = {"a": jnp.array([0.8]), "b": jnp.array([-0.5])}
PAIRS = [
    pytest.param(command, name, id=f"{command}, {name}")
    for command, entry in CATALOGUE.items()
    for name, problem in PROBLEMS.items()
    if entry.kind().refusal(problem) is None
]


@eqx.filter_jit
def follower(problem, x):
    """The lower level at the start, which no method has a part in."""
    view = getattr(problem, "population", problem)
    return bx.hypergradient(view, x, throw=False).lower


def begin(problem, method, x, lower, key):
    view = getattr(problem, "population", problem)
    scales = Scales(jnp.asarray(2.0), jnp.asarray(3.0), jnp.asarray(1.0))
    return method.init(view, x, lower, scales, key=key)


def advance(problem, method, state, t, key):
    return method.step(
        problem, state, step=t, num_steps=jnp.asarray(STEPS), key=jr.fold_in(key, t)
    )


@eqx.filter_jit
def short_runs(problem, method, xs, lowers, keys):
    """The iterates and records of one run per member."""

    def one(x, lower, key):
        state = begin(problem, method, x, lower, key)
        arrays, rest = eqx.partition(state, eqx.is_array)

        def body(arrays, t):
            new, record = advance(problem, method, eqx.combine(arrays, rest), t, key)
            out = (new.x, record)
            new = eqx.filter(new, eqx.is_array)
            assert jax.tree.structure(new) == jax.tree.structure(arrays)
            return jax.tree.map(same_kind, new, arrays), out

        return jax.lax.scan(body, arrays, jnp.arange(STEPS))[1]

    return jax.vmap(one)(xs, lowers, keys)


@functools.cache
def four_runs(command, name):
    """Points and records; kept, since a program may be forgotten between two tests."""
    problem, method = PROBLEMS[name], CATALOGUE[command].kind()
    keys = jr.wrap_key_data(
        jnp.stack([jr.key_data(jr.key(seed)) for seed in (0, 0, 1, 0)])
    )
    xs = jax.tree.map(lambda leaf: jnp.stack([leaf] * 4).at[3].set(jnp.nan), X)
    return short_runs(problem, method, xs, followers(name, xs), keys)


def followers(name, xs):
    return eqx.filter_vmap(follower, in_axes=(None, 0))(PROBLEMS[name], xs)


def same_kind(new, old):
    assert new.shape == old.shape
    assert new.dtype == old.dtype
    return (
        new if jnp.issubdtype(new.dtype, jax.dtypes.prng_key) else new.astype(old.dtype)
    )


@pytest.mark.parametrize(("command", "name"), PAIRS)
def test_a_method_keeps_its_contract(command, name):
    problem = PROBLEMS[name]
    points, records = four_runs(command, name)
    # Structure in, structure out; x is a pytree.
    assert jax.tree.structure(X) == jax.tree.structure(points)
    flat = np.concatenate([points["a"], points["b"]], axis=-1)
    assert flat.shape == (4, STEPS, 2)
    # The good members of a batch are not spoilt by the bad one, which is told.
    assert np.all(np.isfinite(flat[:3]))
    assert np.all(np.asarray(records.status)[3] != 0)
    # The same key is the same run, and the method does something.
    np.testing.assert_array_equal(flat[0], flat[1])
    assert np.any(flat[0, -1] != np.concatenate([X["a"], X["b"]]))
    work = {count: np.asarray(getattr(records, count))[:3] for count in WORK}
    assert all(np.all(counted >= 0) for counted in work.values())
    assert np.all(work["upper_gradients"].sum(axis=1) > 0) or command == "zero-order"
    sampled = isinstance(problem, bx.StochasticProblem)
    assert np.all((work["samples"] > 0) == sampled)


@pytest.mark.parametrize("command", CATALOGUE)
def test_compiled_and_plain_are_the_same_run(command):
    method = CATALOGUE[command].kind()
    name = "equality rows" if "aipod" in command else "inequality rows"
    problem, key = PROBLEMS[name], jr.key(0)
    points, records = four_runs(command, name)
    state = begin(problem, method, X, follower(problem, X), key)
    for t in range(2):
        state, record = advance(problem, method, state, jnp.asarray(t), key)
        for leaf in ("a", "b"):
            np.testing.assert_allclose(
                state.x[leaf], points[leaf][0, t], rtol=1e-9, atol=1e-12
            )
        assert int(record.status) == int(records.status[0, t])


def test_what_a_method_refuses_it_names():
    for command, entry in CATALOGUE.items():
        for name, problem in PROBLEMS.items():
            refusal = entry.kind().refusal(problem)
            if refusal is None:
                continue
            assert refusal.endswith("."), (command, name)
            assert refusal.startswith(entry.kind.__name__) or entry.name in refusal
            with pytest.raises(ValueError, match="."):
                bx.solve(problem, entry.kind(), X, key=jr.key(0), num_steps=1)
