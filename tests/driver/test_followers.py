"""Runs over many followers: every method that takes gradients, and what judges them."""

import json
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bilevax as bx
from bilevax._cli.main import main
from bilevax._implicit.feasible import moves, onto_allowed
from bilevax._methods.base import refused
from bilevax._methods.catalogue import CATALOGUE

COUNT = 6
RNG = np.random.default_rng(0)
DATA = dict(a=RNG.uniform(0.5, 1.5, size=(COUNT, 2)), b=RNG.uniform(1, 2, size=COUNT))
BOX = bx.Box(jnp.zeros(2), jnp.full(2, 4.0))


def toll(d):
    """A traveller with a budget of trips; the leader earns tolls."""
    return bx.Problem(
        lambda x, y: -x @ y,
        lambda x, y: 0.5 * jnp.sum(d["a"] * y**2) + (x - 3) @ y,
        bx.Polyhedron(
            A=jnp.array([[1.0, 1.0], [-1, 0], [0, -1]]),
            b=jnp.concatenate([d["b"][None], jnp.zeros(2)]),
        ),
    )


FOLLOWERS = bx.Followers(toll, DATA, domain=BOX)
X0 = jnp.array([0.5, 1.0])


def revenue(x):
    """By hand: tolls below the kink of every traveller are paid by all."""
    flows = []
    for a, b in zip(DATA["a"], DATA["b"], strict=True):
        free = np.maximum((3 - x) / a, 0)
        if free.sum() > b:
            # Of two roads: the price that fills the budget, both used or one.
            best = None
            for used in ([0, 1], [0], [1]):
                price = ((3 - x[used]) / a[used]).sum() - b
                price /= (1 / a[used]).sum()
                y = np.zeros(2)
                y[used] = (3 - x[used] - price) / a[used]
                cost = 0.5 * (a * y**2).sum() + (x - 3) @ y
                if y.min() >= 0 and (best is None or cost < best[0]):
                    best = cost, y
            assert best is not None
            free = best[1]
        flows.append(free)
    return -np.mean([x @ y for y in flows])


def grid_best():
    grid = np.linspace(1.0, 2.6, 33)
    return min(revenue(np.array([u, v])) for u in grid for v in grid)


def test_ds_blo_with_its_polish_finds_the_best_tolls():
    s = bx.solve(FOLLOWERS, bx.DSBLO(), X0, key=0, num_steps=150)
    assert s.success
    assert s.value <= grid_best() + 1e-9
    np.testing.assert_allclose(s.value, revenue(np.asarray(s.x)), rtol=1e-9)
    assert s.y.shape == (COUNT, 2)
    # Work counts for every follower.
    assert s.history.totals["lower_solves"] >= 150 * COUNT


def test_a_minibatch_run_is_judged_by_all_followers():
    sampled = FOLLOWERS.minibatch(2)
    s = bx.solve(sampled, bx.DSBLO(), X0, key=0, num_steps=100)
    assert s.success
    assert s.value <= grid_best() + 1e-9
    assert s.history["samples"].sum() == 100
    assert s.history["lower_solves"].sum() == 200


def test_a_sampled_run_that_ends_too_early_says_so():
    sampled = FOLLOWERS.minibatch(2)
    s = bx.solve(sampled, bx.DSBLO(), X0, key=0, num_steps=3, polish=False)
    assert "F was still falling" in s.stopped
    assert s.success


TAKES = [name for name, e in CATALOGUE.items() if e.kind().takes_followers]


def test_methods_that_read_rows_refuse_in_a_sentence():
    assert set(CATALOGUE) - set(TAKES) == {
        "aipod", "e-aipod", "igba", "lv-hba", "blocc", "gam", "pigd",
    }  # fmt: skip
    for problem in (FOLLOWERS, FOLLOWERS.minibatch(2)):
        assert "cannot run on Followers" in str(refused(bx.AiPOD(), problem))
        with pytest.raises(ValueError, match="cannot run on Followers"):
            bx.solve(problem, bx.AiPOD(), X0, key=0)


@pytest.mark.parametrize("name", ["ssigd", "dsigd", "ingd", "zero-order"])
def test_methods_that_take_values_or_gradients_descend(name):
    method = CATALOGUE[name].kind()
    s = bx.solve(FOLLOWERS, method, X0, key=0, num_steps=15, polish=False, throw=False)
    first = bx.hypergradient(FOLLOWERS, X0).value
    assert s.success
    assert s.value < float(first)


def test_a_failing_follower_is_named_by_the_solve():
    data = dict(a=DATA["a"], b=np.where(np.arange(COUNT) == 4, -1.0, DATA["b"]))
    followers = bx.Followers(toll, data, domain=BOX)
    with pytest.raises(bx.BilevelError, match="Follower 4 of 6: infeasible"):
        bx.solve(followers, bx.DSBLO(), X0, key=0, num_steps=5)


def test_certificates_and_assumptions_are_those_of_all_followers():
    best = bx.solve(FOLLOWERS, bx.DSBLO(), X0, key=0, num_steps=150).x
    far = bx.certify(FOLLOWERS, X0, 1e-3, key=0, num_samples=64)
    near = bx.certify(FOLLOWERS, best, 1e-3, key=0, num_samples=64)
    e = bx.hypergradient(FOLLOWERS, X0, quality=True)
    assert abs(far.measure - float(jnp.linalg.norm(e.grad))) < 1e-2
    assert near.measure < 0.2 * far.measure
    assert e.quality is not None
    assert 0 <= float(e.quality.bias) < 1e-9
    found = bx.explain(FOLLOWERS, X0)
    assert found.holds
    assert "follower" in str(found)


def test_travellers_who_may_be_without_an_answer_have_a_way_back():
    """`y1 + y2 >= x` and `y <= b`: the leader must not ask for more than 2 min b."""

    def asked(d):
        return bx.Problem(
            lambda x, y: jnp.sum((x - 5) ** 2) + 0 * jnp.sum(y),
            lambda x, y: 0.5 * jnp.sum(y**2),
            bx.Polyhedron(
                A=jnp.concatenate([-jnp.ones((1, 2)), jnp.eye(2)]),
                B=jnp.array([[1.0], [0.0], [0.0]]),
                b=jnp.concatenate([jnp.zeros(1), jnp.full(2, d["b"])]),
            ),
        )

    followers = bx.Followers(asked, dict(b=np.array([1.5, 1.0, 2.0])))
    assert moves(followers)
    x = onto_allowed(cast(Any, followers), jnp.array([4.0]))
    np.testing.assert_allclose(x, [2.0], atol=1e-4)
    assert bx.hypergradient(followers, x).success


FILE = """
import jax, jax.numpy as jnp, numpy as np
import bilevax as bx

def one(d):
    return bx.Problem(
        lambda x, y: jnp.sum((x - d["a"]) ** 2) + jnp.sum(y),
        lambda x, y: 0.5 * jnp.sum((y - x) ** 2),
        bx.Box(jnp.zeros(1), jnp.full(1, 10.0)),
    )

problem = bx.Followers(one, dict(a=np.arange(1.0, 4.0)))
x0 = jnp.array([3.0])
"""


def test_the_command_line_takes_followers(tmp_path, capsys):
    path = tmp_path / "many.py"
    path.write_text(FILE)
    assert main(["solve", str(path), "--steps", "30", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    np.testing.assert_allclose(np.ravel(found["x"]), [1.5], atol=1e-6)
    assert np.size(found["y"]) == 3
    assert main(["explain", str(path)]) == 0
    assert "of 3" in capsys.readouterr().out
    assert main(["certify", str(path), "--samples", "8"]) == 0


def test_followers_are_compared():
    found = bx.compare(
        {"tolls": (FOLLOWERS, X0)},
        {"DS-BLO": bx.DSBLO(), "AiPOD": bx.AiPOD()},
        seeds=1,
        budget=bx.Budget(steps=20),
    )
    assert [row["status"] for row in found.rows] == ["finished", "refused"]
    assert jax.tree.leaves(found.rows[0]["totals"])
