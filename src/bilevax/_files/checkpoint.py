"""Runs on disk: arrays and a description, nothing that could execute.

A checkpoint is one `.npz` file written beside its place and moved there in one step, so
that whoever reads it sees a whole file or the one before.
"""

import contextlib
import io
import json
import os
import platform
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import numpy as np

from .digest import digest

FORMAT = "bilevax-checkpoint-2"
REMEDY = "It was left alone; delete it, or name another file, to start afresh."


class CheckpointError(ValueError):
    """A file that is no checkpoint of this run; it is left as it is."""


def save(path: str | os.PathLike, arrays: dict[str, np.ndarray], meta: dict) -> None:
    """Write atomically: a temporary file, flushed to disk, then renamed.

    Of the processes of a distributed run the first one writes.
    """
    if jax.process_index() != 0:
        return
    text = json.dumps({"format": FORMAT, **meta}, sort_keys=True)
    with _writing(Path(path)) as (file, name):
        np.savez(file, allow_pickle=False, meta=np.array(text), **arrays)
        file.flush()
        os.fsync(file.fileno())
        os.replace(name, path)


def check_writable(path: str | os.PathLike) -> None:
    """Raise a `CheckpointError` where `save` could not write, before a run begins."""
    if jax.process_index() != 0:
        return
    if Path(path).is_dir():
        raise CheckpointError(f"{path} is a folder; name a file for the checkpoint.")
    with _writing(Path(path)):
        pass


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[tuple[Any, Path]]:
    """A new file beside `path` and its name; it is gone afterwards, if not renamed."""
    # By name, not by `tempfile`, whose files nobody else may read.
    name = path.with_name(f"{path.name}.{platform.node()}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _forget_killed(path)
        with open(name, "wb") as file:
            yield file, name
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be written ({error.strerror or error}). A file that was "
            "there is as it was; free space, mend permissions or name another file."
        ) from error
    finally:
        with contextlib.suppress(OSError):
            name.unlink(missing_ok=True)


def _forget_killed(path: Path) -> None:
    """Remove what processes of this machine left that were killed while they wrote."""
    start = f"{path.name}.{platform.node()}."
    for entry in os.listdir(path.parent):
        number = entry.removeprefix(start).removesuffix(".tmp")
        if entry == f"{start}{number}.tmp" and number.isdigit():
            if not _is_alive(int(number)):
                with contextlib.suppress(OSError):
                    path.with_name(entry).unlink()


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):  # somebody else's, or no way to know
        return True
    return True


def load(path: str | os.PathLike) -> tuple[dict[str, np.ndarray], dict]:
    """Arrays and description, or a `CheckpointError`."""
    try:
        # In memory first: a damaged archive would leave the file open.
        content = io.BytesIO(Path(path).read_bytes())
        with zipfile.ZipFile(content) as archive:
            # Sums first: the header of a damaged array may ask for all memory.
            damaged = archive.testzip()
            if damaged is not None:
                raise ValueError(f"the part {damaged!r} is not what was written")
        content.seek(0)
        with np.load(content, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        strangers = [n for n, a in arrays.items() if not isinstance(a, np.ndarray)]
        if strangers:
            raise ValueError(f"the part {strangers[0]!r} is no array")
        meta = json.loads(str(arrays.pop("meta")))
        if not isinstance(meta, dict):
            raise ValueError("its description is not one")
    except FileNotFoundError:
        raise
    except Exception as error:  # of a dozen kinds, by what is damaged
        raise CheckpointError(
            f"{path} is damaged or not a checkpoint of bilevax ({error}). {REMEDY}"
        ) from error
    if meta.get("format") != FORMAT:
        raise CheckpointError(
            f"{path} is not a checkpoint of this version of bilevax (format "
            f"{meta.get('format')!r}, expected {FORMAT!r}). {REMEDY}"
        )
    return arrays, meta


def check_kinds(path, meta: dict, kinds: dict[str, Any]) -> None:
    """Raise unless each entry of the description is there and of its kind."""
    for name, kind in kinds.items():
        if name not in meta or not isinstance(meta[name], kind):
            found = repr(meta[name]) if name in meta else "nothing"
            raise CheckpointError(f"{path} is damaged: its {name} is {found}. {REMEDY}")


def check_same(path, found: dict, expected: dict) -> None:
    """Raise unless the file belongs to the run that is asked for."""
    for name, want in expected.items():
        if name not in found or found[name] != want:
            # A digest of data and functions tells a reader nothing.
            digests = dict(
                problem="its functions or data are others", x0="it began at another x0"
            )
            other = f"its {name} is {found.get(name)!r}, this run has {want!r}"
            cause = digests.get(name, other)
            raise CheckpointError(
                f"{path} belongs to another run: {cause}. It was left alone; name "
                "another file or repeat the call that wrote it."
            )


def label(module: Any) -> str:
    """The kind of a module, with a digest of all its numbers and choices."""
    return f"{type(module).__name__} {fingerprint(module)}"


def fingerprint(tree: Any) -> str:
    """A digest of all arrays, choices and functions."""
    return digest(tree)


def flatten(tree: Any, prefix: str) -> dict[str, np.ndarray]:
    """The array leaves of `tree`, numbered in JAX order.

    Of a distributed run all processes take part, since each holds a part of the whole.
    """
    leaves = jax.tree.leaves(eqx.filter(tree, eqx.is_array))
    return {f"{prefix}{i}": _whole(_plain(leaf)) for i, leaf in enumerate(leaves)}


def unflatten(
    arrays: dict[str, np.ndarray], prefix: str, like: Any, path: Any = "the checkpoint"
) -> Any:
    """The tree shaped like `like` with the stored leaves; `path` is for complaints."""
    dynamic, static = eqx.partition(like, eqx.is_array)
    leaves, structure = jax.tree.flatten(dynamic)
    new = []
    for i, leaf in enumerate(leaves):
        stored = arrays.get(f"{prefix}{i}")
        want = _plain(leaf)
        # Numbers may have another precision, but kinds do not change.
        if (
            stored is None
            or stored.shape != want.shape
            or stored.dtype.kind != want.dtype.kind
        ):
            raise CheckpointError(
                f"{path} holds arrays of other shapes or kinds than this run needs: it "
                f"is damaged or belongs to another problem or method. {REMEDY}"
            )
        new.append(_restored(stored, leaf))
    return eqx.combine(structure.unflatten(new), static)


def _whole(leaf) -> np.ndarray:
    if leaf.is_fully_addressable or leaf.is_fully_replicated:
        return np.asarray(leaf)
    from jax.experimental.multihost_utils import process_allgather

    return np.asarray(process_allgather(leaf, tiled=True))


def _plain(leaf):
    """Random keys as the integers they are made of."""
    if eqx.is_array(leaf) and jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jax.random.key_data(leaf)
    return leaf


def _restored(stored, like):
    if jax.numpy.issubdtype(like.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(stored, impl=jax.random.key_impl(like))
    # Weak types are part of what a compiled program expects.
    array = jax.numpy.asarray(stored, like.dtype)
    return jax.lax.convert_element_type(array, like.dtype)
