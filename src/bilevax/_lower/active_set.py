"""The default lower-level solver: warm-started active set, safeguarded."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Bool, Float, Int

from .._status import Status
from .._tolerances import tolerances
from .base import (
    AbstractLowerSolver,
    Iterations,
    LowerSolution,
    all_finite,
    run_if,
    strongly_typed,
)
from .classify import classify
from .dense import (
    Factor,
    FlatLower,
    Rows,
    Schur,
    blank_factor,
    blank_schur,
    factorise,
    flatten,
    largest,
    schur,
    unit_rows,
)
from .flat import is_decided, is_loose, prepared_hessian
from .newton import (
    Sweep,
    begin,
    newton_pass,
    pass_on,
    stands_still,
    without_decline,
)
from .safeguard import guarded_step


class DenseFactor(eqx.Module):
    """What the adjoint solve and the next lower-level solve can reuse."""

    hessian: Factor
    rows_inverse: Schur
    norm: Float[Array, " k"]


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
        lower, y = flatten(problem, x)
        rows = unit_rows(problem.constraints, x, y.size, y.dtype)
        start, factor, rows_inverse = _start(rows, y, warm)
        sweep = begin(lower, rows, rows_inverse, *start)
        if warm is None or warm.factor is None:
            sweep = eqx.tree_at(lambda s: s.stale, sweep, jnp.asarray(True))
        else:
            # The usual case of a warm start, outside the loop so that the factor is
            # read and not copied.
            sweep = pass_on(lower, rows, factor, rows_inverse, sweep)
            # What a blank factor finds, even at rest, proves nothing.
            sweep = eqx.tree_at(
                lambda s: (s.stale, s.done),
                sweep,
                (sweep.stale | ~factor.definite, sweep.done & factor.definite),
            )
        return self._run(problem, x, lower, rows, y, sweep, factor)

    def solve_from(self, problem, x, lower, rows, y, start, steps):
        """Finish from a primal–dual `start` that took another method `steps`."""
        factor = blank_factor(rows.rhs.size, y.size, y.dtype)
        sweep = begin(lower, rows, blank_schur(rows.rhs.size, y.dtype), *start)
        sweep = eqx.tree_at(lambda s: s.stale, sweep, jnp.asarray(True))
        solution = self._run(problem, x, lower, rows, y, sweep, factor)
        passes = solution.iterations.passes + steps
        return eqx.tree_at(lambda s: s.iterations.passes, solution, passes)

    def _run(self, problem, x, lower, rows, y, sweep, factor):
        progress = Progress(
            mode=jnp.where(sweep.done & _solved(sweep, factor), _OVER, _FAST),
            sweep=sweep,
            start=(y, jnp.zeros_like(rows.rhs), rows.equality & rows.usable),
            restart=jnp.asarray(False),
            penalty=jnp.zeros((), y.dtype),
            reach=jnp.ones((), y.dtype),
            damping=jnp.ones((), y.dtype),
            infeasible=jnp.asarray(False),
            tries=sweep.passes,
            passes=sweep.passes,
            safeguard=jnp.asarray(0),
            factorisations=jnp.asarray(0),
        )
        progress, factor = jax.lax.while_loop(
            lambda c: ~rows.empty & (c[0].mode < _OVER),
            lambda c: self._step(lower, rows, y, *c),
            (progress, factor),
        )
        return _solution(problem, x, lower, rows, progress, factor, self.diagnose)

    def _step(self, lower, rows, cold_y, p: "Progress", factor: Factor):
        """One pass of the present mode, with whatever factor and restart it needs."""
        stale = p.sweep.stale | (p.mode == _GUARD)
        factor = run_if(
            stale,
            lambda _: factorise(
                rows,
                prepared_hessian(
                    lower,
                    rows,
                    p.sweep.point,
                    p.sweep.next_active,
                    p.mode == _GUARD,
                    p.damping,
                ),
            ),
            factor,
        )
        p = eqx.tree_at(lambda p: p.factorisations, p, p.factorisations + stale)
        before = jnp.linalg.norm(p.sweep.point.gradient @ factor.whitener)
        guarded = p.mode == _GUARD
        new = run_if(guarded, lambda p: self._guard(lower, rows, factor, p), p)
        new = run_if(
            ~guarded, lambda p: self._pass(lower, rows, factor, cold_y, p), new
        )
        sweep = run_if(
            new.restart,
            lambda s: begin(lower, rows, s.rows_inverse, *new.start),
            new.sweep,
        )
        # Once a full step makes the quadratic model predict the gradient, `g` is
        # quadratic as far as it matters, and Newton passes do the rest.
        after = jnp.linalg.norm(sweep.point.stationarity @ factor.whitener)
        trusted = guarded & (new.mode == _TRUST)
        tol = tolerances(after.dtype)
        # A damped program has other rows until it stands still, and along an edge of a
        # flat `g` forces may be small and the way long.
        damped = factor.damped
        small = jnp.where(damped, tol.eps**0.5, tol.stale)
        model_holds = after <= small * before
        model_holds = run_if(
            trusted & model_holds & damped,
            lambda _: is_decided(lower, rows, sweep.point.y, sweep.point.active),
            model_holds,
        )
        mode = jnp.where(trusted & ~model_holds, _GUARD, new.mode)
        limit = (mode == _GUARD) & guarded & (new.tries >= self.max_safeguard_steps)
        mode = jnp.where(limit, _OVER, mode)
        # An indefinite Hessian ends everything, except a fast path gone astray.
        mode = jnp.where(factor.definite, mode, jnp.where(p.mode == _FAST, mode, _OVER))
        tries = jnp.where(trusted & model_holds, 0, new.tries)
        new = eqx.tree_at(
            lambda q: (q.sweep, q.mode, q.tries), new, (sweep, mode, tries)
        )
        return new, factor

    def _guard(self, lower, rows, factor, p: "Progress") -> "Progress":
        step = guarded_step(lower, rows, factor, p.sweep.point, p.penalty, p.reach)
        over = step.infeasible | ~jnp.all(jnp.isfinite(step.y))
        return Progress(
            mode=jnp.where(over, _OVER, jnp.where(step.full, _TRUST, _GUARD)),
            sweep=p.sweep,
            start=(step.y, step.multipliers, step.active),
            restart=jnp.asarray(True),
            penalty=step.penalty,
            reach=step.reach,
            damping=_damping(p.damping, step.full),
            infeasible=step.infeasible,
            tries=p.tries + 1,
            passes=p.passes,
            safeguard=p.safeguard + step.steps,
            factorisations=p.factorisations,
        )

    def _pass(self, lower, rows, factor, cold_y, p: "Progress") -> "Progress":
        sweep = newton_pass(lower, rows, factor, p.sweep, p.mode == _HOLD)
        if sweep.point.y.dtype != jnp.float64:
            # What regularising the rows leaves behind is visible in low precision: a
            # second pass on the same rows removes it.
            new_rows = jnp.any(sweep.point.active != p.sweep.point.active)
            again = new_rows & jnp.isfinite(sweep.point.kkt)
            sweep = eqx.tree_at(lambda s: s.done, sweep, sweep.done & ~again)
        sweep = without_decline(p.sweep, sweep, factor.damped)
        spent = sweep.done | (p.tries + 1 >= self.max_passes) | ~factor.definite
        # Without a definite Hessian a stationary point is not the answer.
        failed = spent & ~(_solved(sweep, factor) & factor.definite)
        # The safeguard trusts no `y` of the fast path, but tries its rows first.
        guess = (cold_y, sweep.point.multipliers, sweep.point.active)
        start = jax.tree.map(
            lambda a, b: jnp.where(p.mode == _FAST, a, b), guess, p.start
        )
        return Progress(
            mode=jnp.where(failed, p.mode + 1, jnp.where(spent, _OVER, p.mode)),
            sweep=sweep,
            start=start,
            # The last mode has nowhere to go: its point is the answer there is.
            restart=failed & (p.mode != _HOLD),
            penalty=p.penalty,
            reach=p.reach,
            damping=p.damping,
            infeasible=p.infeasible,
            tries=jnp.where(spent, 0, p.tries + 1),
            passes=p.passes + 1,
            safeguard=p.safeguard,
            factorisations=p.factorisations,
        )


# Modes of a solve, each the fall-back of the one before. Newton passes from the start;
# exact quadratic programs with a line search; Newton passes from the active set
# that these proved; the same with that set held.
_FAST, _GUARD, _TRUST, _HOLD, _OVER = range(5)


class Progress(eqx.Module):
    """State of a solve. `start` is where the next restart begins."""

    mode: Int[Array, ""]
    sweep: Sweep
    start: tuple
    restart: Bool[Array, ""]
    penalty: Float[Array, ""]
    reach: Float[Array, ""]
    damping: Float[Array, ""]
    infeasible: Bool[Array, ""]
    tries: Int[Array, ""]
    passes: Int[Array, ""]
    safeguard: Int[Array, ""]
    factorisations: Int[Array, ""]


def _damping(damping, full):
    """Along flat directions steps grow as long as they are not cut."""
    return jnp.clip(jnp.where(full, 0.25, 4) * damping, 1e-6, 1)


def _solved(sweep: Sweep, factor: Factor):
    """Whether the residual is small, and hides nothing.

    Next to stiff directions any force along a soft one looks small. So the step that is
    left must be no blatant one; where directions are flat the pass must have been a
    Newton step as well, on rows that are right to rounding, to a known place.
    """
    point, tol = sweep.point, tolerances(sweep.point.y.dtype)
    error, far = largest(sweep.y_noise, point.y)
    length = jnp.maximum(far, jnp.max(point.length, initial=0))
    known = error <= jnp.where(factor.damped, tol.sure, 1 / tol.sure) * length
    newton = sweep.describes & stands_still(sweep)
    # Where no force is left at all, nothing is hidden.
    sure = (known & (newton | ~factor.damped)) | (point.kkt == 0)
    return (point.kkt <= tol.accept) & sure


@eqx.filter_jit
def blank_solution(problem) -> LowerSolution:
    """A failed warm start: with it a cold solve is the same program as a warm one."""
    y, unravel = ravel_pytree(problem.y0)
    k, dtype = problem.constraints.num_rows, y.dtype
    no, nan = jnp.zeros(k, bool), jnp.asarray(jnp.nan, dtype)
    zeros, zero = jnp.zeros(k, dtype), jnp.asarray(0)
    blank = LowerSolution(
        y=unravel(y),
        multipliers=zeros,
        slack=zeros,
        active=no,
        weak=no,
        shared_dependence=jnp.asarray(True),
        margin=nan,
        error=nan,
        kkt_residual=nan,
        iterations=Iterations(zero, zero, zero),
        status=Status.iteration_limit,
        factor=DenseFactor(
            # Nothing was factored, and nobody may believe it was.
            eqx.tree_at(
                lambda factor: factor.definite,
                blank_factor(k, y.size, dtype),
                jnp.asarray(False),
            ),
            blank_schur(k, dtype),
            jnp.ones(k, dtype),
        ),
    )
    return strongly_typed(blank)


def _start(rows: Rows, y, warm: LowerSolution | None):
    """Primal–dual start, factor and inverse for the active rows.

    A failed warm start gives its factor only.
    """
    k = rows.rhs.size
    factor, rows_inverse = blank_factor(k, y.size, y.dtype), blank_schur(k, y.dtype)
    if warm is None:
        active = rows.equality & rows.usable
        return (y, jnp.zeros(k, y.dtype), active), factor, rows_inverse
    usable = warm.success
    y = jnp.where(usable, ravel_pytree(warm.y)[0].astype(y.dtype), y)
    multipliers = jnp.where(usable, warm.multipliers * rows.norm, 0)
    active = rows.usable & (rows.equality | (usable & warm.active))
    if warm.factor is not None:
        factor = warm.factor.hessian
        rows_inverse = run_if(
            jnp.any(active != warm.factor.rows_inverse.active),
            lambda _: schur(factor, active),
            warm.factor.rows_inverse,
        )
    return (y, jnp.where(active, multipliers, 0), active), factor, rows_inverse


def _solution(
    problem, x, lower: FlatLower, rows: Rows, p: Progress, factor: Factor, diagnose
) -> LowerSolution:
    point = p.sweep.point
    coupling = problem.constraints.coupling_matrix(
        sum(leaf.size for leaf in jax.tree.leaves(x)), point.y.dtype
    )
    if coupling is not None:
        coupling = coupling / rows.norm[:, None]
    split, margin, error = classify(
        rows, coupling, p.sweep, factor, p.infeasible, diagnose
    )
    p = eqx.tree_at(lambda p: p.infeasible, p, p.infeasible | split.empty)
    unsolved = rows.empty | split.empty | ~_solved(p.sweep, factor)

    def verdict(_):
        loose = is_loose(lower, rows, factor, point.y, split.active, split.weak)
        failure = _failure(rows, p, ~factor.definite | loose, x)
        return Status.where(unsolved | loose, failure, Status.successful)

    status = run_if(unsolved | factor.damped, verdict, Status.successful)
    void = (status != Status.successful) & (status != Status.iteration_limit)
    nan = jnp.asarray(jnp.nan, point.y.dtype)
    slack = jnp.where(
        rows.usable, -point.violation * rows.norm, problem.constraints.rhs(x)
    )
    return LowerSolution(
        y=lower.unravel(jnp.where(void, nan, point.y)),
        multipliers=jnp.where(void, nan, split.multipliers / rows.norm),
        slack=jnp.where(void, nan, slack),
        active=split.active | rows.equality,
        weak=split.weak,
        shared_dependence=split.shared,
        margin=jnp.where(void, nan, margin),
        error=jnp.where(void, nan, error),
        kkt_residual=jnp.where(void, nan, point.kkt),
        iterations=Iterations(p.passes, p.factorisations, p.safeguard),
        status=status,
        factor=DenseFactor(factor, split.rows_inverse, rows.norm),
    )


def _failure(rows: Rows, p: Progress, soft, x):
    """Why there is no solution; earlier lines win."""
    data = (x, rows.A, jnp.where(rows.usable, rows.rhs, 0))
    cases = (
        (~all_finite(data), Status.non_finite),
        (rows.empty | p.infeasible, Status.infeasible),
        (~all_finite(p.sweep.point.gradient), Status.non_finite),
        (soft, Status.not_strongly_convex),
    )
    status = Status.iteration_limit
    for failed, kind in reversed(cases):
        status = Status.where(failed, kind, status)
    return status
