"""Small classifiers, some with a robust accuracy that is known."""

import jax
import jax.numpy as jnp
import numpy as np

from bilevax.adversarial.attacks.boxes import pixel_box

KEY = jax.random.key(7)
SHAPE = (3, 3, 2)
PIXELS = int(np.prod(SHAPE))
BUDGET = {"epsilon": 0.04, "steps": 5, "key": KEY}


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
