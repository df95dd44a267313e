"""The default lower-level solver: warm-started active set, safeguarded."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Bool, Float, Int

from .._status import Status
from .._tolerances import tolerances
from .base import AbstractLowerSolver, Iterations, LowerSolution, run_if
from .classify import classify
from .dense import Factor, FlatLower, Rows, blank_factor, flatten, unit_rows
from .newton import Sweep, begin, newton, newton_pass
from .safeguard import guarded_newton


class DenseFactor(eqx.Module):
    """What the adjoint solve and the next lower-level solve can reuse."""

    hessian: Factor
    root: Float[Array, "k k"]
    norm: Float[Array, " k"]


class ActiveSet(AbstractLowerSolver):
    """Semismooth Newton from the last active set; a finite method stands behind it.

    Exact for quadratic `g`, quadratically convergent for general strongly convex `g`.
    Forms the Hessian and the rows, so it is meant for up to some thousand variables.

    - `max_passes`: passes of the fast path before the safeguard takes over.
    - `max_safeguard_steps`: damped Newton steps of the safeguard.
    """

    max_passes: int = 12
    max_safeguard_steps: int = 100

    def __call__(self, problem, x, warm=None):
        lower, y = flatten(problem, x)
        rows = unit_rows(problem.constraints, x, y.size, y.dtype)
        start, factor = _start(rows, y, warm)
        sweep = begin(lower, rows, *start)
        stage = _GUARDED
        if warm is not None:
            # The usual case of a warm start, outside the loop so that the factor is
            # read and not copied.
            sweep, stage = newton_pass(lower, rows, factor, sweep), _WARM
        return self._run(problem, x, lower, rows, y, start, sweep, factor, stage)

    def solve_from(self, problem, x, lower, rows, y, start, steps):
        """Finish from a primal–dual `start` that took another method `steps`."""
        factor = blank_factor(rows.rhs.size, y.size, y.dtype)
        sweep = begin(lower, rows, *start)
        sweep = eqx.tree_at(lambda s: s.stale, sweep, jnp.asarray(True))
        solution = self._run(problem, x, lower, rows, y, start, sweep, factor, _WARM)
        passes = solution.iterations.passes + steps
        return eqx.tree_at(lambda s: s.iterations.passes, solution, passes)

    def _run(self, problem, x, lower, rows, y, start, sweep, factor, stage):
        attempt = Attempt(
            stage=jnp.where(sweep.done & _solved(sweep), _OVER, stage),
            start=start,
            sweep=sweep,
            factor=factor,
            infeasible=jnp.asarray(False),
            safeguard=jnp.asarray(0),
            factorisations=jnp.asarray(0),
        )
        attempt = jax.lax.while_loop(
            lambda a: ~rows.empty & (a.stage < _OVER),
            lambda a: self._stage(lower, rows, y, a),
            attempt,
        )
        return _solution(problem, x, lower, rows, attempt)

    def _stage(self, lower, rows, y, attempt: "Attempt") -> "Attempt":
        """Run one stage; the next one follows if this one did not solve."""
        a = run_if(
            attempt.stage == _GUARDED, lambda a: self._guard(lower, rows, y, a), attempt
        )
        sweep = jax.tree.map(
            lambda restart, go_on: jnp.where(a.stage == _WARM, go_on, restart),
            begin(lower, rows, *a.start),
            a.sweep,
        )
        sweep, factor, count = newton(
            lower,
            rows,
            a.factor,
            sweep,
            self.max_passes,
            hold=a.stage == _HELD,
            enabled=~a.infeasible & (a.factor.definite | (a.stage == _WARM)),
        )
        hopeless = a.infeasible | (~factor.definite & (a.stage != _WARM))
        return Attempt(
            stage=jnp.where(_solved(sweep) | hopeless, _OVER, a.stage + 1),
            start=a.start,
            sweep=sweep,
            factor=factor,
            infeasible=a.infeasible,
            safeguard=a.safeguard,
            factorisations=a.factorisations + count,
        )

    def _guard(self, lower, rows, y, attempt: "Attempt") -> "Attempt":
        guard = guarded_newton(lower, rows, y, self.max_safeguard_steps)
        return Attempt(
            stage=attempt.stage,
            start=(guard.y, guard.multipliers, guard.active),
            sweep=attempt.sweep,
            factor=guard.factor,
            infeasible=guard.infeasible,
            safeguard=guard.steps,
            factorisations=attempt.factorisations + guard.factorisations,
        )


# Stages of a solve. A warm start is tried first; the safeguard then proves an active
# set, from which Newton passes refine; if they leave that set, it is held.
_WARM, _GUARDED, _HELD, _OVER = range(4)


class Attempt(eqx.Module):
    """State of a solve across its stages; `start` is where the next one begins."""

    stage: Int[Array, ""]
    start: tuple
    sweep: Sweep
    factor: Factor
    infeasible: Bool[Array, ""]
    safeguard: Int[Array, ""]
    factorisations: Int[Array, ""]


def _solved(sweep: Sweep):
    return sweep.point.kkt <= tolerances(sweep.point.y.dtype).accept


def _start(rows: Rows, y, warm: LowerSolution | None):
    """Primal–dual start and factor; a failed warm start gives its factor only."""
    if warm is None or warm.factor is None:
        factor = blank_factor(rows.rhs.size, y.size, y.dtype)
    else:
        factor = warm.factor.hessian
    if warm is None:
        zeros = jnp.zeros(rows.rhs.size, y.dtype)
        return (y, zeros, rows.equality & rows.usable), factor
    usable = warm.success
    y = jnp.where(usable, ravel_pytree(warm.y)[0].astype(y.dtype), y)
    multipliers = jnp.where(usable, warm.multipliers * rows.norm, 0)
    active = rows.usable & (rows.equality | (usable & warm.active))
    return (y, jnp.where(active, multipliers, 0), active), factor


def _solution(
    problem, x, lower: FlatLower, rows: Rows, attempt: Attempt
) -> LowerSolution:
    point = attempt.sweep.point
    coupling = problem.constraints.coupling_matrix(
        sum(leaf.size for leaf in jax.tree.leaves(x)), point.y.dtype
    )
    if coupling is not None:
        coupling = coupling / rows.norm[:, None]
    split, margin, error = classify(
        rows, coupling, point, attempt.factor, attempt.sweep.root
    )
    status = run_if(
        rows.empty | ~_solved(attempt.sweep),
        lambda _: _failure(rows, attempt, x),
        Status.successful,
    )
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
        iterations=Iterations(
            attempt.sweep.passes, attempt.factorisations, attempt.safeguard
        ),
        status=status,
        factor=DenseFactor(attempt.factor, split.root, rows.norm),
    )


def _failure(rows: Rows, attempt: Attempt, x):
    """Why there is no solution; earlier lines win."""
    data = (x, rows.A, jnp.where(rows.usable, rows.rhs, 0))
    cases = (
        (~_all_finite(data), Status.non_finite),
        (rows.empty | attempt.infeasible, Status.infeasible),
        (~_all_finite(attempt.sweep.point.gradient), Status.non_finite),
        (~attempt.factor.definite, Status.not_strongly_convex),
    )
    status = Status.iteration_limit
    for failed, kind in reversed(cases):
        status = Status.where(failed, kind, status)
    return status


def _all_finite(tree) -> Array:
    leaves = [jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(tree)]
    return jnp.all(jnp.stack(leaves))
