"""Hostile lower levels by class, each with its truth.

Most are planted: the answer, the rows that hold it and their multipliers are drawn as
integers and the linear term follows, so that the truth is exact for the data as posed.
Rows that are weakly active are certified by a direction that leaves them and no other
tight row: no choice of multipliers then gives them one. Random programs are enumerated.
"""

import itertools

import numpy as np

from .hostile_draws import (
    curvature,
    empty,
    finished,
    in_groups,
    integers,
    partly_scaled,
    planted,
    rank,
    scaled,
    some_rows,
    times,
    upper_level,
)
from .hostile_layout import M, blank, joined, taken
from .hostile_stiff import lengths, planar, stiff_curved, stiff_quadratic

BLOCK = 250

PLANTS = (
    dict(n=2, strong=1, loose=4),
    dict(n=3, strong=2, loose=3),
    dict(n=3, strong=1, loose=4, equal=1),
    dict(n=4, strong=3, loose=5),
    dict(n=4, strong=2, loose=4, equal=2),
    dict(n=5, strong=3, loose=6, equal=1),
    dict(n=6, strong=4, loose=8),
    dict(n=3, strong=4, loose=2, kind="twice"),
    dict(n=4, strong=3, loose=4, kind="sums"),
)
VERTICES = (
    dict(n=2, strong=4),
    dict(n=2, strong=6, loose=2),
    dict(n=2, strong=3, equal=1, loose=2),
    dict(n=3, strong=6),
    dict(n=3, strong=8, loose=3),
    dict(n=3, strong=5, equal=1, kind="sums"),
    dict(n=4, strong=8, kind="twice", loose=2),
    dict(n=4, strong=10),
    dict(n=3, strong=6, kind="pinned"),
    dict(n=4, strong=6, weak=2, loose=1),
    dict(n=3, strong=4, weak=3),
    dict(n=4, strong=4, weak=1, equal=1, loose=2),
    dict(n=5, strong=9, weak=1),
)
WEAK = (
    dict(n=2, strong=1, weak=1, loose=2),
    dict(n=3, strong=1, weak=1, loose=3),
    dict(n=3, weak=1, loose=4),
    dict(n=3, weak=3),
    dict(n=4, strong=2, weak=2, loose=3, equal=1),
    dict(n=4, strong=2, weak=1, loose=3),
    dict(n=6, strong=3, weak=2, loose=4),
)


def plants(rng, count, recipes, *rest):
    makers = [lambda size, r=recipe: planted(rng, size, **r) for recipe in recipes]
    return in_groups(rng, count, makers + list(rest))


def random_qps(rng, count):
    """Small integers, nothing planted; duplicates, sums, equalities, empty ones."""
    sizes = ((2, 4, 0), (2, 5, 1), (3, 5, 0), (3, 4, 1), (4, 4, 0), (4, 4, 2))
    makers = [lambda size, s=s: enumerated(rng, size, *s) for s in sizes]
    rest = [lambda size: empty(rng, size, 3, 4), lambda size: empty(rng, size, 4, 4, 1)]
    return in_groups(rng, count, [*makers, *rest])


def units(rng, count):
    """Columns whose units differ by up to 2^40, rows by as much."""
    rest = [lambda size: empty(rng, size, 3, 4, 1), lambda size: empty(rng, size, 4, 5)]
    members = plants(rng, count, PLANTS, *rest)
    return scaled(rng, members, 20, 20)


def vertices(rng, count):
    """More tight rows than variables; a third of them in mixed units."""
    return partly_scaled(rng, plants(rng, count, VERTICES), 10)


def weak_rows(rng, count):
    """Rows that are tight with a multiplier of zero; a third in mixed units."""
    return partly_scaled(rng, plants(rng, count, WEAK), 10)


GRAPHS = (
    (3, ((0, 1), (1, 2), (2, 0), (1, 0), (2, 1), (0, 2)), 3),
    (4, ((0, 1), (0, 2), (1, 3), (2, 3), (1, 2)), 3),
    (4, ((0, 1), (0, 2), (1, 3), (2, 3), (1, 2), (0, 3)), 3),
    (3, ((0, 1), (1, 2), (0, 2), (0, 2)), 2),
)


def networks(rng, count):
    """Flows: balance at nodes, capacities, unused arcs without any curvature."""
    makers = [lambda size, g=g: flows(rng, size, *g) for g in GRAPHS]
    members = in_groups(rng, count, makers)
    members["s"][:] = 2.0 ** rng.integers(-10, 11, size=(count, 1))
    return members


def flows(rng, count, nodes, arcs, balanced):
    n = len(arcs)
    incidence = np.zeros((nodes, n))
    for j, (tail, head) in enumerate(arcs):
        incidence[tail, j], incidence[head, j] = 1, -1
    where = rng.choice(3, size=(count, n), p=(0.4, 0.25, 0.35))
    empty_arc, full = where == 0, where == 1
    flow = np.where(empty_arc, 0, rng.integers(1, 6, size=(count, n))).astype(float)
    price = rng.integers(1, 6, size=(count, n)).astype(float)
    bend = 2.0 ** rng.integers(-8, 9, size=(count, n))
    flat = (empty_arc | full) & (rng.uniform(size=(count, n)) < 0.7)
    held = np.concatenate([empty_arc, full], axis=1)
    part = dict(
        A=np.tile(np.concatenate([-np.eye(n), np.eye(n)]), (count, 1, 1)),
        E=np.tile(incidence[:balanced], (count, 1, 1)),
        H=np.where(flat, 0, bend)[:, :, None] * np.eye(n),
        z=flow,
        lam=np.where(held, np.concatenate([price, price], axis=1), 0),
        mu=integers(rng, 5, count, balanced),
        strong=held,
        weak=np.zeros((count, 2 * n), bool),
    )
    return finished(rng, part, split=0.0)


def enumerated(rng, count, n, k, equal):
    """Random integer programs; the truth by trying every set of rows."""
    part = dict(
        A=some_rows(rng, count, k, n),
        E=some_rows(rng, count, equal, n),
        H=curvature(rng, count, n),
        B=integers(rng, 2, count, k, M),
        D=integers(rng, 2, count, equal, M),
        b=integers(rng, 5, count, k) + 3,
        e=integers(rng, 5, count, equal),
        C=integers(rng, 2, count, n, M),
        c=integers(rng, 9, count, n),
        x=integers(rng, 2, count, M),
    )
    # Equalities are independent here, or no set of rows would be.
    if equal:
        part["E"][rank(part["E"]) < equal] = np.eye(n)[:equal]
    copies = rng.uniform(size=count) < 0.15
    for name in ("A", "B", "b"):
        part[name][copies, -1] = 2 * part[name][copies, 0]
    sums = ~copies & (rng.uniform(size=count) < 0.15)
    for name in ("A", "B", "b"):
        part[name][sums, -1] = part[name][sums, 0] + part[name][sums, 1]
    return part | truth_by_trial(part) | upper_level(rng, count, n)


def refined(matrix, rhs):
    """Solutions of linear systems, with residuals in extended precision."""
    wide = matrix.astype(np.longdouble)
    found = np.zeros(rhs.shape, np.longdouble)
    for _ in range(3):
        residual = (rhs - times(wide, found)).astype(float)
        found = found + np.linalg.solve(matrix, residual[:, :, None])[:, :, 0]
    return found.astype(float)


def truth_by_trial(part):
    """Answer, multipliers and split by solving for every independent set of rows.

    The numbers are so small that double precision decides every sign: what is not
    zero is at least the inverse of a determinant, 1e-7 or more.
    """
    A, E, H = part["A"], part["E"], part["H"]
    count, k, n = A.shape
    equal = E.shape[1]
    linear = times(part["C"], part["x"]) + part["c"]
    b = part["b"] - times(part["B"], part["x"])
    e = part["e"] - times(part["D"], part["x"])
    z, lam, mu = np.zeros((count, n)), np.zeros((count, k)), np.zeros((count, equal))
    feasible, positive = np.zeros(count, bool), np.zeros((count, k), bool)
    for size in range(n - equal + 1):
        for chosen in itertools.combinations(range(k), size):
            rows = np.concatenate([A[:, list(chosen)], E], axis=1)
            total = n + rows.shape[1]
            matrix = np.zeros((count, total, total))
            matrix[:, :n, :n] = H
            matrix[:, n:, :n], matrix[:, :n, n:] = rows, np.swapaxes(rows, 1, 2)
            regular = np.abs(np.linalg.det(matrix)) > 0.5
            matrix[~regular] = np.eye(total)
            rhs = np.concatenate([-linear, b[:, list(chosen)], e], axis=1)
            found = refined(matrix, rhs)
            point, force = found[:, :n], found[:, n : n + size]
            inside = (times(A, point) <= b + 1e-9).all(1)
            good = regular & inside & (force >= -1e-9).all(1)
            new = good & ~feasible
            z[new], mu[new] = point[new], found[new, n + size :]
            lam[np.ix_(new, chosen)] = force[new]
            feasible |= good
            positive[:, chosen] |= good[:, None] & (force > 1e-9)
    tight = feasible[:, None] & (np.abs(times(A, z) - b) < 1e-9)
    held = np.concatenate([np.where(tight[:, :, None], A, 0), E], axis=1)
    # Where tight rows depend on each other vertices may not show every multiplier.
    known = (rank(held) == tight.sum(1) + equal) | (positive == tight).all(1)
    return dict(
        z=z,
        lam=np.where(feasible[:, None], lam, 0),
        mu=mu,
        feasible=feasible,
        strong=positive & tight,
        weak=tight & ~positive,
        sets=known,
        exact=np.zeros(count, bool),
    )


def single(rng, count):
    """What float32 holds exactly: small integers, fixed variables, weak rows."""
    fixed = dict(n=4, strong=4, loose=4, kind="pinned")
    boxed = [lambda size: boxes(rng, size, 4), lambda size: boxes(rng, size, 6)]
    recipes = (*PLANTS, *VERTICES[:9], *WEAK[:4], fixed)
    members = plants(rng, count, recipes, *boxed, lambda size: empty(rng, size, 3, 4))
    return partly_scaled(rng, members, 6)


def boxes(rng, count, n):
    """Boxes in which some variables are fixed, written as rows."""
    state = rng.choice(4, size=(count, n), p=(0.2, 0.2, 0.25, 0.35))
    fixed = state == 2
    low, high = (state == 0) | fixed, (state == 1) | fixed
    lam = rng.integers(1, 9, size=(count, 2 * n)).astype(float)
    held = np.concatenate([low, high], axis=1)
    part = dict(
        A=np.tile(np.concatenate([-np.eye(n), np.eye(n)]), (count, 1, 1)),
        E=np.zeros((count, 0, n)),
        H=curvature(rng, count, n),
        z=integers(rng, 4, count, n) / 2,
        lam=np.where(held, lam, 0),
        mu=np.zeros((count, 0)),
        strong=held,
        weak=np.zeros((count, 2 * n), bool),
    )
    return finished(rng, part, split=0.0)


CLASSES = {
    "random_qps": random_qps,
    "units": units,
    "stiff_quadratic": stiff_quadratic,
    "stiff_curved": stiff_curved,
    "vertices": vertices,
    "networks": networks,
    "weak_rows": weak_rows,
    "planar": planar,
    "float32": single,
    "lengths": lengths,
}


# Classes that have a program of their own: the dtype, and sizes without padding.
APART = {
    "planar": (np.float64, (2, 2, 0)),
    "float32": (np.float32, None),
}


def draw(name: str, seed: int, count: int) -> dict:
    """The first members of one class in natural units, in blocks.

    A member depends on the seed, its class and its index alone.
    """
    number = list(CLASSES).index(name)
    blocks = [
        CLASSES[name](np.random.default_rng([seed, number, block]), BLOCK)
        for block in range(-(-count // BLOCK))
    ]
    return taken(joined([*blocks, blank(0)]), slice(count))
