"""Domains without a point are a mistake that can be told before anything runs."""

import jax
import numpy as np
from jax.core import Tracer

from .box import Box
from .polyhedron import Polyhedron

# A linear program is solved to 1e-7; what is empty by less is not told here.
_EMPTY_BY = 1e-6


def check_box(box: Box, name: str) -> None:
    """Raise a `ValueError` that names the coordinate at which a box has no point."""
    lower = jax.tree_util.tree_flatten_with_path(box.lower)[0]
    for (path, low), high in zip(lower, jax.tree.leaves(box.upper), strict=True):
        if not (_is_known(low) and _is_known(high)):
            continue
        low, high = np.asarray(low), np.asarray(high)
        # Compares false with NaN, and no number is beyond infinity.
        wrong = ~((low <= high) & (low < np.inf) & (high > -np.inf))
        if not wrong.any():
            continue
        at = np.unravel_index(int(np.argmax(wrong)), wrong.shape)
        index = f"[{', '.join(map(str, at))}]" if at else ""
        coordinate = f"{name}{jax.tree_util.keystr(path)}{index}"
        a, b = float(low[at]), float(high[at])
        if np.isnan(a) or np.isnan(b):
            raise ValueError(
                f"`domain` has a bound that is NaN at {coordinate}: {a:g} to {b:g}. "
                "Where there is no bound, write -inf or inf."
            )
        raise ValueError(
            f"`domain` is empty: at {coordinate} the lower bound is {a:g} and the "
            f"upper bound {b:g}. Exchange or widen them."
        )


def check_polyhedron(domain: Polyhedron) -> None:
    """Raise a `ValueError` that names the rows which leave `x` no point."""
    rows, bounds, names = [], [], []
    for A, b, name, signs in (
        (domain.A, domain.b, "A", (1,)),
        (domain.A_eq, domain.b_eq, "A_eq", (1, -1)),
    ):
        if A is None or b is None or not (_is_known(A) and _is_known(b)):
            continue
        A, b = np.asarray(A, float), np.asarray(b, float)
        for i in range(len(b)):
            if np.isnan(b[i]) or not np.all(np.isfinite(A[i])):
                raise ValueError(
                    f"`domain` holds a NaN or an infinity in row {i} of `{name}`; only "
                    "entries of `b` may be inf, where there is no bound."
                )
            if b[i] == -np.inf or (b[i] == np.inf and len(signs) > 1):
                raise ValueError(
                    f"`domain` is empty: row {i} of `{name}` asks for {b[i]}, which no "
                    "`x` reaches."
                )
            length = np.linalg.norm(A[i]) or 1.0
            for sign in signs:
                if b[i] < np.inf:
                    rows.append(sign * A[i] / length)
                    bounds.append(sign * b[i] / length)
                    names.append(f"row {i} of `{name}`")
    if rows:
        _check_rows(np.array(rows), np.array(bounds), names)


def _check_rows(A, b, names) -> None:
    """The least `t` with `A x <= b + t`; if positive, its multipliers name rows."""
    # A quarter of the time that `import bilevax` would take.
    from scipy.optimize import linprog

    size = 1 + np.abs(b).max()
    cost = np.append(np.zeros(A.shape[1]), 1.0)
    found = linprog(
        cost,
        A_ub=np.c_[A, -np.ones(len(b))],
        b_ub=b / size,
        bounds=[(None, None)] * A.shape[1] + [(0, None)],
    )
    if found.status != 0 or found.fun <= _EMPTY_BY:
        return
    pulls = np.flatnonzero(np.abs(found.ineqlin.marginals) > 1e-9)
    blamed = list(dict.fromkeys(names[i] for i in pulls))
    shown = ", ".join(blamed[:8]) + (", ..." if len(blamed) > 8 else "")
    raise ValueError(
        f"`domain` is empty: no `x` satisfies {shown} together; every `x` breaks one "
        f"of them by {found.fun * size:.3g} or more (of rows of length one). Relax "
        "`b`, or look for a wrong sign."
    )


def _is_known(array) -> bool:
    """Whether the numbers are here: not traced, nor in another process."""
    known = not isinstance(array, Tracer)
    return known and getattr(array, "is_fully_addressable", True)
