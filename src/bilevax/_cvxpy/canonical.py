"""A cvxpy model as arrays that depend on the leader's parameters.

cvxpy brings the model to the form

    minimise 0.5 z^T P z + q^T z + d   subject to   A z + b = 0 or >= 0, row by row,

with P, q, d, A, b affine in the parameters. Its own maps back, fed with numbers of
entries, say which entry of `z` is which of the user's variables and which row belongs
to which of the user's constraints.
"""

from typing import Any, NamedTuple

import numpy as np
import scipy.sparse as sp


class Affine(NamedTuple):
    """Numbers `constant[i] + sum_j slope[i, j] p[j]` for the leader's `p`."""

    constant: np.ndarray
    slope: Any

    def rows(self, chosen) -> "Affine":
        return Affine(self.constant[chosen], self.slope[chosen])

    @property
    def moves(self) -> bool:
        return self.slope.nnz > 0


class Group(NamedTuple):
    """Rows of one constraint of the user, in the order of its entries."""

    name: str
    rows: np.ndarray
    shape: tuple[int, ...]


class Definitions(NamedTuple):
    """Entries `s` of `z` that rows define by others: `A z + b + scale * s = 0`."""

    entries: np.ndarray
    scale: np.ndarray
    A: Affine
    A_places: tuple[np.ndarray, np.ndarray]
    b: Affine


class Canonical(NamedTuple):
    """The model: `n` entries of `z`, and rows of which some are `equations`.

    - `P`, `A`: entries of the matrices, with their places; `q` has `d` at its end.
    - `variables`: places in `z` by name and in the user's shape; `rest`: all others
      but those that `defined` has.
    - `groups`: the rows by name, those of the user's constraints first.
    """

    n: int
    P: Affine
    P_places: tuple[np.ndarray, np.ndarray]
    q: Affine
    A: Affine
    A_places: tuple[np.ndarray, np.ndarray]
    b: Affine
    equations: np.ndarray
    variables: dict[str, np.ndarray]
    rest: np.ndarray
    groups: list[Group]
    num_named: int
    defined: Definitions


def canonical(cp: Any, follower: Any, leader: list, names: dict) -> Canonical:
    """The arrays of a model that `check_class` let pass.

    `names` are those of its constraints, by their ids.
    """
    program, reductions, memories = _reduced(cp, follower, leader)
    n, m = program.x.size, program.constr_size
    columns = _columns(program, leader)
    fixed = _values(program, leader)
    P_used, P = _affine(program.P, fixed, columns)
    q = _affine_all(program.q, fixed, columns)
    used, both = _affine(program.A, fixed, columns)
    # Column after column, the last of which is `b`.
    row, column = used % max(m, 1), used // max(m, 1)
    inside = column < n
    offsets = _affine_all(sp.coo_array(program.A), fixed, columns, n * m, (n + 1) * m)
    equations = np.concatenate(
        [
            np.full(c.size, isinstance(c, cp.constraints.Zero))
            for c in program.constraints
        ]
        or [np.zeros(0, bool)]
    )
    variables, rest = _user_variables(follower, program, reductions)
    places = row[inside], column[inside]
    groups = _user_rows(cp, follower, program, reductions, memories, names)
    A = both.rows(inside)
    defining, entries = _defining(equations, A, places, groups, rest)
    defined = _definitions(defining, entries, A, places, offsets)
    rest = np.setdiff1d(rest, entries)
    # The other rows, counted anew.
    left = np.setdiff1d(np.arange(m), defining)
    number = np.full(m, -1)
    number[left] = np.arange(len(left))
    stays = number[places[0]] >= 0
    A, places = A.rows(stays), (number[places[0][stays]], places[1][stays])
    equations, offsets = equations[left], offsets.rows(left)
    groups = [group._replace(rows=number[group.rows]) for group in groups]
    extra = _other_rows(len(left), groups, places, rest)
    return Canonical(
        n=n,
        P=P,
        P_places=(P_used % n, P_used // n),
        q=q,
        A=A,
        A_places=places,
        b=offsets,
        equations=equations,
        variables=variables,
        rest=rest,
        groups=groups + extra,
        num_named=len(groups),
        defined=defined,
    )


def _defining(equations, A: Affine, places, groups, rest):
    """Rows that say what an entry of cvxpy's own is, and these entries.

    `sum_squares(F y)` becomes the squares of `s` with `s = F y`. Such an entry is in no
    other row, so it can be put into the objective, and the follower stays small.
    """
    row, column = places
    own = equations.copy()
    for group in groups:
        own[group.rows] = False
    fixed = np.diff(A.slope.indptr) == 0
    count = np.bincount(column, minlength=1 + max(rest, default=0))
    once = fixed & own[row] & np.isin(column, rest[count[rest] == 1])
    # One entry for each row, the first.
    found, first = np.unique(row[once], return_index=True)
    return found, column[once][first]


def _definitions(rows, entries, A: Affine, places, b: Affine) -> Definitions:
    row, column = places
    number = np.full(len(b.constant), -1)
    number[rows] = np.arange(len(rows))
    theirs = number[row] >= 0
    itself = theirs.copy()
    itself[theirs] = column[theirs] == entries[number[row[theirs]]]
    scale = np.zeros(len(rows))
    scale[number[row[itself]]] = A.constant[itself]
    others = theirs & ~itself
    return Definitions(
        entries,
        scale,
        A.rows(others),
        (number[row[others]], column[others]),
        b.rows(rows),
    )


def _reduced(cp, follower, leader):
    """The program of cvxpy, and the way back from it."""
    blank = [p for p in leader if p.value is None]
    for parameter in blank:
        # The form does not depend on the value; cvxpy asks for one all the same.
        parameter.value = parameter.project(np.ones(parameter.shape))
    try:
        _, chain, _ = follower.get_problem_data(cp.CLARABEL)
    finally:
        for parameter in blank:
            parameter.value = None
    program, reductions, memories = follower, chain.reductions[:-1], []
    for reduction in reductions:
        program, memory = reduction.apply(program)
        memories.append(memory)
    return program, reductions, memories


def _columns(program, leader) -> np.ndarray:
    """Where cvxpy keeps the leader's entries; ours are by name, row after row."""
    found = []
    for p in sorted(leader, key=lambda p: p.name()):
        start = program.param_id_to_col.get(p.id)
        if start is None:
            # Of no part of this model, but of what the leader wants.
            found.append(np.full(p.size, -1))
            continue
        places = start + np.arange(p.size)
        found.append(places.reshape(p.shape, order="F").ravel())
    return np.concatenate(found)


def _values(program, leader) -> np.ndarray:
    """The parameters that are not the leader's, and the one of the constant column."""
    theirs = {p.id for p in leader}
    values = np.zeros(program.total_param_size + 1)
    values[-1] = 1
    for p in program.parameters:
        if p.id in theirs:
            continue
        value = p.value.toarray() if sp.issparse(p.value) else np.asarray(p.value)
        start = program.param_id_to_col[p.id]
        values[start : start + p.size] = value.ravel(order="F")
    return values


def _affine(tensor: Any, fixed, columns) -> tuple[np.ndarray, Affine]:
    """Which rows of a tensor are not zero for all parameters, and these."""
    # A covariance of thousands has more places than numbers.
    tensor = sp.coo_array(tensor if tensor is not None else (0, len(fixed)))
    used, row = np.unique(tensor.row, return_inverse=True)
    shape = len(used), len(fixed)
    small = sp.csc_array((tensor.data, (row, tensor.col)), shape=shape)
    slope = sp.csr_array((len(used), len(columns)))
    there = np.flatnonzero(columns >= 0)
    if there.size:
        ones, shape = np.ones(there.size), (len(fixed), len(columns))
        slope = small @ sp.csc_array((ones, (columns[there], there)), shape=shape)
    slope = sp.csr_array(slope)
    slope.eliminate_zeros()
    return used, Affine(np.asarray(small @ fixed).ravel(), slope)


def _affine_all(tensor: Any, fixed, columns, start=0, end=None) -> Affine:
    """The rows from `start` to `end`, those of zeros too."""
    tensor = sp.coo_array(tensor)
    end = tensor.shape[0] if end is None else end
    used, found = _affine(tensor, fixed, columns)
    keep = (used >= start) & (used < end)
    place = sp.csr_array(
        (np.ones(keep.sum()), (used[keep] - start, np.flatnonzero(keep))),
        shape=(end - start, len(used)),
    )
    return Affine(place @ found.constant, sp.csr_array(place @ found.slope))


def _user_variables(follower, program, reductions):
    labels = {
        v.id: np.arange(start, start + v.size).reshape(v.shape, order="F") + 1.0
        for v in program.variables
        for start in [program.var_id_to_col[v.id]]
    }
    for reduction in reversed(reductions):
        labels = reduction.var_forward(labels)
    found = {
        v.name(): np.asarray(labels[v.id]).astype(int).reshape(v.shape) - 1
        for v in follower.variables()
        if v.id in labels
    }
    taken = np.concatenate([places.ravel() for places in found.values()])
    return found, np.setdiff1d(np.arange(program.x.size), taken)


def _user_rows(cp, follower, program, reductions, memories, names) -> list[Group]:
    from cvxpy.reductions.solution import Solution

    start, duals = 0, {}
    for constraint in program.constraints:
        duals[constraint.id] = np.arange(start, start + constraint.size) + 1.0
        start += constraint.size
    point = {program.x.id: np.zeros(program.x.size)}
    solution = Solution(cp.settings.OPTIMAL, 0.0, point, duals, {})
    for reduction, memory in zip(reversed(reductions), reversed(memories), strict=True):
        solution = reduction.invert(solution, memory)
    groups = []
    for constraint in follower.constraints:
        found = solution.dual_vars.get(constraint.id)
        if found is not None and constraint.size:
            rows = np.asarray(found).astype(int).ravel() - 1
            groups.append(Group(names[constraint.id], rows, constraint.shape))
    return groups


def _other_rows(m: int, groups, places, rest) -> list[Group]:
    """Bounds that variables were made with, and rows of what cvxpy has added."""
    row, column = places
    taken = np.concatenate([g.rows for g in groups] or [np.zeros(0, int)])
    left = np.setdiff1d(np.arange(m), taken)
    hidden = np.zeros(m, bool)
    hidden[row[np.isin(column, rest)]] = True
    kinds = (("bounds", left[~hidden[left]]), ("auxiliary", left[hidden[left]]))
    return [Group(name, rows, (len(rows),)) for name, rows in kinds if len(rows)]
