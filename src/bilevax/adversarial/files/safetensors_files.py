"""Networks as safetensors: arrays and a line of text, nothing that could execute."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.random as jr

from ..._files.checkpoint import CheckpointError
from ..networks.models import build, description
from ..networks.network import AbstractNetwork
from .torch_names import from_torch, to_torch

# The entry of the file's metadata that says how to build the network.
_BUILT = "bilevax.network"
_NORMALISE = "normalise"


def save_safetensors(network: AbstractNetwork, path: str | os.PathLike) -> None:
    """Write the network: its arrays, and as text how to build it."""
    write = _library().numpy.save
    norm = network.normalise
    text = {_NORMALISE: json.dumps(dict(mean=norm.mean, std=norm.std))}
    built = description(network)
    if built is not None:
        text[_BUILT] = json.dumps(built)
    _replace(Path(path), write(to_torch(network), {"format": "pt", **text}))


def load_safetensors(
    path: str | os.PathLike, like: AbstractNetwork | None = None
) -> AbstractNetwork:
    """The network in the file; `like` is of its shapes, where it is one of your own."""
    library = _library()
    try:
        with library.safe_open(path, framework="numpy") as file:
            text = file.metadata() or {}
            arrays = {name: file.get_tensor(name) for name in file.keys()}
        if like is None:
            like = _built(text)
        return from_torch(arrays, like)
    except FileNotFoundError:
        raise ValueError(f"{path} does not exist.") from None
    except (OSError, ValueError, TypeError, library.SafetensorError) as error:
        raise CheckpointError(
            f"{path} is damaged or holds another network: {error}. It was left alone; "
            "export it again, or pass `like=`, a network of its shapes."
        ) from error


def _built(text: Mapping[str, str]) -> AbstractNetwork:
    if _BUILT not in text:
        raise ValueError("it does not say which network of bilevax it is")
    made: dict[str, Any] = json.loads(text[_BUILT])
    if not isinstance(made, dict):
        raise ValueError("it does not say how to build its network")
    return build(key=jr.key(0), **made)


def _replace(path: Path, content: bytes) -> None:
    """Write and rename: whoever reads sees a whole file, or the one before."""
    new = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        new.write_bytes(content)
        new.replace(path)
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be written ({error.strerror or error}); free space, mend "
            "permissions or name another file."
        ) from error
    finally:
        new.unlink(missing_ok=True)


def _library() -> Any:
    try:
        import safetensors
        import safetensors.numpy
    except ImportError:
        raise ImportError(
            "Files of safetensors need the package safetensors: "
            "pip install 'bilevax[export]'."
        ) from None
    return safetensors
