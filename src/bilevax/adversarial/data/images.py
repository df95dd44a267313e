"""Image sets from local files: CIFAR-10, CIFAR-100, any `.npz`, scikit-learn digits.

Nothing is downloaded, and nothing is read that could execute.
"""

import dataclasses
import os
from pathlib import Path

import numpy as np
from jaxtyping import Int32, UInt8

from . import cifar_files, npz_files
from .cifar_files import CIFARS, SIDE, Cifar
from .npz_files import Arrays

DATASETS = (*CIFARS, "npz", "digits")


@dataclasses.dataclass(frozen=True, eq=False)
class Images:
    """A labelled set: bytes in `(N, H, W, C)`, labels in `0..classes-1`.

    `mean` and `std`, by channel, are of pixels scaled to `[0, 1]`; networks take them.
    """

    name: str
    x_train: UInt8[np.ndarray, "n h w c"]
    y_train: Int32[np.ndarray, " n"]
    x_test: UInt8[np.ndarray, "m h w c"]
    y_test: Int32[np.ndarray, " m"]
    classes: int
    mean: tuple[float, ...]
    std: tuple[float, ...]


def load_images(dataset: str, folder: str | os.PathLike | None = None) -> Images:
    """A set from local files.

    - "cifar10", "cifar100": the official binary version, in `folder` or in the folder
      of it that the archive makes, or else `cifar10.npz` / `cifar100.npz`. `folder`
      may also be such an `.npz` file itself.
    - "npz": any file with `x_train`, `y_train`, `x_test`, `y_test`, or a folder with
      one such file; `mean` and `std` are those of its training images.
    - "digits": 8x8 grey digits that come with scikit-learn; no folder is needed. The
      first 1500 are for training.
    """
    if dataset not in DATASETS:
        raise ValueError(f"no dataset {dataset!r}; there are {', '.join(DATASETS)}.")
    if dataset == "digits":
        if folder is not None:
            raise ValueError(
                'the dataset "digits" comes with scikit-learn and reads no files; '
                f'for those in {folder} name another one, such as "npz".'
            )
        return _digits()
    if folder is None:
        raise ValueError(
            f"where are the files of {dataset}? Give their `folder` (--data on the "
            "command line)."
        )
    path = Path(folder).expanduser()
    if dataset == "npz":
        return _any_npz(path)
    return _cifar(dataset, CIFARS[dataset], path)


def split(images: Images, held_out: int) -> Images:
    """The set for choices: its test images are the last `held_out` for training.

    The true test images are not in it. `mean` and `std` stay. A set that is sorted by
    label must be shuffled before.
    """
    count = len(images.x_train)
    if not 0 < held_out < count:
        raise ValueError(
            f"between 1 and {count - 1} of the {count} training images can be held "
            f"out; got {held_out}."
        )
    kept = count - held_out
    return dataclasses.replace(
        images,
        x_train=images.x_train[:kept],
        y_train=images.y_train[:kept],
        x_test=images.x_train[kept:],
        y_test=images.y_train[kept:],
    )


def moments(
    x: UInt8[np.ndarray, "n h w c"],
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and deviation by channel of bytes scaled to `[0, 1]`.

    From counts of the 256 values, so without a copy in floats. A deviation is at least
    that of one byte: a channel that never changes must not be divided by zero.
    """
    values = np.arange(256) / 255
    means, deviations = [], []
    for channel in range(x.shape[-1]):
        counts = np.zeros(256)
        for start in range(0, len(x), 1000):
            part = x[start : start + 1000, ..., channel]
            counts += np.bincount(part.ravel(), minlength=256)
        share = counts / counts.sum()
        mean = share @ values
        means.append(float(mean))
        deviation = np.sqrt(share @ (values - mean) ** 2)
        deviations.append(float(max(deviation, 1 / 255)))
    return tuple(means), tuple(deviations)


def _cifar(dataset: str, cifar: Cifar, path: Path) -> Images:
    if path.suffix == ".npz":
        arrays = _cifar_npz(cifar, path)
    elif place := cifar_files.find(cifar, path):
        arrays = cifar_files.read(cifar, place)
    elif (path / cifar.npz).exists():
        arrays = _cifar_npz(cifar, path / cifar.npz)
    else:
        cause = cifar_files.missing(cifar, path)
        raise ValueError(f"no {cifar.title}: {cause} {cifar.remedy(path)}")
    return Images(dataset, *arrays, cifar.classes, cifar.mean, cifar.std)


def _cifar_npz(cifar: Cifar, path: Path) -> Arrays:
    arrays = npz_files.read(path)
    shape, top = arrays[0].shape[1:], max(arrays[1].max(), arrays[3].max())
    if shape != (SIDE, SIDE, 3) or top >= cifar.classes:
        raise ValueError(
            f"{path} is not {cifar.title}: its images have shape {shape} and its "
            f"labels go up to {top}, not ({SIDE}, {SIDE}, 3) and {cifar.classes - 1}. "
            'For a set of your own use the dataset "npz". ' + cifar.remedy(path.parent)
        )
    return arrays


def _any_npz(path: Path) -> Images:
    if path.is_dir():
        found = sorted(path.glob("*.npz"))
        if len(found) != 1:
            raise ValueError(
                f"{path} holds {len(found)} .npz files; name the one to read."
            )
        path = found[0]
    arrays = npz_files.read(path)
    cause = npz_files.fault_of_own(arrays)
    if cause is not None:
        raise ValueError(f"{path}: {cause}.")
    classes = int(max(arrays[1].max(), arrays[3].max())) + 1
    return Images(path.stem, *arrays, classes, *moments(arrays[0]))


def _digits() -> Images:
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ImportError(
            'the dataset "digits" comes with scikit-learn, which is not installed: '
            "pip install scikit-learn, or bilevax with the extra `train`."
        ) from error
    data = load_digits()
    # Grey goes from 0 to 16 there.
    x = np.round(data.images * (255 / 16)).astype(np.uint8)[..., None]  # pyright: ignore
    y = data.target.astype(np.int32)  # pyright: ignore
    parts = x[:1500], y[:1500], x[1500:], y[1500:]
    return Images("digits", *parts, 10, *moments(parts[0]))
