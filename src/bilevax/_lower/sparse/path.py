"""The interior path with sparse rows, see `interior_point.py`.

Bounds add to the diagonal of the Hessian; other rows stay rows of the KKT matrix, which
is quasi-definite and keeps its places from step to step. A start inside the bounds
stays inside, so `lower` is asked for nothing beyond them.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from ..._programs.arrays import sp
from ..._tolerances import tolerances
from .hessian import SparseHessian
from .kkt import factored
from .rows import SparseRows

_SHIFT = 1e-10
_FAINT = 1e-12
_TO_BORDER = 0.995
_HALVINGS = 27
# Steps without a residual that is halved.
_PATIENCE = 30


class Path(NamedTuple):
    """The end of the path; `broken` where it led nowhere."""

    y: np.ndarray
    slack: np.ndarray
    multipliers: np.ndarray
    steps: int
    broken: bool


class _Point(NamedTuple):
    """A point of the path; `pull` is the gradient of `g`, the others what is left."""

    y: np.ndarray
    slack: np.ndarray
    mu: np.ndarray
    pull: np.ndarray
    dual: np.ndarray
    primal: np.ndarray

    @property
    def size(self) -> float:
        return float(np.linalg.norm(self.dual) + np.linalg.norm(self.primal))


def interior_path(
    gradient: Callable,
    hessian: SparseHessian,
    rows: SparseRows,
    y,
    max_steps: int,
    accept: float,
) -> Path:
    """From `y`, moved inside the bounds; `gradient` is that of `g`.

    It ends where no more than `accept` is left of the forces, lengths and products of
    slacks and multipliers, in units of the program.
    """
    program = _Program(gradient, rows)
    p = program.start(y)
    first_force = np.linalg.norm(p.pull)
    least, waited, step = np.inf, 0, 0
    for step in range(1, max_steps + 1):
        H = hessian.at(p.y)
        newton = None if H is None else _Newton.at(program, p, H)
        new = None if newton is None else newton.step()
        if new is None:
            return Path(p.y, p.slack, p.mu, step, True)
        p = new
        wrong = program.wrong(p, first_force)
        if wrong <= accept:
            break
        least, waited = (wrong, 0) if wrong < 0.5 * least else (least, waited + 1)
        if waited >= _PATIENCE:
            break
    return Path(p.y, p.slack, p.mu, step, False)


class _Program:
    """What does not change along the path."""

    def __init__(self, gradient: Callable, rows: SparseRows):
        self.gradient, self.rows, self.A = gradient, rows, rows.fixed.A
        self.transposed = rows.fixed.transposed
        self.bounded, self.equal = rows.bounded, rows.held
        self.bound = self.bounded & (rows.fixed.column >= 0)
        self.general = self.bounded & ~self.bound
        self.column = rows.fixed.column[self.bound]
        self.count = max(int(self.bounded.sum()), 1)
        order = np.flatnonzero(self.general), np.flatnonzero(self.equal)
        self.R, self.first = self.A[np.concatenate(order)], len(order[0])
        self.reach = float(np.where(rows.usable, rows.scale, 0).max(initial=0))

    def start(self, y) -> _Point:
        """Inside the bounds, and near the equations unless `g` has no value there.

        Where `g` bends has to do with how large `y` must be.
        """
        y = inside(self.rows, y)
        E = self.A[np.flatnonzero(self.equal)]
        if E.shape[0]:
            eye = sp.eye_array(len(y), format="csr")
            solve = _solver(sp.block_array([[eye, E.T], [E, None]]).tocsr(), len(y))
            gap = (self.rows.rhs - self.A @ y)[self.equal]
            if solve is not None:
                change = solve(np.concatenate([0 * y, gap]))[: len(y)]
                near = inside(self.rows, y + change, np.abs(change).mean())
                y = near if np.all(np.isfinite(self.gradient(near))) else y
        room, pull = self.rows.rhs - self.A @ y, self.gradient(y)
        typical = 1 + np.abs(np.where(self.bounded, room, 0)).max(initial=0)
        slack = np.where(self.bounded, np.maximum(room, 0.1 * typical), 1.0)
        slack = np.where(self.bound, room, slack)
        force = np.abs(pull).max(initial=0)
        mu = np.where(self.bounded, force if force > 0 else 1.0, 0.0)
        return self.point(y, slack, mu)

    def point(self, y, slack, mu) -> _Point:
        pull, ahead = self.gradient(y), self.A @ y - self.rows.rhs
        primal = np.where(self.bounded, ahead + slack, 0)
        primal = np.where(self.equal, ahead, primal)
        return _Point(y, slack, mu, pull, pull + self.transposed @ mu, primal)

    def gap(self, slack, mu) -> float:
        return float(np.sum((slack * mu)[self.bounded]) / self.count)

    def wrong(self, p: _Point, first_force) -> float:
        """What is left, in units of the forces and lengths of the program."""
        tol, gap = tolerances(np.float64), self.gap(p.slack, p.mu)
        force = np.linalg.norm(p.pull) + tol.eps * first_force + tol.eps**2
        length = np.linalg.norm(p.y) + self.reach + tol.eps**2
        parts = (
            np.linalg.norm(p.dual) / force,
            np.linalg.norm(p.primal) / length,
            # A product of one row beside the sizes of one force and one length.
            gap * len(p.y) / (force * length),
        )
        return float(max(parts))


class _Newton:
    """Mehrotra's predictor and corrector from one point."""

    def __init__(self, program: _Program, p: _Point, ratio, solve: Callable):
        self.program, self.p, self.ratio, self.solve = program, p, ratio, solve

    @classmethod
    def at(cls, program: _Program, p: _Point, H) -> "_Newton | None":
        """None where the matrix cannot be factored."""
        n, R = len(p.y), program.R
        ratio = np.where(program.bounded, p.mu / p.slack, 0)
        if not np.all(np.isfinite(ratio)):
            return None
        extra = np.bincount(program.column, ratio[program.bound], minlength=n)
        K = H + sp.diags_array(extra.astype(float))
        if R.shape[0]:
            corner = np.zeros(R.shape[0])
            corner[: program.first] = -1 / ratio[program.general]
            K = sp.block_array([[K, R.T], [R, sp.diags_array(corner)]])
        solve = _solver(K.tocsr(), n)
        return None if solve is None else cls(program, p, ratio, solve)

    def direction(self, product):
        """A step towards `slack * multiplier = product`."""
        program, p, ratio = self.program, self.p, self.ratio
        want = product / p.slack - p.mu + ratio * p.primal
        want = np.where(program.bounded, want, 0)
        top = -p.dual - program.transposed @ np.where(program.bound, want, 0)
        general = -want[program.general] / ratio[program.general]
        z = self.solve(np.concatenate([top, general, -p.primal[program.equal]]))
        n = len(p.y)
        dy, ahead = z[:n], program.A @ z[:n]
        ds = np.where(program.bounded, -p.primal - ahead, 0)
        dmu = np.where(program.bounded, want + ratio * ahead, 0)
        dmu[program.equal] = z[n + program.first :]
        return dy, ds, dmu

    def longest(self, ds, dmu) -> float:
        """The step that keeps slacks and multipliers positive."""
        limit = np.inf
        for value, change in ((self.p.slack, ds), (self.p.mu, dmu)):
            falls = self.program.bounded & (change < 0)
            if falls.any():
                limit = min(limit, np.min(-value[falls] / change[falls]))
        return float(min(1.0, _TO_BORDER * limit))

    def step(self) -> _Point | None:
        """The next point; None where no step makes what is left smaller."""
        program, p = self.program, self.p
        gap, centre = program.gap(p.slack, p.mu), 0.0
        _, ds, dmu = self.direction(np.zeros_like(p.mu))
        ahead = self.longest(ds, dmu)
        left = program.gap(p.slack + ahead * ds, p.mu + ahead * dmu)
        if gap > 0:
            centre = (left / gap) ** 3 * gap
        dy, ds, dmu = self.direction(centre - ds * dmu)
        noise = tolerances(np.float64).rounding * (
            1 + np.linalg.norm(p.mu) + np.linalg.norm(p.pull)
        )
        allowed = p.size + centre * program.count + noise
        # A curved `g` can make the full step worse; halve until residuals shrink.
        t = self.longest(ds, dmu)
        for _ in range(_HALVINGS):
            new = program.point(p.y + t * dy, p.slack + t * ds, p.mu + t * dmu)
            if new.size <= allowed:
                return new
            t *= 0.5
        return None


def inside(rows: SparseRows, y, far: float = 0.0) -> np.ndarray:
    """`y` moved away from its bounds, as `far` as there is room."""
    fixed = rows.fixed
    bound = np.flatnonzero(rows.bounded & (fixed.column >= 0))
    low, high = np.full(len(y), -np.inf), np.full(len(y), np.inf)
    column, value = fixed.column[bound], fixed.sign[bound] * rows.rhs[bound]
    up = fixed.sign[bound] > 0
    np.minimum.at(high, column[up], value[up])
    np.maximum.at(low, column[~up], value[~up])
    known = rows.scale[rows.usable & (rows.scale > 0)]
    away = max(far, 0.1 * np.median(known) if known.size else 0.1)
    away = np.minimum(away, 0.1 * np.where(low < high, high - low, 0))
    moved = np.clip(y, low + away, high - away)
    pinned = np.flatnonzero(rows.pinned)
    moved[fixed.column[pinned]] = (fixed.sign * rows.rhs)[pinned]
    return moved


def _solver(K: Any, n: int) -> Callable | None:
    """Solves with `K`, refined twice; None where it cannot be factored."""
    diagonal = np.abs(K.diagonal())
    top = diagonal[:n].max(initial=0)
    unit = 1 / np.sqrt(np.maximum(diagonal[:n], _FAINT * (top if top > 0 else 1)))
    scaled = K[n:, :n] @ sp.diags_array(unit)
    length = np.sqrt(scaled.multiply(scaled).sum(axis=1) + diagonal[n:])
    units = np.concatenate([unit, 1 / np.where(length > 0, length, 1)])
    both = sp.diags_array(units)
    K = (both @ K @ both).tocsr()
    shift = np.full(K.shape[0], _SHIFT)
    shift[n:] = -_SHIFT
    try:
        lu = factored(K + sp.diags_array(shift))
    except RuntimeError:
        return None

    def solve(rhs):
        rhs = rhs * units
        z = lu.solve(rhs)
        for _ in range(2):
            z = z + lu.solve(rhs - K @ z)
        return z * units

    return solve
