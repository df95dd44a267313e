"""[D]SIGD, [S]SIGD and the proximal subgradient method against their known numbers."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

import bilevax as bx
from bilevax.experiments.families import Member

from .. import zoo
from ..ensembles import Noise, Still, ensemble, interval, noisy_kink

# One object, so that it compiles once per method.
KINK = zoo.t1()
START = jnp.array([2.0])
# The best known value of the tight family at dimension 10, seed 0.
BEST = -2.144207


def run_key(key):
    """The key of the first start of `solve`, and that of its whole run."""
    key = jr.fold_in(jr.split(key, 3)[2], 0)
    return key, jr.fold_in(key, 2**31 - 1)


def slope(x, q):
    """The gradient of the tilted analytic kink, where `y* = min(x - q, 0)`."""
    return x / 2 + 1 / 2 - (1.0 if x < q else 0.0)


def value(x, q):
    return x**2 / 4 + x / 2 - min(x - q, 0.0)


def test_ssigd_with_a_constant_step_is_the_recursion_of_the_paper():
    law, key, steps = bx.Gaussian(0.01), jr.key(3), 40
    method = bx.SSIGD(0.3, law)
    s = bx.solve(KINK, method, START, key=key, num_steps=steps, polish=False)
    q = float(law.sample(jnp.zeros(1), key=run_key(key)[1])[0])
    x = 2.0
    for _ in range(steps):
        x -= 0.3 * slope(x, q)
    np.testing.assert_allclose(s.x[0], x, rtol=zoo.EXACT)
    assert s.history.totals["lower_solves"] == steps
    assert s.history.totals["samples"] == 0


def test_ssigd_stays_off_the_kink_in_proportion_to_its_step():
    # Gradient noise 0.1, X = [-5, 5]; the distances were measured independently.
    problem = bx.StochasticProblem(Noise(), noisy_kink)
    distances = []
    for steps, expected in ((400, 0.075), (1600, 0.034), (6400, 0.015)):
        method = bx.SSIGD(5 / np.sqrt(steps), bx.Gaussian(0.01))
        state = ensemble(problem, method, START, 20, steps).state
        distances.append(float(jnp.mean(jnp.abs(state.x - state.q))))
        assert 0.5 * expected < distances[-1] < 1.5 * expected
    ratios = np.array(distances[:-1]) / np.array(distances[1:])
    assert np.all((ratios > 1.5) & (ratios < 3))


def test_dsigd_is_the_recursion_of_armijo():
    law, key, steps, sigma = bx.Gaussian(0.01), jr.key(3), 12, 0.1
    method = bx.DSIGD(1.0, law, sigma=sigma)
    s = bx.solve(KINK, method, START, key=key, num_steps=steps, polish=False)
    q = float(law.sample(jnp.zeros(1), key=run_key(key)[1])[0])
    x, solves = 2.0, 1
    for _ in range(steps):
        a, g = 1.0, slope(x, q)
        while True:
            solves += 1
            if value(x - a * g, q) <= value(x, q) - sigma * a * g * g:
                break
            a /= 2
        x -= a * g
    np.testing.assert_allclose(s.x[0], x, rtol=zoo.EXACT)
    assert s.history.totals["lower_solves"] == solves
    # One gradient per accepted point, and the first.
    assert s.history.totals["upper_gradients"] == steps + 1


@pytest.mark.parametrize("sigma", [0.1, 1e-4])
def test_dsigd_ends_at_the_tilted_kink(sigma):
    law = bx.Gaussian(0.01)
    for x0 in (2.0, 0.9, -1.7):
        key = jr.key(int(10 * abs(x0)))
        s = bx.solve(
            KINK, bx.DSIGD(1.0, law, sigma=sigma), jnp.array([x0]), key=key,
            num_steps=100, polish=False,
        )  # fmt: skip
        q = float(law.sample(jnp.zeros(1), key=run_key(key)[1])[0])
        assert abs(float(s.x[0]) - q) < 1e-3
        # Once no trial is accepted nothing more is tried.
        assert s.history["lower_solves"][-1] == 0


def test_dsigd_reaches_the_best_value_of_the_tight_family():
    s = bx.solve(
        Member("tight", 10, 0).problem, bx.DSIGD(), np.ones(10), key=jr.key(0),
        num_starts=8, polish=False,
    )  # fmt: skip
    assert BEST - 1e-6 < s.value < BEST + 1e-3


class NoisyProduct(eqx.Module):
    noise: jax.Array

    def __call__(self, x, y):
        return jnp.abs(x[0] ** 2 - 1) + self.noise * x[0]


def noisy_product(noise):
    return bx.Problem(
        NoisyProduct(noise), Still(), y0=np.zeros(1), domain=interval(-2, 2)
    )


def squared_moreau(x):
    """`|grad phi_{1/4}|^2` of `|x^2 - 1|`, whose proximal point has a closed form."""
    a = jnp.abs(x[0])
    near = jnp.where(a >= 1.5, 2 * a / 3, jnp.where(a <= 0.5, 2 * a, 1.0))
    return (4 * (a - near)) ** 2


def test_the_closed_form_of_the_moreau_measure():
    problem = noisy_product(jnp.zeros(()))
    free = bx.Problem(problem.upper, problem.lower, y0=problem.y0)
    for x in (1.9, 1.2, 0.8, 0.3):
        measured = bx.moreau(free, jnp.array([x]), 0.25)
        np.testing.assert_allclose(
            measured**2, squared_moreau(jnp.array([x])), rtol=1e-4, atol=1e-10
        )


def test_the_proximal_subgradient_method_has_the_rate_of_its_theorem():
    problem = bx.StochasticProblem(Noise(), noisy_product)
    lengths, means = (100, 400, 1600, 6400), []
    for steps, expected in zip(lengths, (0.54, 0.27, 0.145, 0.082), strict=True):
        method = bx.ProximalSubgradient(0.2 / np.sqrt(steps + 1))
        runs = ensemble(problem, method, START, 20, steps, squared_moreau)
        means.append(runs.mean.mean())
        assert 0.5 * expected < means[-1] < 1.5 * expected
    rate = np.polyfit(np.log(lengths), np.log(means), 1)[0]
    assert -0.6 < rate < -0.4


def test_the_proximal_subgradient_method_stays_off_the_kink_like_ssigd():
    problem, steps = bx.StochasticProblem(Noise(), noisy_kink), 1600
    method = bx.ProximalSubgradient(5 / np.sqrt(steps))
    x = ensemble(problem, method, START, 20, steps).state.x
    assert 0.5 * 0.034 < float(jnp.mean(jnp.abs(x))) < 1.5 * 0.034
