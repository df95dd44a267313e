"""Image sets as one `.npz` file with `x_train`, `y_train`, `x_test`, `y_test`."""

import io
import zipfile
import zlib
from pathlib import Path

import numpy as np

# Training images and labels, test images and labels.
Arrays = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]
NAMES = ("x_train", "y_train", "x_test", "y_test")
SHAPE = (
    "Images are uint8 of shape (number, height, width, channels), labels integers "
    "of shape (number,), both under the names " + ", ".join(NAMES) + "."
)


def read(path: Path) -> Arrays:
    """`x_train, y_train, x_test, y_test`; pickled objects are refused."""
    try:
        # In memory first: a damaged archive would leave the file open.
        file = np.load(io.BytesIO(path.read_bytes()), allow_pickle=False)
        if not isinstance(file, np.lib.npyio.NpzFile):
            raise ValueError("it holds one bare array")
        with file:
            absent = [name for name in NAMES if name not in file.files]
            if absent:
                raise ValueError("it has no " + ", ".join(absent))
            x_train, y_train, x_test, y_test = (file[name] for name in NAMES)
    except FileNotFoundError:
        raise ValueError(f"{path} does not exist. Put the .npz file there.") from None
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        # NumPy takes what it cannot read for pickles, and would have them loaded.
        cause = "" if "pickle" in str(error) else f" ({error})"
        raise ValueError(
            f"{path} is damaged or no .npz file of images{cause}. {SHAPE} Write it "
            "again with numpy.savez."
        ) from error
    for kind, x, y in (("train", x_train, y_train), ("test", x_test, y_test)):
        cause = _fault(kind, x, y)
        if cause:
            raise ValueError(f"{path}: {cause}. {SHAPE}")
    if x_train.shape[1:] != x_test.shape[1:]:
        raise ValueError(
            f"{path}: training images have shape {x_train.shape[1:]}, test images "
            f"{x_test.shape[1:]}. Bring both to one shape."
        )
    return x_train, y_train.astype(np.int32), x_test, y_test.astype(np.int32)


def fault_of_own(arrays: Arrays) -> str | None:
    """What is wrong with a set of the user's own as a whole."""
    x_train, y_train, _, y_test = arrays
    if x_train.max() <= 1:
        return (
            f"no byte of x_train exceeds {x_train.max()}, but pixels go from 0 to 255. "
            "Multiply by 255 before the conversion to uint8"
        )
    known, asked = np.unique(y_train), np.unique(y_test)
    if known[0] > 0:
        return (
            f"the lowest label of y_train is {known[0]}. Labels count from 0: subtract "
            "it"
        )
    if known.size < 2:
        return "all training images have one label; a classifier needs two classes"
    if known[-1] >= 2 * known.size:
        return (
            f"y_train has {known.size} labels, but they go up to {known[-1]}. Number "
            "the classes from 0 without gaps"
        )
    strangers = np.setdiff1d(asked, known)
    if strangers.size:
        return f"no training image has the label {strangers[0]} of y_test"
    return None


def _fault(kind: str, x: np.ndarray, y: np.ndarray) -> str | None:
    """What is wrong with one half of the set."""
    if x.dtype != np.uint8:
        return f"x_{kind} is {x.dtype}, not uint8"
    if x.ndim != 4 or 0 in x.shape:
        return f"x_{kind} has shape {x.shape}, not four axes that hold something"
    if x.shape[1] in (1, 3) and x.shape[3] > 4:
        return f"x_{kind} has shape {x.shape}, with channels first"
    if not np.issubdtype(y.dtype, np.integer):
        return f"y_{kind} is {y.dtype}, not integer"
    if y.shape != x.shape[:1]:
        return f"y_{kind} has shape {y.shape} for {len(x)} images"
    if y.min() < 0 or y.max() >= 2**31 - 1:
        worst = y.min() if y.min() < 0 else y.max()
        return f"y_{kind} has the label {worst}; labels count from 0"
    return None
