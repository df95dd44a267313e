"""The nearest allowed `x` as one convex quadratic program in `(x, y)`.

    min |z - x|^2 / 2 + w |y - y'|^2 / 2   s.t.   A y + B z <= b,  z in the domain

`w` is small, and proximal steps move `y'` to where it does not matter. Here is what
both ways to solve it share, and the way for sparse rows, on the host.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float

from .._constraints import Polyhedron, csr_of
from .._lower.base import LowerSolution
from .._lower.sparse.solver import SparseActiveSet
from .._problem.problem import Problem
from .._programs.arrays import ravel, sp, xp
from .._programs.control import on_host, stage_by_stage
from .._programs.modules import Plain, made, with_fields
from .._status import Status, status_code
from .._tolerances import tolerances
from .adjoint import default_adjoint, kkt_system

# Weight of `y` in the joint program: enough for strong convexity, too little to matter
# after the proximal steps below.
LOWER_WEIGHT = 1e-6
PROXIMAL_STEPS = 4
_LINEARISATIONS = 8


class Nearest(Plain):
    """The nearest allowed point, with what its derivative needs."""

    x: Float[Array, " d"]
    problem: Problem
    solution: LowerSolution

    def pull_back(self, v: Float[Array, " d"]) -> Float[Array, " d"]:
        """`J^T v` with `J` the derivative of the projection (symmetric)."""
        u = ravel(self.solution.y)
        system = kkt_system(self.problem, self.x, u, self.solution.active)
        top = xp.concatenate([v, xp.zeros(u.size - v.size, u.dtype)])
        bottom = xp.zeros_like(self.solution.multipliers)
        adjoint = default_adjoint(self.solution)
        return adjoint.solve(system, self.solution, top, bottom)[0][: v.size]


def joint_problem(rows, x, y, weight) -> Problem:
    """The joint program with these rows, for `x`, from `y`."""
    A, b, A_eq, b_eq = rows
    return Problem(
        no_upper,
        Distance(y, weight),
        Polyhedron(A=A, b=b, A_eq=A_eq, b_eq=b_eq),
        y0=jnp.concatenate([x, y]),
    )


class Distance(Plain):
    """`|z - x|^2 / 2`, and a little weight on the distance of `y` to `near`."""

    near: Float[Array, " n"]
    weight: Float[Array, ""]

    def __call__(self, x, u):
        z, y = u[: x.size], u[x.size :]
        distance = 0.5 * jnp.sum((z - x) ** 2)
        return distance + 0.5 * self.weight * jnp.sum((y - self.near) ** 2)


def no_upper(x, u):
    return jnp.zeros((), u.dtype)


def onto_allowed_sparse(problem: Problem, x: Any) -> Any:
    """`onto_allowed` for a problem whose lower level has sparse rows."""
    flat, unravel = ravel_pytree(x)
    flat, margin, y = np.asarray(flat), 1.0, None
    # Twice: what the weight on `y` leaves undone shrinks with the distance. Rows that
    # are functions of `x` are made linear around each point.
    for _ in range(2 if problem.constraints.moving is None else _LINEARISATIONS):
        found = nearest_sparse(problem, flat, unravel, y, margin)
        if status_code(found.solution.status) == status_code(Status.successful):
            flat, y = found.x, np.asarray(found.solution.y)[flat.size :]
        else:
            # A set without an interior has no room for the margin.
            margin = 0.0
    return unravel(jnp.asarray(flat))


def nearest_sparse(
    problem: Problem, x, unravel, y=None, margin: float = 1.0
) -> Nearest:
    """The joint program by the sparse solver; see `feasible.nearest`."""
    x = np.asarray(x)
    solver, last, success = SparseActiveSet(), None, status_code(Status.successful)
    y = np.asarray(ravel_pytree(problem.y0)[0]) if y is None else y
    rows, weight = _sparse_rows(problem, unravel(jnp.asarray(x)), y, margin)
    joint = joint_problem(rows, x, y, weight)
    with stage_by_stage():
        solution: Any = None
        for _ in range(PROXIMAL_STEPS):
            joint = on_host(_from(joint, x, y, weight))
            found = solver(joint, x, last)
            if status_code(found.status) != success:
                solution = found if solution is None else solution
                break
            solution = last = found
            y = np.asarray(found.y)[x.size :]
    point: Any = np.asarray(solution.y)[: x.size]
    return Nearest(point, joint, solution)


def _from(joint: Problem, x, y, weight) -> Any:
    weight = np.asarray(weight)
    lower, y0 = made(Distance, near=y, weight=weight), np.concatenate([x, y])
    return with_fields(joint, lower=lower, y0=y0)


def _sparse_coupling(constraints: Any, x, d: int, y):
    """`B`, or the derivative of rows that are functions of `x`."""
    if isinstance(constraints, Polyhedron) and constraints.moving is None:
        sizes = (constraints.num_inequalities, constraints.num_equalities)
        parts = [
            sp.csr_array((size, d)) if part is None else csr_of(part)
            for part, size in zip((constraints.B, constraints.B_eq), sizes, strict=True)
        ]
        return sp.vstack(parts)
    B = constraints.coupling_matrix(x, np.dtype(float), jnp.asarray(y))
    return sp.csr_array((constraints.num_rows, d) if B is None else np.asarray(B))


def _sparse_rows(problem: Problem, x, y, margin: float):
    """`A, b, A_eq, b_eq` on `(x, y)`, and the weight of `y` in units of the rows."""
    constraints: Any = problem.constraints.at(x)
    n, flat = ravel_pytree(problem.y0)[0].size, np.asarray(ravel_pytree(x)[0])
    d = flat.size
    A, k = constraints.sparse_matrix(n), constraints.num_inequalities
    B = _sparse_coupling(constraints, x, d, y)
    both = sp.hstack([B, A]).tocsr()
    rhs = np.array(constraints.rhs(x), float) + B @ flat
    # A little inside, or rounding would leave the lower level empty after all.
    scale = np.abs(rhs) + np.sqrt(both.multiply(both).sum(axis=1))
    shift = np.where(np.isfinite(rhs), 2 * tolerances(np.float64).accept * scale, 0)
    rhs[:k] -= margin * shift[:k]
    less, equal = [(both[:k], rhs[:k])], [(both[k:], rhs[k:])]
    domain = problem.domain
    if domain is not None:
        top = domain.num_inequalities
        own = sp.csr_array(np.asarray(domain.matrix(d, np.dtype(float))))
        own = sp.hstack([own, sp.csr_array((own.shape[0], n))]).tocsr()
        edge = np.asarray(domain.rhs(jnp.zeros(d)), float)
        less.append((own[:top], edge[:top]))
        equal.append((own[top:], edge[top:]))
    join = lambda parts: (
        sp.vstack([rows for rows, _ in parts]).tocsr(),
        np.concatenate([edge for _, edge in parts]),
    )
    norms = [np.sqrt(M.multiply(M).sum()) for M in (A, B)]
    ratio = norms[0] / norms[1] if norms[1] > 0 else np.inf
    usable = np.isfinite(ratio) and ratio > 0
    weight = LOWER_WEIGHT * (ratio**2 if usable else 1.0)
    return (*join(less), *join(equal)), jnp.asarray(weight)
