"""Upper constraints `C(x) = c(x, y*(x))` at a point: values, gradients, multipliers."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float, PyTree

from .._lower.base import LowerSolution
from .._lower.choose import checked_solver
from .._problem.checks import checked_point
from .._problem.penalised import rows_of, weighted
from .._problem.problem import Problem
from .._programs.arrays import ravel, xp
from .._programs.control import on_device, on_host, stage_by_stage
from .._programs.modules import Plain
from .._programs.quick import once_jit
from .._programs.threads import few_threads
from .._status import (
    Status,
    first_failure,
    have_values,
    message,
    raise_on_failure,
)
from .hypergradient import exact, hypergradient, staged


class UpperConstraints(Plain):
    """`F` and the upper constraints at one `x`, with the follower's answer there.

    - `value`, `grad`: of `F`.
    - `constraints`, `equalities`: `c` and `h`, as their functions return them.
    - `jacobian`, `equality_jacobian`: their derivatives in `x` through `y*(x)`; to each
      array of shape `s` belong arrays of shape `s + x.shape`.
    - `lower`, `status`: as in an `Evaluation`. At a kink the values are right and the
      gradients are those of one side.
    """

    value: Float[Array, ""]
    grad: PyTree[Array]
    constraints: PyTree[Array]
    equalities: PyTree[Array]
    jacobian: PyTree[Array]
    equality_jacobian: PyTree[Array]
    lower: LowerSolution
    status: Any

    @property
    def violation(self) -> Float[Array, ""]:
        """The largest of `[c]_+` and `|h|`."""
        c, h = ravel_pytree(self.constraints)[0], ravel_pytree(self.equalities)[0]
        outside = jnp.concatenate([c, jnp.abs(h)])
        least = jnp.zeros((), outside.dtype)
        return jnp.max(outside, initial=least)

    @property
    def success(self):
        """Whether the values are right."""
        return have_values(self.status)

    @property
    def message(self) -> str:
        """What is wrong or special here and what to do about it; else empty."""
        return message(self.status)


def constraint_gradients(
    problem: Problem,
    x: PyTree,
    *,
    warm: LowerSolution | None = None,
    throw: bool = True,
) -> UpperConstraints:
    """`F` and the upper constraints at `x`, each with its exact gradient.

    One lower-level solve, and one adjoint solve for `F` and for each constraint.
    `hypergradient` of such a problem is that of `F` alone.
    """
    if not (isinstance(problem, Problem) and problem.is_coupled):
        raise ValueError(
            "`problem` must be a Problem with `upper_constraints` or "
            "`upper_equalities`; without them there is only F, and `hypergradient`."
        )
    x = checked_point(problem, x)
    shapes = rows_of(problem).shapes(problem, x)
    found = in_structure(stacked(problem, x, warm, size_of(shapes)), shapes, x)
    if throw:
        raise_on_failure(found, "The evaluation of the upper constraints")
    return found


def size_of(shapes) -> int:
    return sum(int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(shapes))


class Stack(NamedTuple):
    """`F`, then all constraints, as vectors; `slopes` has a row for each of them."""

    value: Float[Array, ""]
    values: Float[Array, " rows"]
    slopes: Float[Array, "rows+1 d"]
    lower: LowerSolution
    status: Any


def stacked(problem: Problem, x, warm, size: int) -> Stack:
    """`F` and `size` upper constraints with their gradients; nothing is checked."""
    solver = checked_solver(problem, None, False, on_host=True)
    if not staged(problem, x, solver, problem.adjoint, warm):
        return _program(problem, x, warm, size)
    with few_threads(problem), stage_by_stage():
        problem, x = on_host((problem, x))
        unit, slopes = np.eye(1 + size), []
        first: Any = None
        # The first solve is the warm start of the others, which find nothing to do.
        for row in unit:
            one = weighted(problem, row[0], row[1:])
            e = exact(one)(x, warm)
            first, warm = (e if first is None else first), e.lower
            slopes.append(ravel(e.grad))
        value, values = first.aux
        fine = bool(first.lower.success)
        value, values = (xp.where(fine, part, np.nan) for part in (value, values))
        return Stack(value, values, xp.stack(slopes), first.lower, first.status)


@once_jit
def _program(problem: Problem, x, warm, size: int) -> Stack:
    def gradient(unit, warm):
        one = weighted(problem, unit[0], unit[1:])
        return hypergradient(one, x, warm=warm, throw=False)

    unit = jnp.eye(1 + size)
    first = gradient(unit[0], warm)
    slopes = jax.vmap(lambda u: ravel_pytree(gradient(u, first.lower).grad)[0])(unit)
    # Without an answer of the follower there are no values.
    fine = first.lower.success
    value, values = (jnp.where(fine, part, jnp.nan) for part in first.aux)
    return Stack(value, values, slopes, first.lower, first.status)


def in_structure(stack: Stack, shapes, x) -> UpperConstraints:
    value, values, flat, lower, status = on_device(stack)
    unravel = ravel_pytree(x)[1]
    sane = jnp.all(jnp.isfinite(values)) & jnp.all(jnp.isfinite(flat))
    sane = Status.where(sane, Status.successful, Status.non_finite)
    status = first_failure(status, Status.where(lower.success, sane, status))
    count = size_of(shapes[0])
    c, h = values[:count], values[count:]
    slopes = flat[1 : 1 + count], flat[1 + count :]
    return UpperConstraints(
        value=value,
        grad=unravel(flat[0]),
        constraints=shaped(c, shapes[0], ()),
        equalities=shaped(h, shapes[1], ()),
        jacobian=_jacobian(slopes[0], shapes[0], unravel),
        equality_jacobian=_jacobian(slopes[1], shapes[1], unravel),
        lower=lower,
        status=status,
    )


def shaped(flat, shapes, tail):
    """Rows of `flat`, one per number, in the structure of `shapes`."""
    leaves, structure = jax.tree.flatten(shapes)
    ends = np.cumsum([int(np.prod(leaf.shape)) for leaf in leaves])[:-1]
    parts = jnp.split(flat, ends) if leaves else []
    shaped = [
        part.reshape(leaf.shape + tail)
        for part, leaf in zip(parts, leaves, strict=True)
    ]
    return jax.tree.unflatten(structure, shaped)


def _jacobian(rows, shapes, unravel):
    """To each array of `shapes` a tree like `x`, as `jax.jacobian` orders them."""
    columns = jax.vmap(unravel)(rows)
    leaves, structure = jax.tree.flatten(columns)
    each = [shaped(leaf, shapes, leaf.shape[1:]) for leaf in leaves]
    outer = jax.tree.structure(shapes)
    parts = zip(*(jax.tree.leaves(tree) for tree in each), strict=True)
    return jax.tree.unflatten(outer, [structure.unflatten(part) for part in parts])
