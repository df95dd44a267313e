"""Followers whose data stay on the host: the same problem, and only batches travel."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import bilevax as bx

COUNT, SIZE = 60, 2
RNG = np.random.default_rng(3)
AIMS = 0.2 * RNG.normal(size=(COUNT, SIZE))


def follower(d):
    """The answer is `max(x, 0)`, as long as no entry is beyond 10."""
    return bx.Problem(
        lambda x, y: 0.5 * jnp.sum((y - 3 - d["aim"]) ** 2),
        lambda x, y: 0.5 * jnp.sum((y - x) ** 2),
        bx.Box(jnp.zeros(SIZE), jnp.full(SIZE, 10.0)),
    )


DATA = dict(aim=AIMS)
BEST = 3 + AIMS.mean(axis=0)
X0 = jnp.array([1.0, 6.0])


@pytest.fixture
def stored(tmp_path):
    """The data as a memory map of a file."""
    np.save(tmp_path / "aims.npy", AIMS)
    return dict(aim=np.load(tmp_path / "aims.npy", mmap_mode="r"))


def test_a_run_on_a_memory_map_ends_at_the_mean_of_all(stored):
    many = bx.HostFollowers(follower, stored)
    assert isinstance(many.data.arrays[0], np.memmap)
    s = bx.solve(many.minibatch(10), bx.DSBLO(), X0, key=0, num_steps=120, polish=False)
    assert s.success
    np.testing.assert_allclose(s.x, BEST, atol=0.04)
    assert s.history["lower_solves"].sum() == 120 * 10
    again = bx.solve(
        many.minibatch(10), bx.DSBLO(), X0, key=0, num_steps=120, polish=False
    )
    np.testing.assert_array_equal(s.x, again.x)


def test_few_followers_are_polished_on_all_of_them():
    many = bx.HostFollowers(follower, DATA)
    s = bx.solve(many.minibatch(10), bx.DSBLO(), X0, key=0, num_steps=20)
    np.testing.assert_allclose(s.x, BEST, rtol=1e-8)
    judged = bx.solve(
        many.minibatch(10, judges=20), bx.DSBLO(), X0, key=0, num_steps=20
    )
    assert judged.polish is None
    assert judged.y.shape == (20, SIZE)


def test_an_epoch_sees_every_follower_once():
    sampled = bx.HostFollowers(follower, DATA).minibatch(20, seed=5)
    key = jnp.zeros(2, jnp.uint32)
    for epoch in range(2):
        seen = [sampled.draw(key, 3 * epoch + i).members for i in range(3)]
        np.testing.assert_array_equal(np.sort(np.concatenate(seen)), np.arange(COUNT))


def test_parts_are_all_followers_once():
    many = bx.HostFollowers(follower, DATA)
    whole = bx.hypergradient(bx.Followers(follower, DATA), X0)
    value, grad = 0.0, jnp.zeros(SIZE)
    for part in many.parts(25):
        e = bx.hypergradient(part, X0)
        value, grad = value + len(part) * e.value, grad + len(part) * e.grad
    np.testing.assert_allclose(value / COUNT, whole.value, rtol=1e-12)
    np.testing.assert_allclose(grad / COUNT, whole.grad, rtol=1e-12)


def test_a_run_is_continued_from_its_checkpoint(tmp_path):
    sampled = bx.HostFollowers(follower, DATA).minibatch(10)
    options: Any = dict(key=0, num_steps=40, chunk=20, polish=False)
    method, path = bx.DSBLO(), tmp_path / "run.npz"
    whole = bx.solve(sampled, method, X0, **options)

    part = bx.Stop(0, 0, seconds=0)
    bx.solve(sampled, method, X0, checkpoint=path, stop=part, **options)
    again = bx.solve(sampled, method, X0, checkpoint=path, **options)
    np.testing.assert_array_equal(again.x, whole.x)


def test_what_cannot_be_is_refused_in_a_sentence():
    many: Any = bx.HostFollowers(follower, DATA)
    with pytest.raises(ValueError, match="NumPy array of numbers or a memory map"):
        bx.HostFollowers(follower, dict(aim=jnp.asarray(AIMS)))
    with pytest.raises(ValueError, match="leading axis"):
        bx.HostFollowers(follower, dict(aim=AIMS, more=np.zeros(3)))
    with pytest.raises(ValueError, match="at most 60"):
        many.minibatch(61)
    with pytest.raises(ValueError, match="`judges` must be a positive"):
        many.minibatch(6, judges=0)
    with pytest.raises(ValueError, match="less than 60"):
        many.chosen([60])
    with pytest.raises(ValueError, match="HostFollowers"):
        bx.hypergradient(many, X0)
