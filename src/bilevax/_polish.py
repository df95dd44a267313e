"""Deterministic descent on the unperturbed `F`, through its kinks.

BFGS with a weak Wolfe line search: on non-smooth functions the inverse Hessian learns
to step along the kink instead of zig-zagging across it, and where `F` is smooth the
convergence is superlinear. Points outside the allowed set are replaced by the nearest
allowed one, at the price of an exact penalty, so that the constraints on `x` are kinks
like any other. Written here because optax and optimistix stop at the first kink.
"""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Bool, Float, Int, PyTree

from ._constraints import Box
from ._feasible import Nearest, moves, nearest
from ._implicit import hypergradient
from ._lower.base import LowerSolution, run_if
from ._problem import Problem
from ._quick import quick_jit
from ._status import Status
from ._tolerances import tolerances


class Polish(eqx.Module):
    """Where the polish ended; `start_value` is `F` where it began."""

    x: PyTree[Array]
    value: Float[Array, ""]
    start_value: Float[Array, ""]
    steps: Int[Array, ""]
    evaluations: Int[Array, ""]


class _Point(eqx.Module):
    """`x`, the allowed point it stands for, and the penalised objective there."""

    x: Float[Array, " d"]
    allowed: Float[Array, " d"]
    value: Float[Array, ""]
    merit: Float[Array, ""]
    grad: Float[Array, " d"]
    lower: LowerSolution


class _Search(eqx.Module):
    """A line search inside a BFGS iteration; one evaluation a trip."""

    base: _Point
    trial: _Point
    inverse: Float[Array, "d d"]
    direction: Float[Array, " d"]
    low: Float[Array, ""]
    high: Float[Array, ""]
    length: Float[Array, ""]
    tries: Int[Array, ""]
    weight: Float[Array, ""]
    fresh: Bool[Array, ""]
    steps: Int[Array, ""]
    evaluations: Int[Array, ""]
    stalls: Int[Array, ""]
    done: Bool[Array, ""]


@quick_jit
def polish(
    problem: Problem,
    x: PyTree[Array],
    lower: LowerSolution,
    length: Float[Array, ""],
    max_evaluations: Any = 2000,
) -> Polish:
    """Descend from `x`, with first steps of about `length`, until nothing improves.

    `lower` is the lower-level solution at `x`.
    """
    flat, unravel = ravel_pytree(x)
    tol = tolerances(flat.dtype)
    d = flat.size
    eye = jnp.eye(d, dtype=flat.dtype)
    blank = _Point(flat, flat, jnp.inf * flat[0], jnp.inf * flat[0], 0 * flat, lower)
    start = _Search(
        base=blank,
        trial=blank,
        inverse=eye,
        direction=0 * flat,
        low=jnp.zeros((), flat.dtype),
        high=jnp.asarray(jnp.inf, flat.dtype),
        length=jnp.zeros((), flat.dtype),
        tries=jnp.asarray(0),
        weight=jnp.zeros((), flat.dtype),
        fresh=jnp.asarray(True),
        steps=jnp.asarray(0),
        evaluations=jnp.asarray(0),
        stalls=jnp.asarray(0),
        done=jnp.asarray(False),
    )

    def body(s: _Search) -> _Search:
        here = s.base.x + s.length * s.direction
        new = _evaluate(problem, unravel, here, s.trial.lower, s.weight)
        first = s.evaluations == 0
        slope = s.base.grad @ s.direction
        # A NaN or an empty lower level compares false and shortens the step.
        lower_enough = new.merit <= s.base.merit + 1e-4 * s.length * slope
        flat_enough = new.grad @ s.direction >= 0.5 * slope
        accept = first | (lower_enough & flat_enough)
        low = jnp.where(lower_enough, s.length, s.low)
        high = jnp.where(lower_enough, s.high, s.length)
        longer = jnp.where(jnp.isinf(high), 2 * low, 0.5 * (low + high))
        given_up = ~accept & (s.tries >= 40)
        # A search that ran out of digits still keeps what it gained.
        gained = given_up & lower_enough & (new.merit < s.base.merit)
        take = accept | gained

        moved, turned = new.x - s.base.x, new.grad - s.base.grad
        inverse = jnp.where(
            take & ~first, _bfgs(s.inverse, moved, turned, s.fresh), s.inverse
        )
        # Without progress, once more with what steepest descent says.
        inverse = jnp.where(given_up, eye, inverse)
        base = _where(take, new, s.base)
        weight = jnp.maximum(s.weight, 2 * jnp.linalg.norm(base.grad))
        weight = jnp.where(first, 4 * jnp.linalg.norm(base.grad), weight)
        drop = s.base.merit - base.merit
        small = drop <= 4 * tol.eps * (jnp.abs(s.base.merit) + jnp.abs(drop))
        stalls = jnp.where(take & ~small, 0, s.stalls + (take | given_up))
        stalls = jnp.where(first, 0, stalls)

        fresh = first | given_up | (s.fresh & ~take)
        direction = -(inverse @ base.grad)
        # A first step in units of the problem; afterwards BFGS knows its own length.
        size = jnp.linalg.norm(direction)
        unit = jnp.where(first, length, jnp.linalg.norm(moved))
        restart = first | given_up
        direction = jnp.where(
            restart, direction * unit / jnp.where(size > 0, size, 1), direction
        )
        next_search = take | given_up
        return _Search(
            base=base,
            trial=new,
            inverse=inverse,
            direction=jnp.where(next_search, direction, s.direction),
            low=jnp.where(next_search, 0, low),
            high=jnp.where(next_search, jnp.inf, high),
            length=jnp.where(next_search, 1, longer),
            tries=jnp.where(next_search, 0, s.tries + 1),
            weight=weight,
            fresh=fresh,
            steps=s.steps + (take & ~first),
            evaluations=s.evaluations + 1,
            stalls=stalls,
            done=(stalls >= 3) | ~jnp.isfinite(base.merit) | (size == 0),
        )

    end = jax.lax.while_loop(
        lambda s: ~s.done & (s.evaluations < max_evaluations), body, start
    )
    return Polish(
        x=unravel(end.base.allowed),
        value=end.base.value,
        start_value=jnp.asarray(jnp.nan),
        steps=end.steps,
        evaluations=end.evaluations,
    )


def _bfgs(inverse, s, y, fresh):
    """The inverse update; a fresh identity is scaled to the first pair."""
    sy = s @ y
    usable = sy > 0
    sy = jnp.where(usable, sy, 1)
    yy = y @ y
    scale = jnp.where(fresh, sy / jnp.where(yy > 0, yy, 1), 1)
    inverse = scale * inverse
    Hy = inverse @ y
    update = (1 + y @ Hy / sy) * jnp.outer(s, s) / sy
    update = update - (jnp.outer(s, Hy) + jnp.outer(Hy, s)) / sy
    return jnp.where(usable, inverse + update, inverse)


def _evaluate(problem: Problem, unravel, x, warm, weight) -> _Point:
    """`F` at the nearest allowed point plus `weight` times the distance to it."""
    domain = problem.domain
    box = isinstance(domain, Box)
    allowed, keep = x, lambda grad: grad
    if isinstance(domain, Box):
        low, high = ravel_pytree(domain.lower)[0], ravel_pytree(domain.upper)[0]
        allowed = jnp.clip(x, low, high)
        # Outside, and at a bound where descent points outwards, `x` changes nothing.
        keep = lambda grad: jnp.where(
            (x < low)
            | (x > high)
            | ((x == low) & (grad > 0))
            | ((x == high) & (grad < 0)),
            0,
            grad,
        )
    project = moves(problem) or (domain is not None and not box)
    if not project:
        e = hypergradient(problem, unravel(allowed), warm=warm, throw=False)
        grad = keep(ravel_pytree(e.grad)[0])
        return _with_penalty(x, allowed, e.value, grad, e.lower, weight)

    # The general set needs a quadratic program, but only outside of it.
    def project_if(predicate, near: Nearest) -> Nearest:
        arrays, rest = eqx.partition(near, eqx.is_array)
        find = lambda _: eqx.filter(find_nearest(), eqx.is_array)
        return eqx.combine(run_if(predicate, find, arrays), rest)

    def find_nearest() -> Nearest:
        return nearest(problem, x, coupled=moves(problem))

    def attempt(carry):
        lower, outside, *_ = carry
        near = project_if(outside, blank)
        point = jnp.where(outside, near.x, allowed)
        e = hypergradient(problem, unravel(point), warm=lower, throw=False)
        grad = keep(ravel_pytree(e.grad)[0])
        grad = run_if(outside, lambda _: near.pull_back(ravel_pytree(e.grad)[0]), grad)
        empty = (e.status == Status.infeasible) & ~outside
        return e.lower, outside | empty, empty, point, e.value, grad

    shapes = eqx.filter_eval_shape(find_nearest)
    blank = jax.tree.map(
        lambda leaf: (
            jnp.zeros(leaf.shape, leaf.dtype)
            if isinstance(leaf, jax.ShapeDtypeStruct)
            else leaf
        ),
        shapes,
    )
    outside = jnp.asarray(False)
    if domain is not None and not box:
        outside = ~_inside(domain, x)
    zero = jnp.zeros((), x.dtype)
    lower, _, _, allowed, value, grad = jax.lax.while_loop(
        lambda c: c[2], attempt, (warm, outside, jnp.asarray(True), x, zero, x)
    )
    return _with_penalty(x, allowed, value, grad, lower, weight)


def _with_penalty(x, allowed, value, grad, lower, weight) -> _Point:
    away = x - allowed
    distance = jnp.linalg.norm(away)
    push = jnp.where(distance > 0, away / jnp.where(distance > 0, distance, 1), 0)
    merit = value + weight * distance
    return _Point(x, allowed, value, merit, grad + weight * push, lower)


def _inside(domain, x):
    k = domain.num_inequalities
    rows = domain.matrix(x.size, x.dtype) @ x - domain.rhs(x)
    gap = jnp.where(jnp.arange(rows.size) < k, rows, jnp.abs(rows))
    return jnp.all(gap <= 0)


def _where(predicate, new, old):
    return jax.tree.map(lambda a, b: jnp.where(predicate, a, b), new, old)
