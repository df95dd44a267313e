"""The default lower-level solver: warm-started active set, safeguarded.

         start ──> FAST ──solved──────────────────────────────┐
                    │ fails                                    │
                    v                                          v
      ┌────────> GUARD ──infeasible, too many steps────────> OVER
      │             │ a full step that the model predicted     ^
      │             v                                          │
      │           TRUST ──solved───────────────────────────────┤
      │             │ fails                                    │
      │             v                                          │
      └──────────  HOLD ──solved, or nothing is left to gain───┘

FAST takes Newton passes from the start, GUARD exact quadratic programs with a line
search, TRUST Newton passes from the active set that these proved, and HOLD the same
with that set held.
"""

import functools
from typing import Any, NamedTuple

import equinox as eqx
import jax
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from .._programs.arrays import ravel, xp
from .._programs.control import (
    choose_rarely,
    in_stages,
    loop,
    on_host,
    once,
    packed,
    rarely,
    run_if,
    run_unless,
    unless_rarely,
)
from .._programs.modules import made, plain_method, with_fields
from .._status import Status, as_status, code_of
from .._tolerances import tolerances
from .base import AbstractLowerSolver, Iterations, LowerSolution, all_finite
from .classify import Split, classify, margin_of
from .columns import may_have_units, units_of_columns
from .dense import (
    Factor,
    FlatLower,
    Rows,
    Schur,
    Unravel,
    blank_factor,
    blank_schur,
    factorise,
    hessian_of,
    schur,
    unit_rows,
)
from .flat import is_decided, is_loose, prepared_hessian
from .newton import Sweep, begin, is_solved, newton_pass, without_decline
from .safeguard import Guarded, guarded_step

_FAST, _GUARD, _TRUST, _HOLD, _OVER = range(5)


class DenseFactor(NamedTuple):
    """What the adjoint solve and the next lower-level solve can reuse."""

    hessian: Factor
    rows_inverse: Schur
    norm: Float[Array, " k"]
    columns: Float[Array, " n"]


class ActiveSet(AbstractLowerSolver):
    """Semismooth Newton from the last active set; a finite method stands behind it.

    Exact for quadratic `g`, quadratically convergent for general strongly convex `g`;
    directions without curvature are fine where active rows decide them (`flat.py`).
    Forms the Hessian and the rows, so it is meant for up to some thousand variables.

    - `max_passes`: passes of the fast path before the safeguard takes over.
    - `max_safeguard_steps`: damped Newton steps of the safeguard.
    - `diagnose`: whether weakly active and dependent rows are analysed; without it
      compilation is shorter and the split of degenerate rows is arbitrary.
    """

    max_passes: int = 12
    max_safeguard_steps: int = 100
    diagnose: bool = True

    def __call__(self, problem, x, warm=None):
        p = start(problem, x, warm)
        lower, rows = p.lower, p.rows
        rows_inverse = run_unless(
            p.same, lambda _: schur(p.factor, p.active), p.rows_inverse
        )
        sweep = begin(lower, rows, rows_inverse, p.y, p.multipliers, p.active)
        # The usual case of a warm start, outside the loop so that the factor is read
        # and not copied. What a blank factor finds, even at rest, proves nothing.
        if not in_stages() or p.factor.definite:
            sweep = newton_pass(lower, rows, p.factor, rows_inverse, sweep, False)
        return self._run(problem, x, p, sweep, p.factor)

    @plain_method
    def solve_from(self, problem, x, begun: "Start", start, steps):
        """Finish from a primal–dual `start` that took another method `steps`."""
        lower, rows, y = begun.lower, begun.rows, begun.cold
        factor = blank_factor(rows.rhs.size, y.size, y.dtype)
        factor = factor._replace(definite=xp.asarray(False))
        rows_inverse = blank_schur(rows.rhs.size, y.dtype)
        sweep = begin(lower, rows, rows_inverse, *start)
        solution = self._run(problem, x, begun, sweep, factor)
        passes = solution.iterations.passes + steps
        return eqx.tree_at(lambda s: s.iterations.passes, solution, passes)

    @plain_method
    def _run(self, problem, x, begun: "Start", sweep, factor):
        lower, rows = begun.lower, begun.rows
        progress = _first(rows, begun.cold, sweep, factor)
        progress, factor = loop(
            lambda c: c[0].going,
            lambda c: self._step(lower, rows, *c),
            (progress, factor),
            # Passes before the safeguard, and twice as many after each of its steps.
            limit=(2 * self.max_passes + 1) * (self.max_safeguard_steps + 1),
        )
        return self._solution(problem, x, begun, progress, factor)

    @plain_method
    def _step(self, lower, rows, p: "Progress", factor: Factor):
        """One pass of the present mode, with whatever factor and restart it needs."""

        def refactor(_):
            hessian = hessian_of(lower, p.sweep.point.y)
            active = p.sweep.next_active
            lifted = prepared_hessian(
                hessian, rows, p.sweep.point, active, p.guarding, p.damping
            )
            return factorise(rows, lifted)

        def guard(p: Progress):
            point = p.sweep.point
            step = guarded_step(lower, rows, factor, point, p.penalty, p.reach)
            return _guarded(p, step)

        def newton(p: Progress):
            inverse = schur(factor, p.sweep.next_active)
            sweep = newton_pass(lower, rows, factor, inverse, p.sweep, p.holding)
            return _passed(p, sweep, factor, self.max_passes, self.max_safeguard_steps)

        def restart(new: Progress):
            sweep = begin(lower, rows, new.sweep.rows_inverse, *new.start)
            return new._replace(sweep=sweep)

        def decide(turned: Progress):
            point = turned.sweep.point
            return _decided(turned, rows, hessian_of(lower, point.y))

        factor = run_if(p.stale, refactor, factor)
        new = choose_rarely(p.guarding, guard, newton, p)
        new = rarely(new.restart, restart, new)
        new = rarely(p.guarding, lambda new: _trusted(new, factor), new)
        new = rarely(new.doubtful, decide, new)
        return _turn(p, new, factor, rows, self.max_safeguard_steps), factor

    @plain_method
    def _solution(self, problem, x, begun: "Start", p: "Progress", factor: Factor):
        lower, rows, columns = begun.lower, begun.rows, begun.columns
        constraints, unravel = problem.constraints, once(Unravel.like, problem.y0)
        split, plain = classify(
            rows, constraints, x, p.sweep, factor, p.infeasible, self.diagnose
        )
        point = p.sweep.point

        def verdict(_):
            loose = is_loose(lower, rows, factor, point.y, split.active, split.weak)
            return _verdict(x, rows, p, split, factor, loose)

        status = unless_rarely(split.settled, verdict, code_of(Status.successful))
        found = _assembled(
            unravel, constraints, x, columns, rows, p, split, plain, status
        )
        return made(
            LowerSolution,
            **found._asdict(),
            weak=split.weak,
            shared_dependence=split.shared,
            iterations=Iterations(p.passes, p.factorisations, p.safeguard),
            status=as_status(status),
            factor=DenseFactor(factor, split.rows_inverse, rows.norm, columns),
        )


class Start(NamedTuple):
    """Where a solve begins: primal–dual point, factor, and the inverse of its rows.

    `cold` is the start without a warm one; `same` says that `rows_inverse` is of the
    `active` rows.
    """

    lower: Any
    rows: Rows
    columns: Float[Array, " n"]
    cold: Float[Array, " n"]
    y: Float[Array, " n"]
    multipliers: Float[Array, " k"]
    active: Bool[Array, " k"]
    same: Bool[Array, ""]
    factor: Factor
    rows_inverse: Schur


class Progress(NamedTuple):
    """State of a solve. `start` is where the next restart begins.

    `decrement`, `noise` and `force` are those of the last step of the safeguard.
    The truth values at the end say what the next step is.
    """

    mode: Int[Array, ""]
    sweep: Sweep
    start: tuple
    restart: Bool[Array, ""]
    penalty: Float[Array, ""]
    reach: Float[Array, ""]
    damping: Float[Array, ""]
    infeasible: Bool[Array, ""]
    decrement: Float[Array, ""]
    noise: Float[Array, ""]
    force: Float[Array, ""]
    rounds: Int[Array, ""]
    tries: Int[Array, ""]
    passes: Int[Array, ""]
    safeguard: Int[Array, ""]
    factorisations: Int[Array, ""]
    going: Bool[Array, ""]
    guarding: Bool[Array, ""]
    holding: Bool[Array, ""]
    stale: Bool[Array, ""]
    doubtful: Bool[Array, ""]


def _announced(p: Progress, rows: Rows) -> Progress:
    """`p` with what its mode says about the next step."""
    guarding = p.mode == _GUARD
    return p._replace(
        going=~rows.empty & (p.mode < _OVER),
        guarding=guarding,
        holding=p.mode == _HOLD,
        stale=p.sweep.stale | guarding,
    )


def _first(rows: Rows, cold_y, sweep: Sweep, factor: Factor) -> Progress:
    sweep = sweep._replace(
        stale=sweep.stale | ~factor.definite, done=sweep.done & factor.definite
    )
    no, zero, one = xp.asarray(False), xp.asarray(0), xp.ones((), cold_y.dtype)
    progress = Progress(
        mode=xp.where(sweep.done & is_solved(sweep, factor), _OVER, _FAST),
        sweep=sweep,
        start=(cold_y, xp.zeros_like(rows.rhs), rows.equality & rows.usable),
        restart=no,
        penalty=0 * one,
        reach=one,
        damping=one,
        infeasible=no,
        decrement=xp.inf * one,
        noise=0 * one,
        force=0 * one,
        rounds=zero,
        tries=sweep.passes,
        passes=sweep.passes,
        safeguard=zero,
        factorisations=zero,
        going=no,
        guarding=no,
        holding=no,
        stale=no,
        doubtful=no,
    )
    return _announced(progress, rows)


def _guarded(p: Progress, step: Guarded) -> Progress:
    """After a step of the safeguard."""
    over = step.infeasible | ~xp.all(xp.isfinite(step.y))
    # Along flat directions steps grow as long as they are not cut.
    damping = xp.clip(xp.where(step.full, 0.25, 4) * p.damping, 1e-6, 1)
    return p._replace(
        mode=xp.where(over, _OVER, xp.where(step.full, _TRUST, _GUARD)),
        start=(step.y, step.multipliers, step.active),
        restart=xp.asarray(True),
        penalty=step.penalty,
        reach=step.reach,
        damping=damping,
        infeasible=step.infeasible,
        decrement=step.decrement,
        noise=step.noise,
        force=step.force,
        rounds=p.rounds + 1,
        tries=xp.zeros_like(p.tries),
        safeguard=p.safeguard + step.steps,
    )


def _passed(
    p: Progress, sweep: Sweep, factor: Factor, max_passes, max_rounds
) -> Progress:
    """After a Newton pass."""
    if sweep.point.y.dtype != xp.float64:
        # What regularising the rows leaves behind is visible in low precision: a
        # second pass on the same rows removes it.
        new_rows = xp.any(sweep.point.active != p.sweep.point.active)
        again = new_rows & xp.isfinite(sweep.point.kkt)
        sweep = sweep._replace(done=sweep.done & ~again)
    sweep = without_decline(p.sweep, sweep, factor.damped)
    spent = sweep.done | (p.tries + 1 >= max_passes) | ~factor.definite
    # Without a definite Hessian a stationary point is not the answer.
    failed = spent & ~(is_solved(sweep, factor) & factor.definite)
    # The safeguard trusts no `y` of the fast path, but tries its rows first.
    guess = (p.start[0], sweep.point.multipliers, sweep.point.active)
    start = jax.tree.map(lambda a, b: xp.where(p.mode == _FAST, a, b), guess, p.start)
    # What Newton passes cannot finish goes back to the safeguard, as long as that has
    # somewhere to go; else their point is the answer there is.
    more = (p.decrement > p.noise) & (p.rounds < max_rounds)
    behind = xp.where(more, _GUARD, _OVER)
    behind = xp.where(p.mode == _HOLD, behind, p.mode + 1)
    mode = xp.where(failed, behind, xp.where(spent, _OVER, p.mode))
    return p._replace(
        mode=mode,
        sweep=sweep,
        start=start,
        restart=failed & (mode != _OVER),
        tries=xp.where(spent, 0, p.tries + 1),
        passes=p.passes + 1,
    )


def _trusted(new: Progress, factor: Factor) -> Progress:
    """After the safeguard: whether Newton passes may do the rest.

    Once a full step makes the quadratic model predict the gradient, `g` is quadratic as
    far as it matters. In lengths of steps: forces along soft directions would drown in
    those of stiff ones.
    """
    after = xp.linalg.norm(new.sweep.point.stationarity @ factor.whitener)
    trusted = new.mode == _TRUST
    tol = tolerances(after.dtype)
    # A damped program has other rows until it stands still, and along an edge of a flat
    # `g` forces may be small and the way long.
    damped = tol.eps**0.5 * new.force
    small = xp.where(factor.damped, damped, tol.stale * new.decrement + new.noise)
    holds = after <= small
    return new._replace(
        mode=xp.where(trusted & ~holds, _GUARD, new.mode),
        doubtful=trusted & holds & factor.damped,
    )


def _decided(turned: Progress, rows: Rows, hessian) -> Progress:
    """A damped step counts only where the rows it found leave nothing open."""
    decided = is_decided(hessian, rows, turned.sweep.point.active)
    return turned._replace(mode=xp.where(decided, turned.mode, _GUARD))


def _turn(p: Progress, new: Progress, factor: Factor, rows: Rows, max_rounds):
    """What comes next."""
    limit = (new.mode == _GUARD) & p.guarding & (new.rounds >= max_rounds)
    mode = xp.where(limit, _OVER, new.mode)
    # An indefinite Hessian ends everything, except a fast path gone astray.
    astray = xp.where(p.mode == _FAST, mode, _OVER)
    mode = xp.where(factor.definite, mode, astray)
    new = new._replace(
        mode=mode,
        factorisations=p.factorisations + p.stale,
        doubtful=xp.asarray(False),
    )
    return _announced(new, rows)


def start(problem, x, warm: LowerSolution | None = None) -> Start:
    """The lower level in units of its columns, and where its solve begins.

    A failed warm start gives its factor only; a run computes the units once, since
    `warm` has them.
    """
    if warm is None:
        warm = blank_solution(problem)
    constraints, unravel = problem.constraints, once(Unravel.like, problem.y0)
    factor: Any = warm.factor
    if factor is None:
        factor = blank_solution(problem).factor
    given = (warm.status._value, warm.y, warm.multipliers, warm.active)
    inverted = factor.rows_inverse.active
    at = lambda units: _start(constraints, x, problem.y0, given, units, inverted)
    found = at(factor.columns)
    found = unless_rarely(
        found.known, lambda _: at(_units(constraints, unravel)), found
    )
    lower = packed(FlatLower(problem.lower, x, unravel, found.columns))
    parts: Any = found[:-1]
    return Start(lower, *parts, factor=factor.hessian, rows_inverse=factor.rows_inverse)


class _Started(NamedTuple):
    """`Start` without what is not an array; `known` tells that units are right."""

    rows: Rows
    columns: Float[Array, " n"]
    cold: Float[Array, " n"]
    y: Float[Array, " n"]
    multipliers: Float[Array, " k"]
    active: Bool[Array, " k"]
    same: Bool[Array, ""]
    known: Bool[Array, ""]


def _units(constraints, unravel: Unravel):
    size, dtype = unravel.size, unravel.dtypes[0]
    return units_of_columns(constraints.matrix(size, dtype))


def _start(constraints, x, y0, given, columns, inverted):
    code, warm_y, warm_multipliers, warm_active = given
    y0 = ravel(y0)
    size, dtype = y0.size, y0.dtype
    known = xp.all(columns > 0)
    # The same array in stages, where what is known of it is remembered.
    units = columns if in_stages() and known else xp.where(known, columns, 1)
    rows = unit_rows(constraints, x, size, dtype, units)
    usable = code == code_of(Status.successful)
    cold = y0 / units
    y = xp.where(usable, ravel(warm_y).astype(dtype) / units, cold)
    active = rows.usable & (rows.equality | (usable & warm_active))
    multipliers = xp.where(usable & active, warm_multipliers * rows.norm, 0)
    same = xp.all(active == inverted)
    known = known | ~may_have_units(rows.A)
    return _Started(rows, units, cold, y, multipliers, active, same, known)


def blank_solution(problem) -> LowerSolution:
    """A failed warm start: with it a cold solve is the same program as a warm one."""
    y = problem.y0
    k, leaf = problem.constraints.num_rows, jax.tree.leaves(y)[0]
    size = sum(part.size for part in jax.tree.leaves(y))
    make = _kept_blank if in_stages() else _blank
    blank = make(k, size, leaf.dtype)
    return LowerSolution(
        y=y, status=as_status(code_of(Status.iteration_limit)), **blank
    )


def cold_start(problem) -> LowerSolution:
    """`blank_solution` for a call in stages, which finds the units of columns once."""
    blank: Any = blank_solution(problem)
    constraints = on_host(problem.constraints)
    columns = _units(constraints, once(Unravel.like, problem.y0))
    return with_fields(blank, factor=blank.factor._replace(columns=columns))


def _blank(k: int, n: int, dtype) -> dict[str, Any]:
    no, nan = np.zeros(k, bool), np.asarray(np.nan, dtype)
    zeros, zero = np.zeros(k, dtype), xp.asarray(0)
    units: Any = (np.ones(k, dtype), np.zeros(n, dtype))
    # Nothing was factored, and nobody may believe it was.
    factor = blank_factor(k, n, dtype)._replace(definite=np.asarray(False))
    blank = dict(
        multipliers=zeros,
        slack=zeros,
        active=no,
        weak=no,
        shared_dependence=np.asarray(True),
        margin=nan,
        error=nan,
        kkt_residual=nan,
        iterations=Iterations(zero, zero, zero),
        factor=DenseFactor(factor, blank_schur(k, dtype), *units),
    )
    return jax.tree.map(xp.asarray, blank)


_kept_blank = functools.lru_cache(maxsize=64)(_blank)


def _verdict(x, rows: Rows, p: Progress, split: Split, factor: Factor, loose):
    """The status of an answer that is none, or that is not unique."""
    infeasible = p.infeasible | split.empty
    unsolved = rows.empty | split.empty | ~is_solved(p.sweep, factor)
    data = (x, rows.A, xp.where(rows.usable, rows.rhs, 0))
    # Earlier lines win.
    cases = (
        (~(unsolved | loose), Status.successful),
        (~all_finite(data), Status.non_finite),
        (rows.empty | infeasible, Status.infeasible),
        (~all_finite(p.sweep.point.gradient), Status.non_finite),
        (~factor.definite | loose, Status.not_strongly_convex),
    )
    status = xp.asarray(code_of(Status.iteration_limit))
    for holds, kind in reversed(cases):
        status = xp.where(holds, code_of(kind), status)
    return status


class _Found(NamedTuple):
    y: Any
    multipliers: Float[Array, " k"]
    slack: Float[Array, " k"]
    active: Bool[Array, " k"]
    margin: Float[Array, ""]
    error: Float[Array, ""]
    kkt_residual: Float[Array, ""]


def _assembled(unravel, constraints, x, columns, rows, p, split, plain, status):
    """The answer in the units of the problem; NaN where there is none."""
    point = p.sweep.point
    answers = (code_of(Status.successful), code_of(Status.iteration_limit))
    void = (status != answers[0]) & (status != answers[1])
    or_nan = lambda value: xp.where(void, xp.nan, value)
    slack = xp.where(rows.usable, -point.violation * rows.norm, constraints.rhs(x))
    return _Found(
        y=unravel(or_nan(point.y) * columns),
        multipliers=or_nan(split.multipliers / rows.norm),
        slack=or_nan(slack),
        active=split.active | rows.equality,
        margin=or_nan(margin_of(rows, split, plain)),
        error=or_nan(xp.linalg.norm(columns * p.sweep.y_noise)),
        kkt_residual=or_nan(point.kkt),
    )
