"""IGBA: implicit gradients of a lower level with a logarithmic barrier."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Bool, Float, Int, PyTree

from .._implicit.feasible import onto_domain
from .._implicit.hypergradient import Evaluation
from .._lower.base import LowerSolution, all_finite
from .._lower.dense import FlatLower, Rows, flatten, largest, ratio, unit_rows
from .._problem.problem import Problem
from .._programs.control import loop
from .._programs.modules import Plain
from .._status import Status
from .._tolerances import tolerances
from .base import (
    AbstractMethod,
    Number,
    Scales,
    draws,
    falling,
    number,
    report,
    tree_step,
)

# Newton steps from the last centre before starting anew, and in all.
_WARM_STEPS = 20
_ALL_STEPS = 100
# Share of the way to the boundary of the positive orthant that a step may go.
_INSIDE = 0.99
# How fast the products of slack and multiplier fall towards `t` from afar.
_SHRINK = 0.1


class Centre(Plain):
    """The minimiser of the barrier problem, in unit rows.

    `slack` and `multipliers` of an inequality row have the product `t`.
    """

    y: Float[Array, " n"]
    slack: Float[Array, " k"]
    multipliers: Float[Array, " k"]


class IGBAState(Plain):
    """`x`, the last `x` that had an interior, and the centre there."""

    x: PyTree[Array]
    inside: PyTree[Array]
    centre: Centre
    lower: LowerSolution
    scales: Scales
    t_unit: Float[Array, ""]


class IGBA(AbstractMethod):
    """Gradient descent on `F` with a barrier in place of the inequality rows.

    With `s = b - A y - B x` the slacks of the inequality rows,

        y_t(x) = argmin_y g(x, y) - t sum_i log s_i   s.t. the equality rows
        F_t(x) = f(x, y_t(x))
        x+     = P(x - eta grad F_t(x))

    where the implicit function theorem gives `grad F_t` by one solve with the Hessian
    `G + t A^T diag(s^-2) A`, and the rows of `B` enter the mixed derivative
    `g_yx + t A^T diag(s^-2) B`. `F_t` is smooth; it differs from `F` by `O(t)` away
    from kinks and by `O(sqrt(t))` at them.

    - `t`: weight of the barrier, fixed for the whole run as published.
    - `first_t`, `t_decay`: without `t`, the weight falls geometrically from `first_t`
      to `first_t * t_decay`, in units of `force^2 / curvature` of `g`.
    - `step_size`: constant `eta`. Without it, `eta` falls geometrically from
      `first_step` to `first_step * decay`, in units of length over slope.

    Paper: Tsaknakis, Khanduri, Hong, "An implicit gradient method for constrained
    bilevel problems using barrier approximation", ICASSP 2023.

    Deviations:

    - By default `t` and `eta` fall along the run; the paper fixes both.
    - The barrier problem is solved by Newton's method in primal-dual form
      (`s_i lambda_i = t` instead of `lambda_i = t / s_i`): the same minimiser and the
      same linear systems there, but a start need not be feasible, so nothing has to be
      recentred when `x` moves the last centre out of the interior, and small `t` need
      no more steps than large ones. Slacks and multipliers stay positive first, then
      the residual must fall.
    - Where the lower level has no interior, `x` goes half the way back to the last
      point that had one.

    Reconstruction: the adjoint form of the gradient with equality rows is ours.
    """

    t: Number | None = number(None)
    step_size: Number | None = number(None)
    first_step: Number = number(0.1)
    decay: Number = number(1e-2)
    first_t: Number = number(1e-3)
    t_decay: Number = number(1e-7)

    def init(self, problem, x, lower, scales, *, key):
        flat, y = flatten(problem, x)
        y = _finite_or(ravel_pytree(lower.y)[0].astype(y.dtype), y)
        rows = unit_rows(problem.constraints, x, y.size, y.dtype)
        unit = scales.force**2 / _stiffness(flat.hessian(y))
        t = self._t(unit, 0, 1)
        return IGBAState(
            x=x,
            inside=x,
            centre=_cold(flat, rows, y, t),
            lower=lower,
            scales=scales,
            t_unit=unit,
        )

    def step(self, problem, state, *, step, num_steps, key):
        now = problem.draw(draws(key).sample, step)
        t = self._t(state.t_unit, step, num_steps)
        b = barrier_gradient(now, state.x, t, state.centre)
        usable = b.status == Status.successful
        eta = self.step_size
        if eta is None:
            eta = falling(self.first_step, self.decay, step, num_steps)
            slope = jnp.where(state.scales.slope > 0, state.scales.slope, 1)
            eta = eta * state.scales.length / slope
        ahead = onto_domain(now, tree_step(state.x, -eta, b.grad))
        back = jax.tree.map(lambda a, b: 0.5 * (a + b), state.inside, state.x)
        pick = lambda a, b: jax.tree.map(lambda a, b: jnp.where(usable, a, b), a, b)
        new_x = pick(ahead, back)
        record = report(
            problem,
            Evaluation(b.value, None, b.grad, state.lower, b.status, None),
            state.lower,
            state.x,
            new_x,
            recovered=~usable,
            lower_solves=0,
            penalty_solves=1,
            lower_passes=b.steps,
            factorisations=b.steps + 1,
            safeguard=0,
        )
        new = eqx.tree_at(
            lambda s: (s.x, s.inside, s.centre),
            state,
            (new_x, pick(state.x, state.inside), pick(b.centre, state.centre)),
        )
        return new, record

    def _t(self, unit, step, num_steps):
        if self.t is not None:
            return self.t
        t = unit * falling(self.first_t, self.t_decay, step, num_steps)
        # Slacks near a kink are about sqrt(t) and must stay above rounding.
        return jnp.maximum(t, tolerances(unit.dtype).rounding * unit)


class Barrier(Plain):
    """`F_t` and its gradient at one `x`, NaN unless `status` is successful."""

    value: Float[Array, ""]
    grad: PyTree[Array]
    centre: Centre
    steps: Int[Array, ""]
    status: Any


def barrier_gradient(
    problem: Problem, x: PyTree[Array], t, warm: Centre | None = None
) -> Barrier:
    """Value and gradient of `F_t` at `x`; `warm` is the centre of a nearby `x`.

    With `D = diag(s^2 / t)` on inequality rows and zero on equality rows, solve

        [G  A^T] [v]   [grad_y f]
        [A  -D ] [w] = [   0    ]

    and subtract from `grad_x f` the `x`-gradient of `<grad_y g, v> + <w, B x>`.
    """
    lower, y = flatten(problem, x)
    rows = unit_rows(problem.constraints, x, y.size, y.dtype)
    cold = _cold(lower, rows, y, t)
    search = _search(lower, rows, cold, cold if warm is None else warm, t)
    centre = search.centre
    y = lower.unravel(centre.y)
    value_of = lambda x, y: problem.upper_value(x, y)[0]
    value, (f_x, f_y) = jax.value_and_grad(value_of, argnums=(0, 1))(x, y)
    f_y, unravel = ravel_pytree(f_y)
    newton = _Newton(lower.hessian(centre.y), rows, centre)
    v, w = newton(f_y.astype(centre.y.dtype), jnp.zeros_like(rows.rhs))
    w = w / rows.norm
    v = unravel(v.astype(f_y.dtype))

    def cross(x):
        along = jax.jvp(lambda y: problem.lower_value(x, y), (y,), (v,))[1]
        return along + problem.constraints.coupling(x, w)

    grad = jax.tree.map(jnp.subtract, f_x, jax.grad(cross)(x))
    failure = _failure(lower, rows, search, cold)
    failure = Status.where(
        search.solved & ~all_finite((value, grad)), Status.non_finite, failure
    )
    nan_where = failure != Status.successful
    value, grad = jax.tree.map(
        lambda leaf: jnp.where(nan_where, jnp.nan, leaf), (value, grad)
    )
    return Barrier(value, grad, centre, search.steps, failure)


class _Search(Plain):
    centre: Centre
    solved: Bool[Array, ""]
    over: Bool[Array, ""]
    steps: Int[Array, ""]


def _search(lower: FlatLower, rows: Rows, cold: Centre, warm: Centre, t) -> _Search:
    """Newton steps from `warm`, and from `cold` if these do not end soon."""
    tol = tolerances(cold.y.dtype)
    bounded = _bounded(rows)
    count = jnp.maximum(jnp.sum(bounded), 1)

    def residuals(c: Centre, target):
        dual = lower.gradient(c.y) + c.multipliers @ rows.A
        primal = jnp.where(rows.usable, rows.A @ c.y + c.slack - rows.rhs, 0)
        product = jnp.where(bounded, c.slack * c.multipliers - target, 0)
        return dual, primal, product

    def solved(c: Centre):
        dual, primal, product = residuals(c, t)
        gradient, curvature = jax.jvp(lower.gradient, (c.y,), (c.y,))
        parts = largest(curvature, gradient - curvature, c.multipliers @ rows.A)
        length = jnp.linalg.norm(c.y) + rows.scale + c.slack
        return (
            (ratio(largest(dual)[0], sum(parts)) <= tol.accept)
            & jnp.all(jnp.abs(primal) <= tol.rounding * length)
            & jnp.all(jnp.abs(product) <= tol.accept * t)
        )

    def body(s: _Search) -> _Search:
        c = s.centre
        c = jax.tree.map(lambda a, b: jnp.where(s.steps == _WARM_STEPS, a, b), cold, c)
        gap = jnp.sum(jnp.where(bounded, c.slack * c.multipliers, 0)) / count
        target = jnp.maximum(t, _SHRINK * gap)
        dual, primal, product = residuals(c, target)
        # slack dmu + mu dslack = -product,  A dy + dslack = -primal
        off_centre = product / jnp.where(bounded, c.multipliers, 1)
        newton = _Newton(lower.hessian(c.y), rows, c)
        dy, dmu = newton(-dual, off_centre - primal)
        ds = jnp.where(bounded, -primal - rows.A @ dy, 0)
        limit = jnp.minimum(
            jnp.where(bounded & (ds < 0), -c.slack / ds, jnp.inf),
            jnp.where(bounded & (dmu < 0), -c.multipliers / dmu, jnp.inf),
        )
        # Feasibility first.
        longest = jnp.minimum(1, _INSIDE * jnp.min(limit, initial=jnp.inf))
        move = lambda a: Centre(c.y + a * dy, c.slack + a * ds, c.multipliers + a * dmu)
        # Then the residuals must fall, each in its own unit.
        force = jnp.linalg.norm(lower.gradient(c.y)) + jnp.linalg.norm(c.multipliers)
        length = jnp.linalg.norm(c.y) + jnp.linalg.norm(c.slack)

        def size(a):
            dual, primal, product = residuals(move(a), target)
            parts = (
                ratio(jnp.linalg.norm(dual), force),
                ratio(jnp.linalg.norm(primal), length),
                ratio(jnp.linalg.norm(product), force * length),
            )
            return jnp.sqrt(sum(part**2 for part in parts))

        start = size(0.0)
        share = loop(
            lambda a: ~(size(a) <= (1 - 1e-4 * a) * start + tol.rounding) & (a > 1e-9),
            lambda a: 0.5 * a,
            longest,
            limit=30,
        )
        new = move(share)
        sane = all_finite((new.y, new.slack, new.multipliers))
        new = jax.tree.map(lambda a, b: jnp.where(sane, a, b), new, c)
        done = sane & solved(new)
        # Without a step from the cold start either, nothing will change any more.
        over = done | (~sane & (s.steps >= _WARM_STEPS))
        steps = jnp.where(sane, s.steps, jnp.maximum(s.steps, _WARM_STEPS - 1)) + 1
        return _Search(new, done, over, steps)

    start = _Search(warm, jnp.asarray(False), rows.empty, jnp.asarray(0))
    return loop(lambda s: ~s.over, body, start, limit=_ALL_STEPS)


class _Newton:
    """Solves with `[[H, A^T], [A, -diag(slack / multiplier)]]` over all rows.

    The second block is zero for equality rows. Eliminating `y` and not the multipliers
    keeps the digits that the large weights of active rows would cost.
    """

    def __init__(self, hessian, rows: Rows, c: Centre):
        self.rows = rows
        root = jax.scipy.linalg.cho_factor(hessian, lower=True)
        self.lifted = jax.scipy.linalg.cho_solve(root, rows.A.T)
        self.hessian = root
        gram = rows.A @ self.lifted
        diagonal = jnp.diagonal(gram)
        softness = c.slack / jnp.where(_bounded(rows), c.multipliers, 1)
        softness = jnp.where(_bounded(rows), softness, 0)
        softness = softness + tolerances(gram.dtype).regularise * diagonal
        softness = jnp.where(rows.usable, softness, 1)
        self.root = None
        if softness.size:
            gram = jnp.where(rows.usable[:, None] & rows.usable, gram, 0)
            self.root = jax.scipy.linalg.cho_factor(
                gram + jnp.diag(softness), lower=True
            )

    def __call__(self, top, bottom):
        free = jax.scipy.linalg.cho_solve(self.hessian, top)
        if self.root is None:
            return free, bottom
        miss = jnp.where(self.rows.usable, self.rows.A @ free - bottom, 0)
        mu = jax.scipy.linalg.cho_solve(self.root, miss)
        return free - self.lifted @ mu, mu


def _bounded(rows: Rows):
    return rows.usable & ~rows.equality


def _stiffness(hessian):
    diagonal = jnp.max(jnp.abs(jnp.diagonal(hessian)))
    return jnp.where(diagonal > 0, diagonal, 1)


def _cold(lower: FlatLower, rows: Rows, y, t) -> Centre:
    """A start from nothing but `y`, with slacks and multipliers well inside."""
    bounded = _bounded(rows)
    stiffness = _stiffness(lower.hessian(y))
    room = jnp.where(bounded, rows.rhs - rows.A @ y, 0)
    force = jnp.linalg.norm(lower.gradient(y))
    length = jnp.maximum(jnp.max(jnp.abs(room), initial=0), force / stiffness)
    length = jnp.maximum(length, jnp.sqrt(t / stiffness))
    slack = jnp.maximum(room, 0.1 * length)
    multipliers = jnp.full_like(slack, jnp.maximum(force, stiffness * length))
    return Centre(y, jnp.where(bounded, slack, 0), jnp.where(bounded, multipliers, 0))


def _finite_or(y, other):
    return jnp.where(jnp.all(jnp.isfinite(y)), y, other)


def _failure(lower: FlatLower, rows: Rows, search: _Search, cold: Centre):
    """Why there is no centre; earlier lines win."""
    c = search.centre
    miss = jnp.where(rows.usable, rows.A @ c.y + c.slack - rows.rhs, 0)
    length = jnp.linalg.norm(c.y) + rows.scale
    tol = tolerances(c.y.dtype)
    hessian = lower.hessian(c.y)
    bent = jnp.all(jnp.isfinite(jnp.linalg.cholesky(hessian)))
    cases = (
        (search.solved, Status.successful),
        (~all_finite((lower.x, rows.rhs, hessian)), Status.non_finite),
        (~bent, Status.not_strongly_convex),
        (rows.empty | jnp.any(jnp.abs(miss) > tol.accept * length), Status.infeasible),
    )
    status = Status.iteration_limit
    for failed, kind in reversed(cases):
        status = Status.where(failed, kind, status)
    return status
