"""Active sets of the lower level: how large, and how close to dependent, rows can be.

Adding a row to a set of independent ones can only lower the smallest eigenvalue of
`A A^T` and raise its largest (interlacing), so the extremes are at the largest sets.
"""

import itertools
import math

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from .._constraints import AbstractConstraints, Box, Simplex

_MAX_SETS = 20_000
_SAMPLES = 500
_CHUNK = 500


class RowConstants(eqx.Module):
    """Extremes over sets of independent rows that hold every equality row.

    - `independent`: whether all rows together are independent.
    - `bounded`: whether they bound the set; None where that is not known.
    - `exact`: false where the sets were too many to enumerate and were sampled.
    - `duplicates`: whether a row is a multiple of another, `B` and `b` included.
    """

    L_A: float
    lambda_min: float
    independent: bool = eqx.field(static=True)
    bounded: bool | None = eqx.field(static=True)
    L_B: float = 0.0
    exact: bool = eqx.field(static=True, default=True)
    duplicates: bool = eqx.field(static=True, default=False)


def row_constants(constraints: AbstractConstraints, x, y_size: int) -> RowConstants:
    """Measure the rows of `constraints`; `x` fixes the structure of the upper variable.

    Rows without a finite right-hand side are never active and are left out.
    """
    dtype = jnp.result_type(float)
    b = np.asarray(constraints.rhs(_zeros(x)), dtype)
    finite = np.isfinite(b)
    if not finite.any():
        return RowConstants(
            L_A=0.0, lambda_min=math.inf, independent=True, bounded=False
        )
    if isinstance(constraints, Box):
        # Of a pair of bounds one is active: rows are unit vectors up to sign.
        halves = finite.reshape(2, -1)
        return RowConstants(
            L_A=1.0,
            lambda_min=1.0,
            independent=not halves.all(0).any(),
            bounded=bool(halves.all()),
        )
    if isinstance(constraints, Simplex):
        return _simplex_constants(constraints.shape[-1])
    A = np.asarray(constraints.matrix(y_size, dtype), dtype)[finite]
    B = constraints.coupling_matrix(_zeros(x), dtype)
    B = np.zeros((len(b), 1)) if B is None else np.asarray(B, dtype)
    B, b = B[finite], b[finite]
    equality = (np.arange(len(finite)) >= constraints.num_inequalities)[finite]
    smallest, largest, exact = _extremes(A, equality)
    return RowConstants(
        L_A=largest,
        L_B=float(np.linalg.norm(B, 2)),
        lambda_min=smallest**2,
        exact=exact,
        duplicates=_duplicated(np.column_stack([A, B, b])),
        independent=bool(_independent(A[None])[0]),
        bounded=_bounded(A, equality),
    )


def _simplex_constants(n: int) -> RowConstants:
    """Closed form: one sum and `s` bounds have `A A^T = [[n, -1^T], [-1, I]]`.

    Its extreme eigenvalues are `(n + 1 -+ sqrt((n - 1)^2 + 4 s)) / 2`; at most
    `s = n - 1` bounds are active, and then their product is one.
    """
    largest = (n + 1 + math.sqrt((n - 1) * (n + 3))) / 2
    return RowConstants(
        L_A=math.sqrt(largest), lambda_min=1 / largest, independent=False, bounded=True
    )


def _extremes(A, equality):
    """Smallest and largest singular values over the largest independent sets."""
    fixed, free = np.flatnonzero(equality), np.flatnonzero(~equality)
    if len(fixed) and not _independent(A[fixed][None])[0]:
        raise ValueError(
            "`A_eq` must have independent rows (`ass:rank`): the multipliers are not "
            "unique and no constant bounds them. Remove the dependent rows."
        )
    rank = int(np.linalg.matrix_rank(_unit(A)))
    if rank == 0:
        return math.inf, 0.0, True
    choose = rank - len(fixed)
    if math.comb(len(free), choose) > _MAX_SETS:
        # The norm of all rows bounds that of any; nothing such from below.
        return _sampled_smallest(A, fixed, free), float(np.linalg.norm(A, 2)), False
    sets = itertools.combinations(free, choose)
    smallest, largest = math.inf, 0.0
    while chunk := list(itertools.islice(sets, _CHUNK)):
        rows = np.array([[*fixed, *chosen] for chosen in chunk], int)
        rows = rows[_independent(A[rows])]
        values = np.linalg.svd(A[rows], compute_uv=False)
        smallest = min(smallest, float(values.min(initial=math.inf)))
        largest = max(largest, float(values.max(initial=0)))
    return smallest, largest, True


def _sampled_smallest(A, fixed, free):
    rng = np.random.default_rng(0)
    sets = (
        _first_independent(A, fixed, rng.permutation(free)) for _ in range(_SAMPLES)
    )
    return min(float(np.linalg.svd(A[i], compute_uv=False).min()) for i in sets)


def _first_independent(A, fixed, order):
    """`fixed`, then rows in the given order, each unless it depends on those before."""
    basis, chosen = np.zeros((0, A.shape[1])), []
    for i in (*fixed, *order):
        row = _unit(A[i])
        # Projected twice: one pass of Gram-Schmidt loses orthogonality.
        for _ in range(2):
            row = row - basis.T @ (basis @ row)
        if np.linalg.norm(row) > 1e-9:
            basis = np.vstack([basis, _unit(row)])
            chosen.append(i)
    return chosen


def _unit(A):
    norms = np.linalg.norm(A, axis=-1, keepdims=True)
    return A / np.where(norms > 0, norms, 1)


def _independent(stacks):
    """Whether each matrix of a stack has independent rows, whatever their scale."""
    if stacks.shape[-2] > stacks.shape[-1]:
        return np.zeros(len(stacks), bool)
    values = np.linalg.svd(_unit(stacks), compute_uv=False)
    tol = max(stacks.shape[-2:]) * np.finfo(stacks.dtype).eps
    return values.min(-1) > tol * values.max(-1)


def _duplicated(rows):
    unit = _unit(rows)
    return any(
        np.abs(unit[i + 1 :] - unit[i]).max(1).min() < 1e-12
        for i in range(len(unit) - 1)
    )


def _bounded(A, equality):
    """False where the set is unbounded for sure, None where nothing is known.

    A bounded polyhedron needs rows of full column rank and one row more than that, an
    equality counting twice.
    """
    rank = np.linalg.matrix_rank(_unit(A))
    few = len(A) + equality.sum() <= A.shape[1]
    return False if rank < A.shape[1] or few else None


def _zeros(x):
    flat, unravel = ravel_pytree(x)
    return unravel(0 * flat)
