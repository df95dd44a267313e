"""Lower levels as a layer between other people's tensors: answers, and cotangents back.

`solution_map` is one function of JAX for calculus of any order. A layer of another
framework asks for two programs instead, and for more: one that solves a batch and says
how each member ended, and one that pulls cotangents back. With `(v, w)` from the KKT
system of a member (`adjoint.py`) for cotangents of `y` and of its multipliers, the
cotangent of the parameters `p` is

    - d/dp [ v^T grad_y g(p, y) + v^T A(p)^T lam + w^T (A(p) y - rhs(p)) ],

at the answer `(y, lam)`, over active rows. Members without an answer send back zero.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Bool, Float, Int, PyTree

from .._constraints import AbstractConstraints, tree_as_float
from .._lower.base import LowerSolution, all_finite
from .._lower.choose import checked_solver
from .._problem.checks import check_functions
from .._problem.problem import Problem
from .._programs.control import without_rare_branches
from .._programs.modules import Plain
from .._programs.quick import once_jit, quick_jit
from .._status import as_status, have_values
from .adjoint import DenseAdjoint, default_adjoint, kkt_system
from .hypergradient import status_codes


class Instance(NamedTuple):
    """How parameters become the lower level of one member, and how that is solved."""

    build: Callable
    solver: Any
    adjoint: Any

    def lower_level(self, parameters) -> tuple[Problem, PyTree[Array]]:
        """A problem and its `x`, all in the precision of the calculation."""
        problem, x = _read(self.build(*parameters), parameters)
        problem, x = jax.tree.map(_in_full_precision, (problem, x))
        return problem.localised(x), x


class Answers(NamedTuple):
    """What a batch is answered; `codes` are numbers of `Status`."""

    y: PyTree[Array]
    multipliers: Float[Array, "batch k"]
    codes: Int[Array, " batch"]
    lower: LowerSolution


def answers(instance: Instance, axes: PyTree, parameters: PyTree, path) -> Answers:
    """The answers of all members; NaN for those that have none.

    `axes` has a zero for each array of `parameters` that has a leading axis of members,
    and None for one that they share. `path` knows whether the usual path, a program
    that compiles and runs in a fraction of the time, has been enough for such calls.
    """
    if path.pays():
        program = _usually if path.taken < _MANY else _usually_and_fast
        found, left_out = program(instance, axes, parameters)
        missed = bool(jnp.any(left_out))
        path.met(missed)
        if not missed:
            return found
    return _always(instance, axes, parameters)


def _on_usual_path(instance: Instance, axes, parameters) -> tuple[Answers, Any]:
    one = without_rare_branches(lambda member: _answer(instance, member))
    return jax.vmap(one, in_axes=(axes,))(parameters)


# Optimised, it compiles for more than twice as long and runs in half of the time.
_usually, _usually_and_fast = once_jit(_on_usual_path), quick_jit(_on_usual_path)
# Calls after which more are expected.
_MANY = 100


@once_jit
def _always(instance: Instance, axes, parameters) -> Answers:
    return jax.vmap(lambda member: _answer(instance, member), in_axes=(axes,))(
        parameters
    )


def _answer(instance: Instance, parameters) -> Answers:
    problem, x = instance.lower_level(parameters)
    check_functions(problem, x)
    dense = isinstance(instance.adjoint, DenseAdjoint)
    solver = checked_solver(problem, instance.solver, dense)
    lower = solver(problem, x)
    value = problem.lower_value(x, lower.y)
    sane = all_finite((value, lower.y)) & solver.inside(problem, x, lower.y)
    code = status_codes(lower, sane, jnp.asarray(True))
    usable = have_values(as_status(code))
    or_nan = lambda leaf: jnp.where(usable, leaf, jnp.nan)
    y = jax.tree.map(or_nan, lower.y)
    return Answers(y, or_nan(lower.multipliers), code, lower)


@once_jit
def pulled_back(
    instance: Instance,
    axes: PyTree,
    wanted: tuple[bool, ...],
    parameters: PyTree,
    answered: Answers,
    cotangents: tuple[PyTree[Array], Float[Array, "batch k"]],
) -> tuple[list[Array], Bool[Array, " batch"]]:
    """Cotangents of the `wanted` leaves, and which members' linear solve was fine."""
    usable = have_values(as_status(answered.codes))
    lower, stand_in = answered.lower, jnp.argmax(usable)

    # A member that has an answer stands in for each that has none, so that nothing
    # that is not a number reaches what members share; the substitutes do not count.
    def pick(leaf):
        return jnp.where(_beside(usable, leaf), leaf, leaf[stand_in])

    parameters = jax.tree.map(
        lambda axis, leaf: leaf if axis is None else pick(leaf),
        axes,
        parameters,
        is_leaf=lambda axis: axis is None,
    )
    lower, cotangents = jax.tree.map(pick, (lower, cotangents))

    def adjoint(parameters, lower, cotangent):
        problem, x = instance.lower_level(parameters)
        how = default_adjoint(lower) if instance.adjoint is None else instance.adjoint
        flat, unravel = ravel_pytree(lower.y)
        top = ravel_pytree(cotangent[0])[0].astype(flat.dtype)
        bottom = jnp.where(lower.active, cotangent[1], 0).astype(flat.dtype)
        system = kkt_system(problem, x, flat, lower.active)
        v, w, fine = how.solve(system, lower, top, bottom)
        return unravel(v), w, fine

    v, w, fine = jax.vmap(adjoint, in_axes=(axes, 0, 0))(parameters, lower, cotangents)
    counts = usable & fine
    v, w = jax.tree.map(lambda leaf: jnp.where(_beside(counts, leaf), leaf, 0), (v, w))
    leaves, structure = jax.tree.flatten(parameters)

    def total(chosen):
        chosen = iter(chosen)
        pairs = zip(leaves, wanted, strict=True)
        whole = structure.unflatten([next(chosen) if w else leaf for leaf, w in pairs])
        one = lambda *member: _conditions(instance, *member)
        return jnp.sum(jax.vmap(one, in_axes=(axes, 0, 0, 0))(whole, lower, v, w))

    chosen = [leaf for leaf, w in zip(leaves, wanted, strict=True) if w]
    found = [-leaf for leaf in jax.grad(total)(chosen)]
    found = [jnp.where(jnp.any(usable), leaf, 0) for leaf in found]
    return found, fine | ~usable


def _conditions(instance: Instance, parameters, lower: LowerSolution, v, w):
    """`(v, w)` times the conditions of optimality at a fixed answer."""
    problem, x = instance.lower_level(parameters)
    flat = lambda tree: ravel_pytree(tree)[0]
    slope = jax.jvp(lambda y: problem.lower_value(x, y), (lower.y,), (v,))[1]
    if w.size == 0:
        return slope
    constraints, active = problem.constraints, lower.active
    pulled = constraints.pull(jnp.where(active, lower.multipliers, 0))
    over = constraints.push(flat(lower.y)) - constraints.rhs(x)
    # Rows that are not active may have infinite bounds.
    return slope + flat(v) @ pulled + w @ jnp.where(active, over, 0)


def _read(built, parameters) -> tuple[Problem, PyTree[Array]]:
    """What an instance returned, as a problem and its `x`."""
    if isinstance(built, Problem):
        return built, tree_as_float(parameters[0], "x")
    if not isinstance(built, tuple) or not 2 <= len(built) <= 3:
        raise ValueError(_WHAT_TO_RETURN.format(_said(built)))
    objective, constraints, *start = built
    if not callable(objective) or isinstance(objective, Problem):
        raise ValueError(_WHAT_TO_RETURN.format(_said(built)))
    if not (constraints is None or isinstance(constraints, AbstractConstraints)):
        raise ValueError(_WHAT_TO_RETURN.format(_said(built)))
    problem = Problem(
        _no_leader,
        _OfY(objective),
        constraints,
        y0=start[0] if start else None,
    )
    return problem, jnp.zeros(1)


_WHAT_TO_RETURN = (
    "`instance` must return the lower level of one member: an objective, a function of "
    "`y` alone, and a set for `y` (`return objective, constraints`, and a third, `y0`, "
    "where the set does not tell the shape of `y`), or a Problem, whose `x` is then "
    "the first parameter; got {}."
)


def _said(built) -> str:
    if isinstance(built, tuple):
        return f"a tuple of {', '.join(type(part).__name__ for part in built)}"
    return type(built).__name__


class _OfY(Plain):
    """An objective of `y` alone as one of `(x, y)`."""

    objective: Callable

    def __call__(self, x, y):
        return self.objective(y)


def _no_leader(x, y):
    return jnp.zeros(())


def _in_full_precision(leaf):
    """Numbers that somebody made in single precision, in double where that is on."""
    if eqx.is_inexact_array(leaf):
        return leaf.astype(jnp.promote_types(leaf.dtype, jnp.result_type(float)))
    return leaf


def _beside(mask, leaf):
    """`mask` with as many axes as `leaf`."""
    return mask.reshape(mask.shape + (1,) * (leaf.ndim - mask.ndim))
