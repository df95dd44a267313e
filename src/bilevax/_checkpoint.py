"""Runs on disk: arrays and a description, nothing that could execute.

A checkpoint is one `.npz` file written beside its place and moved there in one step, so
that whoever reads it sees a whole file or the one before.
"""

import contextlib
import hashlib
import io
import json
import os
import zipfile
import zlib
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import numpy as np

FORMAT = "bilevax-checkpoint-2"
# What NumPy and its archives raise for files that are not what they should be.
_UNREADABLE = (
    OSError, ValueError, KeyError, EOFError, TypeError, NotImplementedError,
    zipfile.BadZipFile, zlib.error,
)  # fmt: skip


class CheckpointError(ValueError):
    """A file that is no checkpoint of this run; it is left as it is."""


def save(path: str | os.PathLike, arrays: dict[str, np.ndarray], meta: dict) -> None:
    """Write atomically: a temporary file, flushed to disk, then renamed.

    Of the processes of a distributed run the first one writes.
    """
    if jax.process_index() != 0:
        return
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"format": FORMAT, **meta}, sort_keys=True)
    # By name, not by `tempfile`, whose files nobody else may read.
    name = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with open(name, "wb") as file:
            np.savez(file, allow_pickle=False, meta=np.array(text), **arrays)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        name.unlink(missing_ok=True)
        raise


def load(path: str | os.PathLike) -> tuple[dict[str, np.ndarray], dict]:
    """Arrays and description, or a `CheckpointError`."""
    try:
        # In memory first: a damaged archive would leave the file open.
        content = io.BytesIO(Path(path).read_bytes())
        with np.load(content, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        meta = json.loads(str(arrays.pop("meta")))
    except _UNREADABLE as error:
        if isinstance(error, FileNotFoundError):
            raise
        raise CheckpointError(
            f"{path} is damaged or not a checkpoint of bilevax ({error}). It was left "
            "alone; delete it, or name another file, to start afresh."
        ) from error
    if meta.get("format") != FORMAT:
        raise CheckpointError(
            f"{path} is not a checkpoint of this version of bilevax (format "
            f"{meta.get('format')!r}, expected {FORMAT!r}). It was left alone."
        )
    return arrays, meta


def check_same(path, found: dict, expected: dict) -> None:
    """Raise unless the file belongs to the run that is asked for."""
    for name, want in expected.items():
        if found.get(name) != want:
            # A digest of data and functions tells a reader nothing.
            cause = "its functions or data are others"
            if name != "problem":
                cause = f"its {name} is {found.get(name)!r}, this run has {want!r}"
            raise CheckpointError(
                f"{path} belongs to another run: {cause}. It was left alone; name "
                "another file or repeat the call that wrote it."
            )


def label(module: Any) -> str:
    """The kind of a module, with a digest of all its numbers and choices."""
    choices = hashlib.sha256(repr(module).encode()).hexdigest()[:8]
    return f"{type(module).__name__} {fingerprint(module)}{choices}"


def fingerprint(tree: Any) -> str:
    """A digest of all arrays; functions count by name and by what they close over."""
    digest = hashlib.sha256()
    _digest(tree, digest, set())
    return digest.hexdigest()[:16]


def _digest(tree: Any, digest, seen: set[int]) -> None:
    for leaf in jax.tree.leaves(tree):
        if eqx.is_array(leaf) or isinstance(leaf, np.ndarray | float | int | bool):
            array = np.asarray(_plain(leaf))
            digest.update(f"{array.dtype}{array.shape}".encode())
            digest.update(array.tobytes())
            continue
        digest.update(getattr(leaf, "__qualname__", type(leaf).__name__).encode())
        if isinstance(leaf, str):
            digest.update(leaf.encode())
        if id(leaf) not in seen:
            seen.add(id(leaf))
            for cell in getattr(leaf, "__closure__", None) or ():
                # A name that was not bound yet leaves its cell empty.
                with contextlib.suppress(ValueError):
                    _digest(cell.cell_contents, digest, seen)


def flatten(tree: Any, prefix: str) -> dict[str, np.ndarray]:
    """The array leaves of `tree`, numbered in JAX order.

    Of a distributed run all processes take part, since each holds a part of the whole.
    """
    leaves = jax.tree.leaves(eqx.filter(tree, eqx.is_array))
    return {f"{prefix}{i}": _whole(_plain(leaf)) for i, leaf in enumerate(leaves)}


def unflatten(arrays: dict[str, np.ndarray], prefix: str, like: Any) -> Any:
    """The tree shaped like `like` with the stored leaves."""
    dynamic, static = eqx.partition(like, eqx.is_array)
    leaves, structure = jax.tree.flatten(dynamic)
    new = []
    for i, leaf in enumerate(leaves):
        stored = arrays.get(f"{prefix}{i}")
        if stored is None or stored.shape != np.shape(_plain(leaf)):
            raise CheckpointError(
                "the checkpoint holds arrays of other shapes than this run needs; it "
                "belongs to another problem or method."
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
