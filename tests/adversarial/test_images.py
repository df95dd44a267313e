"""Image sets on disk, and random crops of them."""

import dataclasses
import sys
from typing import Any

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

from bilevax.adversarial.data.augment import crop, crop_and_flip, draw, mirror
from bilevax.adversarial.data.images import Images, load_images, moments, split

PAGE = "binary version from https://www.cs.toronto.edu/~kriz/cifar.html"


cropped = jax.jit(crop_and_flip, static_argnames=("padding", "flip"))


def fake(count, seed=0, classes=10, shape=(32, 32, 3)):
    rng = np.random.default_rng(seed)
    x = rng.integers(0, 256, (count, *shape), np.uint8)
    return x, rng.integers(0, classes, count, np.int32)


def write_batch(path, x, *labels):
    """Label bytes, then the red, the green and the blue plane of each image."""
    path.parent.mkdir(parents=True, exist_ok=True)
    planes = np.moveaxis(x, -1, 1).reshape(len(x), -1)
    columns = [np.asarray(y, np.uint8)[:, None] for y in labels]
    np.concatenate([*columns, planes], axis=1).tofile(path)


def write_cifar10(folder):
    """Five batches of four images and a test batch of three."""
    x, y = fake(20)
    for i in range(5):
        part = slice(4 * i, 4 * i + 4)
        write_batch(folder / f"data_batch_{i + 1}.bin", x[part], y[part])
    x_test, y_test = fake(3, seed=1)
    write_batch(folder / "test_batch.bin", x_test, y_test)
    return x, y, x_test, y_test


def write_npz(path, **changes):
    x, y = fake(6)
    x_test, y_test = fake(4, seed=1)
    arrays: dict[str, Any] = dict(x_train=x, y_train=y, x_test=x_test, y_test=y_test)
    arrays |= changes
    np.savez(path, **{k: v for k, v in arrays.items() if v is not None})
    return arrays


def check_same(images, arrays):
    names = ("x_train", "y_train", "x_test", "y_test")
    for name, expected in zip(names, arrays, strict=True):
        np.testing.assert_array_equal(getattr(images, name), expected)
    assert images.x_train.dtype == images.x_test.dtype == np.uint8
    assert images.y_train.dtype == images.y_test.dtype == np.int32


@pytest.mark.parametrize("folder", [".", "cifar-10-batches-bin"])
def test_cifar10_binary_batches_come_back_as_they_were_written(tmp_path, folder):
    arrays = write_cifar10(tmp_path / folder)
    images = load_images("cifar10", str(tmp_path))
    check_same(images, arrays)
    assert (images.name, images.classes) == ("cifar10", 10)
    assert images.mean == (0.4914, 0.4822, 0.4465)
    assert images.std == (0.2470, 0.2435, 0.2616)


@pytest.mark.parametrize("folder", [".", "cifar-100-binary"])
def test_cifar100_labels_are_the_fine_ones(tmp_path, folder):
    x, y = fake(5, classes=100)
    x_test, y_test = fake(3, seed=1, classes=100)
    write_batch(tmp_path / folder / "train.bin", x, y // 5, y)
    write_batch(tmp_path / folder / "test.bin", x_test, y_test // 5, y_test)
    images = load_images("cifar100", tmp_path)
    check_same(images, (x, y, x_test, y_test))
    assert (images.name, images.classes) == ("cifar100", 100)
    assert images.mean == (0.5071, 0.4865, 0.4409)
    assert images.std == (0.2673, 0.2564, 0.2762)


def test_cifar_may_be_one_npz_in_the_folder_or_by_name(tmp_path):
    arrays = write_npz(tmp_path / "cifar10.npz", y_train=np.arange(6, dtype=np.int64))
    for place in (tmp_path, tmp_path / "cifar10.npz"):
        images = load_images("cifar10", place)
        check_same(images, arrays.values())
        assert images.mean == (0.4914, 0.4822, 0.4465)


def test_any_npz_has_its_own_mean_and_deviation(tmp_path):
    x, y = fake(7, classes=4, shape=(5, 6, 2))
    write_npz(tmp_path / "mine.npz", x_train=x, y_train=y, x_test=x[:2], y_test=y[:2])
    for place in (tmp_path, tmp_path / "mine.npz"):
        images = load_images("npz", place)
        assert (images.name, images.classes) == ("mine", y.max() + 1)
        np.testing.assert_allclose(images.mean, (x / 255).mean((0, 1, 2)), rtol=1e-12)
        np.testing.assert_allclose(images.std, (x / 255).std((0, 1, 2)), rtol=1e-10)


def test_moments_span_chunks_and_a_constant_channel_is_not_divided_by_zero():
    x, _ = fake(2100, shape=(2, 2, 2))
    x[..., 1] = 51
    mean, std = moments(x)
    np.testing.assert_allclose(mean, [(x[..., 0] / 255).mean(), 0.2], rtol=1e-12)
    np.testing.assert_allclose(std, [(x[..., 0] / 255).std(), 1 / 255], rtol=1e-10)


def test_digits_fill_the_range_of_bytes():
    digits = load_images("digits")
    assert digits.x_train.shape == (1500, 8, 8, 1)
    assert digits.x_test.shape == (297, 8, 8, 1)
    assert (digits.x_train.min(), digits.x_train.max()) == (0, 255)
    assert set(digits.y_train) == set(range(10)) == set(digits.y_test)
    # Every level of grey comes back exactly.
    levels = digits.x_train * (16 / 255)
    assert np.abs(levels - np.round(levels)).max() < 0.05


def test_digits_without_scikit_learn_say_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(ImportError, match="pip install scikit-learn"):
        load_images("digits")


def test_held_out_images_are_the_last_of_training():
    x, y = fake(10)
    whole = Images("a", x, y, *fake(4, seed=1), 10, (0.5,) * 3, (0.2,) * 3)
    part = split(whole, 3)
    check_same(part, (x[:7], y[:7], x[7:], y[7:]))
    assert (part.name, part.mean) == ("a", whole.mean)
    for count in (0, 10, -1):
        with pytest.raises(ValueError, match="between 1 and 9.*10 training images"):
            split(whole, count)
    with pytest.raises(dataclasses.FrozenInstanceError):
        whole.classes = 3  # pyright: ignore


def test_unknown_sets_and_absent_folders_are_named(tmp_path):
    with pytest.raises(ValueError, match="'mnist'.*cifar10, cifar100, npz, digits"):
        load_images("mnist", tmp_path)
    with pytest.raises(ValueError, match="where are the files of cifar10"):
        load_images("cifar10")
    with pytest.raises(ValueError, match="nowhere does not exist.*" + PAGE):
        load_images("cifar10", tmp_path / "nowhere")
    with pytest.raises(ValueError, match="holds neither test_batch.bin.*cifar10.npz"):
        load_images("cifar10", tmp_path)
    text = f"Download cifar-100-binary.tar.gz, the {PAGE}.*cifar-100-binary/test.bin"
    with pytest.raises(ValueError, match=text):
        load_images("cifar100", tmp_path)
    with pytest.raises(ValueError, match="holds 0 .npz files; name the one"):
        load_images("npz", tmp_path)
    with pytest.raises(ValueError, match="a.npz does not exist"):
        load_images("npz", tmp_path / "a.npz")


@pytest.mark.parametrize(
    ("dataset", "name"),
    [
        ("cifar10", "cifar-10-batches-py/data_batch_1"),
        ("cifar10", "data_batch_1"),
        ("cifar100", "cifar-100-python/train"),
    ],
)
def test_pickles_are_refused_unread(tmp_path, dataset, name):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_bytes(b"\x80\x02}.")
    with pytest.raises(ValueError, match="Python version.*may run any.*" + PAGE):
        load_images(dataset, tmp_path)


def test_a_packed_archive_is_to_be_unpacked(tmp_path):
    (tmp_path / "cifar-10-binary.tar.gz").write_bytes(b"")
    with pytest.raises(ValueError, match="tar.gz has not been unpacked"):
        load_images("cifar10", tmp_path)


def test_damaged_binary_batches_are_named(tmp_path):
    folder = tmp_path / "cifar-10-batches-bin"
    fourth = folder / "data_batch_4.bin"
    # The folder to unpack in is the one around the official one.
    remedy = f"{PAGE}.*{tmp_path}/cifar-10-batches-bin/test_batch.bin exists"

    write_cifar10(folder)
    whole = fourth.read_bytes()
    fourth.unlink()
    with pytest.raises(ValueError, match="data_batch_4.bin is missing.*" + remedy):
        load_images("cifar10", tmp_path)
    fourth.write_bytes(whole[:-1])
    with pytest.raises(ValueError, match="data_batch_4.bin is damaged: 12291 bytes"):
        load_images("cifar10", tmp_path)
    fourth.write_bytes(b"")
    with pytest.raises(ValueError, match="data_batch_4.bin is damaged: 0 bytes"):
        load_images("cifar10", tmp_path)
    fourth.write_bytes(whole[:3073])
    with pytest.raises(ValueError, match="4.bin is damaged: 1 images.*have 4"):
        load_images("cifar10", tmp_path)
    fourth.write_bytes(b"\x0a" + whole[1:])
    with pytest.raises(ValueError, match=r"4.bin is damaged: it has label 10.*0\.\.9"):
        load_images("cifar10", tmp_path)
    fourth.unlink()
    fourth.mkdir()
    with pytest.raises(ValueError, match="data_batch_4.bin cannot be read"):
        load_images("cifar10", tmp_path)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (dict(y_test=None), "it has no y_test"),
        (dict(x_train=fake(6)[0] / 255), "x_train is float64, not uint8"),
        (dict(x_train=fake(6)[0][..., 0]), r"x_train has shape \(6, 32, 32\)"),
        (dict(x_test=fake(4)[0][:0]), r"x_test has shape \(0, 32, 32, 3\)"),
        (dict(y_train=np.zeros(6)), "y_train is float64, not integer"),
        (dict(y_train=np.zeros((6, 1), int)), r"y_train has shape \(6, 1\) for 6"),
        (dict(y_train=np.zeros(5, int)), r"y_train has shape \(5,\) for 6"),
        (dict(y_test=np.full(4, -1)), "y_test has the label -1"),
        (dict(x_test=fake(4, shape=(8, 8, 3))[0]), "Bring both to one shape"),
        (dict(x_train=np.array([{}] * 6)), "damaged or no .npz file of images"),
        (dict(x_train=np.zeros((6, 3, 32, 32), "uint8")), "with channels first"),
        (dict(x_train=fake(6)[0] // 255), "no byte of x_train exceeds 1"),
        (dict(y_train=np.arange(1, 7)), "the lowest label of y_train is 1.*subtract"),
        (dict(y_train=np.zeros(6, int)), "all training images have one label"),
        (dict(y_train=np.array([0, 1, 2, 3, 4, 99])), "6 labels, but they go up to 99"),
        (dict(y_train=np.arange(6), y_test=np.full(4, 8)), "has the label 8 of y_test"),
    ],
)
def test_faulty_npz_files_are_named(tmp_path, changes, text):
    write_npz(tmp_path / "a.npz", **changes)
    with pytest.raises(ValueError, match="a.npz.*" + text):
        load_images("npz", tmp_path)


def test_an_npz_cut_off_anywhere_is_damaged(tmp_path):
    path = tmp_path / "cifar10.npz"
    write_npz(path)
    whole = path.read_bytes()
    for size in (0, 3, 1000, len(whole) // 2, len(whole) - 10):
        path.write_bytes(whole[:size])
        with pytest.raises(ValueError, match="cifar10.npz is damaged"):
            load_images("cifar10", tmp_path)
    flipped = bytearray(whole)
    flipped[5000] ^= 255
    path.write_bytes(flipped)
    with pytest.raises(ValueError, match="cifar10.npz is damaged"):
        load_images("cifar10", tmp_path)
    with path.open("wb") as file:
        np.save(file, np.zeros(3))
    with pytest.raises(ValueError, match="one bare array"):
        load_images("cifar10", tmp_path)


@pytest.mark.parametrize(
    "changes",
    [
        dict(y_train=np.full(6, 10)),
        dict(x_train=fake(6, shape=(8, 8, 1))[0], x_test=fake(4, shape=(8, 8, 1))[0]),
    ],
)
def test_another_set_is_not_taken_for_cifar10(tmp_path, changes):
    write_npz(tmp_path / "cifar10.npz", **changes)
    with pytest.raises(ValueError, match='not CIFAR-10.*dataset "npz".*' + PAGE):
        load_images("cifar10", tmp_path)


def reference(images, corners, mirrored, padding):
    """Crop and mirror one image after the other."""
    height, width = images.shape[1:3]
    result = []
    for image, (row, column), flipped in zip(images, corners, mirrored, strict=True):
        border = ((padding, padding), (padding, padding), (0, 0))
        part = np.pad(image, border)[row : row + height, column : column + width]
        result.append(part[:, ::-1] if flipped else part)
    return np.array(result)


@pytest.mark.parametrize("dtype", [np.uint8, np.float32])
@pytest.mark.parametrize("padding", [0, 3])
def test_crops_are_windows_of_the_padded_image(dtype, padding):
    x = fake(50, shape=(7, 9, 2))[0].astype(dtype)
    key = jr.key(padding)
    corners, mirrored = draw(key, 50, padding)
    assert 0 < np.sum(mirrored) < 50
    expected = reference(x, np.asarray(corners), np.asarray(mirrored), padding)
    result = cropped(jnp.asarray(x), key, padding)
    assert result.dtype == dtype
    np.testing.assert_array_equal(result, expected)
    upright = cropped(jnp.asarray(x), key, padding, flip=False)
    still = np.zeros(50, bool)
    np.testing.assert_array_equal(
        upright, reference(x, np.asarray(corners), still, padding)
    )


def test_given_corners_give_given_windows():
    x = jnp.arange(1, 10).reshape(1, 3, 3, 1).repeat(3, 0)
    corners = jnp.array([[1, 1], [0, 0], [2, 1]], jnp.int32)
    y = crop(x, corners, 1)[..., 0]
    np.testing.assert_array_equal(y[0], x[0, ..., 0])
    np.testing.assert_array_equal(y[1], [[0, 0, 0], [0, 1, 2], [0, 4, 5]])
    np.testing.assert_array_equal(y[2], [[4, 5, 6], [7, 8, 9], [0, 0, 0]])
    turned = mirror(x, jnp.array([True, False, False]))[..., 0]
    np.testing.assert_array_equal(turned[0], [[3, 2, 1], [6, 5, 4], [9, 8, 7]])
    np.testing.assert_array_equal(turned[1], x[1, ..., 0])


def test_all_corners_come_up_and_as_often():
    corners, mirrored = draw(jr.key(0), 40_000, 4)
    places, counts = np.unique(np.asarray(corners) @ [9, 1], return_counts=True)
    np.testing.assert_array_equal(places, np.arange(81))
    # Five deviations of a count around its mean.
    mean = 40_000 / 81
    assert np.abs(counts - mean).max() < 5 * mean**0.5
    assert abs(np.mean(mirrored) - 0.5) < 5 * 0.5 / 200
    # Where an image lies says nothing about whether it is mirrored.
    assert abs(np.corrcoef(corners[:, 0], mirrored)[0, 1]) < 5 / 200


def test_the_draw_of_an_image_depends_on_its_place_alone():
    x = jnp.asarray(fake(12)[0])
    key = jr.key(3)
    whole = cropped(x, key)
    np.testing.assert_array_equal(whole[:5], cropped(x[:5], key))
    np.testing.assert_array_equal(whole, crop_and_flip(x, key))
    assert not np.array_equal(whole, cropped(x, jr.key(4)))
    with jax.enable_x64(False):
        np.testing.assert_array_equal(whole, cropped(x, key))


def test_impossible_crops_are_refused():
    with pytest.raises(ValueError, match="not negative; got -1"):
        crop_and_flip(jnp.zeros((1, 4, 4, 1)), jr.key(0), -1)
    with pytest.raises(ValueError, match=r"channels\); got \(4, 4, 1\)"):
        crop_and_flip(jnp.zeros((4, 4, 1)), jr.key(0))
