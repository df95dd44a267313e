"""The step sizes of Auto-PGD, by hand and against plain Python."""

import equinox as eqx
import jax.numpy as jnp
import numpy as np

from bilevax.adversarial.attacks.apgd import APGD, checkpoints, must_halve
from bilevax.adversarial.attacks.attack import Target
from bilevax.adversarial.attacks.boxes import image_keys, random_start
from bilevax.adversarial.attacks.losses import (
    margin,
)

from .. import zoo
from ..classifiers import KEY, linear


def test_checkpoints_by_hand():
    assert checkpoints(100) == [22, 41, 57, 70, 80, 87, 93, 99]
    # Shares of 50: 11, 20.5, 28.5, 35, 40, 43.5, 46.5, 49.5.
    assert checkpoints(50) == [11, 21, 29, 35, 40, 44, 47, 50]
    assert checkpoints(1) == [1]
    for steps in range(1, 120):
        marks = checkpoints(steps)
        assert marks == sorted(set(marks))
        assert 1 <= marks[0]
        assert marks[-1] <= steps


def test_a_step_is_halved_for_few_rises_or_for_standing_still():
    rises = jnp.array([14, 15, 20, 20, 20])
    halved = jnp.array([True, True, False, True, False])
    improved = jnp.array([True, True, False, False, True])
    # Three quarters of 20 are 15: 14 rises are too few, 15 are enough.
    expected = [True, False, True, False, False]
    np.testing.assert_array_equal(
        must_halve(rises, jnp.asarray(20), halved, improved), expected
    )


def final_state(predict, model, images, epsilon, steps, loss=margin):
    labels = jnp.zeros(len(images), int)
    target = Target(predict, model, images, labels, loss)
    keys = image_keys(KEY, jnp.arange(len(images)))
    return eqx.filter_jit(APGD(epsilon, steps=steps).climb)(target, keys)


def test_a_linear_loss_is_done_after_one_step_and_halves_at_every_checkpoint():
    # The first step of 2 eps reaches the corner; nothing rises after that.
    images = jnp.full((2, 2, 2, 1), 0.5)
    model = jnp.array([[1.0, -1.0], [2.0, 0.5], [-1.0, 1.0], [0.3, 0.0]]), jnp.zeros(2)
    # Of the stretches 1, 1, 1, 1 of four steps, the first is all rise.
    for steps, marks, halvings in ((100, 8, 8), (4, 4, 3)):
        assert len(checkpoints(steps)) == marks
        state = final_state(linear, model, images, 0.1, steps)
        np.testing.assert_allclose(state.step_size, 0.2 / 2.0**halvings, rtol=1e-12)
        corner = 0.1 * np.sign(np.array([-2, -1.5, 2, -0.3])).reshape(2, 2, 1)
        np.testing.assert_allclose(state.best.perturbation, [corner, corner])


def plain_apgd(start, epsilon, steps, value, slope):
    """Algorithm 1 of the paper for one number without pixel limits, in plain Python."""
    project = lambda d: min(max(d, -epsilon), epsilon)
    length, now, before = 2 * epsilon, start, start
    best, best_at_mark, mark, rises, halved = start, value(start), 0, 0, False
    for k in range(1, steps + 1):
        ahead = project(now + length * np.sign(slope(now)))
        if k > 1:
            ahead = project(now + 0.75 * (ahead - now) + 0.25 * (now - before))
        rises += value(ahead) > value(now)
        before, now = now, ahead
        best = now if value(now) > value(best) else best
        if k in checkpoints(steps):
            few = rises < 0.75 * (k - mark)
            still = not halved and value(best) == best_at_mark
            halved = few or still
            if halved:
                length, now = length / 2, best
            best_at_mark, mark, rises = value(best), k, 0
    return now, best, length


def test_apgd_follows_its_algorithm_to_a_maximum_inside_the_box():
    # Class 1 is ahead by -(d - 0.03)^2 - 1 at 0.5 + d: the best perturbation is 0.03.
    def bump(model, images):
        ahead = -((images[:, 0, 0, 0] - model) ** 2)
        return jnp.stack([jnp.ones_like(ahead), ahead], axis=-1)

    images, epsilon = jnp.full((4, 1, 1, 1), 0.5), 0.1
    keys = image_keys(KEY, jnp.arange(4))
    starts = random_start(images, jnp.asarray(epsilon), keys)[:, 0, 0, 0]
    for steps, error in ((5, 0.05), (100, 2e-3)):
        state = final_state(bump, jnp.asarray(0.53), images, epsilon, steps)
        expected = [
            plain_apgd(
                float(start), epsilon, steps,
                lambda d: -((d - 0.03) ** 2) - 1, lambda d: 0.03 - d,
            )
            for start in starts
        ]  # fmt: skip
        now, best, length = np.array(expected).T
        np.testing.assert_allclose(state.step_size, length, rtol=1e-12)
        np.testing.assert_allclose(state.now.perturbation.ravel(), now, atol=zoo.EXACT)
        np.testing.assert_allclose(
            state.best.perturbation.ravel(), best, atol=zoo.EXACT
        )
        assert np.abs(best - 0.03).max() < error
        assert bool(jnp.all(state.found.robust))
