"""The set of `x` a method may visit: the domain, and where the lower level has a point.

The second part is a polyhedron too, the shadow of `{(x, y) : A y + B x <= b}`, so the
nearest allowed `x` is one convex quadratic program in `(x, y)`.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float, PyTree

from .._constraints import Box, Polyhedron
from .._lower.active_set import ActiveSet, blank_solution
from .._lower.choose import is_on_host
from .._lower.dense import unit_rows
from .._lower.interior_point import InteriorPoint
from .._problem.followers import Followers
from .._problem.problem import Problem
from .._programs.arrays import xp
from .._programs.control import in_stages, on_host, run_if
from .._programs.quick import in_program, quick_jit
from .._tolerances import tolerances
from .joint import (
    LOWER_WEIGHT,
    PROXIMAL_STEPS,
    Nearest,
    joint_problem,
    onto_allowed_sparse,
)

# Rounds where rows are made linear around each point.
_LINEARISATIONS = 8
# Rows of the joint program above which it starts from an interior point.
_LARGE = 200


def moves(problem: Problem | Followers) -> bool:
    """Whether the rows of the lower level move with `x`, so that it can be empty."""
    return not problem.always_feasible and problem.rows_move


def onto_domain(problem: Problem | Followers, x: PyTree[Array]) -> PyTree[Array]:
    """The nearest point of the domain."""
    domain = problem.domain
    if domain is None:
        return x
    if isinstance(domain, Box):
        return jax.tree.map(xp.clip, x, domain.lower, domain.upper)
    found = _onto_polyhedron(problem, x)
    return on_host(found) if in_stages() else found


@quick_jit
def _onto_polyhedron(problem: Problem | Followers, x):
    domain: Any = problem.domain
    flat, unravel = ravel_pytree(x)
    # A point that was projected before may be outside by rounding.
    noise = tolerances(flat.dtype).rounding * jnp.linalg.norm(flat)
    return unravel(
        run_if(
            excess(domain, flat)[0] > noise,
            lambda point: nearest(problem, point, coupled=False).x,
            flat,
        )
    )


def excess(domain: Polyhedron, x: Float[Array, " d"]):
    """By how much `x` breaks the (unit) rows in all, and the gradient of that."""
    rows = unit_rows(domain, xp.zeros_like(x), x.size, x.dtype)
    over = xp.where(rows.usable, rows.A @ x - rows.rhs, 0)
    sign = xp.where(rows.equality, xp.sign(over), over > 0)
    return sign @ over, sign @ rows.A


def onto_allowed(problem: Problem, x: PyTree[Array]) -> PyTree[Array]:
    """The nearest point of the domain at which the lower level has a point."""
    if is_on_host(problem) and not in_program():
        return onto_allowed_sparse(problem, x)
    return _onto_allowed(problem, x)


@quick_jit
def _onto_allowed(problem: Problem, x):
    flat, unravel = ravel_pytree(x)

    def again(state, _):
        x, y, margin = state
        found = nearest(problem, x, y, margin, coupled=True, unravel=unravel)
        ahead = found.x, found.solution.y[x.size :], margin
        # A set without an interior, such as two opposite rows, has no room for it.
        stay = x, y, jnp.zeros_like(margin)
        pick = lambda new, old: jnp.where(found.solution.success, new, old)
        return jax.tree.map(pick, ahead, stay), None

    # Twice: what the weight on `y` leaves undone shrinks with the distance. Rows that
    # are no linear functions of `x` are taken as such around each point.
    rounds = 2 if isinstance(problem, Followers) else _rounds(problem)
    y = ravel_pytree(problem.y0)[0].astype(flat.dtype)
    start = flat, y, jnp.ones((), flat.dtype)
    return unravel(jax.lax.scan(again, start, None, length=rounds)[0][0])


def _rounds(problem: Problem) -> int:
    return 2 if problem.constraints.moving is None else _LINEARISATIONS


def nearest(
    problem: Problem | Followers,
    x: Float[Array, " d"],
    y: Float[Array, " n"] | None = None,
    margin: Float[Array, ""] | float = 1.0,
    *,
    coupled: bool,
    unravel: Callable = lambda flat: flat,
) -> Nearest:
    """Solve the joint program from `y`; without `coupled`, for the domain alone.

    Rows that are functions of `x` are made linear around `(x, y)`; `unravel` gives `x`
    the structure that they know. `margin`: 1 to stay a little inside the rows of the
    lower level, 0 for their edge.
    """
    start = ravel_pytree(problem.y0)[0].astype(x.dtype) if y is None else y
    rows = joint_rows(problem, unravel(x), x.dtype, coupled, margin, start)
    n = rows[0].shape[1] - x.size
    weight = jnp.ones((), x.dtype)
    if n:
        weight = _weight(problem, unravel(x), x.dtype, start)
    y = ravel_pytree(problem.y0)[0].astype(x.dtype)[:n] if y is None else y
    solver = ActiveSet(diagnose=False)
    joint = joint_problem(rows, x, y, weight)
    # Of a large program, the path through the interior visits far fewer points.
    large = joint.constraints.num_rows > _LARGE
    first = InteriorPoint(polish=solver)(joint, x) if large else blank_solution(joint)

    def proximal(state, _):
        y, last = state
        solution = solver(joint_problem(rows, x, y, weight), x, last)
        return (jnp.where(solution.success, solution.y[x.size :], y), solution), None

    # One site of the solver in the program, however many steps.
    (y, solution), _ = jax.lax.scan(
        proximal, (y, first), None, length=PROXIMAL_STEPS if n else 1
    )
    return Nearest(solution.y[: x.size], joint_problem(rows, x, y, weight), solution)


def _weight(problem: Problem | Followers, x, dtype, y) -> Float[Array, ""]:
    """Of `y` beside `x`, in the units in which the rows weigh both alike."""
    A, B, _, _ = _lower_rows(problem, x, dtype, y)
    if B is None:
        return jnp.asarray(LOWER_WEIGHT, dtype)
    ratio = jnp.linalg.norm(A) / jnp.linalg.norm(B)
    usable = jnp.isfinite(ratio) & (ratio > 0)
    return LOWER_WEIGHT * jnp.where(usable, ratio, 1).astype(dtype) ** 2


def _lower_rows(problem: Problem | Followers, x, dtype, y):
    """`A`, `B`, `b` of the lower level, and how many of the rows are inequalities.

    Of rows that are functions of `x` the linear part there, and at `y` if they turn.
    """
    if not isinstance(problem, Followers):
        constraints = problem.constraints.at(x)
        A = constraints.matrix(ravel_pytree(problem.y0)[0].size, dtype)
        B = constraints.coupling_matrix(x, dtype, y)
        if constraints.moving is None:
            rhs = constraints.rhs(jax.tree.map(jnp.zeros_like, x))
        else:
            rhs = constraints.rhs(x) + B @ ravel_pytree(x)[0]
        return A, B, rhs, constraints.num_inequalities
    count, k = len(problem), problem.one.constraints.num_inequalities
    ys = jax.vmap(lambda i: y[_place(problem.y0, i)])(jnp.arange(count))
    A, B, rhs, _ = jax.vmap(
        lambda row, y: _lower_rows(problem.instance(row), x, dtype, y)
    )(problem.data, ys)
    # Inequalities of all, then equations of all; `y` is one tree, leaf after leaf.
    places = jax.vmap(lambda i: _place(problem.y0, i))(jnp.arange(count))
    blocks = jnp.zeros((*A.shape[:2], problem.size), dtype)
    blocks = jax.vmap(lambda block, at, A: block.at[:, at].set(A))(blocks, places, A)
    flat = lambda a: jnp.concatenate([
        a[:, :k].reshape(-1, *a.shape[2:]), a[:, k:].reshape(-1, *a.shape[2:])
    ])  # fmt: skip
    return flat(blocks), None if B is None else flat(B), flat(rhs), count * k


def _place(y0, i):
    """Where the entries of follower `i` are in the flat answers of all."""
    numbers = ravel_pytree(y0)[1](jnp.arange(ravel_pytree(y0)[0].size))
    return ravel_pytree(jax.tree.map(lambda leaf: leaf[i], numbers))[0]


def joint_rows(
    problem: Problem | Followers, x, dtype, coupled: bool, margin: Any = 1.0, y=None
):
    """All rows on `(x, y)`: `A, b, A_eq, b_eq`, around this `(x, y)`."""
    d = ravel_pytree(x)[0].size
    n = ravel_pytree(problem.y0)[0].size if coupled else 0
    y = ravel_pytree(problem.y0)[0] if y is None else y
    less, equal = [], []
    if coupled:
        A, B, rhs, k = _lower_rows(problem, x, dtype, y)
        both = jnp.concatenate([jnp.zeros((A.shape[0], d)) if B is None else B, A], 1)
        # A little inside, or rounding would leave the lower level empty after all.
        scale = jnp.abs(rhs) + jnp.linalg.norm(both, axis=1)
        shift = jnp.where(jnp.isfinite(rhs), 2 * tolerances(dtype).accept * scale, 0)
        rhs = rhs.at[:k].add(-margin * shift[:k])
        less.append((both[:k], rhs[:k]))
        equal.append((both[k:], rhs[k:]))
    domain = problem.domain
    if domain is not None:
        k = domain.num_inequalities
        A = domain.matrix(d, dtype)
        A = jnp.concatenate([A, jnp.zeros((A.shape[0], n), dtype)], axis=1)
        rhs = domain.rhs(jnp.zeros(d, dtype)).astype(dtype)
        less.append((A[:k], rhs[:k]))
        equal.append((A[k:], rhs[k:]))
    width = d + n
    join = lambda parts: (
        jnp.concatenate([A for A, _ in parts] or [jnp.zeros((0, width), dtype)]),
        jnp.concatenate([b for _, b in parts] or [jnp.zeros(0, dtype)]),
    )
    return (*join(less), *join(equal))
