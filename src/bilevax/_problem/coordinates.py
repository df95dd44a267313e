"""What numbers in a tree are called: `x[2]` in an array, `tolls[2]` in a dictionary.

In the order of `ravel_pytree`, which sorts the names of dictionaries; nobody should
have to know it.
"""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np


def coordinate_names(tree: Any, name: str = "x") -> list[str]:
    """One name for each number in `tree`; `name` is that of the tree itself."""
    names = []
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        start = _joined(path) or name
        shape = np.shape(leaf)
        if shape == ():
            names.append(start)
        for index in np.ndindex(*shape) if shape else ():
            names.append(f"{start}[{', '.join(map(str, index))}]")
    return names


def checked_names(tree: Any, names: Sequence[str] | None) -> list[str]:
    """`names`, one for each number in `tree`; without any, what these are called."""
    if names is None:
        return coordinate_names(tree)
    count = sum(int(np.size(leaf)) for leaf in jax.tree.leaves(tree))
    texts = not isinstance(names, str) and all(isinstance(n, str) for n in names)
    if not texts or len(names) != count or len(set(names)) != count:
        raise ValueError(
            f"`names` must be {count} different texts, one for each number in x; got "
            f"{names!r}."
        )
    return list(names)


def coordinate_index(names: Sequence[str], wanted: Any, what: str) -> int:
    """Which coordinate a name, or a number itself, stands for."""
    if isinstance(wanted, int | np.integer) and not isinstance(wanted, bool):
        if -len(names) <= wanted < len(names):
            return int(wanted) % len(names)
        raise ValueError(
            f"`{what}` is a coordinate of x, from 0 to {len(names) - 1}; got {wanted}."
        )
    if isinstance(wanted, str):
        if wanted in names:
            return names.index(wanted)
        shown = ", ".join(names[:6]) + (", ..." if len(names) > 6 else "")
        raise ValueError(
            f"`{what}` names no coordinate: x has {shown}; got {wanted!r}."
        )
    raise ValueError(
        f"`{what}` is the name of a coordinate of x, such as {names[0]!r}, or its "
        f"number; got {wanted!r}."
    )


def _joined(path) -> str:
    """Keys with points between them, positions in brackets."""
    text = ""
    for entry in path:
        key = getattr(entry, "key", getattr(entry, "name", None))
        if isinstance(key, str):
            text += f".{key}" if text else key
        else:
            text += f"[{getattr(entry, 'idx', key)}]"
    # A tree that is a list: its entries are those of x.
    return f"x{text}" if text.startswith("[") else text
