"""Accuracies on whole sets."""

import os
import subprocess
import sys

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bilevax.adversarial.attacks.apgd import APGD, apgd
from bilevax.adversarial.attacks.boxes import unit_range
from bilevax.adversarial.attacks.evaluate import evaluate
from bilevax.adversarial.attacks.losses import (
    cross_entropy,
)
from bilevax.adversarial.attacks.pgd import pgd
from bilevax.adversarial.attacks.survivors import Aim, Crowd

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
from bilevax.adversarial.attacks.evaluate import evaluate

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
