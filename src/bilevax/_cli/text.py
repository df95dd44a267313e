"""Points as text."""

from typing import Any

import jax
import numpy as np


def short(tree: Any) -> str:
    leaves = jax.tree.leaves(tree)
    shown = [
        np.array2string(np.asarray(leaf), precision=6, threshold=20) for leaf in leaves
    ]
    return shown[0] if len(shown) == 1 else ", ".join(shown)


def as_lists(tree: Any) -> list:
    return [np.asarray(leaf).tolist() for leaf in jax.tree.leaves(tree)]
