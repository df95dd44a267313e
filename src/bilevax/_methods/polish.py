"""Deterministic descent on the unperturbed `F`, through its kinks.

BFGS with a weak Wolfe line search: on non-smooth functions the inverse Hessian learns
to step along the kink instead of zig-zagging across it, and where `F` is smooth the
convergence is superlinear. From a point that sits on the kink no such search succeeds;
then gradients of both sides are combined to the shortest one, as in bundle methods.
Constraints on `x` become kinks too, by an exact penalty: the rows of a polyhedral
domain as they are, a box and the edge of the set of `x` with a non-empty lower level
through the nearest allowed point, since `F` may be undefined beyond. Written here
because optax and optimistix stop at the first kink.
"""

from typing import NamedTuple

import equinox as eqx
import jax
from jaxtyping import Array, Bool, Float, Int, PyTree

from .._constraints import Box, Polyhedron
from .._implicit.feasible import excess, moves, nearest
from .._implicit.hypergradient import exact, staged
from .._implicit.joint import Nearest, nearest_sparse
from .._lower.active_set import opened_factor
from .._lower.base import LowerSolution, strongly_typed
from .._lower.choose import checked_solver, is_on_host
from .._lower.dense import Unravel
from .._problem.problem import Problem
from .._programs.arrays import ravel, xp
from .._programs.control import (
    in_stages,
    loop,
    on_device,
    on_host,
    run_if,
    stage_by_stage,
    usual_path_in_use,
)
from .._programs.modules import Plain
from .._programs.quick import once_jit
from .._programs.threads import few_threads
from .._status import Status, code_of, status_code
from .._tolerances import tolerances

# Searches in a row that may fail before the descent ends.
_STALLS = 12
# First trials of a search reach so many lengths of the problem.
_FAR = 1e4
# Evaluations between two looks at whether the usual path is one.
_FEW = 400


class Polish(Plain):
    """Where the polish ended; `start_value` is `F` where it began.

    `empty` counts the points at which the lower level had none, where nothing led back,
    `undefined` those at which `F` or its gradient was not finite for another reason.
    """

    x: PyTree[Array]
    value: Float[Array, ""]
    start_value: Float[Array, ""]
    steps: Int[Array, ""]
    evaluations: Int[Array, ""]
    empty: Int[Array, ""]
    undefined: Int[Array, ""]


class _Point(NamedTuple):
    """`x`, the allowed point it stands for, `F` there, and how far `x` is outside.

    `slope` and `push` are the gradients of `value` and `distance`.
    """

    x: Float[Array, " d"]
    allowed: Float[Array, " d"]
    value: Float[Array, ""]
    distance: Float[Array, ""]
    slope: Float[Array, " d"]
    push: Float[Array, " d"]

    def merit(self, weight) -> Float[Array, ""]:
        return self.value + weight * self.distance

    def grad(self, weight) -> Float[Array, " d"]:
        return self.slope + weight * self.push


class Search(NamedTuple):
    """A line search inside a BFGS iteration; one evaluation a trip.

    `lower` is the last lower-level solution, from which the next one starts.
    """

    base: _Point
    trial: _Point
    lower: LowerSolution
    inverse: Float[Array, "d d"]
    shortest: Float[Array, " d"]
    reach: Float[Array, ""]
    direction: Float[Array, " d"]
    low: Float[Array, ""]
    high: Float[Array, ""]
    length: Float[Array, ""]
    tries: Int[Array, ""]
    weight: Float[Array, ""]
    fresh: Bool[Array, ""]
    steps: Int[Array, ""]
    evaluations: Int[Array, ""]
    empty: Int[Array, ""]
    undefined: Int[Array, ""]
    stalls: Int[Array, ""]
    raises: Int[Array, ""]
    going: Bool[Array, ""]


def polish(
    problem: Problem,
    x: PyTree[Array],
    lower: LowerSolution,
    length: Float[Array, ""],
    stages: bool = True,
    max_evaluations: int = 2000,
) -> Polish:
    """Descend from `x`, with first steps of about `length`, until nothing improves.

    `lower` is the lower-level solution at `x`; with `stages`, evaluations are taken one
    by one where that is possible.
    """
    solver = checked_solver(problem, None, False, on_host=True)
    search = None
    stages = stages or is_on_host(problem)
    if stages and staged(problem, x, solver, problem.adjoint, lower):
        with few_threads(problem), stage_by_stage(often=True):
            search = _in_stages(problem, x, lower, length, max_evaluations)
            max_evaluations -= int(search.evaluations)
            if not (search.going and max_evaluations):
                return on_device(ended(search, Unravel.like(x)))
        search = on_device(search)
    lower = opened_factor(lower)
    return _as_program(problem, x, lower, length, search, max_evaluations)


def finished(problem: Problem, x, search: Search, length, max_evaluations: int):
    """The polish that has come to `search`, as a program to its end."""
    search = on_device(search)
    return _as_program(problem, x, search.lower, length, search, max_evaluations)


def _in_stages(problem: Problem, x, lower, length, max_evaluations: int) -> Search:
    """Search until nothing improves, or until a program of all would be faster."""
    problem, x, lower, length = on_host((problem, x, lower, length))
    unravel, search, path = (
        Unravel.like(x),
        search_from(x, lower, length),
        usual_path_in_use(),
    )
    few = min(_FEW, max_evaluations)
    while few and search.going and (path is None or path.pays()):
        search = search_on(problem, unravel, search, length, few)
        few = min(_FEW, max_evaluations - int(search.evaluations))
    return search


def search_on(problem: Problem, unravel, start, length, max_evaluations: int):
    """Searches, one evaluation after the other, until nothing improves."""
    domain = problem.domain

    def search(s: Search) -> Search:
        aim = aimed(domain, unravel, s)
        point, lower = _evaluate(problem, unravel, aim, s.lower)
        return searched(s, point, lower, length)

    return loop(lambda s: s.going, search, start, limit=max_evaluations)


@once_jit
def _as_program(problem, x, lower, length, start, max_evaluations) -> Polish:
    start = strongly_typed(search_from(x, lower, length) if start is None else start)
    unravel = Unravel.like(x)
    end = search_on(problem, unravel, start, length, max_evaluations)
    return ended(end, unravel)


def ended(end: Search, unravel: Unravel) -> Polish:
    return Polish(
        x=unravel(end.base.allowed),
        value=end.base.value,
        start_value=xp.asarray(xp.nan),
        steps=end.steps,
        evaluations=end.evaluations,
        empty=end.empty,
        undefined=end.undefined,
    )


def search_from(x, lower: LowerSolution, length) -> Search:
    flat = ravel(x)
    zero, flat0 = xp.zeros((), flat.dtype), xp.zeros_like(flat)
    blank = _Point(flat, flat, zero + xp.inf, zero, flat0, flat0)
    none = xp.asarray(0)
    return Search(
        base=blank,
        trial=blank,
        lower=lower,
        inverse=xp.eye(flat.size, dtype=flat.dtype),
        shortest=flat0,
        reach=length + zero,
        direction=flat0,
        low=zero,
        high=zero + xp.inf,
        length=zero,
        tries=none,
        weight=zero,
        fresh=xp.asarray(True),
        steps=none,
        evaluations=none,
        empty=none,
        undefined=none,
        stalls=none,
        raises=none,
        going=xp.asarray(True),
    )


def searched(s: Search, new: _Point, lower: LowerSolution, length) -> Search:
    """After an evaluation at the trial point: what to try next."""
    tol, eye = tolerances(new.x.dtype), xp.eye(new.x.size, dtype=new.x.dtype)
    first = s.evaluations == 0
    weight = xp.where(first, 4 * xp.linalg.norm(new.slope), s.weight)
    start, now = s.base.merit(weight), new.merit(weight)
    old_grad, new_grad = s.base.grad(weight), new.grad(weight)
    slope = old_grad @ s.direction
    # A NaN or an empty lower level compares false and shortens the step.
    lower_enough = now <= start + 1e-4 * s.length * slope
    flat_enough = new_grad @ s.direction >= 0.5 * slope
    accept = first | (lower_enough & flat_enough)
    low = xp.where(lower_enough, s.length, s.low)
    high = xp.where(lower_enough, s.high, s.length)
    longer = xp.where(xp.isinf(high), 2 * low, 0.5 * (low + high))
    given_up = ~accept & (s.tries >= 30)
    # A search that ran out of digits still keeps what it gained.
    take = accept | (given_up & lower_enough & (now < start))

    moved = new.x - s.base.x
    inverse = xp.where(
        take & ~first,
        _bfgs(s.inverse, moved, new_grad - old_grad, s.fresh),
        s.inverse,
    )
    inverse = xp.where(given_up, eye, inverse)
    base = _where(take, new, s.base)
    drop = start - base.merit(weight)
    small = drop <= 4 * tol.eps * (xp.abs(start) + xp.abs(drop))
    stalls = s.stalls + xp.where(take, _STALLS // 3, given_up)
    stalls = xp.where(first | (take & ~small), 0, stalls)
    # An end outside the allowed set asks for a heavier penalty.
    size = length + xp.linalg.norm(base.x)
    outside = (stalls >= _STALLS) & (base.distance > tol.accept * size)
    heavier = outside & (s.raises < 6)
    weight = xp.where(heavier, 10 * weight, weight)
    weight = xp.maximum(weight, 2 * xp.linalg.norm(base.slope))
    fresh = first | heavier
    inverse = xp.where(heavier, eye, inverse)
    stalls = xp.where(heavier, 0, stalls)

    # Both sides of a kink that stopped the search, in one direction along it.
    usable = xp.isfinite(now) & xp.all(xp.isfinite(new_grad))
    shortest = _shortest(s.shortest, new_grad)
    shortest = xp.where(given_up & ~take & ~fresh & usable, shortest, base.grad(weight))
    direction = -(inverse @ shortest)
    # A first step in units of the problem; afterwards BFGS knows its own length.
    size = xp.linalg.norm(direction)
    reach = xp.where(take, xp.linalg.norm(moved), 0.5 * s.reach)
    reach = xp.where(fresh, length, reach)
    direction = xp.where(
        fresh | given_up,
        direction * reach / xp.where(size > 0, size, 1),
        # Where gradients hardly changed, the model may see its minimum anywhere.
        direction
        * xp.minimum(1, _farthest(length, base) / xp.where(size > 0, size, 1)),
    )
    next_search = take | given_up
    no_point = xp.any(code_of(lower.status) == code_of(Status.infeasible))
    return Search(
        base=base,
        trial=new,
        lower=lower,
        inverse=inverse,
        shortest=xp.where(next_search, shortest, s.shortest),
        reach=xp.where(next_search, reach, s.reach),
        direction=xp.where(next_search, direction, s.direction),
        low=xp.where(next_search, 0, low),
        high=xp.where(next_search, xp.inf, high),
        length=xp.where(next_search, 1, longer),
        tries=xp.where(next_search, 0, s.tries + 1),
        weight=weight,
        fresh=fresh | given_up | (s.fresh & ~take),
        steps=s.steps + (take & ~first),
        evaluations=s.evaluations + 1,
        empty=s.empty + no_point,
        undefined=s.undefined + (~usable & ~no_point),
        stalls=stalls,
        raises=s.raises + heavier,
        going=~((stalls >= _STALLS) | ~xp.isfinite(base.value) | (size == 0)),
    )


def _farthest(length, base: _Point):
    """How far a search may begin to look; from there it doubles."""
    return _FAR * (length + xp.linalg.norm(base.x))


def _shortest(a, b):
    """The shortest vector between `a` and `b`."""
    gap = a - b
    length = gap @ gap
    share = xp.where(length > 0, a @ gap / xp.where(length > 0, length, 1), 0)
    return a - xp.clip(share, 0, 1) * gap


def _bfgs(inverse, s, y, fresh):
    """The inverse update; a fresh identity is scaled to the first pair."""
    sy = s @ y
    usable = sy > 0
    sy = xp.where(usable, sy, 1)
    yy = y @ y
    scale = xp.where(fresh, sy / xp.where(yy > 0, yy, 1), 1)
    inverse = scale * inverse
    Hy = inverse @ y
    update = (1 + y @ Hy / sy) * xp.outer(s, s) / sy
    update = update - (xp.outer(s, Hy) + xp.outer(Hy, s)) / sy
    return xp.where(usable, inverse + update, inverse)


class _Aim(NamedTuple):
    """Where to look: `x`, the point of the domain it stands for, and that as a tree."""

    x: Float[Array, " d"]
    allowed: Float[Array, " d"]
    tree: PyTree[Array]


def aimed(domain, unravel: Unravel, s: Search) -> _Aim:
    x = s.base.x + s.length * s.direction
    allowed = x
    if isinstance(domain, Box):
        low, high = ravel(domain.lower), ravel(domain.upper)
        allowed = xp.clip(x, low, high)
    return _Aim(x, allowed, unravel(allowed))


def _evaluate(problem: Problem, unravel: Unravel, aim: _Aim, warm):
    """`F` at the allowed point that `x` stands for, and its lower-level solution."""
    solve, domain = exact(problem), problem.domain
    if not moves(problem):
        e = solve(aim.tree, warm)
        return placed_inside(domain, aim, e.value, e.grad), e.lower
    if in_stages():
        e = solve(aim.tree, warm)
        if status_code(e.status) != status_code(Status.infeasible):
            return placed_inside(domain, aim, e.value, e.grad), e.lower
        sparse = is_on_host(problem)
        near = (
            nearest_sparse(problem, aim.x, unravel)
            if sparse
            else _nearest(problem, aim.x, unravel)
        )
        near = on_host(near)
        e = solve(unravel(near.x), e.lower)
        pull_back = Nearest.pull_back if sparse else _pull_back
        grad = on_host(pull_back(near, ravel(e.grad)))
        return _placed(domain, aim.x, near.x, e.value, grad), e.lower

    # Where the lower level is empty: the nearest point where it is not.
    x = aim.x

    def find_nearest() -> Nearest:
        return nearest(problem, x, coupled=True, unravel=unravel)

    def attempt(carry):
        lower, outside, *_ = carry
        arrays, rest = eqx.partition(blank, eqx.is_array)
        find = lambda _: eqx.filter(find_nearest(), eqx.is_array)
        near = eqx.combine(run_if(outside, find, arrays), rest)
        point = xp.where(outside, near.x, aim.allowed)
        e = solve(unravel(point), lower)
        flat = ravel(e.grad)
        kept = _kept_inside(problem.domain, x, flat)
        grad = run_if(outside, lambda _: near.pull_back(flat), kept)
        empty = (e.status == Status.infeasible) & ~outside
        return e.lower, outside | empty, empty, point, e.value, grad

    blank = jax.tree.map(
        lambda leaf: (
            xp.zeros(leaf.shape, leaf.dtype)
            if isinstance(leaf, jax.ShapeDtypeStruct)
            else leaf
        ),
        eqx.filter_eval_shape(find_nearest),
    )
    no, yes, zero = xp.asarray(False), xp.asarray(True), xp.zeros((), x.dtype)
    lower, _, _, allowed, value, grad = loop(
        lambda c: c[2], attempt, (warm, no, yes, x, zero, x), limit=2
    )
    return _placed(domain, x, allowed, value, grad), lower


@once_jit
def _nearest(problem: Problem, x, unravel: Unravel) -> Nearest:
    return nearest(problem, x, coupled=True, unravel=unravel)


@once_jit
def _pull_back(near: Nearest, v):
    return near.pull_back(v)


def _kept_inside(domain, x, grad):
    """The gradient where a box lets `x` move: outside, and at a bound where descent
    points outwards, `x` changes nothing."""
    if not isinstance(domain, Box):
        return grad
    low, high = ravel(domain.lower), ravel(domain.upper)
    outside = (x < low) | (x > high)
    held = ((x == low) & (grad > 0)) | ((x == high) & (grad < 0))
    return xp.where(outside | held, 0, grad)


def placed_inside(domain, aim: _Aim, value, grad) -> _Point:
    grad = _kept_inside(domain, aim.x, ravel(grad))
    return _placed(domain, aim.x, aim.allowed, value, grad)


def _placed(domain, x, allowed, value, grad) -> _Point:
    point = _point(x, allowed, value, grad)
    if not isinstance(domain, Polyhedron):
        return point
    over, push = excess(domain, x)
    return point._replace(distance=point.distance + over, push=point.push + push)


def _point(x, allowed, value, grad) -> _Point:
    away = x - allowed
    distance = xp.linalg.norm(away)
    push = xp.where(distance > 0, away / xp.where(distance > 0, distance, 1), 0)
    return _Point(x, allowed, value, distance, grad, push)


def _where(predicate, new, old):
    if in_stages():
        return new if predicate else old
    return jax.tree.map(lambda a, b: xp.where(predicate, a, b), new, old)
