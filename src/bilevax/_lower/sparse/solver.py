"""Sparse lower levels: interior path, then an exchange of rows that ends exactly.

A warm start skips the path: rows that pull leave and rows that are violated enter, all
at once as long as their number falls, and else the last one alone (Judice and Pires
1994), which does not cycle. The end is that of `ActiveSet`: KKT conditions to rounding
on a set of rows that is sure, or said not to be.
"""

from typing import Any, NamedTuple

import jax
import numpy as np

from ..._programs.arrays import ravel
from ..._programs.control import in_stages, once, packed
from ..._programs.modules import made
from ..._status import Status, as_status, code_of
from ..._tolerances import tolerances
from ..base import AbstractLowerSolver, Iterations, LowerSolution
from ..dense import FlatLower, Unravel, along
from .hessian import SparseHessian
from .kkt import SparseFactor
from .path import interior_path
from .rows import SparseRows, sparse_rows
from .split import Noise, Split, has_no_point, split

# Passes that may leave as many wrong rows before rows are exchanged one by one.
_TRIES = 4
# Where the path ends the second time.
_FAR_DOWN = 1e-13
# Passes of a warm start: then the path, which is as long as some of them, is shorter.
_WARM_PASSES = 12
# The slack, relative to `y`, of a row that holds a `y` which has no end.
_NEAR = 1e-6


class SparseActiveSet(AbstractLowerSolver):
    """Interior path and active set with a sparse factorisation, for calls from Python.

    For 10^3 to 10^5 variables with sparse rows and a sparse Hessian of `g`, quadratic
    or not; answers, statuses and margins are those of `ActiveSet`. The places of the
    Hessian's entries are found by products, so nothing needs to be declared. It
    computes on the host, so it cannot be part of a compiled program.

    - `max_steps`: steps along the interior path.
    - `max_passes`: exchanges of rows, each with a factorisation.
    """

    max_steps: int = 100
    max_passes: int = 60

    def __call__(self, problem, x, warm=None):
        if not in_stages():
            raise ValueError(
                "`SparseActiveSet` computes on the host and cannot be part of `jit`, "
                "`vmap`, `grad` or of a compiled run. Call `hypergradient` outside of "
                "them, or use `ActiveSet()` there."
            )
        return _Solve(self, problem, x, warm).solution()


class _Point(NamedTuple):
    y: np.ndarray
    mu: np.ndarray
    gradient: np.ndarray


class _Solve:
    """One solve: the lower level at `x`, and the work that was done."""

    def __init__(self, solver: SparseActiveSet, problem, x, warm):
        self.solver, self.problem, self.x, self.warm = solver, problem, x, warm
        self.unravel = once(Unravel.like, problem.y0)
        y0 = ravel(problem.y0)
        self.n, self.dtype = y0.size, y0.dtype
        self.y0 = np.asarray(y0, float)
        ones: Any = np.ones(self.n, self.dtype)
        self.lower = packed(FlatLower(problem.lower, x, self.unravel, ones))
        self.hessian = SparseHessian(self.lower)
        self.rows: SparseRows = sparse_rows(problem.constraints, x, self.n)
        self.passes = self.factorisations = self.steps = 0

    def gradient(self, y):
        y = y.astype(self.dtype)
        return np.asarray(along(self.lower, y, np.zeros_like(y))[0], float)

    def solution(self) -> LowerSolution:
        rows = self.rows
        inputs = (*jax.tree.leaves(self.x), rows.rhs, rows.fixed.A.data)
        if not all(np.all(np.isfinite(leaf)) for leaf in inputs):
            return self.failed(Status.non_finite)
        if rows.empty:
            return self.failed(Status.infeasible)
        found = self.from_warm()
        if found is None:
            found = self.from_path()
        return found if isinstance(found, LowerSolution) else self.told(*found)

    def from_warm(self):
        """The exchange from the rows of a warm start, or None where it fails."""
        warm: Any = self.warm
        if warm is None or warm.status._value != code_of(Status.successful):
            return None
        rows = self.rows
        active = rows.held | (rows.bounded & np.asarray(warm.active))
        y = np.asarray(ravel(warm.y), float)
        mu = np.where(active, np.asarray(warm.multipliers, float) * rows.fixed.norm, 0)
        factor = warm.factor if isinstance(warm.factor, SparseFactor) else None
        most = min(_WARM_PASSES, self.solver.max_passes)
        return self.exchanged(y, mu, active, factor, most)

    def from_path(self):
        gradient = self.gradient(self.y0)
        if not np.all(np.isfinite(gradient)):
            return self.failed(Status.non_finite)
        rows = self.rows
        # Rows that are hard to tell apart are told farther down the path.
        for accept in (tolerances(np.float64).accept, _FAR_DOWN):
            path = interior_path(
                self.gradient,
                self.hessian,
                rows,
                self.y0,
                self.solver.max_steps,
                accept,
            )
            self.steps += path.steps
            active = rows.held | (rows.bounded & (path.multipliers > path.slack))
            mu = np.where(active, path.multipliers, 0)
            most = self.solver.max_passes
            found = self.exchanged(path.y, mu, active, None, most)
            if found is not None:
                return found
            if path.broken:
                break
        if has_no_point(rows, self.n):
            return self.failed(Status.infeasible)
        if not np.all(np.isfinite(self.gradient(path.y))):
            return self.failed(Status.non_finite)
        H = self.hessian.at(path.y)
        if H is None:
            return self.failed(Status.non_finite)
        # Where nothing holds `y` it is far away by now, and from most rows.
        near = path.slack <= _NEAR * (1 + np.abs(path.y).max())
        factor = SparseFactor(rows.fixed, H, rows.held | (rows.bounded & near))
        if not factor.definite or factor.open_directions()[0]:
            return self.failed(Status.not_strongly_convex)
        return self.failed(Status.iteration_limit)

    def exchanged(self, y, mu, active, factor, most: int):
        """The point, its factor and its noise once no row is wrong; else None."""
        tol, rows = tolerances(np.float64), self.rows
        fixed = rows.fixed
        point = _Point(y, mu, self.gradient(y))
        fewest, tries, last = np.inf, _TRIES, np.inf
        known = factor
        for count in range(most):
            if not np.all(np.isfinite(point.gradient)):
                return None
            if known is None or not np.array_equal(known.active, active):
                factor = None
            if factor is None:
                H = self.hessian.at(point.y)
                if H is None:
                    return None
                try:
                    factor = known = SparseFactor(fixed, H, active)
                except RuntimeError:
                    return None
                self.factorisations += 1
            self.passes += 1
            pull = -point.gradient - fixed.transposed @ np.where(active, point.mu, 0)
            gap = np.where(active, rows.rhs - fixed.A @ point.y, 0)
            d, dmu, _ = factor.solve(pull, gap)
            y = point.y + d
            mu = np.where(active, point.mu + dmu, 0)
            new = _Point(y, mu, self.gradient(y))
            if not np.all(np.isfinite(new.gradient)):
                return None
            force = np.abs(new.gradient) + abs(fixed.transposed) @ np.abs(mu)
            top = force.max(initial=0)
            length = fixed.absolute @ np.abs(y) + rows.scale
            left = new.gradient + fixed.transposed @ mu
            gap = np.where(active, fixed.A @ y - rows.rhs, 0)
            wrong = max(
                np.abs(left).max(initial=0) / (top if top > 0 else 1),
                np.abs(gap).max(initial=0) / max(length.max(initial=0), 1e-300),
            )
            # Rounding of the forces and of the rows, as it reaches `y` and `mu`.
            signs = np.where(np.arange(self.n) % 2, 1.0, -1.0)
            dy, noise, _ = factor.solve(
                tol.eps * force * signs, np.where(active, tol.eps * length, 0)
            )
            dy = np.abs(dy) + tol.eps * np.abs(y)
            push = np.abs(noise).max(initial=0) + tol.eps * top
            slack_noise = tol.safety * (
                fixed.absolute @ np.maximum(dy, 0.1 * dy.max(initial=0))
                + tol.eps * length
            )
            push = tol.safety * push
            enters = rows.bounded & ~active & (fixed.A @ y - rows.rhs > slack_noise)
            leaves = rows.bounded & active & (mu < -push)
            change = enters | leaves
            if not change.any():
                if wrong <= tol.rounding or (
                    wrong <= tol.accept and wrong > 0.5 * last
                ):
                    return new, factor, dy, Noise(push, slack_noise)
                # Of another Hessian: the next pass has that of this point.
                stale = wrong > tol.stale * last
                last, point = wrong, new
                if stale or count == 0 and wrong > tol.accept:
                    factor = known = None
                continue
            last = np.inf
            wrongs = int(change.sum())
            if wrongs < fewest:
                fewest, tries = wrongs, _TRIES
            elif tries > 0:
                tries -= 1
            else:
                only = np.zeros_like(change)
                only[np.flatnonzero(change)[-1]] = True
                change = only
            active = active ^ change
            point = _Point(new.y, np.where(active, new.mu, 0), new.gradient)
        return None

    def told(self, point: _Point, factor: SparseFactor, y_noise, noise: Noise):
        """The solution at the end of an exchange."""
        rows, fixed = self.rows, self.rows.fixed
        loose, depends = factor.open_directions()
        if loose or not factor.definite:
            return self.failed(Status.not_strongly_convex)
        slack = rows.rhs - fixed.A @ point.y
        found: Split = split(
            rows, factor, point.mu, point.gradient, slack, noise, depends, self.coupled
        )
        mu, active = found.multipliers.copy(), found.active
        unit = np.where(rows.bounded, np.maximum(mu, slack), np.inf)
        margin = max(float(unit.min(initial=np.inf)), 0.0)
        left = point.gradient + fixed.transposed @ mu
        force = np.abs(point.gradient).max(initial=0)
        kkt = np.abs(left).max(initial=0) / (force if force > 0 else 1)
        # A pair of bounds without room: who holds is told by the sign.
        pinned = np.flatnonzero(rows.pinned)
        other = np.flatnonzero(rows.second)
        for i in pinned[mu[pinned] < 0]:
            j = other[fixed.column[other] == fixed.column[i]][0]
            mu[i], mu[j] = 0.0, -mu[i]
        natural = lambda value: value.astype(self.dtype)
        rhs = np.asarray(self.problem.constraints.rhs(self.x), float)
        outside = np.where(rows.usable, slack * fixed.norm, rhs if rhs.size else 0.0)
        return made(
            LowerSolution,
            y=self.unravel(natural(point.y)),
            multipliers=natural(mu / fixed.norm),
            slack=natural(outside),
            active=active | rows.second | fixed.equality,
            weak=found.weak,
            shared_dependence=np.asarray(found.shared),
            margin=natural(np.asarray(margin)),
            error=natural(np.asarray(np.linalg.norm(y_noise))),
            kkt_residual=natural(np.asarray(kkt)),
            iterations=self.work(),
            status=as_status(code_of(Status.successful)),
            factor=found.factor,
            layout=self.problem.constraints.layout,
        )

    def coupled(self, random):
        """`B` times a random vector, in unit rows; None where rows stay."""
        constraints, rows = self.problem.constraints, self.rows
        if not len(rows.rhs):
            return None
        if constraints.turns:
            # Rows that turn share no dependence.
            return random.normal(size=len(rows.rhs))
        v = jax.tree.map(lambda leaf: random.normal(size=np.shape(leaf)), self.x)
        moved = np.asarray(constraints.motion_along(self.x, v), float)
        moved = np.where(rows.usable, moved / rows.fixed.norm, 0)
        return moved if np.any(moved) else None

    def work(self) -> Iterations:
        counts: Any = (self.passes + self.steps, self.factorisations + self.steps, 0)
        arrays: Any = map(np.asarray, counts)
        return Iterations(*arrays)

    def failed(self, status) -> LowerSolution:
        k, nan = len(self.rows.rhs), np.asarray(np.nan, self.dtype)
        rows = np.full(k, np.nan, self.dtype)
        return made(
            LowerSolution,
            y=self.unravel(np.full(self.n, np.nan, self.dtype)),
            multipliers=rows,
            slack=rows,
            active=self.rows.fixed.equality,
            weak=np.zeros(k, bool),
            shared_dependence=np.asarray(True),
            margin=nan,
            error=nan,
            kkt_residual=nan,
            iterations=self.work(),
            status=as_status(code_of(status)),
            factor=SparseFactor.none(),
            layout=self.problem.constraints.layout,
        )
