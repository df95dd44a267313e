"""What the functions of the front take, under which names, and what they refuse."""

from typing import Any

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
import scipy.sparse
from jax.experimental.sparse import BCOO

import bilevax as bx

from ..methods.test_ds_blo import kink

X0 = jnp.array([2.0])


def solve(**changes):
    options: dict[str, Any] = dict(key=jr.key(0), num_steps=2, polish=False) | changes
    return bx.solve(kink(), bx.DSBLO(), X0, **options)


@pytest.mark.parametrize("seed", [3, np.int32(3)])
def test_an_integer_is_the_seed_of_a_key(seed):
    np.testing.assert_array_equal(solve(key=seed).x, solve(key=jr.key(3)).x)
    certificates = [
        bx.certify(kink(), X0, 0.1, key=key).measure for key in (seed, jr.key(3))
    ]
    assert certificates[0] == certificates[1]
    tunings = [
        bx.tune(kink(), None, X0, key=key, grid=[0.1], num_steps=2).values
        for key in (seed, jr.key(3))
    ]
    assert tunings[0] == tunings[1]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (dict(key=0.5), ("`key`", "integer", "0.5")),
        (dict(key=None), ("`key`", "None")),
        (dict(key=True), ("`key`", "True")),
        (dict(key=jr.split(jr.key(0))), ("`key`", "(2,)")),
        (dict(num_steps="a"), ("`num_steps`", "positive integer", "'a'")),
        (dict(num_steps=True), ("`num_steps`", "True")),
        (dict(num_steps=np.inf), ("`num_steps`", "inf")),
        (dict(chunk=[3]), ("`chunk`", "[3]")),
        (dict(num_starts="b"), ("`num_starts`", "'b'")),
        (dict(stop=3), ("`stop`", "Stop(seconds=60)", "3")),
        (dict(average="a"), ("`average`", "decay", "'a'")),
        (dict(certify=-1.0), ("`certify`", "radius", "-1.0")),
        (dict(certify="a"), ("`certify`", "radius", "'a'")),
        (dict(callback=3), ("`callback`", "function", "3")),
    ],
)
def test_what_is_of_the_wrong_kind_is_named(options, words):
    with pytest.raises(ValueError, match=".") as info:
        solve(**options)
    for word in words:
        assert word in str(info.value)


@pytest.mark.parametrize("transform", [jax.jit, jax.vmap, jax.grad])
def test_a_solve_inside_a_transformation_is_refused_in_a_sentence(transform):
    value = lambda x: bx.solve(kink(), bx.DSBLO(), x, key=jr.key(0)).value
    x = jnp.ones((2, 1)) if transform is jax.vmap else X0
    with pytest.raises(ValueError, match=r"cannot be inside `jit`, `vmap`.*outside"):
        transform(value)(x)


@pytest.mark.parametrize(
    "A", [scipy.sparse.eye(2).tocsr(), scipy.sparse.coo_array(np.eye(2)),
          BCOO.fromdense(jnp.eye(2))]
)  # fmt: skip
def test_sparse_matrices_are_refused_in_a_sentence_where_dense_ones_are_needed(A):
    for make in (
        lambda: bx.Polyhedron(A=np.eye(2), b=A),
        lambda: bx.Box(A, jnp.inf),
        lambda: bx.hypergradient(kink(), A),
    ):
        with pytest.raises(ValueError, match=r"is sparse .*dense.*Polyhedron"):
            make()


def test_the_former_order_of_tune_warns_and_works():
    options: dict[str, Any] = dict(key=0, grid=[0.1], num_steps=2)
    new = bx.tune(kink(), bx.DSBLO(), X0, **options)
    former: Any = bx.tune
    for arguments, named in (
        ((X0,), {}),
        ((X0,), dict(method=bx.DSBLO())),
    ):
        with pytest.warns(DeprecationWarning, match="method, x0"):
            assert former(kink(), *arguments, **named, **options).values == new.values
    assert bx.tune(kink(), x0=X0, **options).values == new.values


def test_the_former_name_of_the_radius_warns_and_works():
    new = bx.certify(kink(), X0, radius=0.1, key=0)
    assert bx.certify(kink(), X0, 0.1, key=0).measure == new.measure
    with pytest.warns(DeprecationWarning, match="radius"):
        assert bx.certify(kink(), X0, delta_bar=0.1, key=0).measure == new.measure
    with pytest.raises(ValueError, match="radius"):
        bx.certify(kink(), X0, 0.0, key=0)
    with pytest.raises(ValueError, match="former name"):
        bx.certify(kink(), X0, 0.1, delta_bar=0.1, key=0)
