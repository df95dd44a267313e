"""The INGD family against its recursions and known numbers."""

import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

import bilevax as bx
from bilevax._methods.search import shortest_between

from .. import zoo
from ..ensembles import Noise, ensemble, noisy_kink, weighted_l1

# One object, so that it compiles once per method.
KINK = zoo.t1()
START = jnp.array([2.0])
# The Lipschitz constant of the weighted l1 function, the length of its weights.
LIPSCHITZ = 1.9621
WEIGHTS = np.arange(1, 11) / 10
# Just below the smallest weight: at equality rounding would decide where a run ends.
EPS = 0.0999


def reference(perturbed: bool, rng) -> tuple[int, int, float]:
    """INGD (or the method of Davis et al.) on the weighted l1 function, in NumPy.

    Steps, gradients and the last value, with `delta = 0.1`, `eps = EPS`, from the ones.
    """
    f, grad = lambda x: WEIGHTS @ np.abs(x), lambda x: WEIGHTS * np.sign(x)
    delta = 0.1

    def ball():
        u = rng.normal(size=10)
        return u / np.linalg.norm(u) * rng.uniform() ** 0.1

    x, steps, gradients = np.ones(10), 0, 0
    while True:
        steps, gradients = steps + 1, gradients + 1
        m = grad(x + delta * ball()) if perturbed else grad(x)
        while True:
            size = np.linalg.norm(m)
            if size <= EPS:
                return steps, gradients, f(x)
            ahead = x - delta * m / size
            if f(x) - f(ahead) >= delta * size / 4:
                break
            end = m
            if perturbed:
                share = 1 - (1 - size**2 / (128 * LIPSCHITZ**2)) ** 2
                end = m + 0.5 * size * np.sqrt(share) * ball()
            g = grad(x - rng.uniform() * delta * end / np.linalg.norm(end))
            gradients += 1
            if perturbed:
                gap = m - g
                along = np.clip(m @ gap / max(gap @ gap, 1e-300), 0, 1)
                m = m - along * gap
            else:
                bound = 4 * LIPSCHITZ**2
                b = (bound - size**2) / (bound + 2 * size**2)
                m = b * m + (1 - b) * g
        x = ahead


def statistics(method, count=40):
    """Steps, gradients and last values of `count` runs on the weighted l1 function."""
    runs = ensemble(weighted_l1(), method, jnp.ones(10), count, 90)
    assert np.all(runs.state.over)
    return np.stack([runs.busy, runs.gradients, runs.state.value], axis=1)


def agree(a, b):
    """Whether the means of two samples agree to four standard errors."""
    error = np.sqrt(a.var(axis=0) / len(a) + b.var(axis=0) / len(b))
    return np.all(np.abs(a.mean(axis=0) - b.mean(axis=0)) < 4 * error)


def test_ingd_certifies_the_weighted_l1_function():
    found = statistics(bx.INGD(0.1, EPS, LIPSCHITZ))
    rng = np.random.default_rng(0)
    assert agree(found, np.array([reference(False, rng) for _ in range(200)]))
    steps, gradients, value = found.mean(axis=0)
    assert 57 <= steps <= 60
    assert 590 <= gradients <= 870
    assert 0.010 <= value <= 0.031


def test_perturbed_ingd_certifies_the_weighted_l1_function():
    found = statistics(bx.PerturbedINGD(0.1, EPS, LIPSCHITZ))
    rng = np.random.default_rng(0)
    assert agree(found, np.array([reference(True, rng) for _ in range(200)]))
    steps, gradients, value = found.mean(axis=0)
    assert 52 <= steps <= 55
    # Five independent runs took 230 to 300 gradients; the mean of many is lower.
    assert 0.75 * 230 <= gradients <= 300
    assert 0.018 <= value <= 0.029
    # Half of the gradients of INGD or less, which is what shortest vectors are for.
    averaging = statistics(bx.PerturbedINGD(0.1, EPS, LIPSCHITZ, variant="tian"))
    assert gradients < 0.5 * averaging[:, 1].mean()
    assert 57 <= averaging[:, 0].mean() <= 60


def test_what_they_certify_is_a_goldstein_point():
    problem = weighted_l1()
    for method in (bx.INGD(0.1, 0.1), bx.PerturbedINGD(0.1, 0.1)):
        s = bx.solve(
            problem, method, np.ones(10), key=jr.key(0), num_steps=90, polish=False
        )
        # The smallest weight is 0.1, so the bound may hold with equality.
        measure = bx.certify(problem, s.x, 0.1, key=jr.key(1)).measure
        assert measure <= 0.1 * (1 + zoo.EXACT)
        # It stays there and works no more.
        assert s.history["move"][-1] == 0
        assert s.history["lower_solves"][-1] == 0
        moves = s.history["move"][s.history["move"] > 0]
        np.testing.assert_allclose(moves, 0.1, rtol=1e-9)


def test_the_shortest_vector_of_a_segment():
    a, b = {"u": jnp.array([1.0, 1.0])}, {"u": jnp.array([-1.0, 1.0])}
    np.testing.assert_allclose(shortest_between(a, b)["u"], [0.0, 1.0], atol=1e-15)
    far = {"u": jnp.array([3.0, 1.0])}
    np.testing.assert_allclose(shortest_between(a, far)["u"], a["u"])
    np.testing.assert_allclose(shortest_between(a, a)["u"], a["u"])


@pytest.mark.parametrize("kind", [bx.StochasticINGD, bx.PerturbedStochasticINGD])
def test_explicit_constants_give_the_recursion(kind):
    p, q, beta, steps, key = 10.0, 10.0, 0.9, 60, jr.key(3)
    s = bx.solve(KINK, kind(p, q, beta), START, key=key, num_steps=steps, polish=False)
    run_key = jr.fold_in(jr.split(key, 3)[2], 0)
    blur = 1e-3 / p if kind is bx.PerturbedStochasticINGD else 0.0
    x, m = 2.0, None
    for t in range(steps):
        _, _, segment_key, direction_key = jr.split(jr.fold_in(run_key, t), 4)
        ahead = x if m is None else x - m / (p * abs(m) + q)
        u = float(bx.UniformBall(1.0).sample(jnp.zeros(1), key=direction_key)[0])
        end = ahead if m is None else ahead + blur * u
        at = x + float(jr.uniform(segment_key)) * (end - x)
        grad = at / 2 + 1 / 2 - (1.0 if at < 0 else 0.0)
        m = grad if m is None else beta * m + (1 - beta) * grad
        x = ahead
    np.testing.assert_allclose(s.x[0], x, rtol=zoo.EXACT)
    assert s.history.totals["lower_solves"] == steps
    assert np.all(s.history["move"] <= 1 / p)


def test_normalised_momentum_stays_off_the_kink_by_what_its_constants_allow():
    # The tilted run is DS-BLO; without a tilt, or with blurred segments, the distance
    # is of the same size.
    rows = (
        (2000, 0.9, 10, 10, 0.025),
        (2000, 0.9, 1, 10, 0.030),
        (5000, 0.99, 100, 20, 0.011),
    )
    for steps, beta, p, q, expected in rows:
        for method in (
            bx.DSBLO(p, q, beta, perturbation=bx.Gaussian(0.01)),
            bx.StochasticINGD(p, q, beta),
            bx.PerturbedStochasticINGD(p, q, beta),
        ):
            x = ensemble(KINK, method, START, 20, steps).state.x
            assert 0.5 * expected < float(jnp.mean(jnp.abs(x))) < 1.5 * expected


def test_a_random_iterate_lies_a_window_before_the_drawn_step():
    kept = []
    for window in (0, 1000):
        s = bx.solve(
            KINK, bx.StochasticINGD(window=window), START, key=jr.key(5),
            polish=False, output="random",
        )  # fmt: skip
        kept.append(float(s.x[0]))
    # A window longer than the run keeps the first iterate, which stands still.
    assert kept[1] == 2.0
    assert kept[0] != 2.0


@pytest.mark.parametrize("kind", [bx.DSIGD, bx.INGD, bx.PerturbedINGD])
def test_methods_that_compare_values_refuse_samples(kind):
    problem = bx.StochasticProblem(Noise(), noisy_kink, noisy_kink(jnp.zeros(())))
    with pytest.raises(ValueError, match=f"{kind.__name__} compares values"):
        bx.solve(problem, kind(), START, key=jr.key(0))


def test_constants_that_belong_together_are_asked_for_together():
    with pytest.raises(ValueError, match="`delta` and `eps`"):
        bx.INGD(delta=0.1)
    with pytest.raises(ValueError, match="`delta` and `eps`"):
        bx.PerturbedINGD(eps=0.1)
    with pytest.raises(ValueError, match="variant"):
        bx.PerturbedINGD(variant="none")
    for kind in (bx.StochasticINGD, bx.PerturbedStochasticINGD):
        with pytest.raises(ValueError, match="`p` and `q`"):
            kind(p=1.0)
