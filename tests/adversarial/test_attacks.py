"""Attacks on classifiers whose robust accuracy is known."""

import jax.numpy as jnp
import numpy as np
import pytest

from bilevax.adversarial.attacks.apgd import apgd
from bilevax.adversarial.attacks.attack import Attack, worst
from bilevax.adversarial.attacks.boxes import image_keys, random_start
from bilevax.adversarial.attacks.ensemble import robust_ensemble
from bilevax.adversarial.attacks.evaluate import evaluate
from bilevax.adversarial.attacks.losses import (
    Towards,
    correct,
    dlr,
    targeted_dlr,
    targeted_margin,
)
from bilevax.adversarial.attacks.pgd import pgd

from ..classifiers import (
    BUDGET,
    KEY,
    assert_inside,
    linear,
    linear_case,
    perceptron,
    perceptron_case,
    robust_exactly,
)


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
