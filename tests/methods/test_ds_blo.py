"""DS-BLO: the paper's recursion, its defaults, and the optima it must find."""

from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

import bilevax as bx
from bilevax.experiments.families import Member

from .. import zoo

# Best known values of the tight family at dimension 10, seeds 0 to 2.
TIGHT = (-2.144207, -2.529289, -2.495225)
UNIFORM = (-1.082985, -1.034786, -0.984044)


class ScaledUpper(eqx.Module):
    """`c_f f(x / c_x, y)` for the analytic kink."""

    x_unit: jax.Array
    f_unit: jax.Array

    def __call__(self, x, y):
        z = x[0] / self.x_unit
        return self.f_unit * (z**2 / 4 + z / 2 - y[0])


class ScaledLower(eqx.Module):
    x_unit: jax.Array
    g_unit: jax.Array

    def __call__(self, x, y):
        return self.g_unit * 0.5 * (y[0] - x[0] / self.x_unit) ** 2


def kink(x_unit=1.0, f_unit=1.0, g_unit=1.0):
    # Of one type, whole numbers too: other units are then no other program.
    x, f, g = (jnp.asarray(unit, float) for unit in (x_unit, f_unit, g_unit))
    return bx.Problem(
        ScaledUpper(x, f),
        ScaledLower(x, g),
        bx.Polyhedron(A=[[1.0]], b=[0.0]),
    )


def coupled_kink():
    return bx.Problem(
        lambda x, y: x[0] ** 2 / 4 - x[0] / 2 + y[0],
        lambda x, y: 0.5 * y[0] ** 2,
        bx.Polyhedron(A=[[-1.0]], B=[[1.0]], b=[0.0]),
    )


@pytest.mark.parametrize("make", [kink, coupled_kink], ids=["T1", "T1b"])
def test_the_analytic_kink(make):
    problem = make()
    for seed in range(3):
        s = bx.solve(problem, bx.DSBLO(), jnp.array([2.0]), key=jr.key(seed))
        assert s.success
        assert abs(float(s.stochastic[0][0])) < 1e-2
        assert abs(float(s.x[0])) < 1e-6
        assert abs(s.value) < 1e-6


def test_the_family_of_the_paper():
    for seed, (tight, uniform) in enumerate(zip(TIGHT, UNIFORM, strict=True)):
        for family, best, starts in (("tight", tight, 8), ("uniform", uniform, 1)):
            s = bx.solve(
                Member(family, 10, seed).problem,
                bx.DSBLO(),
                np.ones(10),
                key=jr.key(seed),
                num_starts=starts,
            )
            assert abs(s.value - best) < 1e-4
            # The listed values are rounded to six digits.
            assert s.value < best + 1e-6
            again = bx.hypergradient(Member(family, 10, seed).problem, s.x)
            np.testing.assert_allclose(again.value, s.value, rtol=zoo.EXACT)


def test_a_run_has_no_units():
    plain = bx.solve(kink(), bx.DSBLO(), jnp.array([2.0]), key=jr.key(1), polish=False)
    for units in ((8.0, 1, 1), (2.0**-10, 1, 1), (1, 2.0**20, 1), (1, 1, 2.0**-20)):
        x_unit, f_unit, _ = units
        scaled = bx.solve(
            kink(*units), bx.DSBLO(), jnp.array([2.0 * x_unit]), key=jr.key(1),
            polish=False,
        )  # fmt: skip
        np.testing.assert_allclose(scaled.x / x_unit, plain.x, rtol=1e-6, atol=1e-12)
        np.testing.assert_allclose(
            scaled.history["value"] / f_unit, plain.history["value"], rtol=1e-6
        )
        np.testing.assert_allclose(
            scaled.history["move"] / x_unit, plain.history["move"], rtol=1e-6
        )


def test_explicit_constants_give_the_recursion_of_the_paper():
    gamma1, gamma2, beta, steps = 10.0, 10.0, 0.9, 60
    law = bx.Gaussian(0.01)
    method = bx.DSBLO(gamma1, gamma2, beta, perturbation=law)
    key, x0 = jr.key(3), jnp.array([2.0])
    s = bx.solve(kink(), method, x0, key=key, num_steps=steps, polish=False)

    # The same draws in plain Python, with the closed form of y*: y = min(x - q, 0).
    run_key = jr.fold_in(jr.split(key, 3)[2], 0)
    x, m = 2.0, None
    for t in range(steps):
        _, tilt_key, segment_key, _ = jr.split(jr.fold_in(run_key, t), 4)
        ahead = x if m is None else x - m / (gamma1 * abs(m) + gamma2)
        at = x + float(jr.uniform(segment_key)) * (ahead - x)
        q = float(law.sample(jnp.zeros(1), key=tilt_key)[0])
        grad = at / 2 + 1 / 2 - (1.0 if at < q else 0.0)
        m = grad if m is None else beta * m + (1 - beta) * grad
        x = ahead
    np.testing.assert_allclose(s.x[0], x, rtol=1e-9)
    assert s.history["lower_solves"].sum() == steps

    transform = bx.scale_by_normalised_momentum(gamma1, gamma2, beta)
    state = transform.init({"x": jnp.zeros(1)})
    m = None
    for grad in (1.0, -0.5, 0.25):
        step, state = transform.update({"x": jnp.array([grad])}, state)
        m = grad if m is None else beta * m + (1 - beta) * grad
        want = -m / (gamma1 * abs(m) + gamma2)
        np.testing.assert_allclose(jax.tree.leaves(step)[0], want, rtol=1e-12)


def test_the_constants_of_the_theorem_make_a_method():
    box = bx.Box(np.full(1, -3.0), np.full(1, 3.0))
    base = bx.theory.measure(kink(), box, box, sigma_f=0.0)
    inputs = bx.theory.algorithm_inputs(
        bx.theory.derived(base), eps=0.5, delta_bar=0.1, Delta=2.0
    )
    method = bx.DSBLO.from_theory(inputs, bx.UniformBall(1e-3))
    assert method.window == inputs.K
    s = bx.solve(
        kink(), method, jnp.array([2.0]), key=jr.key(0), num_steps=200, polish=False,
        output="random",
    )  # fmt: skip
    # So careful that 200 steps hardly leave the start, but downhill.
    assert 1.0 < float(s.x[0]) <= 2.0
    lengths = s.history["move"][1:]
    assert np.all(lengths <= 1 / inputs.gamma1)


def test_one_gamma_alone_is_refused():
    with pytest.raises(ValueError, match="gamma1"):
        bx.DSBLO(gamma1=1.0)


def sampled_kink(batch_size):
    """T1 with a linear term that is only right on average."""
    noise = np.random.default_rng(0).normal(size=400)
    noise = jnp.asarray(noise - noise.mean())

    def instance(batch):
        def upper(x, y):
            return x[0] ** 2 / 4 + x[0] / 2 - y[0] + jnp.mean(batch) * (x[0] + y[0])

        base = kink()
        return bx.Problem(upper, base.lower, base.constraints)

    return bx.StochasticProblem.from_data(noise, batch_size, instance), noise


def test_sampled_gradients_are_unbiased_and_their_variance_falls():
    x, variances = jnp.array([-0.7]), {}
    for size in (2, 8, 32):
        problem, noise = sampled_kink(size)
        gradient = jax.jit(
            jax.vmap(
                lambda k, p=problem: bx.hypergradient(p.draw(k), x, throw=False).grad[0]
            )
        )
        draws = np.asarray(gradient(jr.split(jr.key(size), 2000)))
        spread = draws.std() / np.sqrt(len(draws))
        # F' = x/2 + 1/2 - 1 at x < 0, where y* = x.
        assert abs(draws.mean() - (-0.85)) < 4 * spread
        variances[size] = draws.var()
        # d/dx of noise * (x + y*(x)) is 2 noise, so the variance is 4 var / size.
        np.testing.assert_allclose(draws.var(), 4 * noise.var() / size, rtol=0.15)
    assert variances[2] > variances[8] > variances[32]


def test_option_two_finds_the_same_optimum():
    problem, _ = sampled_kink(8)
    s = bx.solve(problem, bx.DSBLO(), jnp.array([2.0]), key=jr.key(0), num_steps=600)
    assert s.polish is None
    assert abs(float(s.x[0])) < 1e-2


class Noisy(eqx.Module):
    """An upper level with a linear term that vanishes on average."""

    upper: Callable
    shift: jax.Array

    def __call__(self, x, y):
        return self.upper(x, y) + self.shift @ jnp.concatenate([x, y])


def test_option_two_on_the_family_of_the_paper():
    base = Member("tight", 10, 0).problem
    noise = np.random.default_rng(0).normal(size=(500, 20))
    noise = jnp.asarray(noise - noise.mean(axis=0))

    def instance(rows):
        noisy = Noisy(base.upper, jnp.mean(rows, axis=0))
        return eqx.tree_at(lambda p: p.upper, base, noisy)

    problem = bx.StochasticProblem.from_data(noise, 16, instance)
    x = jnp.full(10, -0.3)
    gradient = jax.jit(
        jax.vmap(lambda key: bx.hypergradient(problem.draw(key), x, throw=False).grad)
    )
    draws = np.asarray(gradient(jr.split(jr.key(1), 2000)))
    spread = draws.std(axis=0) / np.sqrt(len(draws))
    exact = np.asarray(bx.hypergradient(base, x).grad)
    assert np.all(np.abs(draws.mean(axis=0) - exact) < 4.5 * spread)

    s = bx.solve(problem, bx.DSBLO(), np.ones(10), key=jr.key(0), num_steps=2000)
    assert TIGHT[0] - 1e-6 < s.value < TIGHT[0] + 2e-3


def test_a_random_iterate_can_be_returned():
    s = bx.solve(
        kink(), bx.DSBLO(), jnp.array([2.0]), key=jr.key(5), polish=False,
        output="random",
    )  # fmt: skip
    last = bx.solve(kink(), bx.DSBLO(), jnp.array([2.0]), key=jr.key(5), polish=False)
    assert s.success
    assert float(s.x[0]) != float(last.x[0])
    # It is one of the iterates: its distance to the end is at most what was left to go.
    assert abs(float(s.x[0]) - float(last.x[0])) <= last.history["move"].sum()


def test_tuning_uses_common_random_numbers():
    grid = (1e-3, 5e-2)
    found = bx.tune(
        kink(), None, jnp.array([2.0]), key=jr.key(0), grid=grid, num_steps=100
    )
    assert found.grid == grid
    assert isinstance(found.method, bx.DSBLO)
    assert float(found.method.first_step) == grid[int(np.argmin(found.values))]
    again = bx.solve(
        kink(), found.method, jnp.array([2.0]), key=jr.key(0), num_steps=100,
        polish=False,
    )  # fmt: skip
    np.testing.assert_allclose(again.value, min(found.values), rtol=1e-12)
    with pytest.raises(ValueError, match="gamma1"):
        bx.tune(kink(), None, jnp.array([2.0]), key=jr.key(0), parameter="gamma1")
