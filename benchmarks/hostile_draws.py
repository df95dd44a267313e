"""Drawing hostile members: integers, planted answers, units."""

import numpy as np

from .hostile_layout import M, joined, place, taken


def integers(rng, high, *shape):
    return rng.integers(-high, high + 1, size=shape).astype(float)


def some_rows(rng, count, k, n):
    """Integer rows, none of them zero."""
    A = integers(rng, 3, count, k, n)
    empty = ~A.any(2)
    A[empty, rng.integers(0, n, size=empty.sum())] = 1
    return A


def unimodular(rng, count, n):
    """Integer matrices with integer inverses."""
    low = np.tril(integers(rng, 1, count, n, n), -1) + np.eye(n)
    return low @ np.swapaxes(
        np.tril(integers(rng, 1, count, n, n), -1) + np.eye(n), 1, 2
    )


def times(matrix, vector):
    return np.einsum("...ij,...j->...i", matrix, vector)


def pulled(matrix, vector):
    return np.einsum("...ij,...i->...j", matrix, vector)


def rank(matrix):
    return np.linalg.matrix_rank(matrix) if matrix.size else np.zeros(len(matrix), int)


def upper_level(rng, count, n):
    return dict(
        R=integers(rng, 2, count, M, n),
        p=integers(rng, 3, count, n),
        P=rng.integers(0, 3, size=(count, n)).astype(float),
    )


def curvature(rng, count, n):
    root = integers(rng, 2, count, n, n)
    return np.swapaxes(root, 1, 2) @ root + np.eye(n)


def finished(rng, part, split: float = 0.15):
    """Couple the rows to `x` and choose the linear term: `part` becomes a member.

    Where tight rows depend on each other their part of `x` shares the dependence, but
    for a share `split`, where it does not.
    """
    A, E, z = part["A"], part["E"], part["z"]
    count, k, n = A.shape
    x = part["x"] = integers(rng, 2, count, M)
    B, D = integers(rng, 2, count, k, M), integers(rng, 2, count, E.shape[1], M)
    shift = integers(rng, 1, count, n, M)
    held = part["strong"] | part["weak"]
    strong = np.where(part["strong"][:, :, None], A, 0)
    basis = np.concatenate([strong, E], axis=1)
    dependent = rank(basis) < part["strong"].sum(1) + E.shape[1]
    shared = dependent & (rng.uniform(size=count) >= split)
    follow = shared[:, None, None] & part["strong"][:, :, None]
    part["B"] = np.where(follow, A @ shift, B)
    part["D"] = np.where(shared[:, None, None], E @ shift, D)
    slack = np.where(held, 0, rng.integers(1, 6, size=(count, k)))
    part["b"] = times(A, z) + times(part["B"], x) + slack
    part["e"] = times(E, z) + times(part["D"], x)
    part["C"] = integers(rng, 2, count, n, M)
    force = times(part["H"], z) + times(part["C"], x)
    part["c"] = -(force + pulled(A, part["lam"]) + pulled(E, part["mu"]))
    return part | upper_level(rng, count, n)


def planted(rng, count, n, strong=0, weak=0, loose=0, equal=0, kind="plain"):
    """Programs with integer data and a known split of their rows.

    `kind`: "plain"; "twice" (strong rows copied and scaled), "sums" (strong rows that
    are sums of others), "pinned" (strong rows in opposite pairs).
    """
    k = strong + weak + loose
    A, E = some_rows(rng, count, k, n), some_rows(rng, count, equal, n)
    if weak:
        A[:, :strong, 0] = 0
        E[:, :, 0] = 0
    for i in range(1, strong):
        if kind == "twice" and i % 2:
            A[:, i] = A[:, i - 1] * 2.0 ** rng.integers(0, 3, size=(count, 1))
        if kind == "sums" and i >= 2 and i % 2 == 0:
            A[:, i] = A[:, i - 1] + A[:, i - 2]
        if kind == "pinned" and i % 2:
            A[:, i] = -A[:, i - 1]
    for rows in (A[:, :strong], E):
        empty = ~rows.any(2)
        rows[empty, -1] = 1
    if weak:
        A[:, strong : strong + weak, 0] = -rng.integers(1, 4, size=(count, weak))
        turn = unimodular(rng, count, n)
        A, E = A @ turn, E @ turn
    split = np.zeros((count, k), bool)
    part = dict(
        A=A,
        E=E,
        H=curvature(rng, count, n),
        z=integers(rng, 4, count, n),
        lam=np.zeros((count, k)),
        mu=integers(rng, 3, count, equal),
        strong=split.copy(),
        weak=split.copy(),
    )
    part["lam"][:, :strong] = rng.integers(1, 5, size=(count, strong))
    part["strong"][:, :strong] = True
    part["weak"][:, strong : strong + weak] = True
    return finished(rng, part)


def empty(rng, count, n, k, equal=0):
    """Programs without a feasible point: one row contradicts a sum of the others."""
    part = planted(rng, count, n, loose=k, equal=equal)
    ray = rng.integers(0, 3, size=(count, k - 1)).astype(float)
    ray[:, 0] += 1
    for name in ("A", "B", "b"):
        part[name][:, -1] = -np.einsum("bi,bi...->b...", ray, part[name][:, :-1])
    for name, other in (("A", "E"), ("B", "D"), ("b", "e")):
        if equal:
            part[name][:, -1] -= part[other][:, 0]
    part["b"][:, -1] -= rng.integers(1, 4, size=count)
    part["feasible"] = np.zeros(count, bool)
    return part


def scaled(rng, members, columns: int, rows: int):
    """Variables and rows in units from 2^-columns to 2^columns, and so for rows."""
    for name, high in (("s", columns), ("rho", rows), ("sigma", rows)):
        members[name] = 2.0 ** integers(rng, high, *members[name].shape)
    return members


def partly_scaled(rng, members, high: int):
    """A third of the members in units from 2^-high to 2^high."""
    third = len(members["z"]) // 3
    mixed = scaled(rng, taken(members, slice(third)), high, high)
    return joined([mixed, taken(members, slice(third, None))])


def in_groups(rng, count, makers):
    """`count` members from makers in turn."""
    sizes = np.diff(np.linspace(0, count, len(makers) + 1).astype(int))
    parts = [
        place(make(size), rng) for make, size in zip(makers, sizes, strict=True) if size
    ]
    members = joined(parts)
    return taken(members, rng.permutation(count))
