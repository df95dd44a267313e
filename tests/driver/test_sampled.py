"""Runs that see samples get to optima that are known, without a polish.

`F(x) = E (x - a)' D (x - a) / 2` near its optimum `E a`, with a stiff `D` and samples
that scatter: steps that fall too early never arrive there.
"""

import jax.numpy as jnp
import numpy as np
import pytest

import bilevax as bx

COUNT, SIZE = 200, 6
STIFF = np.geomspace(1.0, 50.0, SIZE)
RNG = np.random.default_rng(1)
AIMS = RNG.normal(size=SIZE) + 0.3 * RNG.normal(size=(COUNT, SIZE))
SHIFTS = RNG.normal(size=(COUNT, SIZE)) / 3
STEPS = np.diff(np.eye(SIZE), axis=0)
# So wide that no row is active on the way.
RAMPS = bx.Polyhedron(A=np.concatenate([STEPS, -STEPS]), b=np.full(10, 20.0))
FAR = 2.0 * np.where(np.arange(SIZE) % 2, 1.0, -1.0)


def cost(y, aim):
    return 0.5 * jnp.sum(STIFF * (y - aim) ** 2)


def one_model(batch):
    """All rows share one answer."""
    return bx.Problem(
        lambda x, y: jnp.mean(0.5 * jnp.sum(STIFF * (y - batch) ** 2, axis=1)),
        lambda x, y: 0.5 * jnp.sum((y - x) ** 2),
        RAMPS,
    )


def one_follower(d):
    """Each row has an answer of its own."""
    return bx.Problem(
        lambda x, y: cost(y, d["aim"] + d["shift"]),
        lambda x, y: 0.5 * jnp.sum((y - x - d["shift"]) ** 2),
        RAMPS,
    )


PROBLEMS = {
    "from_data": bx.StochasticProblem.from_data(AIMS, 10, one_model),
    "from_data in epochs": bx.StochasticProblem.from_data(
        AIMS, 10, one_model, epochs=True
    ),
    "followers": bx.Followers(one_follower, dict(aim=AIMS, shift=SHIFTS)).minibatch(10),
}
BEST = AIMS.mean(axis=0)
LEAST = 0.5 * np.sum(STIFF * AIMS.var(axis=0))


@pytest.mark.parametrize("name", PROBLEMS)
def test_ds_blo_alone_arrives_at_the_mean_of_the_samples(name):
    gaps = []
    for steps in (300, 1000):
        s = bx.solve(
            PROBLEMS[name], bx.DSBLO(), FAR, key=0, num_steps=steps, polish=False
        )
        gaps.append(s.value / LEAST - 1)
    assert 0 < gaps[1] < gaps[0] < 5e-3
    assert gaps[1] < 2e-3


def test_steps_of_a_sampled_run_fall_as_far_as_samples_resolve():
    """To three over their number and linearly to zero, or as was asked for."""
    rest = 1 - 999 / 1000
    falls = ((None, (3 / 1000) ** (998 / 999) * rest), (1e-2, 1e-2 ** (998 / 999)))
    for decay, share in falls:
        method = bx.DSBLO(decay=decay)
        s = bx.solve(
            PROBLEMS["followers"], method, FAR, key=0, num_steps=1000, polish=False
        )
        moves = s.history["move"]
        np.testing.assert_allclose(moves[-1] / moves[1], share, rtol=0.05)
