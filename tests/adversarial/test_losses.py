"""Losses of attacks, by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bilevax.adversarial.attacks.losses import (
    Towards,
    cross_entropy,
    dlr,
    kl_divergence,
    margin,
    targeted_dlr,
    targeted_margin,
    wrong_classes,
)

from .. import zoo


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
