"""What is asked of followers before anything is solved."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import bilevax as bx


def instance(d):
    return bx.Problem(
        lambda x, y: jnp.sum(y * x),
        lambda x, y: 0.5 * jnp.sum((y - d["a"] * x) ** 2),
        bx.Box(jnp.zeros(2), jnp.full(2, 1.0)),
    )


def within(d):
    top = d["top"] if "top" in d else jnp.ones(2)
    box = bx.Box(jnp.zeros(2), top)
    return bx.Problem(
        lambda x, y: jnp.sum(y), lambda x, y: jnp.sum((y - x) ** 2), y0=jnp.zeros(2),
        domain=box,
    )  # fmt: skip


def test_leading_axes_that_differ_are_named():
    with pytest.raises(ValueError, match=r"data\['b'\]\[1\].*expected 3, got 4"):
        bx.Followers(instance, dict(a=np.ones(3), b=[np.ones(3), np.ones(4)]))
    with pytest.raises(ValueError, match="leading axis that counts the followers"):
        bx.Followers(instance, dict(a=2.0))
    with pytest.raises(ValueError, match="at least one follower"):
        bx.Followers(instance, dict(a=np.ones((0, 2))))
    with pytest.raises(ValueError, match="array of numbers"):
        bx.Followers(instance, dict(a=["one", "two"]))


def test_parts_that_are_no_parts_are_refused():
    data = dict(a=np.ones(3))
    with pytest.raises(ValueError, match="`instance` must be a function"):
        bx.Followers(instance(dict(a=1.0)), data)
    with pytest.raises(ValueError, match=r"must return a Problem.*float"):
        bx.Followers(lambda d: 1.0, data)
    with pytest.raises(ValueError, match="`upper` must be a function"):
        bx.Followers(instance, data, upper=1.0)
    with pytest.raises(ValueError, match="`batch` must be a positive number"):
        bx.Followers(instance, data, batch=0)
    followers = bx.Followers(instance, data)
    with pytest.raises(ValueError, match="`q` must have the shapes of `y`"):
        followers.perturbed(np.ones(2))
    with pytest.raises(IndexError, match="no follower 3 among 3"):
        followers[3]


def test_the_domain_is_told_once_or_by_all_alike():
    data = dict(a=np.ones(3))
    assert bx.Followers(instance, data).domain is None
    box = bx.Box(jnp.zeros(2), jnp.ones(2))
    assert bx.Followers(instance, data, domain=box).domain is box
    told: Any = bx.Followers(within, data).domain
    np.testing.assert_array_equal(told.upper, np.ones(2))
    assert bx.Followers(within, data, domain=box)[1].domain is not None


def test_domains_that_contradict_each_other_are_refused():
    top = np.ones((3, 2))
    top[1, 0] = 2.0
    with pytest.raises(ValueError, match="follower 1 is not that of follower 0"):
        bx.Followers(within, dict(top=top))
    larger = bx.Box(jnp.zeros(2), jnp.full(2, 3.0))
    with pytest.raises(ValueError, match="the instances give another one"):
        bx.Followers(within, dict(a=np.ones(3)), domain=larger)


def test_epochs_visit_every_follower_once():
    followers = bx.Followers(instance, dict(a=np.arange(12.0)))
    sampled = followers.minibatch(4)
    key = jnp.zeros(2, jnp.uint32)
    for epoch in range(2):
        seen = [sampled.draw(key, 3 * epoch + i) for i in range(3)]
        a = np.concatenate([problem.data["a"] for problem in seen])
        np.testing.assert_array_equal(np.sort(a), np.arange(12.0))
        members = np.concatenate([problem.members for problem in seen])
        np.testing.assert_array_equal(a, members)


def test_minibatches_that_make_no_sense_are_refused():
    followers = bx.Followers(instance, dict(a=np.ones(3)))
    sizes: Any = (0, 4, 1.5)
    for size in sizes:
        with pytest.raises(ValueError, match="at least 1 and at most 3"):
            followers.minibatch(size)
    together = bx.Followers(instance, dict(a=np.ones(3)), upper=lambda x, y, d: 0.0)
    with pytest.raises(ValueError, match="needs an F that is the mean"):
        together.minibatch(2)
