"""Every solve of a random quadratic program is right or says that it is not."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

import bilevax as bx

from .. import zoo
from ..quadratics import KINDS, kkt_residual, random_quadratic, reference

N, K, M = 6, 8, 3


@eqx.filter_jit
def evaluate(data):
    return bx.hypergradient(zoo.quadratic_problem(data), data["x"], throw=False)


@eqx.filter_jit
def evaluate_batch(data):
    one = lambda d: bx.hypergradient(zoo.quadratic_problem(d), d["x"], throw=False)
    return jax.vmap(one)(data)


def check(data, evaluation):
    """Right and successful; these programs are feasible and nowhere near a kink."""
    lower = evaluation.lower
    assert kkt_residual(data, np.asarray(lower.y), np.asarray(lower.multipliers)) < 1e-8
    assert bx.status_name(evaluation.status) == "successful"
    y, grad = reference(data, np.asarray(lower.active))
    error = np.linalg.norm(np.asarray(evaluation.grad) - grad)
    assert error <= 1e-8 * np.linalg.norm(grad)


@given(
    seed=st.integers(0, 2**32 - 1),
    kind=st.sampled_from(KINDS),
    digits=st.floats(0, 8),
)
@settings(
    max_examples=150,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
def test_random_programs_are_solved_and_differentiated(seed, kind, digits):
    rng = np.random.default_rng(seed)
    data = random_quadratic(rng, N, K, M, kind, 10**digits)
    check(data, evaluate({name: jnp.asarray(part) for name, part in data.items()}))


@pytest.mark.parametrize(("n", "k"), [(20, 10), (12, 24)])
def test_a_batch_of_random_programs(n, k):
    rng = np.random.default_rng(n + k)
    batch = [
        random_quadratic(rng, n, k, 4, rng.choice(KINDS), 10 ** rng.uniform(0, 8))
        for _ in range(60)
    ]
    stacked = {name: jnp.stack([d[name] for d in batch]) for name in batch[0]}
    out = evaluate_batch(stacked)
    for i, data in enumerate(batch):
        check(data, jax.tree.map(lambda leaf, i=i: leaf[i], out))


@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=40, deadline=None, derandomize=True)
def test_writing_a_row_twice_changes_nothing(seed):
    rng = np.random.default_rng(seed)
    data = random_quadratic(rng, N, K, M, "plain", 1e3)
    twice = dict(data)
    for name in ("A", "B", "b"):
        twice[name] = data[name].copy()
    i, j = rng.choice(K, 2, replace=False)
    once = evaluate({name: jnp.asarray(part) for name, part in data.items()})
    if once.lower.active[j] or once.lower.slack[j] <= 0:
        return
    for name in ("A", "B", "b"):
        twice[name][j] = 3.0 * data[name][i]
    out = evaluate({name: jnp.asarray(part) for name, part in twice.items()})
    assert bx.status_name(out.status) == "successful"
    np.testing.assert_allclose(out.value, once.value, rtol=zoo.EXACT)
    np.testing.assert_allclose(out.grad, once.grad, rtol=zoo.EXACT, atol=zoo.EXACT)
