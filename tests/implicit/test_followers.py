"""Many followers at once are each one alone: hypergradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.scipy.linalg import block_diag

import bilevax as bx

N, K, M = 3, 4, 2


def followers_data(rng, count):
    """Strongly convex quadratic programs, feasible around zero."""
    root = rng.normal(size=(count, N, N))
    return dict(
        H=root @ root.transpose(0, 2, 1) + np.eye(N),
        C=rng.normal(size=(count, N, M)),
        A=rng.normal(size=(count, K, N)),
        B=0.1 * rng.normal(size=(count, K, M)),
        b=rng.uniform(0.05, 0.5, size=(count, K)),
        target=rng.normal(size=(count, N)),
    )


def instance(d):
    upper = lambda x, y: jnp.sum((y - d["target"]) ** 2) + jnp.sin(x[0]) * y[0]
    lower = lambda x, y: 0.5 * y @ d["H"] @ y + y @ (d["C"] @ x)
    return bx.Problem(upper, lower, bx.Polyhedron(A=d["A"], b=d["b"], B=d["B"]))


def one_by_one(followers, x):
    """The sum written by hand: a loop over single hypergradients."""
    return [
        bx.hypergradient(followers[i], x, throw=False) for i in range(len(followers))
    ]


def mean(evaluations):
    value = np.mean([e.value for e in evaluations])
    return value, np.mean([e.grad for e in evaluations], axis=0)


def check_mean(e, alone):
    value, grad = mean(alone)
    np.testing.assert_allclose(e.value, value, rtol=1e-12)
    np.testing.assert_allclose(e.grad, grad, rtol=1e-12, atol=1e-12)


X = jnp.array([0.3, -0.4])


@pytest.mark.parametrize(("seed", "count"), [(0, 1), (2, 9), (3, 9), (4, 9)])
def test_the_mean_of_followers_is_the_mean_of_their_hypergradients(seed, count):
    rng = np.random.default_rng(seed)
    followers = bx.Followers(instance, followers_data(rng, count))
    x = jnp.asarray(rng.normal(size=M))
    e, alone = bx.hypergradient(followers, x), one_by_one(followers, x)
    check_mean(e, alone)
    for i, one in enumerate(alone):
        np.testing.assert_allclose(e.lower.y[i], one.lower.y, rtol=1e-9, atol=1e-12)
        np.testing.assert_array_equal(e.lower.active[i], one.lower.active)
        np.testing.assert_allclose(e.lower.margin[i], one.margin, rtol=1e-6)
        np.testing.assert_allclose(e.each.value[i], one.value, rtol=1e-12)
    assert float(e.margin) == float(jnp.min(e.lower.margin))


def test_a_warm_start_is_that_of_each_follower():
    followers = bx.Followers(instance, followers_data(np.random.default_rng(2), 9))
    cold = bx.hypergradient(followers, X)
    warm = bx.hypergradient(followers, X, warm=cold.lower)
    work = warm.lower.iterations
    assert np.sum(np.asarray(work.passes) == 1) >= 8
    assert np.sum(np.asarray(work.factorisations) == 0) >= 8
    np.testing.assert_allclose(warm.grad, cold.grad, rtol=1e-12)


def test_a_batch_after_the_other_gives_the_same():
    data = followers_data(np.random.default_rng(2), 9)
    whole = bx.hypergradient(bx.Followers(instance, data), X)
    e = bx.hypergradient(bx.Followers(instance, data, batch=4), X)
    np.testing.assert_allclose(e.value, whole.value, rtol=1e-12)
    np.testing.assert_allclose(e.grad, whole.grad, rtol=1e-11)
    np.testing.assert_array_equal(e.lower.active, whole.lower.active)
    # Nothing that is quadratic in the size of a follower is kept.
    assert e.lower.factor is None


def test_an_upper_level_of_all_answers_at_once():
    data = followers_data(np.random.default_rng(5), 9)

    def price(x, ys, data):
        total = jnp.sum(ys, axis=0)
        return jnp.sum(total**2) + jnp.sum(ys * data["target"]) * x[0]

    e = bx.hypergradient(bx.Followers(instance, data, upper=price), X)

    def F(x):
        answers = jax.vmap(lambda d: bx.solution_map(instance(d), x))(data)
        return price(x, answers, data)

    value, grad = jax.value_and_grad(F)(X)
    np.testing.assert_allclose(e.value, value, rtol=1e-12)
    np.testing.assert_allclose(e.grad, grad, rtol=1e-9)


def test_a_tilt_acts_on_every_follower():
    rng = np.random.default_rng(6)
    followers = bx.Followers(instance, followers_data(rng, 9))
    q = rng.normal(size=(9, N))
    tilted = followers.perturbed(q / 2).perturbed(q / 2)
    e, alone = bx.hypergradient(tilted, X), one_by_one(tilted, X)
    check_mean(e, alone)
    own = bx.hypergradient(followers[4].perturbed(q[4]), X)
    np.testing.assert_allclose(e.each.value[4], own.value, rtol=1e-12)


def test_followers_without_an_answer_are_named_and_the_others_stay_right():
    data = followers_data(np.random.default_rng(7), 9)
    data["H"][2] = np.nan
    data["A"][5], data["b"][5] = 0, -1.0
    # Follower 7 sits in the corner of a tight row that nothing presses on.
    data["C"][7], data["b"][7, 0], data["B"][7, 0] = 0, 0, 0
    followers = bx.Followers(instance, data)
    e = bx.hypergradient(followers, X, throw=False)
    names = bx.status_name(e.each.status)
    assert list(np.flatnonzero(names != "successful")) == [2, 5, 7]
    assert (names[2], names[5], names[7]) == ("non_finite", "infeasible", "kink")
    assert "Follower 2 of 9: non_finite" in e.message
    assert "Follower 5 of 9: infeasible" in e.message
    assert np.isnan(e.value)
    assert not e.success
    right = [i for i in range(9) if i not in (2, 5)]
    alone = one_by_one(followers, X)
    value, grad = mean([alone[i] for i in right])
    np.testing.assert_allclose(e.each.others[0], value, rtol=1e-12)
    np.testing.assert_allclose(e.each.others[1], grad, rtol=1e-11)
    for i in right:
        np.testing.assert_allclose(e.lower.y[i], alone[i].lower.y, rtol=1e-9)
    with pytest.raises(bx.BilevelError, match="Follower 5 of 9"):
        bx.hypergradient(followers, X)


def test_a_follower_at_a_kink_is_no_failure():
    data = followers_data(np.random.default_rng(7), 9)
    data["C"][7], data["b"][7, 0], data["B"][7, 0] = 0, 0, 0
    e = bx.hypergradient(bx.Followers(instance, data), X)
    assert bx.status_name(e.status) == "kink"
    assert e.success
    assert e.message.startswith("Follower 7 of 9: kink")
    assert np.isfinite(e.value)


def test_answers_may_be_trees():
    data = dict(a=np.arange(1.0, 5.0))

    def tree(d):
        return bx.Problem(
            lambda x, y: jnp.sum(y["u"]) * y["v"],
            lambda x, y: 0.5 * jnp.sum((y["u"] - x) ** 2) + (y["v"] - d["a"]) ** 2,
            y0=dict(u=jnp.zeros(2), v=jnp.zeros(())),
        )

    e = bx.hypergradient(bx.Followers(tree, data), jnp.array([1.0, 2.0]))
    np.testing.assert_allclose(e.lower.y["u"], np.tile([1.0, 2.0], (4, 1)))
    np.testing.assert_allclose(e.value, 3 * 2.5)
    np.testing.assert_allclose(e.grad, [2.5, 2.5])


def resized(d):
    """Any number of variables and rows; one row keeps them from all being zero."""
    n = len(d["c"])
    rows = jnp.concatenate([d["A"], -jnp.eye(n)])
    return bx.Problem(
        lambda x, y: jnp.sum(d["c"] * y) * x[0] + jnp.sum(y**2),
        lambda x, y: 0.5 * jnp.sum(d["h"] * y**2) + jnp.sum(d["c"] * y) * (x[1] - 2),
        bx.Polyhedron(A=rows, b=jnp.concatenate([d["b"], jnp.zeros(n)])),
    )


def sized(rng, sizes):
    """Data of followers with so many variables and rows."""
    return [
        dict(
            A=rng.uniform(0, 1, size=(k, n)), b=rng.uniform(0.2, 1, size=k),
            c=rng.uniform(0.5, 1, size=n), h=rng.uniform(1, 2, size=n),
        )
        for n, k in sizes
    ]  # fmt: skip


def test_followers_of_different_sizes_are_each_one_alone():
    sizes = [(2, 1), (4, 3), (3, 0), (1, 2)]
    data = sized(np.random.default_rng(8), sizes)
    e = bx.hypergradient(bx.Followers.padded(resized, data), X)
    alone = [bx.hypergradient(resized(d), X) for d in data]
    check_mean(e, alone)
    for i, ((n, _), one) in enumerate(zip(sizes, alone, strict=True)):
        np.testing.assert_allclose(e.lower.y[i, :n], one.lower.y, atol=1e-12)
        np.testing.assert_array_equal(e.lower.y[i, n:], 0)
        np.testing.assert_allclose(e.lower.margin[i], one.margin, rtol=1e-6)


@pytest.mark.parametrize("seed", range(4))
def test_any_number_of_followers_of_any_sizes_is_the_sum_by_hand(seed):
    rng = np.random.default_rng(100 + seed)
    sizes = rng.integers((1, 0), (5, 4), size=(rng.integers(1, 12), 2)).tolist()
    data, x = sized(rng, sizes), jnp.asarray(rng.uniform(-1, 1, size=2))
    together = lambda x, ys, d: jnp.sum(ys) * x[0] + jnp.sum(ys**2)
    padded = bx.Followers.padded(resized, data, upper=together)
    e = bx.hypergradient(padded, x)

    def by_hand(x):
        """All in one lower level: the sum of all costs, and the rows of all."""
        parts = [resized(d) for d in data]
        ends = np.cumsum([n for n, _ in sizes])[:-1]
        cost = lambda x, y: sum(
            part.lower(x, own)
            for part, own in zip(parts, jnp.split(y, ends), strict=True)
        )
        rows = bx.Polyhedron(
            A=block_diag(*(part.constraints.A for part in parts)),
            b=jnp.concatenate([part.constraints.b for part in parts]),
        )
        upper = lambda x, y: jnp.sum(y) * x[0] + jnp.sum(y**2)
        return bx.hypergradient(bx.Problem(upper, cost, rows), x)

    one = by_hand(x)
    np.testing.assert_allclose(e.value, one.value, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(e.grad, one.grad, rtol=1e-12, atol=1e-12)


def test_padding_that_cannot_be_is_refused():
    with pytest.raises(ValueError, match="list with the data of each follower"):
        bx.Followers.padded(resized, dict(c=np.ones(2)))
    simplex = lambda d: bx.Problem(
        lambda x, y: jnp.sum(y), lambda x, y: jnp.sum(y**2), bx.Simplex(len(d))
    )
    with pytest.raises(ValueError, match="a Box, a Polyhedron or .*; got Simplex"):
        bx.Followers.padded(simplex, [np.ones(2), np.ones(3)])
