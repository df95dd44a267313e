"""Networks: their shapes, their batch norm, their precision."""

import functools
import os
import subprocess
import sys
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
import pytest

from bilevax.adversarial.data.images import load_images
from bilevax.adversarial.networks.batch_norm import BatchNorm, Moments
from bilevax.adversarial.networks.layers import Conv, Linear, Normalise
from bilevax.adversarial.networks.models import MODELS, build
from bilevax.adversarial.networks.network import num_weights, statistics_mask
from bilevax.adversarial.networks.preact_resnet import PreActBlock
from bilevax.adversarial.networks.resnet import PostActBlock
from bilevax.adversarial.networks.start import drawn

MEAN, STD = (0.5, 0.4, 0.3), (0.2, 0.25, 0.3)


@eqx.filter_jit
def call(model, images, training):
    return model(images, training=training)


@functools.cache
def narrow(name, **options) -> Any:
    settings: dict[str, Any] = dict(classes=7, channels=3, mean=MEAN, std=STD, width=4)
    return build(name, key=jr.key(0), **(settings | options))


def pixels(*shape, dtype: Any = np.float32, seed=0):
    return jnp.asarray(np.random.default_rng(seed).random(shape), dtype)


def standardised(x, epsilon=1e-5):
    """Batch norm without scale and offset, in NumPy."""
    x = np.asarray(x, np.float64)
    mean, variance = x.mean((0, 1, 2)), x.var((0, 1, 2))
    return (x - mean) / np.sqrt(variance + epsilon), mean, variance


def block_of(kind, inputs, outputs, *, stride) -> Any:
    blank = kind(inputs, outputs, stride=stride, activation="relu", dtype="float64")
    return drawn(blank, jr.key(5))


def convolved(x, w, stride, pad):
    """A convolution as a loop over windows."""
    x = np.pad(np.asarray(x), ((0, 0), (pad, pad), (pad, pad), (0, 0)))
    size = w.shape[0]
    rows = range(0, x.shape[1] - size + 1, stride)
    columns = range(0, x.shape[2] - size + 1, stride)
    windows = [[x[:, i : i + size, j : j + size] for j in columns] for i in rows]
    return np.einsum("pqbhwi,hwio->bpqo", np.array(windows), np.asarray(w))


# By hand. Stem 9*3*64, with its norm 128 in ResNet-18; stages as sums of two blocks;
# PreAct shortcuts have no norm and its first norms are as wide as the inputs.
POST = (
    (1728 + 128)
    + 2 * (2 * 36864 + 2 * 128)
    + (73728 + 147456 + 8192 + 3 * 256)
    + (2 * 147456 + 2 * 256)
    + (294912 + 589824 + 32768 + 3 * 512)
    + (2 * 589824 + 2 * 512)
    + (1179648 + 2359296 + 131072 + 3 * 1024)
    + (2 * 2359296 + 2 * 1024)
    + 5130
)
PRE = (
    1728
    + 2 * (2 * 36864 + 2 * 128)
    + (73728 + 147456 + 8192 + 128 + 256)
    + (2 * 147456 + 2 * 256)
    + (294912 + 589824 + 32768 + 256 + 512)
    + (2 * 589824 + 2 * 512)
    + (1179648 + 2359296 + 131072 + 512 + 1024)
    + (2 * 2359296 + 2 * 1024)
    + 1024
    + 5130
)
SMALL = (9 * 16 + 32) + (9 * 16 * 32 + 64) + (32 * 10 + 10)


@pytest.mark.parametrize(
    ("name", "channels", "count"),
    [
        ("resnet18", 3, 11_173_962),
        ("preact-resnet18", 3, 11_172_170),
        ("small", 1, SMALL),
    ],
)
def test_networks_have_as_many_weights_as_counted_by_hand(name, channels, count):
    assert (POST, PRE) == (11_173_962, 11_172_170)
    model = build(
        name,
        key=jr.key(0),
        classes=10,
        channels=channels,
        mean=(0.5,) * channels,
        std=(0.2,) * channels,
    )
    assert num_weights(model) == count
    assert {leaf.dtype.name for leaf in jax.tree.leaves(model)} == {"float32"}


def test_statistics_are_no_weights_and_all_of_them_are_marked():
    model = narrow("resnet18")
    statistics, weights = eqx.partition(model, statistics_mask(model))
    # One norm after the stem, two in each block, three more on shortcuts.
    assert len(jax.tree.leaves(statistics)) == 2 * (1 + 16 + 3)
    assert all(leaf.ndim == 1 for leaf in jax.tree.leaves(statistics))
    total = sum(leaf.size for leaf in jax.tree.leaves(model))
    assert num_weights(model) == sum(leaf.size for leaf in jax.tree.leaves(weights))
    assert num_weights(model) < total
    assert eqx.tree_equal(eqx.combine(statistics, weights), model)


def test_weights_start_uniform_within_the_inverse_root_of_the_inputs():
    conv = drawn(Conv(16, 64, dtype="float32"), jr.key(1))
    linear = drawn(Linear(100, 50, dtype="float64"), jr.key(2))
    for weight, inputs in ((conv.weight, 144), (linear.weight, 100)):
        bound = inputs**-0.5
        top = np.abs(weight).max()
        assert 0.98 * bound < top <= bound
        np.testing.assert_allclose(np.std(weight), bound / 3**0.5, rtol=0.05)
    assert np.abs(linear.bias).max() <= 0.1
    assert (conv.weight.dtype, linear.weight.dtype) == ("float32", "float64")


@pytest.mark.parametrize(("size", "stride"), [(3, 1), (3, 2), (1, 2)])
def test_convolution_is_the_loop_over_windows(size, stride):
    blank = Conv(3, 5, size=size, stride=stride, dtype="float64")
    conv = drawn(blank, jr.key(3))
    x = pixels(2, 8, 6, 3, dtype=np.float64)
    y = conv(x)
    assert y.shape == (2, 8 // stride, 6 // stride, 5)
    expected = convolved(x, conv.weight, stride, size // 2)
    np.testing.assert_allclose(y, expected, rtol=1e-12, atol=1e-13)


def test_normalisation_is_by_channel_and_holds_no_leaf():
    normalise = Normalise(MEAN, STD, 3)
    x = pixels(2, 4, 4, 3)
    expected = (np.asarray(x, np.float64) - MEAN) / STD
    np.testing.assert_allclose(normalise(x, jnp.float32), expected, atol=1e-6)
    assert jax.tree.leaves(normalise) == []


@pytest.mark.parametrize(
    ("dtype", "atol"), [("float64", 1e-12), ("float32", 2e-4), ("bfloat16", 2e-2)]
)
def test_batch_norm_is_the_formula(dtype, atol):
    # Far from zero, where a difference of squares in float32 would lose the variance
    # if it were not taken around the running mean.
    shift = 0.0 if dtype == "bfloat16" else 100.0
    x = jr.normal(jr.key(4), (8, 5, 6, 3), jnp.float64) * 0.5 + shift
    x = x.astype(dtype)
    norm = BatchNorm(3, dtype=dtype)
    scale, offset = jnp.array([1.0, 2.0, 0.5]), jnp.array([0.0, -1.0, 3.0])
    values = (scale.astype(norm.scale.dtype), offset.astype(norm.scale.dtype))
    norm = eqx.tree_at(lambda n: (n.scale, n.offset), norm, values)
    near = norm.running.mean + (0.0 if dtype == "float64" else 0.98 * shift)
    norm = eqx.tree_at(lambda n: n.running.mean, norm, near)
    y, (seen,) = norm(x, True)
    unit, mean, variance = standardised(x.astype(jnp.float64))
    assert y.dtype == dtype
    assert seen.mean.dtype == ("float64" if dtype == "float64" else "float32")
    np.testing.assert_allclose(y.astype(float), unit * scale + offset, atol=atol)
    np.testing.assert_allclose(seen.mean, mean, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(seen.variance, variance, rtol=1e-4)


def test_batch_norm_of_a_constant_far_from_the_running_mean_is_finite():
    norm = BatchNorm(3, dtype="float32")
    y, (seen,) = norm(jnp.full((8, 5, 6, 3), 1e4), True)
    assert np.all(np.isfinite(y))
    assert np.all(np.asarray(seen.variance) >= 0)


def test_running_statistics_move_by_the_rate_and_pass_no_gradient():
    norm = BatchNorm(2, dtype="float64")
    seen = Moments(jnp.array([1.0, 2.0]), jnp.array([3.0, 4.0]))
    moved = norm.running.moved(seen, 0.25)
    np.testing.assert_allclose(moved.mean, [0.25, 0.5])
    np.testing.assert_allclose(moved.variance, [1.5, 1.75])
    total = lambda m: jnp.sum(norm.running.moved(m, 0.25).variance)
    np.testing.assert_array_equal(jax.grad(total)(seen).variance, 0)

    x = pixels(4, 2, 2, 2, dtype=np.float64)
    still = eqx.tree_at(lambda n: n.running, norm, moved)
    y, nothing = still(x, False)
    assert nothing == ()
    expected = (x - moved.mean) / np.sqrt(moved.variance + 1e-5)
    np.testing.assert_allclose(y, expected, rtol=1e-12)


@pytest.mark.parametrize("name", MODELS)
def test_absorbing_one_batch_for_ever_makes_both_modes_agree(name):
    model = narrow(name, dtype="float64")
    x = pixels(16, 8, 8, 3, dtype=np.float64)
    logits, seen = call(model, x, True)
    assert logits.shape == (16, 7)
    assert logits.dtype == "float64"
    before, nothing = call(model, x, False)
    assert nothing is None
    assert np.abs(before - logits).max() > 1e-3
    absorb = jax.jit(lambda m, s: m.absorb(s, rate=0.3))
    for _ in range(80):
        model = absorb(model, seen)
    np.testing.assert_allclose(call(model, x, False)[0], logits, rtol=1e-8, atol=1e-9)


def test_absorb_refuses_what_is_not_its_own():
    model, other = narrow("small"), narrow("resnet18")
    run = lambda: other(pixels(2, 8, 8, 3), training=True)
    _, seen = eqx.filter_eval_shape(run)
    with pytest.raises(ValueError, match="20 batch norms.*has 2.*training=True"):
        model.absorb(seen)
    with pytest.raises(ValueError, match="0 batch norms"):
        model.absorb(None)


def test_the_preact_shortcut_takes_the_raw_input():
    block = block_of(PreActBlock, 3, 5, stride=2)
    silent = eqx.tree_at(lambda b: b.conv2.weight, block, replace_fn=jnp.zeros_like)
    # Negative numbers, far from normalised: either step would show.
    x = 3 * pixels(2, 8, 8, 3, dtype=np.float64) - 5
    y, seen = silent(x, True)
    expected = np.asarray(x[:, ::2, ::2]) @ np.asarray(block.shortcut.weight[0, 0])
    np.testing.assert_allclose(y, expected, rtol=1e-12, atol=1e-13)
    assert len(seen) == 2

    same = block_of(PreActBlock, 3, 3, stride=1)
    assert same.shortcut is None
    silent = eqx.tree_at(lambda b: b.conv2.weight, same, replace_fn=jnp.zeros_like)
    np.testing.assert_array_equal(silent(x, True)[0], x)


def test_a_preact_block_is_its_formula():
    block = block_of(PreActBlock, 3, 5, stride=2)
    x = pixels(2, 8, 8, 3, dtype=np.float64)
    inner = convolved(np.maximum(standardised(x)[0], 0), block.conv1.weight, 2, 1)
    branch = convolved(np.maximum(standardised(inner)[0], 0), block.conv2.weight, 1, 1)
    side = convolved(x, block.shortcut.weight, 2, 0)
    np.testing.assert_allclose(block(x, True)[0], branch + side, rtol=1e-9, atol=1e-11)


def test_a_postact_block_is_its_formula():
    block = block_of(PostActBlock, 3, 5, stride=2)
    x = pixels(2, 8, 8, 3, dtype=np.float64)
    inner = standardised(convolved(x, block.conv1.weight, 2, 1))[0]
    branch = convolved(np.maximum(inner, 0), block.conv2.weight, 1, 1)
    branch = standardised(branch)[0]
    side = standardised(convolved(x, block.shortcut.weight, 2, 0))[0]
    y, seen = block(x, True)
    expected = np.maximum(branch + side, 0)
    np.testing.assert_allclose(y, expected, rtol=1e-9, atol=1e-11)
    assert len(seen) == 3


@pytest.mark.parametrize("name", ["resnet18", "preact-resnet18"])
def test_sides_halve_three_times_and_channels_double(name):
    model = narrow(name)
    shapes = [np.shape(block.conv2.weight)[-1] for block in model.blocks]
    assert shapes == [4, 4, 8, 8, 16, 16, 32, 32]
    assert [block.conv1.stride for block in model.blocks] == [1, 1, 2, 1, 2, 1, 2, 1]
    assert [block.shortcut is None for block in model.blocks] == [
        *(True, True, False, True, False, True, False, True)
    ]
    run = lambda m, x: m.features(x, True)[0]
    x = jax.ShapeDtypeStruct((2, 32, 32, 3), jnp.float32)
    assert eqx.filter_eval_shape(run, model, x).shape == (2, 4, 4, 32)


@pytest.mark.parametrize("name", MODELS)
def test_bfloat16_logits_are_near_those_of_float32(name):
    x = pixels(16, 8, 8, 3)
    exact, half = narrow(name), narrow(name, dtype=jnp.bfloat16)
    for a, b in zip(jax.tree.leaves(exact), jax.tree.leaves(half), strict=True):
        np.testing.assert_array_equal(a, b)
    (fine, _), (coarse, seen) = call(exact, x, True), call(half, x, True)
    assert fine.dtype == coarse.dtype == "float32"
    assert {leaf.dtype.name for leaf in jax.tree.leaves(seen)} == {"float32"}
    assert 0 < np.abs(fine - coarse).max() < 0.1 * np.abs(fine).max()


@pytest.mark.parametrize(
    ("name", "dtype", "activation"),
    [
        ("preact-resnet18", "float32", "relu"),
        ("small", "bfloat16", "silu"),
        ("small", "float64", "softplus"),
    ],
)
def test_gradients_are_finite_for_weights_and_pixels(name, dtype, activation):
    model = narrow(name, dtype=dtype, activation=activation)
    x = pixels(4, 8, 8, 3)
    statistics, weights = eqx.partition(model, statistics_mask(model))

    @jax.jit
    def gradients(weights, x):
        def loss(weights, x):
            logits, _ = eqx.combine(weights, statistics)(x, training=True)
            return optax.softmax_cross_entropy_with_integer_labels(
                logits, jnp.arange(4)
            ).mean()

        return jax.grad(loss, argnums=(0, 1))(weights, x)

    of_weights, of_pixels = gradients(weights, x)
    for leaf, weight in zip(
        jax.tree.leaves(of_weights), jax.tree.leaves(weights), strict=True
    ):
        assert leaf.dtype == weight.dtype
        assert np.isfinite(leaf).all()
    assert of_pixels.dtype == x.dtype
    assert np.isfinite(of_pixels).all()
    assert np.abs(of_pixels).max() > 0


def test_the_gradient_is_the_slope_of_a_smooth_network():
    model = narrow("small", dtype="float64", activation="silu")
    x = pixels(4, 8, 8, 3, dtype=np.float64)
    way = pixels(4, 8, 8, 3, dtype=np.float64, seed=1)
    value = jax.jit(lambda x: jnp.sum(jnp.sin(model(x, training=True)[0])))
    step = 1e-5
    slope = (value(x + step * way) - value(x - step * way)) / (2 * step)
    np.testing.assert_allclose(jnp.sum(jax.grad(value)(x) * way), slope, rtol=1e-6)


def test_mistakes_are_named():
    with pytest.raises(ValueError, match="'vgg'.*preact-resnet18, resnet18, small"):
        narrow("vgg")
    with pytest.raises(ValueError, match="float32, bfloat16, float64; got float16"):
        narrow("small", dtype="float16")
    with pytest.raises(ValueError, match="relu, softplus, silu; got 'tanh'"):
        narrow("small", activation="tanh")
    with pytest.raises(ValueError, match="each of 3 channels; got 1 and 3"):
        narrow("small", mean=(0.5,))
    with pytest.raises(ValueError, match="`std` must be positive"):
        narrow("small", std=(0.5, 0.0, 0.5))
    with pytest.raises(ValueError, match="at least 1"):
        narrow("small", width=0)
    model = narrow("small")
    with pytest.raises(ValueError, match=r"width, 3\); got \(2, 8, 8, 1\)"):
        model(pixels(2, 8, 8, 1), training=False)
    with pytest.raises(ValueError, match="got uint8. Divide bytes by 255"):
        model(jnp.zeros((2, 8, 8, 3), jnp.uint8), training=False)


def test_float64_is_refused_where_jax_has_switched_it_off():
    with jax.enable_x64(False), pytest.raises(ValueError, match="jax_enable_x64"):
        narrow("small", dtype="float64", classes=3)


@pytest.mark.optimised
def test_the_small_network_learns_digits():
    digits = load_images("digits")
    model = build(
        "small",
        key=jr.key(0),
        classes=10,
        channels=1,
        mean=digits.mean,
        std=digits.std,
    )
    x = jnp.asarray(digits.x_train, jnp.float32) / 255
    y = jnp.asarray(digits.y_train)
    mask = statistics_mask(model)
    optimiser = optax.adam(1e-2)
    statistics, weights = eqx.partition(model, mask)

    def loss(weights, statistics, batch):
        model = eqx.combine(weights, statistics)
        logits, seen = model(x[batch], training=True)
        fit = optax.softmax_cross_entropy_with_integer_labels(logits, y[batch])
        return fit.mean(), seen

    def step(state, batch):
        weights, statistics, memory = state
        grads, seen = jax.grad(loss, has_aux=True)(weights, statistics, batch)
        updates, memory = optimiser.update(grads, memory)
        model: Any = eqx.combine(optax.apply_updates(weights, updates), statistics)
        statistics, weights = eqx.partition(model.absorb(seen), mask)
        return (weights, statistics, memory), None

    batches = jnp.concatenate(
        [jr.permutation(k, 1500).reshape(15, 100) for k in jr.split(jr.key(1), 10)]
    )
    start = (weights, statistics, optimiser.init(weights))
    (weights, statistics, _), _ = jax.jit(
        lambda start: jax.lax.scan(step, start, batches)
    )(start)
    trained = eqx.combine(weights, statistics)
    images = jnp.asarray(digits.x_test, jnp.float32) / 255
    logits, _ = call(trained, images, False)
    assert np.mean(np.argmax(logits, -1) == digits.y_test) > 0.9


SHARDED = """
import jax, jax.numpy as jnp, jax.random as jr, numpy as np, equinox as eqx
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from bilevax.adversarial.data.augment import crop_and_flip
from bilevax.adversarial.networks.models import build

model = build("small", key=jr.key(0), classes=5, channels=3,
              mean=(.5,) * 3, std=(.2,) * 3)
x = jnp.asarray(np.random.default_rng(0).random((8, 8, 8, 3)), jnp.float32)
crop = jax.jit(lambda x: crop_and_flip(x, jr.key(1), 2))

@eqx.filter_jit
def call(model, x):
    def loss(weights):
        logits, seen = weights(x, training=True)
        return jnp.sum(logits**2), (logits, seen)
    return eqx.filter_grad(loss, has_aux=True)(model)

crops, outputs = crop(x), call(model, x)
for kind in (AxisType.Auto, AxisType.Explicit):
    mesh = jax.make_mesh((2,), ("batch",), axis_types=(kind,))
    with jax.set_mesh(mesh):
        spread = jax.device_put(x, NamedSharding(mesh, PartitionSpec("batch")))
        there = jax.device_put(model, NamedSharding(mesh, PartitionSpec()))
        np.testing.assert_array_equal(crops, crop(spread))
        assert crop(spread).sharding.is_equivalent_to(spread.sharding, 4)
        found = call(there, spread)
    for a, b in zip(jax.tree.leaves(outputs), jax.tree.leaves(found), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)
"""


def test_two_devices_see_the_moments_and_the_crops_of_the_whole_batch():
    flags = "--xla_force_host_platform_device_count=2"
    done = subprocess.run(
        [sys.executable, "-c", SHARDED],
        env={**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
