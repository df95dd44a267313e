"""What attacks climb: losses per image, from logits `z` of shape (B, classes).

`y` is the label, `t` a target class, and `z_(1) >= z_(2) >= ...` are sorted logits. An
attack makes them large.
"""

from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

Logits = Float[Array, "B classes"]
Classes = Int[Array, " B"]
PerImage = Float[Array, " B"]


def cross_entropy(logits: Logits, labels: Classes, smoothing: float = 0.0) -> PerImage:
    """`-log p_y`; with labels smoothed by `s`, `-(1 - s) log p_y - s mean log p_j`."""
    log_p = jax.nn.log_softmax(logits)
    sharp = -_at(log_p, labels)
    if smoothing == 0:
        return sharp
    return (1 - smoothing) * sharp - smoothing * jnp.mean(log_p, axis=-1)


def margin(logits: Logits, labels: Classes) -> PerImage:
    """`max_{j != y} z_j - z_y`: positive exactly where the image is misclassified."""
    return jnp.max(_without(logits, labels), axis=-1) - _at(logits, labels)


def targeted_margin(logits: Logits, labels: Classes, targets: Classes) -> PerImage:
    """`z_t - z_y`, defined for any number of classes."""
    return _at(logits, targets) - _at(logits, labels)


def dlr(logits: Logits, labels: Classes) -> PerImage:
    """The difference of logits ratio `(max_{j != y} z_j - z_y) / (z_(1) - z_(3))`.

    It does not change when logits are shifted or scaled, so that a classifier cannot
    hide its gradients behind a saturated softmax. Where the three largest logits are
    equal the numerator alone remains.

    Croce and Hein, Reliable evaluation of adversarial robustness with an ensemble of
    diverse parameter-free attacks, ICML 2020.
    """
    _at_least(3, logits, "the DLR loss divides by z_(1) - z_(3)")
    top, _ = jax.lax.top_k(logits, 3)
    return _ratio(margin(logits, labels), top[:, 0] - top[:, 2])


def targeted_dlr(logits: Logits, labels: Classes, targets: Classes) -> PerImage:
    """The targeted ratio `(z_t - z_y) / (z_(1) - (z_(3) + z_(4)) / 2)` (see `dlr`)."""
    _at_least(4, logits, "the targeted DLR loss divides by z_(1) - (z_(3) + z_(4)) / 2")
    top, _ = jax.lax.top_k(logits, 4)
    spread = top[:, 0] - (top[:, 2] + top[:, 3]) / 2
    return _ratio(targeted_margin(logits, labels, targets), spread)


class Towards(eqx.Module):
    """A targeted loss with its target classes, as a loss of logits and labels."""

    loss: Callable[[Logits, Classes, Classes], PerImage]
    classes: Classes

    def __call__(self, logits: Logits, labels: Classes) -> PerImage:
        return self.loss(logits, labels, self.classes)


def kl_divergence(logits: Logits, other: Logits) -> PerImage:
    """`sum_j p_j (log p_j - log q_j)` for `p`, `q` the softmax of the two arguments.

    TRADES takes clean logits first, perturbed ones second.
    """
    log_p, log_q = jax.nn.log_softmax(logits), jax.nn.log_softmax(other)
    return jnp.sum(jnp.exp(log_p) * (log_p - log_q), axis=-1)


def correct(logits: Logits, labels: Classes) -> Bool[Array, " B"]:
    """Whether the label has the largest logit; never where a logit is not finite."""
    sane = jnp.all(jnp.isfinite(logits), axis=-1)
    return sane & (jnp.argmax(logits, axis=-1) == labels)


def wrong_classes(logits: Logits, labels: Classes) -> Int[Array, "B classes-1"]:
    """All classes but the label, the most likely first."""
    return jnp.argsort(-_without(logits, labels), axis=-1)[:, :-1]


def _ratio(numerator: PerImage, spread: PerImage) -> PerImage:
    # Both in units of the spread first: the derivative of a quotient has the square of
    # the denominator, which leaves the range of float32 for logits near 1e-20.
    positive = spread > 0
    unit = jax.lax.stop_gradient(jnp.where(positive, spread, 1))
    return (numerator / unit) / jnp.where(positive, spread / unit, 1)


def _at(values: Logits, classes: Classes) -> PerImage:
    return jnp.take_along_axis(values, classes[:, None], axis=-1)[:, 0]


def _without(logits: Logits, labels: Classes) -> Logits:
    hit = labels[:, None] == jnp.arange(logits.shape[-1])
    return jnp.where(hit, -jnp.inf, logits)


def _at_least(needed: int, logits: Logits, why: str) -> None:
    if logits.shape[-1] < needed:
        raise ValueError(
            f"{why}: undefined for {logits.shape[-1]} classes. Use the margin loss."
        )
