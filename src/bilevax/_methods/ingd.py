"""INGD: interpolated normalised gradient descent, which certifies where it stops."""

from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, PyTree

from .._arguments import check_fields
from .._implicit.feasible import onto_domain
from .._lower.base import LowerSolution
from .._problem.perturbation import UniformBall
from .._problem.problem import AbstractProblem
from .._programs.control import loop
from .._programs.modules import Plain
from .._status import Status
from .base import (
    AbstractMethod,
    Number,
    Record,
    Scales,
    draws,
    number,
    report,
    tree_norm,
    tree_step,
)
from .search import (
    Work,
    between,
    evaluation,
    gradient_if,
    needs_values,
    no_work,
    plus,
    select,
    tree_dot,
    value_at,
)

# A radius below this share of the length scale is rounding: the search is over.
_SMALLEST = 1e-10


class INGDState(Plain):
    """`x` with `F` and its gradient there, and the radius and tolerance in force.

    - `lipschitz`: the constant of `F`, or the longest gradient so far.
    - `over`: `x` is certified and stays.
    """

    x: PyTree[Array]
    value: Float[Array, ""]
    grad: PyTree[Array]
    lower: LowerSolution
    delta: Float[Array, ""]
    eps: Float[Array, ""]
    lipschitz: Float[Array, ""]
    scales: Scales
    started: Bool[Array, ""]
    over: Bool[Array, ""]


class INGD(AbstractMethod):
    """Steps of one length along a direction that is refined until it descends.

    At `x`, starting from `m = grad F(x)`, until a case ends the step:

    1. `|m| <= eps`: `x` is a `(delta, eps)`-Goldstein point and stays.
    2. `z = x - delta m / |m|` has `F(x) - F(z) >= delta |m| / 4`: move to `z`.
    3. Otherwise take the gradient `g` at a uniform point of the segment `[x, z]` and
       go on with `m <- b m + (1 - b) g`, where
       `b = (4 L^2 - |m|^2) / (4 L^2 + 2 |m|^2)`.

    - `delta`, `eps`: radius and tolerance of the certificate, both or none. Given, the
      method is that of the paper. By default the radius is at first `first_step` in
      units of the length of the problem and the tolerance `first_eps` in units of the
      slope of `F`, both measured at the start; see below.
    - `lipschitz`: the `L` above; by default the longest gradient met so far.
    - `max_gradients`: of step 3, at one `x`. By default `48 L^2 / eps^2`, the number of
      the paper, and without `delta` and `eps` at most 50.
    - `shrink`: factor on the radius and the tolerance.

    Zhang, Lin, Jegelka, Sra and Jadbabaie, Complexity of finding stationary points of
    nonconvex nonsmooth functions, ICML 2020.

    Reconstruction: the weight `b` and the share 1/4 of the decrease were derived from
    the bounds of the paper, not read in it.

    Deviations: the paper asks an oracle for a generalised gradient that agrees with the
    derivative along the segment; here it is the gradient at the random point, which
    exists unless the segment runs inside a kink (`PerturbedINGD` rules that out).
    Without `delta` and `eps` the radius shrinks whenever no descent was found, and the
    tolerance with it whenever that was certified. Points are projected on the domain,
    and `|m|` above is then the decrease per length that `m` predicts for the projected
    step. A point at which the lower level is empty is replaced by the nearest at which
    it is not.
    """

    delta: Number | None = number(None)
    eps: Number | None = number(None)
    lipschitz: Number | None = number(None)
    max_gradients: Number | None = number(None)
    first_step: Number = number(0.05)
    first_eps: Number = number(0.1)
    shrink: Number = number(0.5)

    def __check_init__(self):
        check_fields(self)
        check_pair(self)

    @property
    def takes_followers(self):
        return True

    def refusal(self, problem):
        return needs_values("INGD", problem)

    def init(self, problem, x, lower, scales, *, key):
        return first_state(self, x, lower, scales)

    def step(self, problem, state, *, step, num_steps, key):
        limit = most_gradients(self, state, 48.0)
        end = lambda m, lipschitz, key: m
        return descend(
            self, problem, state, key, limit, end, interpolated, from_ball=False
        )


def interpolated(m: PyTree[Array], g: PyTree[Array], lipschitz) -> PyTree[Array]:
    """`b m + (1 - b) g` with the `b` that makes the bound on its length smallest."""
    square, bound = tree_dot(m, m), 4 * lipschitz**2
    return between(g, m, (bound - square) / (bound + 2 * square))


def check_pair(method) -> None:
    """Raise a `ValueError` if one of `delta` and `eps` is given alone."""
    if (method.delta is None) != (method.eps is None):
        raise ValueError(
            "`delta` and `eps` belong together: give both (one certificate, as in the "
            "paper) or none (both shrink along the run)."
        )


def first_state(method, x, lower, scales: Scales) -> INGDState:
    """Before the first step; nothing is known at `x` yet."""
    zero, no = jnp.zeros_like(scales.slope), jnp.asarray(False)
    explicit = method.delta is not None
    return INGDState(
        x=x,
        value=zero,
        grad=jax.tree.map(jnp.zeros_like, x),
        lower=lower,
        delta=method.delta if explicit else method.first_step * scales.length,
        eps=method.eps if explicit else method.first_eps * scales.slope,
        lipschitz=zero if method.lipschitz is None else method.lipschitz,
        scales=scales,
        started=no,
        over=no,
    )


def most_gradients(method, state: INGDState, constant: float) -> Float[Array, ""]:
    """How many gradients one `x` is worth: `constant L^2 / eps^2` in theory."""
    if method.max_gradients is not None:
        return method.max_gradients
    lipschitz = jnp.maximum(state.lipschitz, state.scales.slope)
    theory = jnp.ceil(constant * lipschitz**2 / state.eps**2)
    return theory if method.delta is not None else jnp.minimum(theory, 50)


class _Search(Plain):
    """The search for a descent direction at one `x`; `tries` counts its gradients."""

    phase: Int[Array, ""]
    state: INGDState
    m: PyTree[Array]
    tries: Int[Array, ""]
    work: Work
    status: Status


# At `x` for the first time; at the first point of a ball; at the end of a step; at a
# point of a segment; and how a search ends.
_HERE, _BALL, _TRIAL, _SEGMENT, _MOVED, _CERTIFIED, _SPENT = range(7)


def descend(
    method,
    problem: AbstractProblem,
    state: INGDState,
    key: PRNGKeyArray,
    limit: Float[Array, ""],
    end: Callable,
    combine: Callable,
    *,
    from_ball: bool,
) -> tuple[INGDState, Record]:
    """One step of the family: search a direction, then move or shrink.

    `end(m, L, key)` is the direction of the segment, `combine(m, g, L)` the next `m`;
    with `from_ball` the first `m` is the gradient at a uniform point of the ball.
    """
    keys = draws(key)
    now = problem.draw(keys.sample)
    delta, eps = state.delta, state.eps

    def aim(s: _Search):
        """Where to look next, before projection."""
        x, key = s.state.x, jr.fold_in(keys.direction, s.tries)
        ball = tree_step(x, delta, unit_ball(x, key))
        share = jr.uniform(jr.fold_in(keys.segment, s.tries), (), delta.dtype)
        share = jnp.where(s.phase == _SEGMENT, share, 1)
        towards = end(s.m, s.state.lipschitz, key)
        towards = select(s.phase == _SEGMENT, towards, s.m)
        ahead = tree_step(x, -share * delta / _positive(tree_norm(towards)), towards)
        return select(s.phase == _HERE, x, select(s.phase == _BALL, ball, ahead))

    def look(s: _Search) -> _Search:
        phase, here = s.phase, s.state
        point = value_at(now, onto_domain(now, aim(s)), here.lower)
        # Without a domain these are `delta |m|` and `|m|`.
        predicted = tree_dot(s.m, jax.tree.map(jnp.subtract, here.x, point.x))
        certified = (phase == _TRIAL) & (predicted <= eps * delta)
        moved = (phase == _TRIAL) & (here.value - point.value >= predicted / 4)
        moved = moved & ~certified
        at_x = (phase == _HERE) | moved
        wanted = (phase == _BALL) | (phase == _SEGMENT) | (at_x & (not from_ball))
        grad, fine = gradient_if(wanted, now, point, here.grad)
        lipschitz = here.lipschitz
        if method.lipschitz is None:
            lipschitz = jnp.maximum(lipschitz, jnp.where(fine, tree_norm(grad), 0))
        there = eqx.tree_at(
            lambda h: (h.x, h.value, h.grad, h.started),
            here,
            (point.x, point.value, grad, jnp.asarray(True)),
        )
        arrived = at_x & jnp.isfinite(point.value) & (fine | from_ball)
        new = select(arrived, there, here)
        new = eqx.tree_at(
            lambda h: (h.lower, h.lipschitz), new, (point.lower, lipschitz)
        )
        m = select(fine & ~moved, grad, s.m)
        m = select((phase == _SEGMENT) & fine, combine(s.m, grad, lipschitz), m)
        tries = s.tries + (phase == _SEGMENT) + ((phase == _BALL) & ~fine)

        known = fine & ((phase == _HERE) | (phase == _BALL))
        following = jnp.where(known | (phase == _SEGMENT), _TRIAL, phase)
        following = jnp.where(arrived & (phase == _HERE) & from_ball, _BALL, following)
        following = jnp.where(phase == _TRIAL, _SEGMENT, following)
        short = (following == _TRIAL) & (tree_norm(m) <= eps)
        spent = (tries >= limit) & (following != _TRIAL)
        spent = spent | ((phase == _HERE) & ~arrived)
        for ends, how in (
            (spent, _SPENT),
            (moved & arrived, _MOVED),
            (certified | short, _CERTIFIED),
        ):
            following = jnp.where(ends, how, following)
        work = plus(s.work, point.work, wanted)
        return _Search(following, new, m, tries, work, point.status)

    first = _BALL if from_ball else _TRIAL
    phase = jnp.where(state.started, first, _HERE)
    short = state.started & (tree_norm(state.grad) <= eps) & (not from_ball)
    phase = jnp.where(state.over | short, _CERTIFIED, phase)
    search = _Search(
        phase, state, state.grad, jnp.asarray(0), no_work(), Status.successful
    )
    # Trials and segments take turns; the first look is at `x`.
    search = loop(lambda s: s.phase < _MOVED, look, search, limit=2 * limit + 4)
    certified = search.phase == _CERTIFIED
    new = _shrunk(method, search.state, search.phase)
    size = jnp.where(certified, eps, tree_norm(search.m))
    record = report(
        problem,
        evaluation(new.value, search.m, new.lower, search.status),
        state.lower,
        state.x,
        new.x,
        # A certificate says no more than this; shorter is chance.
        momentum_norm=size,
        **search.work.entries(),
    )
    return new, record


def _shrunk(method, state: INGDState, phase) -> INGDState:
    certified = phase == _CERTIFIED
    if method.delta is not None:
        return eqx.tree_at(lambda s: s.over, state, certified)
    factor = jnp.where(phase == _MOVED, 1, method.shrink)
    delta = state.delta * factor
    eps = state.eps * jnp.where(certified, method.shrink, 1)
    over = state.over | (delta < _SMALLEST * state.scales.length)
    delta, eps = select(state.over, (state.delta, state.eps), (delta, eps))
    return eqx.tree_at(lambda s: (s.delta, s.eps, s.over), state, (delta, eps, over))


def _positive(size):
    return jnp.maximum(size, jnp.finfo(size.dtype).tiny)


def unit_ball(like: PyTree[Array], key: PRNGKeyArray) -> PyTree[Array]:
    """A uniform point of the unit ball."""
    return UniformBall(1.0).sample(like, key=key)
