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
with that set held. Behind OVER, a point that a bound on rounding leaves in doubt is
judged by rounding as it is measured there.
"""

import functools
from typing import Any, NamedTuple

import equinox as eqx
import jax
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from .._programs.arrays import ravel, xp
from .._programs.bundle import Bundle
from .._programs.control import (
    choose_rarely,
    in_stages,
    loop,
    on_usual_path,
    once,
    packed,
    rarely,
    run_if,
    unless_rarely,
)
from .._programs.modules import made, with_fields
from .._status import Status, as_status, code_of
from .._tolerances import PROXIMAL_FALL, PROXIMAL_LEAST, PROXIMAL_RISE, tolerances
from .base import AbstractLowerSolver, Iterations, LowerSolution, all_finite
from .classify import Split, classify
from .dense import FlatLower, Rows, Unravel, hessian_of, unit_rows
from .flat import convexified, is_decided, is_loose
from .kkt import KKT, Factor, Schur, blank_factor, blank_schur, factorise
from .newton import (
    Sweep,
    begin,
    is_solved,
    measured,
    newton_pass,
    refined,
    without_decline,
)
from .safeguard import Guarded, guarded_step, no_step
from .sparse.kkt import SparseFactor

_FAST, _GUARD, _TRUST, _HOLD, _OVER = range(5)


class DenseFactor(NamedTuple):
    """What the adjoint solve and the next lower-level solve can reuse."""

    hessian: Factor
    rows_inverse: Schur
    norm: Float[Array, " k"]
    columns: Float[Array, " n"]

    def solve(self, top, bottom):
        """See `KKT`; in unit rows and in the units of the columns."""
        return KKT(self.hessian, self.rows_inverse).solve(top, bottom)

    def open(self) -> "DenseFactor":
        return self

    def kept(self) -> "KeptFactor":
        parts = Bundle((self.hessian, self.rows_inverse))
        return KeptFactor(parts, self.norm, self.columns)


class KeptFactor(NamedTuple):
    """A `DenseFactor` between calls from Python: few arrays. Loops keep it open."""

    parts: Bundle
    norm: Float[Array, " k"]
    columns: Float[Array, " n"]

    def open(self) -> DenseFactor:
        hessian, rows_inverse = self.parts.open()
        return DenseFactor(hessian, rows_inverse, self.norm, self.columns)


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
        kkt = KKT(p.factor, p.rows_inverse)
        sweep = begin(p.lower, p.rows, kkt.rows, p.y, p.multipliers, p.active)
        # The usual case of a warm start, outside the loop so that the factor is read
        # and not copied; where less is compiled, in the loop. What a blank factor
        # finds, even at rest, proves nothing.
        if not (on_usual_path() or in_stages() and not p.factor.definite):
            sweep = newton_pass(p.lower, p.rows, kkt.on(p.active), sweep, False)
        return self._run(problem, x, p, sweep, p.factor)

    def solve_from(self, problem, x, begun: "Start", start, steps):
        """Finish from a primal–dual `start` that took another method `steps`."""
        rows, y = begun.rows, begun.cold
        factor = blank_factor(rows.rhs.size, y.size, y.dtype)
        inverse = blank_schur(rows.rhs.size, y.dtype)
        sweep = begin(begun.lower, rows, inverse, *start)
        solution = self._run(problem, x, begun, sweep, factor)
        passes = solution.iterations.passes + steps
        return eqx.tree_at(lambda s: s.iterations.passes, solution, passes)

    def _run(self, problem, x, begun: "Start", sweep: Sweep, factor: Factor):
        lower, rows = begun.lower, begun.rows
        found = sweep.done & factor.definite
        progress = Progress(
            mode=xp.where(found & is_solved(sweep, factor), _OVER, _FAST),
            sweep=sweep._replace(stale=sweep.stale | ~factor.definite, done=found),
            last=no_step(rows, begun.cold),
            proximal=xp.ones((), begun.cold.dtype),
            rounds=xp.asarray(0),
            passes=sweep.passes,
            factorisations=xp.asarray(0),
        )
        progress, factor = loop(
            lambda c: ~rows.empty & (c[0].mode < _OVER),
            lambda c: self._step(lower, rows, *c),
            (progress, factor),
            # Passes before the safeguard, and twice as many after each of its steps.
            limit=(2 * self.max_passes + 1) * (self.max_safeguard_steps + 1),
        )
        return self._solution(problem, x, begun, progress, factor)

    def _step(self, lower, rows: Rows, p: "Progress", factor: Factor):
        """One pass of the present mode, with whatever factor and restart it needs."""
        guarding, max_rounds = p.mode == _GUARD, self.max_safeguard_steps
        stale = p.sweep.stale | guarding

        def refactor(_):
            sweep = p.sweep
            hessian, active = hessian_of(lower, sweep.point.y), sweep.next_active
            return factorise(
                rows,
                convexified(hessian, rows, sweep.point, active, guarding, p.proximal),
            )

        def guard(p: Progress):
            step = guarded_step(lower, rows, factor, p.sweep.point, p.last)
            return _guarded(p, step)

        def newton(p: Progress):
            kkt = KKT(factor, p.sweep.rows_inverse).on(p.sweep.next_active, stale)
            sweep = newton_pass(lower, rows, kkt, p.sweep, p.mode == _HOLD)
            return _passed(p, sweep, factor, self.max_passes, max_rounds)

        def restart(new: Progress):
            # What is known of rows may belong to an older factor.
            step, inverse = new.last, blank_schur(rows.rhs.size, rows.rhs.dtype)
            y, multipliers, active = step.y, step.multipliers, step.active
            sweep = begin(lower, rows, inverse, y, multipliers, active)
            return new._replace(sweep=sweep)

        def decide(new: Progress):
            # A damped step counts only where its rows leave nothing open.
            point = new.sweep.point
            decided = is_decided(hessian_of(lower, point.y), rows, point.active)
            return new._replace(mode=xp.where(decided, new.mode, _GUARD))

        factor = run_if(stale, refactor, factor)
        new = choose_rarely(guarding, guard, newton, p)
        moved = guarding | ((new.mode != p.mode) & (new.mode != _OVER))
        new = rarely(moved, restart, new)
        new = rarely(guarding, lambda new: _trusted(new, factor), new)
        doubtful = guarding & (new.mode == _TRUST) & factor.damped
        new = rarely(doubtful, decide, new)
        limit = guarding & (new.mode == _GUARD) & (new.rounds >= max_rounds)
        # An indefinite Hessian ends everything, except a fast path gone astray.
        over = limit | (~factor.definite & (p.mode != _FAST))
        mode = xp.where(over, _OVER, new.mode)
        count = p.factorisations + stale
        return new._replace(mode=mode, factorisations=count), factor

    def _solution(self, problem, x, begun: "Start", p: "Progress", factor: Factor):
        """The answer in the units of the problem; NaN where there is none."""
        lower, rows, columns = begun.lower, begun.rows, begun.columns
        sweep = refined(p.sweep, rows)
        # Before a point is refused, or nearly: bounds on rounding know no structure of
        # `g`, and one probe may miss the worst direction.
        tol = tolerances(columns.dtype)
        clear = is_solved(sweep, factor, 1 / tol.safety)
        doubtful = factor.definite & ~rows.empty & ~clear
        doubtful = doubtful & (sweep.point.kkt <= tol.accept)
        measure = lambda s: measured(lower, rows, factor, s)
        p = p._replace(sweep=rarely(doubtful, measure, sweep))
        constraints, point = problem.constraints, p.sweep.point
        split, margin = classify(
            rows, constraints, x, p.sweep, factor, p.last.infeasible, self.diagnose
        )

        def verdict(_):
            loose = is_loose(lower, rows, factor, point.y, split.active, split.weak)
            return _verdict(x, rows, p, split, factor, loose)

        status = unless_rarely(split.settled, verdict, code_of(Status.successful))
        answers = (code_of(Status.successful), code_of(Status.iteration_limit))
        void = (status != answers[0]) & (status != answers[1])
        or_nan = lambda value: xp.where(void, xp.nan, value)
        slack = -point.violation * rows.norm
        unravel = once(Unravel.like, problem.y0)
        found = DenseFactor(factor, split.rows_inverse, rows.norm, columns)
        return made(
            LowerSolution,
            y=unravel(or_nan(point.y) * columns),
            multipliers=or_nan(split.multipliers / rows.norm),
            slack=or_nan(xp.where(rows.usable, slack, constraints.rhs(x))),
            active=split.active | rows.equality,
            weak=split.weak,
            shared_dependence=split.shared,
            margin=or_nan(margin),
            error=or_nan(xp.linalg.norm(columns * p.sweep.y_noise)),
            kkt_residual=or_nan(point.kkt),
            iterations=Iterations(p.passes, p.factorisations, p.last.steps),
            status=as_status(status),
            factor=found.kept() if begun.kept else found,
            layout=constraints.layout,
        )


class Progress(NamedTuple):
    """State of a solve. The `last` step of the safeguard is where restarts begin."""

    mode: Int[Array, ""]
    sweep: Sweep
    last: Guarded
    proximal: Float[Array, ""]
    rounds: Int[Array, ""]
    passes: Int[Array, ""]
    factorisations: Int[Array, ""]


def _guarded(p: Progress, step: Guarded) -> Progress:
    """After a step of the safeguard."""
    over = step.infeasible | ~xp.all(xp.isfinite(step.y))
    mode = xp.where(step.full, _TRUST, _GUARD)
    # Along flat directions steps grow as long as they are not cut.
    fall, rise = PROXIMAL_FALL * p.proximal, PROXIMAL_RISE * p.proximal
    return p._replace(
        mode=xp.where(over, _OVER, mode),
        last=step,
        proximal=xp.clip(xp.where(step.full, fall, rise), PROXIMAL_LEAST, 1),
        rounds=p.rounds + 1,
    )


def _passed(
    p: Progress, sweep: Sweep, factor: Factor, max_passes, max_rounds
) -> Progress:
    """After a Newton pass."""
    point, last = sweep.point, p.last
    if point.y.dtype != xp.float64:
        # What regularising the rows leaves behind is visible in low precision: a
        # second pass on the same rows removes it.
        new_rows = xp.any(point.active != p.sweep.point.active)
        again = new_rows & xp.isfinite(point.kkt)
        sweep = sweep._replace(done=sweep.done & ~again)
    sweep = without_decline(p.sweep, sweep, factor.damped)
    spent = sweep.done | (sweep.passes >= max_passes) | ~factor.definite
    # Without a definite Hessian a stationary point is not the answer.
    # One whose passes were spent on the way is not there yet.
    failed = spent & ~(sweep.done & is_solved(sweep, factor) & factor.definite)
    # The safeguard trusts no `y` of the fast path, but tries its rows first.
    pick = lambda a, b: xp.where(p.mode == _FAST, a, b)
    multipliers = pick(sweep.point.multipliers, last.multipliers)
    active = pick(sweep.point.active, last.active)
    # What Newton passes cannot finish goes back to the safeguard, as long as that has
    # somewhere to go; else their point is the answer there is.
    more = (last.decrement > last.noise) & (p.rounds < max_rounds)
    back = xp.where(more, _GUARD, _OVER)
    behind = xp.where(p.mode == _HOLD, back, p.mode + 1)
    return p._replace(
        mode=xp.where(failed, behind, xp.where(spent, _OVER, p.mode)),
        sweep=sweep,
        last=last._replace(multipliers=multipliers, active=active),
        passes=p.passes + 1,
    )


def _trusted(new: Progress, factor: Factor) -> Progress:
    """After the safeguard: whether Newton passes may do the rest.

    Once a full step makes the quadratic model predict the gradient, `g` is quadratic as
    far as it matters. In lengths of steps: forces along soft directions would drown in
    those of stiff ones.
    """
    after = xp.linalg.norm(new.sweep.point.stationarity @ factor.whitener)
    tol, last = tolerances(after.dtype), new.last
    # A damped program has other rows until it stands still, and along an edge of a flat
    # `g` forces may be small and the way long.
    small = tol.stale * last.decrement + last.noise
    small = xp.where(factor.damped, tol.eps**0.5 * last.force, small)
    doubt = (new.mode == _TRUST) & ~(after <= small)
    return new._replace(mode=xp.where(doubt, _GUARD, new.mode))


class Start(NamedTuple):
    """Where a solve begins: primal–dual point, factor, and the inverse of its rows.

    `cold` is the start without a warm one; `kept`: whether solutions keep their factor
    as the warm one does.
    """

    lower: Any
    rows: Rows
    columns: Float[Array, " n"]
    cold: Float[Array, " n"]
    y: Float[Array, " n"]
    multipliers: Float[Array, " k"]
    active: Bool[Array, " k"]
    factor: Factor
    rows_inverse: Schur
    kept: bool


def start(problem, x, warm: LowerSolution | None = None) -> Start:
    """The lower level in units of its columns, and where its solve begins.

    A failed warm start gives its factor only.
    """
    if warm is None:
        warm = blank_solution(problem)
    constraints, unravel = problem.constraints, once(Unravel.like, problem.y0)
    kept: Any = warm.factor
    # Other solvers leave other factors, or none.
    if not isinstance(kept, DenseFactor | KeptFactor):
        kept = blank_solution(problem, kept=True).factor
    factor: DenseFactor = kept.open()
    y0 = ravel(problem.y0)
    size, dtype = y0.size, y0.dtype
    columns = once(_units, constraints, size, dtype)
    rows = unit_rows(constraints, x, size, dtype, columns)
    usable = warm.status._value == code_of(Status.successful)
    active = rows.usable & (rows.equality | (usable & warm.active))
    cold = y0 / columns
    return Start(
        lower=packed(FlatLower(problem.lower, x, unravel, columns)),
        rows=rows,
        columns=columns,
        cold=cold,
        y=xp.where(usable, ravel(warm.y).astype(dtype) / columns, cold),
        multipliers=xp.where(usable & active, warm.multipliers * rows.norm, 0),
        active=active,
        factor=factor.hessian,
        rows_inverse=factor.rows_inverse,
        kept=isinstance(kept, KeptFactor),
    )


def _units(constraints, size: int, dtype):
    return constraints.units(size, dtype)


def blank_solution(problem, kept: bool = False) -> LowerSolution:
    """A failed warm start: with it a cold solve is the same program as a warm one."""
    y = problem.y0
    k, leaf = problem.constraints.num_rows, jax.tree.leaves(y)[0]
    size = sum(part.size for part in jax.tree.leaves(y))
    stages = in_stages()
    make = _kept_blank if stages else _blank
    blank = make(k, size, leaf.dtype, kept or stages)
    return LowerSolution(
        y=y,
        status=as_status(code_of(Status.iteration_limit)),
        layout=problem.constraints.layout,
        **blank,
    )


def _blank(k: int, n: int, dtype, kept: bool) -> dict[str, Any]:
    no, nan = np.zeros(k, bool), np.asarray(np.nan, dtype)
    zeros, zero = np.zeros(k, dtype), xp.asarray(0)
    units: Any = (np.ones(k, dtype), np.ones(n, dtype))
    factor = DenseFactor(blank_factor(k, n, dtype), blank_schur(k, dtype), *units)
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
        factor=factor.kept() if kept else factor,
    )
    return jax.tree.map(xp.asarray, blank)


_kept_blank = functools.lru_cache(maxsize=64)(_blank)


def opened_factor(lower: LowerSolution) -> LowerSolution:
    """`lower` as loops keep it."""
    if isinstance(lower.factor, SparseFactor):
        # In a loop the dense solver stands in.
        y = jax.tree.leaves(lower.y)
        k, n = lower.multipliers.size, sum(leaf.size for leaf in y)
        blank = _blank(k, n, y[0].dtype, kept=False)["factor"]
        return with_fields(lower, factor=blank)
    if not isinstance(lower.factor, KeptFactor):
        return lower
    return with_fields(lower, factor=lower.factor.open())


def _verdict(x, rows: Rows, p: Progress, split: Split, factor: Factor, loose):
    """The status of an answer that is none, or that is not unique."""
    infeasible = p.last.infeasible | split.empty
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
