"""The official binary files of CIFAR-10 and CIFAR-100."""

from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import numpy as np

from .npz_files import Arrays

PAGE = "https://www.cs.toronto.edu/~kriz/cifar.html"
SIDE = 32
PIXELS = 3 * SIDE * SIDE


@dataclass(frozen=True)
class Cifar:
    """How one of the two sets lies on disk, and its usual normalisation.

    - `labels`: how many values each label byte before the pixels may take; the last
      byte is the label that counts (CIFAR-100 has a coarse one before it).
    - `pickles`: what the Python version is called, which is refused.
    """

    title: str
    train: tuple[str, ...]
    test: str
    folder: str
    archive: str
    npz: str
    labels: tuple[int, ...]
    pickles: tuple[str, ...]
    mean: tuple[float, float, float]
    std: tuple[float, float, float]

    @property
    def classes(self) -> int:
        return self.labels[-1]

    def remedy(self, folder: Path) -> str:
        """What to download and where to put it."""
        return (
            f"Download {self.archive}, the binary version from {PAGE}, and unpack it "
            f"there, so that {folder / self.folder / self.test} exists."
        )


CIFARS = {
    "cifar10": Cifar(
        title="CIFAR-10",
        train=tuple(f"data_batch_{i}.bin" for i in range(1, 6)),
        test="test_batch.bin",
        folder="cifar-10-batches-bin",
        archive="cifar-10-binary.tar.gz",
        npz="cifar10.npz",
        labels=(10,),
        pickles=("cifar-10-batches-py", "data_batch_1", "cifar-10-python.tar.gz"),
        mean=(0.4914, 0.4822, 0.4465),
        std=(0.2470, 0.2435, 0.2616),
    ),
    "cifar100": Cifar(
        title="CIFAR-100",
        train=("train.bin",),
        test="test.bin",
        folder="cifar-100-binary",
        archive="cifar-100-binary.tar.gz",
        npz="cifar100.npz",
        labels=(20, 100),
        pickles=("cifar-100-python", "train", "cifar-100-python.tar.gz"),
        mean=(0.5071, 0.4865, 0.4409),
        std=(0.2673, 0.2564, 0.2762),
    ),
}


def find(cifar: Cifar, folder: Path) -> Path | None:
    """The folder with the binary files: this one, or the official one in it."""
    for place in (folder, folder / cifar.folder):
        if any((place / name).exists() for name in (*cifar.train, cifar.test)):
            return place
    return None


def missing(cifar: Cifar, folder: Path) -> str:
    """Why there is nothing to read in `folder`, in one sentence."""
    if not folder.is_dir():
        return f"the folder {folder} does not exist."
    if (folder / cifar.archive).exists():
        return f"{folder / cifar.archive} has not been unpacked."
    for name in cifar.pickles:
        if (folder / name).exists():
            return (
                f"{folder / name} is the Python version of {cifar.title}: pickles, "
                "which are not read because opening one may run any program."
            )
    return (
        f"{folder} holds neither {cifar.test} nor {cifar.folder}/{cifar.test} nor "
        f"{cifar.npz}."
    )


def read(cifar: Cifar, folder: Path) -> Arrays:
    """`x_train, y_train, x_test, y_test` from the binary files in `folder`."""
    batches = [_batch(cifar, folder / name) for name in cifar.train]
    sizes = [len(labels) for _, labels in batches]
    for name, size in zip(cifar.train, sizes, strict=True):
        # All are the same size in the official set, so a shorter one was cut off.
        if size != max(sizes):
            cause = f"is damaged: {size} images, other batches have {max(sizes)}"
            _fail(cifar, folder / name, cause)
    x_test, y_test = _batch(cifar, folder / cifar.test)
    x_train = np.concatenate([x for x, _ in batches])
    return x_train, np.concatenate([y for _, y in batches]), x_test, y_test


def _batch(cifar: Cifar, path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Images and labels of one file: records of label bytes, then three planes."""
    try:
        content = np.frombuffer(path.read_bytes(), np.uint8)
    except FileNotFoundError:
        _fail(cifar, path, "is missing")
    except OSError as error:
        _fail(cifar, path, f"cannot be read ({error.strerror})")
    record = len(cifar.labels) + PIXELS
    if content.size == 0 or content.size % record:
        cause = f"is damaged: {content.size} bytes, no multiple of {record} per image"
        _fail(cifar, path, cause)
    rows = content.reshape(-1, record)
    for column, count in enumerate(cifar.labels):
        if (worst := rows[:, column].max()) >= count:
            cause = f"is damaged: it has label {worst}, out of 0..{count - 1}"
            _fail(cifar, path, cause)
    planes = rows[:, len(cifar.labels) :].reshape(-1, 3, SIDE, SIDE)
    images = np.ascontiguousarray(planes.transpose(0, 2, 3, 1))
    return images, rows[:, len(cifar.labels) - 1].astype(np.int32)


def _fail(cifar: Cifar, path: Path, cause: str) -> NoReturn:
    folder = path.parent.parent if path.parent.name == cifar.folder else path.parent
    raise ValueError(f"{path} {cause}. {cifar.remedy(folder)}")
