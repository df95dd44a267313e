"""Sequential quadratic programming for upper constraints that involve `y`.

Each iteration takes `F` and the constraints `C(x) = c(x, y*(x))` with their exact
gradients, and steps to the minimum of a quadratic model of the Lagrangian subject to
the constraints made linear,

    min_d  <F', d> + <d, H d> / 2   subject to   C + C' d <= 0,  x + d in the domain.

`H` is the damped BFGS matrix of Powell. A step counts by the exact penalty, with a
second-order correction (Nocedal and Wright, chapter 18). Near a solution this is far
sharper than descent on the penalty itself, whose kinks are the constraints. Where `F`
has a kink of its own there, no step may be found; then nothing is lost.
"""

from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import PyTree

from .._implicit.upper_constraints import Stack, stacked
from .._lower.base import LowerSolution
from .._lower.dense import Unravel
from .._problem.problem import Problem
from .._programs.arrays import ravel
from .._programs.control import on_host, stage_by_stage
from .._status import has_value
from .quadratic_program import Step, quadratic_program

_ITERATIONS, _HALVINGS = 60, 20
# Restorations end after so many Newton steps.
_NEWTON = 12


class Point(NamedTuple):
    """`x` (flat) with `F`, the constraints and all gradients there."""

    x: np.ndarray
    value: float
    slope: np.ndarray
    rows: np.ndarray
    jacobian: np.ndarray
    lower: LowerSolution
    fine: bool


class Oracle:
    """`F` and the upper constraints of a problem at flat points.

    `less` is the number of inequalities, the first rows; `sizes` what a violation of
    each row is measured by, and `length` that of `x`.
    """

    def __init__(
        self, problem: Problem, x: PyTree, less: int, sizes: np.ndarray, length: float
    ):
        self.problem, self.less, self.sizes = problem, less, sizes
        self.length = length
        self.unravel: Any = Unravel.like(x)
        self.domain = None
        if problem.domain is not None:
            with stage_by_stage():
                flat, domain = ravel(on_host(x)), on_host(problem.domain)
                A = domain.matrix(flat.size, flat.dtype)
                rhs = domain.rhs(flat)
            k = domain.num_inequalities
            finite = np.isfinite(rhs)
            self.domain = A[finite], rhs[finite], int(finite[:k].sum())

    def __call__(self, x: np.ndarray, warm: Any) -> Point:
        """Everything at `x`; where the follower has no answer, `fine` is false."""
        found = stacked(self.problem, self.unravel(x), warm, len(self.sizes))
        return self._point(x, found, warm)

    def flat(self, x: PyTree) -> np.ndarray:
        """A pytree like `x` in one vector."""
        with stage_by_stage():
            return ravel(jax.tree.map(np.asarray, x))

    def at(self, x: PyTree) -> Point:
        """Everything at an `x` that is a pytree."""
        return self(self.flat(x), None)

    def point(self, x: PyTree, found: Stack) -> Point:
        """What is known already at an `x` that is a pytree."""
        return self._point(self.flat(x), found, found.lower)

    def _point(self, x: np.ndarray, found: Stack, warm: Any) -> Point:
        value, rows, slopes = on_host((found.value, found.values, found.slopes))
        fine = has_value(found.status)
        fine = fine and all(np.isfinite(part).all() for part in (value, rows, slopes))
        lower = found.lower if fine else warm
        return Point(x, float(value), slopes[0], rows, slopes[1:], lower, fine)

    def seen(self, p: Point) -> None:
        """Sizes are at least those of the rows, and of their changes, at `p`."""
        rows, slopes = np.nan_to_num(p.rows), np.nan_to_num(p.jacobian)
        changes = self.length * np.linalg.norm(slopes, axis=1)
        self.sizes = np.maximum(self.sizes, np.maximum(np.abs(rows), changes))

    def outside(self, rows: np.ndarray) -> np.ndarray:
        """The violation of each row."""
        return np.r_[np.maximum(rows[: self.less], 0), np.abs(rows[self.less :])]

    def violation(self, point: Point) -> float:
        """The largest relative violation; infinite where nothing is known."""
        if not point.fine:
            return np.inf
        return float((self.outside(point.rows) / self.sizes).max(initial=0))

    def step(self, p: Point, H, slope, ahead: np.ndarray) -> Step | None:
        """The step of the model at `p` in which the constraints have values `ahead`.

        Multipliers are those of the upper constraints, then of the domain.
        """
        n, m = p.x.size, len(p.rows)
        A, b, less = np.zeros((0, n)), np.zeros(0), 0
        if self.domain is not None:
            A, b, less = self.domain
            b = b - A @ p.x
        equal, k = m - self.less, m - self.less + len(b) - less
        order = np.r_[self.less : m, m + less : m + len(b), : self.less, m : m + less]
        G, r = np.vstack([p.jacobian, A])[order], np.r_[-ahead, b][order]
        assert k == equal + len(b) - less
        found = quadratic_program(H, slope, G, r, k)
        if found is None:
            return None
        multipliers = np.zeros(len(r))
        multipliers[order] = found.multipliers
        return Step(found.d, multipliers)

    def inside(self, x: np.ndarray) -> np.ndarray:
        """`x` without what rounding puts outside simple bounds."""
        if self.domain is None:
            return x
        A, b, less = self.domain
        over = np.maximum(A[:less] @ x - b[:less], 0)
        single = (A[:less] != 0).sum(axis=1) == 1
        scale = np.sum(A[:less] ** 2, axis=1)
        return x - (np.where(single, over / scale, 0) @ A[:less] if less else 0)


class Sequential(NamedTuple):
    """Where it ended: the best point, its multipliers, and the work."""

    point: Point
    multipliers: np.ndarray | None
    residual: float
    evaluations: int


def sequential(
    oracle: Oracle, start: Point, weights: np.ndarray, length: float, accept: float
) -> Sequential:
    """Iterate from `start`, where `weights` are those of the penalty so far."""
    n, m = start.x.size, len(start.rows)
    p, best, multipliers, residual = start, start, None, np.inf
    unit = np.linalg.norm(start.slope) / max(length, 1e-300) or 1.0
    H, fresh, count = unit * np.eye(n), True, 1
    merit = lambda q: q.value + weights @ oracle.outside(q.rows) if q.fine else np.inf
    for _ in range(_ITERATIONS):
        found = oracle.step(p, H, p.slope, p.rows)
        if found is None:
            break
        mu = found.multipliers
        weights = np.maximum(weights, 2 * np.abs(mu[:m]))
        outside = oracle.outside(p.rows)
        expected = p.slope @ found.d - weights @ outside
        if oracle.violation(p) <= accept and p is best:
            multipliers, residual = mu[:m], float(np.linalg.norm(H @ found.d))
        size = abs(p.value) + weights @ (np.abs(p.rows) + oracle.sizes)
        if -expected <= 1e-15 * size:
            break
        new = None
        share = 1.0
        for halving in range(_HALVINGS):
            trial = oracle(oracle.inside(p.x + share * found.d), p.lower)
            count += 1
            enough = merit(p) + 1e-4 * share * expected
            if merit(trial) <= enough:
                new = trial
                break
            if halving == 0 and trial.fine:
                # Constraints bend: aim at where they really are.
                ahead = trial.rows - p.jacobian @ found.d
                again = oracle.step(p, H, p.slope, ahead)
                if again is not None:
                    trial = oracle(oracle.inside(p.x + again.d), p.lower)
                    count += 1
                    if merit(trial) <= enough:
                        new = trial
                        break
            share /= 2
        if new is None:
            if fresh:
                break
            H, fresh = unit * np.eye(n), True
            continue
        H = _bfgs(H, new.x - p.x, _turn(p, new, mu[:m]), fresh)
        fresh, p = False, new
        if _better(oracle, p, best, weights, accept):
            best = p
    return Sequential(best, multipliers, residual, count)


def _turn(old: Point, new: Point, mu: np.ndarray) -> np.ndarray:
    """How the gradient of the Lagrangian changes."""
    return new.slope - old.slope + mu @ (new.jacobian - old.jacobian)


def _better(oracle: Oracle, new: Point, old: Point, weights, accept: float) -> bool:
    """Whether `new` is the better answer: feasible first, then lower."""
    inside = oracle.violation(new) <= accept, oracle.violation(old) <= accept
    if inside[0] != inside[1]:
        return inside[0]
    if inside[0]:
        return new.value <= old.value
    merit = lambda q: q.value + weights @ oracle.outside(q.rows)
    return merit(new) <= merit(old)


def _bfgs(H, s, y, fresh: bool) -> np.ndarray:
    """Powell's damped update; a fresh matrix is first scaled to the pair."""
    sy = s @ y
    if fresh and sy > 0:
        H = np.eye(len(s)) * (y @ y) / sy
    Hs = H @ s
    sHs = s @ Hs
    if not sHs > 0:
        return H
    if sy < 0.2 * sHs:
        share = 0.8 * sHs / (sHs - sy)
        y = share * y + (1 - share) * Hs
        sy = s @ y
    new = H - np.outer(Hs, Hs) / sHs + np.outer(y, y) / sy
    return (new + new.T) / 2 if np.isfinite(new).all() else H


def restored(oracle: Oracle, p: Point, accept: float) -> Point:
    """The nearest point of the constraints, by Newton steps of least length."""
    eye, still = np.eye(p.x.size), np.zeros(p.x.size)
    for _ in range(_NEWTON):
        if oracle.violation(p) <= accept:
            break
        found = oracle.step(p, eye, still, p.rows)
        if found is None:
            break
        new = oracle(oracle.inside(p.x + found.d), p.lower)
        if not oracle.violation(new) < oracle.violation(p):
            break
        p = new
    return p
