"""Attacks on classifiers whose robust accuracy is known, and their parts by hand."""

import os
import subprocess
import sys

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bilevax.adversarial.apgd import APGD, apgd, checkpoints, must_halve
from bilevax.adversarial.attack import Attack, Target, worst
from bilevax.adversarial.boxes import image_keys, pixel_box, random_start, unit_range
from bilevax.adversarial.ensemble import robust_ensemble
from bilevax.adversarial.evaluate import evaluate
from bilevax.adversarial.losses import (
    Towards,
    correct,
    cross_entropy,
    dlr,
    kl_divergence,
    margin,
    targeted_dlr,
    targeted_margin,
    wrong_classes,
)
from bilevax.adversarial.pgd import pgd
from bilevax.adversarial.survivors import Aim, Crowd

from . import zoo

KEY = jax.random.key(7)
SHAPE = (3, 3, 2)
PIXELS = int(np.prod(SHAPE))


def linear(model, images):
    weights, shift = model
    return images.reshape(images.shape[0], -1) @ weights + shift


def perceptron(model, images):
    first, second, scale = model
    hidden = jax.nn.relu(images.reshape(images.shape[0], -1) @ first - 0.5)
    return scale * (hidden @ second)


def linear_case(classes, count, seed, noise=0.1):
    """A linear classifier, images, and labels that are mostly right."""
    rng = np.random.default_rng(seed)
    model = rng.normal(size=(PIXELS, classes)), rng.normal(size=classes)
    # Some pixels at the ends of their range, so that the box differs from the ball.
    images = np.clip(rng.uniform(-0.2, 1.2, size=(count, *SHAPE)), 0, 1)
    labels = np.argmax(linear(model, images), axis=-1)
    random = rng.integers(classes, size=count)
    return model, images, np.where(rng.uniform(size=count) < noise, random, labels)


def robust_exactly(model, images, labels, epsilon):
    """Linear differences of logits are smallest at a corner of the pixel box."""
    weights, _ = model
    low, high = (np.asarray(b).reshape(len(images), -1) for b in box(images, epsilon))
    logits = linear(model, images)
    robust = np.ones(len(images), bool)
    for other in range(weights.shape[1]):
        normal = (weights[:, labels] - weights[:, [other]]).T
        fall = np.minimum(normal * low, normal * high).sum(axis=-1)
        ahead = logits[np.arange(len(images)), labels] - logits[:, other] + fall
        robust &= (ahead > 0) | (labels == other)
        assert np.abs(ahead[labels != other]).min() > 1e-6, "no borderline image"
    return robust


def box(images, epsilon):
    return pixel_box(jnp.asarray(images), epsilon)


def perceptron_case(scale, count=48, classes=5):
    """A small network in float32 that labels its own images."""
    rng = np.random.default_rng(3)
    model = (
        jnp.asarray(rng.normal(size=(PIXELS, 24)), jnp.float32),
        jnp.asarray(rng.normal(size=(24, classes)), jnp.float32),
        jnp.asarray(scale, jnp.float32),
    )
    images = jnp.asarray(rng.integers(0, 256, size=(count, *SHAPE)), jnp.uint8)
    labels = jnp.argmax(perceptron(model, images.astype(jnp.float32) / 255), axis=-1)
    return model, images, labels


def assert_inside(images, epsilon, perturbation):
    low, high = box(images, epsilon)
    assert bool(jnp.all((low <= perturbation) & (perturbation <= high)))
    moved = jnp.asarray(images) + perturbation
    assert bool(jnp.all((moved >= 0) & (moved <= 1)))


# Losses.


def test_dlr_by_hand():
    logits = jnp.array([[5.0, 1.0, 3.0, 2.0, 0.0], [5.0, 1.0, 3.0, 2.0, 0.0]])
    labels, targets = jnp.array([0, 2]), jnp.array([1, 4])
    # Sorted 5, 3, 2, 1, 0: (3 - 5) / (5 - 2) and (5 - 3) / (5 - 2).
    np.testing.assert_allclose(dlr(logits, labels), [-2 / 3, 2 / 3], rtol=1e-12)
    # (1 - 5) / (5 - (2 + 1) / 2) and (0 - 3) / (5 - 3 / 2).
    expected = [-4 / 3.5, -3 / 3.5]
    np.testing.assert_allclose(targeted_dlr(logits, labels, targets), expected)
    np.testing.assert_allclose(margin(logits, labels), [-2, 2])
    np.testing.assert_allclose(targeted_margin(logits, labels, targets), [-4, -3])


@pytest.mark.parametrize("scale", [1e-25, 1e-3, 1e6])
def test_dlr_does_not_see_the_scale_of_logits(scale):
    rng = np.random.default_rng(0)
    logits = jnp.asarray(rng.normal(size=(20, 6)), jnp.float32)
    labels, targets = jnp.arange(20) % 6, (jnp.arange(20) + 1) % 6
    towards = Towards(targeted_dlr, targets)
    for loss in (dlr, towards):
        total = lambda z, loss=loss: jnp.sum(loss(z, labels))
        plain, scaled = logits, logits * jnp.float32(scale)
        np.testing.assert_allclose(
            loss(scaled, labels), loss(plain, labels), rtol=1e-4, atol=1e-5
        )
        signs = [np.sign(jax.grad(total)(z)) for z in (plain, scaled)]
        np.testing.assert_array_equal(*signs)
        assert np.abs(signs[1]).sum() > 0


def test_dlr_of_equal_logits_is_finite_with_a_finite_gradient():
    logits, labels = jnp.ones((3, 5)), jnp.array([0, 1, 2])
    for loss in (dlr, Towards(targeted_dlr, jnp.array([1, 2, 3]))):
        total = lambda z, loss=loss: jnp.sum(loss(z, labels))
        np.testing.assert_array_equal(loss(logits, labels), np.zeros(3))
        assert bool(jnp.all(jnp.isfinite(jax.grad(total)(logits))))


def test_dlr_is_undefined_for_few_classes():
    labels = jnp.zeros(2, int)
    with pytest.raises(ValueError, match="undefined for 2 classes"):
        dlr(jnp.zeros((2, 2)), labels)
    with pytest.raises(ValueError, match="undefined for 3 classes"):
        targeted_dlr(jnp.zeros((2, 3)), labels, labels + 1)


def test_cross_entropy_and_divergence_by_hand():
    logits = jnp.log(jnp.array([[0.5, 0.25, 0.25], [0.2, 0.2, 0.6]]))
    labels = jnp.array([0, 1])
    sharp = -np.log([0.5, 0.2])
    np.testing.assert_allclose(cross_entropy(logits, labels), sharp, rtol=1e-12)
    means = -np.log([0.5 * 0.25 * 0.25, 0.2 * 0.2 * 0.6]) / 3
    np.testing.assert_allclose(
        cross_entropy(logits, labels, 0.1), 0.9 * sharp + 0.1 * means, rtol=1e-12
    )
    p, q = np.exp(np.asarray(logits)), np.exp(np.asarray(logits[::-1]))
    np.testing.assert_allclose(
        kl_divergence(logits + 3, logits[::-1]), (p * np.log(p / q)).sum(-1), rtol=1e-12
    )
    np.testing.assert_allclose(kl_divergence(logits, logits), 0, atol=zoo.IDENTITY)
    # Probabilities that underflow contribute nothing.
    sure = jnp.array([[2000.0, 0.0]])
    np.testing.assert_allclose(kl_divergence(sure, sure), 0)


def test_wrong_classes_are_ranked_without_the_label():
    logits = jnp.array([[3.0, 1.0, 2.0, 0.0], [3.0, 1.0, 2.0, 0.0]])
    ranked = wrong_classes(logits, jnp.array([0, 1]))
    np.testing.assert_array_equal(ranked, [[2, 1, 3], [0, 2, 3]])


# Boxes.


def test_starts_are_uniform_in_the_ball_and_inside_the_pixels():
    images = jnp.concatenate([jnp.full((1, 50, 50, 1), 0.5), jnp.zeros((1, 50, 50, 1))])
    keys = image_keys(KEY, jnp.arange(2))
    start = random_start(images.astype(jnp.float32), jnp.asarray(0.1), keys)
    assert start.dtype == jnp.float32
    assert_inside(images.astype(jnp.float32), 0.1, start)
    # Mean 0 and deviation 0.1 / sqrt(3), five deviations of the estimates allowed.
    assert abs(start[0].mean()) < 5 * 0.1 / np.sqrt(3 * 2500)
    assert abs(start[0].std() - 0.1 / np.sqrt(3)) < 0.005
    # Half of a ball around black lies outside and is clipped to black.
    assert abs(float((start[1] == 0).mean()) - 0.5) < 0.05


# Attacks where the answer is known.


@pytest.mark.parametrize("epsilon", [0.02, 0.08])
def test_attacks_are_exact_on_linear_classifiers_of_two_classes(epsilon):
    model, images, labels = linear_case(2, 150, seed=1)
    exact = robust_exactly(model, images, labels, epsilon)
    assert 0.1 < exact.mean() < 0.9
    calls = {
        "pgd": lambda: pgd(
            linear, model, images, labels,
            epsilon=epsilon, steps=10, restarts=2, key=KEY,
        ),
        "apgd": lambda: apgd(
            linear, model, images, labels, epsilon=epsilon, steps=10, key=KEY
        ),
        "targeted": lambda: apgd(
            linear, model, images, labels, epsilon=epsilon, steps=10, key=KEY,
            loss=Towards(targeted_margin, jnp.asarray(1 - labels)),
        ),
    }  # fmt: skip
    for name, call in calls.items():
        found = call()
        np.testing.assert_array_equal(found.robust, exact, err_msg=name)
        assert_inside(images, epsilon, found.perturbation)
        # The perturbation that is returned is the one that did it.
        again = correct(linear(model, images + found.perturbation), jnp.asarray(labels))
        np.testing.assert_array_equal(again, exact, err_msg=name)
    both = robust_ensemble(
        linear, model, images, labels, epsilon=epsilon, steps=10, key=KEY
    )
    np.testing.assert_array_equal(both.robust, exact)
    assert list(both.left) == ["clean", "apgd_ce", "apgd_t1"]
    assert both.left["apgd_t1"] == exact.sum()


def test_targeted_dlr_is_exact_on_linear_classifiers_of_five_classes():
    epsilon = 0.2
    model, images, labels = linear_case(5, 150, seed=2)
    exact = robust_exactly(model, images, labels, epsilon)
    assert 0.1 < exact.mean() < 0.9
    robust = correct(linear(model, images), jnp.asarray(labels))
    for other in range(1, 5):
        found = apgd(
            linear, model, images, labels, epsilon=epsilon, steps=20, key=KEY,
            loss=Towards(targeted_dlr, jnp.asarray((labels + other) % 5)),
        )  # fmt: skip
        assert_inside(images, epsilon, found.perturbation)
        # No attack takes an image that cannot be taken.
        assert not np.any(exact & ~found.robust)
        robust &= found.robust
    np.testing.assert_array_equal(robust, exact)
    both = robust_ensemble(
        linear, model, images, labels, epsilon=epsilon, steps=20, key=KEY, batch_size=64
    )
    np.testing.assert_array_equal(both.robust, exact)
    plain = apgd(
        linear, model, images, labels, epsilon=epsilon, steps=20, key=KEY, loss=dlr
    )
    assert not np.any(exact & ~plain.robust)
    assert plain.robust.sum() <= exact.sum() + 2


BUDGET = {"epsilon": 0.04, "steps": 5, "key": KEY}


def test_more_restarts_never_raise_the_robust_count():
    model, images, labels = perceptron_case(1.0)
    counts, losses = [], []
    for restarts in (0, 1, 3, 6):
        found = pgd(perceptron, model, images, labels, restarts=restarts, **BUDGET)
        counts.append(int(found.robust.sum()))
        losses.append(np.where(found.robust, found.loss, np.inf))
    assert counts == sorted(counts, reverse=True)
    assert counts[-1] < counts[0] == len(labels)
    for fewer, more in zip(losses, losses[1:], strict=False):
        assert np.all(more >= fewer)


def test_the_worst_of_two_findings_prefers_a_changed_class_to_a_high_loss():
    a = Attack(
        jnp.array([True, False, True]), jnp.zeros((3, 1)), jnp.array([9.0, 1, 1])
    )
    b = Attack(jnp.array([False, True, True]), jnp.ones((3, 1)), jnp.array([1.0, 9, 2]))
    for found in (worst(a, b), worst(b, a)):
        np.testing.assert_array_equal(found.robust, [False, False, True])
        np.testing.assert_array_equal(found.perturbation[:, 0], [1, 0, 1])


def test_apgd_finds_no_less_than_pgd_with_the_same_budget():
    model, images, labels = perceptron_case(1.0)
    fixed = pgd(perceptron, model, images, labels, restarts=1, **BUDGET)
    auto = apgd(perceptron, model, images, labels, restarts=1, **BUDGET)
    assert 0 < auto.robust.sum() <= fixed.robust.sum() < len(labels)


def test_saturated_logits_hide_from_cross_entropy_and_not_from_the_ensemble():
    plain, images, labels = perceptron_case(1.0)
    masked = (*plain[:2], jnp.asarray(1e3, jnp.float32))
    settings = {
        "epsilon": 0.02, "key": KEY, "pgd_steps": 10, "restarts": 2,
        "ensemble_steps": 25, "batch_size": 24,
    }  # fmt: skip
    honest = evaluate(perceptron, plain, images, labels, **settings)
    hidden = evaluate(perceptron, masked, images, labels, **settings)
    # Scaling changes no class, so the truth is the same; cross-entropy cannot see it.
    assert hidden["clean"] == honest["clean"] == 1
    assert hidden["pgd"] > honest["pgd"] + 0.15
    assert hidden["ensemble"] < hidden["pgd"] - 0.15
    assert hidden["ensemble"] == honest["ensemble"]
    left = hidden["left"]
    assert left["apgd_t4"] < left["apgd_ce"]


# The step sizes of APGD.


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


# Whole sets.

SMALL = {"epsilon": 0.04, "key": KEY, "pgd_steps": 4, "restarts": 2}


def without_time(result):
    return {name: value for name, value in result.items() if name != "seconds"}


def test_batches_do_not_change_the_result():
    model, images, labels = perceptron_case(1.0, count=37)
    runs = [
        without_time(
            evaluate(
                perceptron,
                model,
                images,
                labels,
                batch_size=size,
                ensemble_steps=8,
                **SMALL,
            )  # fmt: skip
        )
        for size in (16, 1000)
    ]
    assert runs[0] == runs[1]
    assert 0 < runs[0]["all"] < runs[0]["clean"]


def test_robust_accuracies_are_ordered_and_counted():
    model, images, labels = linear_case(4, 60, seed=5, noise=0.3)
    result = evaluate(
        linear, model, images, labels, ensemble_steps=10, batch_size=25, **SMALL
    )
    left = list(result["left"].values())
    assert result["images"] == 60
    assert 0.5 < result["clean"] < 1
    assert result["all"] <= min(result["pgd"], result["ensemble"])
    assert max(result["pgd"], result["ensemble"]) < result["clean"]
    assert left[0] == round(60 * result["clean"])
    assert left[1] >= left[2] == round(60 * result["pgd"])
    assert left[3:] == sorted(left[3:], reverse=True)
    assert left[-1] == round(60 * result["ensemble"])
    assert set(result["seconds"]) == {"clean", "pgd", "ensemble"}
    exact = robust_exactly(model, images, labels, SMALL["epsilon"])
    assert result["ensemble"] == exact.mean()


def test_the_same_key_gives_the_same_result():
    model, images, labels = perceptron_case(1.0)
    once, again, other = (
        pgd(perceptron, model, images, labels, restarts=2, **{**BUDGET, "key": key})
        for key in (KEY, KEY, jax.random.key(8))
    )
    assert eqx.tree_equal(once, again)
    assert not eqx.tree_equal(once.perturbation, other.perturbation)


def test_bytes_become_floats_up_to_one_and_floats_stay():
    bytes_ = jnp.array([0, 51, 255], jnp.uint8)
    floats = unit_range(bytes_)
    assert floats.dtype == jnp.float32
    np.testing.assert_allclose(floats, [0, 0.2, 1], rtol=1e-7)
    assert unit_range(floats) is floats


def test_a_ball_of_radius_zero_leaves_the_clean_accuracy():
    model, images, labels = linear_case(4, 60, seed=5, noise=0.3)
    named = {**SMALL, "epsilon": 0.0, "ensemble_steps": 10, "batch_size": 25}
    result = evaluate(linear, model, images, labels, **named)
    assert 0.5 < result["clean"] < 1
    assert result["pgd"] == result["ensemble"] == result["all"] == result["clean"]


def holed(model, images):
    """The linear classifier, with another value where the first pixel is dark."""
    *inner, value = model
    return jnp.where(images[:, :1, 0, 0] < 0.5, value, linear(inner, images))


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_logits_that_are_not_finite_are_never_robust(value):
    (weights, _), images, _ = linear_case(4, 40, seed=6)
    # Class 0 wins by far, so that only the missing logits matter.
    model = jnp.asarray(weights), jnp.array([1e3, 0.0, 0.0, 0.0]), jnp.asarray(value)
    labels = jnp.zeros(40, int)
    images[:20, 0, 0, 0], images[25:, 0, 0, 0] = 0.2, 0.8
    # These are sound when clean; no slope leads to the hole, starts fall into it.
    images[20:25, 0, 0, 0] = 0.501
    for attack in (pgd, apgd):
        found = attack(
            holed, model, images, labels, epsilon=0.01, steps=3, restarts=20, key=KEY
        )
        np.testing.assert_array_equal(found.robust[:20], False)
        np.testing.assert_array_equal(found.robust[25:], True)
        assert not np.all(found.robust[20:25])
        assert_inside(images, 0.01, found.perturbation)
    result = evaluate(
        holed, model, images, labels,
        epsilon=0.01, key=KEY, pgd_steps=3, restarts=1, ensemble_steps=3,
    )  # fmt: skip
    assert result["clean"] == 0.5
    assert 0.375 <= result["all"] <= 0.5


def test_new_weights_and_radii_compile_nothing():
    traces = []

    def predict(model, images):
        traces.append(images.shape)
        return linear(model, images)

    model, images, labels = linear_case(4, 20, seed=7)

    def call(model, epsilon, key):
        named = {"epsilon": epsilon, "key": key}
        pgd(predict, model, images, labels, steps=2, restarts=2, **named)
        apgd(predict, model, images, labels, steps=2, **named)
        crowd = Crowd(images, labels, 8)
        climb = APGD(epsilon, steps=2)
        alive = np.ones(20, bool)
        crowd.strike(climb, Aim(predict, cross_entropy), model, alive, key=key)

    call(jax.tree.map(jnp.asarray, model), 0.01, KEY)
    seen = len(traces)
    call(jax.tree.map(lambda w: jnp.asarray(2 * w), model), 0.3, jax.random.key(1))
    assert len(traces) == seen


def test_misuse_is_named():
    model, images, labels = linear_case(4, 6, seed=7)
    named = {"epsilon": 0.1, "key": KEY}
    with pytest.raises(ValueError, match="one label per image"):
        pgd(linear, model, images, labels[:3], **named)
    with pytest.raises(ValueError, match="class numbers"):
        apgd(linear, model, images, labels / 2, **named)
    with pytest.raises(ValueError, match="uint8"):
        evaluate(linear, model, (255 * images).astype(int), labels, **named)
    with pytest.raises(ValueError, match="at least one step"):
        apgd(linear, model, images, labels, steps=0, **named)
    with pytest.raises(ValueError, match="restarts"):
        pgd(linear, model, images, labels, restarts=-1, **named)
    with pytest.raises(ValueError, match="no images"):
        evaluate(linear, model, images[:0], labels[:0], **named)
    with pytest.raises(ValueError, match="at least one image"):
        evaluate(linear, model, images, labels, batch_size=0, **named)


def test_the_progress_bar_counts_every_image_of_every_round():
    model, images, labels = linear_case(4, 10, seed=7)
    result = evaluate(
        linear, model, images, labels, ensemble=False, progress=True, **SMALL
    )
    assert "ensemble" not in result
    counted = []
    alive = np.arange(10) < 7
    Crowd(images, labels, 4).strike(
        APGD(0.1, steps=2), Aim(linear, cross_entropy), model, alive,
        key=KEY, advance=counted.append,
    )  # fmt: skip
    assert counted == [3, 4, 3]


SPLIT = """
import jax, numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from bilevax.adversarial.evaluate import evaluate

rng = np.random.default_rng(0)
images = rng.integers(0, 256, (30, 4, 4, 1)).astype(np.uint8)
weights = rng.normal(size=(16, 4)).astype(np.float32)
predict = lambda model, images: images.reshape(images.shape[0], -1) @ model
labels = np.argmax(predict(weights, images / 255), axis=-1)
labels[0] = (labels[0] + 1) % 4
named = dict(epsilon=0.03, key=jax.random.key(0), pgd_steps=3, restarts=1,
             ensemble=False, batch_size=13)
plain = evaluate(predict, jax.numpy.asarray(weights), images, labels, **named)
assert 0 < plain["pgd"] < plain["clean"] < 1
for kind in (AxisType.Auto, AxisType.Explicit):
    mesh = jax.make_mesh((2,), ("d",), axis_types=(kind,))
    put = lambda x, *spec: jax.device_put(x, NamedSharding(mesh, P(*spec)))
    split = evaluate(predict, put(weights), put(images, "d"), put(labels, "d"), **named)
    assert split["left"] == plain["left"], (kind, split, plain)
"""


def test_a_set_split_over_devices_gives_the_same_counts():
    flags = "--xla_force_host_platform_device_count=2"
    known = os.environ.get("XLA_FLAGS", "")
    ran = subprocess.run(
        [sys.executable, "-W", "error", "-c", SPLIT],
        env={**os.environ, "XLA_FLAGS": f"{known} {flags}", "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
