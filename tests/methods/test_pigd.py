"""PIGD and the zeroth-order method: published behaviour, defaults, failures."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

import bilevax as bx
from bilevax._methods.zero_order import difference
from bilevax.experiments.families import Member

from .. import zoo
from ..affine import Affine, states
from .test_ds_blo import kink

SEEDS = 5
# The tight family, seed 0: its best value, and that of a local minimum near zero.
BEST, LOCAL = -2.144207, -2.058496


def test_the_radius_and_the_step_set_the_distance_to_the_kink():
    for radius, step_size, listed in (
        (0.1, 0.05, 0.028),
        (0.1, 0.01, 0.012),
        (0.01, 0.01, 0.004),
    ):
        method = bx.PIGD(radius=radius, step_size=step_size)
        x, record = states(kink(), method, [2.0], 2000, SEEDS)
        mean = float(np.abs(x[:, -500:]).mean())
        assert listed / 1.5 < mean < listed * 1.5
    assert np.all(np.asarray(record.lower_solves) == 1)
    assert np.all(np.asarray(record.penalty_solves) == 1)
    assert int(np.sum(record.hessian_products)) == 0


def block_means(means):
    """One mean per block of ten, over the last fifty blocks."""
    return float(np.abs(np.asarray(means)[:, 9::10][:, -50:]).mean())


def test_the_clipped_loop_near_the_kink():
    method = bx.PIGD(loop="clipped", clip=0.01, step_size=0.005, block=10)
    means, _ = states(kink(), method, [2.0], 4000, SEEDS, lambda s: s.drift.mean)
    assert 0.0095 / 1.5 < block_means(means) < 0.0095 * 1.5


def test_values_alone_near_the_kink():
    method = bx.ZeroOrder(radius=0.02, clip=0.01, step_size=0.005, block=10)
    means, record = states(kink(), method, [2.0], 4000, SEEDS, lambda s: s.drift.mean)
    assert 0.016 / 1.5 < block_means(means) < 0.016 * 1.5
    assert np.all(np.asarray(record.lower_solves) == 2)
    assert int(np.sum(record.upper_gradients)) == 0


def test_differences_are_unbiased():
    problem = Member("tight", 10, 0).problem
    x, radius = jnp.asarray(np.random.default_rng(3).normal(size=10)), 1e-3
    e = bx.hypergradient(problem, x)
    # No kink within reach, so F is a quadratic there and its mean over a ball has the
    # gradient of F itself.
    assert e.margin > 20 * radius
    draw = lambda key: difference(problem, x, radius, key, e.lower)
    draws, _ = jax.jit(jax.vmap(draw))(jr.split(jr.key(0), 4000))
    spread = np.std(draws.grad, axis=0) / np.sqrt(4000)
    assert np.all(np.abs(np.mean(draws.grad, axis=0) - e.grad) < 4.5 * spread)
    # Each draw is 10 <grad, w> w, so its squared length is 10 |grad|^2 on average.
    square = np.mean(np.sum(draws.grad**2, axis=1))
    np.testing.assert_allclose(square, 10 * np.sum(e.grad**2), rtol=0.1)


def test_values_alone_leave_the_corner_of_an_empty_lower_level():
    # 0 <= y <= 2 - x: empty where an entry of x is above 2.
    eye, zeros = np.eye(2), np.zeros((2, 2))
    problem = bx.Problem(
        lambda x, y: jnp.sum(y**2) + jnp.sum((x - 1) ** 2),
        lambda x, y: 0.5 * jnp.sum((y - 1) ** 2),
        bx.Polyhedron(
            A=np.concatenate([eye, -eye]),
            B=np.concatenate([eye, zeros]),
            b=np.array([2.0, 2.0, 0.0, 0.0]),
        ),
    )
    s = bx.solve(
        problem, bx.ZeroOrder(), np.array([7.0, 5.0]), key=jr.key(0), polish=False
    )
    assert s.success
    assert np.any(s.history["recovered"] > 0)
    np.testing.assert_allclose(s.x, 1.5, atol=1e-2)


@functools.cache
def solved(method_name, problem_name, seed=0):
    method = METHODS[method_name]
    problem, x0 = PROBLEMS[problem_name]
    return bx.solve(problem, method, x0, key=jr.key(seed), polish=False)


METHODS = {
    "PIGD": bx.PIGD(),
    "clipped": bx.PIGD(loop="clipped"),
    "ZeroOrder": bx.ZeroOrder(),
}
PROBLEMS = {
    "kink": (kink(), jnp.array([2.0])),
    "tight": (Member("tight", 10, 0).problem, np.ones(10)),
}


@pytest.mark.parametrize("name", list(METHODS))
def test_no_argument_is_needed_at_the_kink(name):
    for seed in range(3):
        assert abs(float(solved(name, "kink", seed).x[0])) < 1e-2


@pytest.mark.parametrize("name", list(METHODS))
def test_no_argument_is_needed_on_the_family_of_the_paper(name):
    for seed in range(3):
        s = solved(name, "tight", seed)
        assert s.success
        assert min(abs(s.value - BEST), abs(s.value - LOCAL)) < 1e-2


def test_a_run_has_no_units():
    plain = solved("PIGD", "kink", 1)
    for units in ((8.0, 1.0, 1.0), (1.0, 2.0**20, 1.0), (1.0, 1.0, 2.0**-20)):
        x_unit, f_unit, _ = units
        scaled = bx.solve(
            kink(*units), METHODS["PIGD"], jnp.array([2.0 * x_unit]), key=jr.key(1),
            polish=False,
        )  # fmt: skip
        np.testing.assert_allclose(
            scaled.history["value"] / f_unit, plain.history["value"], rtol=1e-6
        )
        np.testing.assert_allclose(
            scaled.history["move"] / x_unit, plain.history["move"], rtol=1e-5
        )


def test_the_equality_oracle_finds_the_closed_form():
    affine = Affine()
    method = bx.PIGD(oracle="equality", step_size=0.2, radius=1e-6, a1=1e6)
    s = bx.solve(
        affine.problem, method, np.zeros(10), key=jr.key(0), num_steps=200, polish=False
    )
    assert affine.error(s.x) < 1e-5
    assert s.history["penalty_solves"].sum() == 200


def test_without_a_gradient_x_stays():
    concave = bx.Problem(
        lambda x, y: jnp.sum(x**2) - 5 * jnp.sum(y**2),
        zoo.Clipped(),
        bx.Polyhedron(A=[[1.0]], b=[0.0]),
    )
    method = bx.PIGD(a1=1.0, radius=1e-3, step_size=0.1)
    x, record = states(concave, method, [-1.0], 5, 1)
    assert np.all(np.asarray(x) == -1.0)
    assert np.all(np.asarray(record.status) == bx.Status.not_strongly_convex._value)


def test_misuse_is_named():
    with pytest.raises(ValueError, match=r"oracle=\"equality\".* 5 inequality rows"):
        bx.solve(
            PROBLEMS["tight"][0],
            bx.PIGD(oracle="equality"),
            np.ones(10),
            key=jr.key(0),
        )
    wrong: dict[str, Any]
    for wrong in (
        dict(oracle="exact"),
        dict(loop="plain"),
        dict(clip=0.1),
        dict(loop="clipped", clip=0.1),
        dict(a2=1.0),
        dict(block=0),
    ):
        with pytest.raises(ValueError, match="`"):
            bx.PIGD(**wrong)
    with pytest.raises(ValueError, match="belong together"):
        bx.ZeroOrder(clip=0.1)
