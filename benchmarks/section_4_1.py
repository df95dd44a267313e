"""The quadratic family of section 4.1 of the paper, and its exact gradient.

Formulas are in `lower_level.py`.
"""

from typing import Any, NamedTuple

import numpy as np
from scipy.optimize import nnls


class Data(NamedTuple):
    """One problem of the family; `H` is the Hessian of `g` in `y`."""

    Q1: Any
    Q2: Any
    A: Any
    B: Any
    b: Any
    H: Any


def draw(n, k, seed=0):
    """The 'tight' instance: `b` is shifted by -2, so that rows are active."""
    rng = np.random.default_rng(seed)
    Q1, Q2 = rng.random((n, n)), rng.random((n, n))
    A, B = rng.random((k, n)), rng.random((k, n))
    return Data(Q1, Q2, A, B, rng.random(k) - 2, 2 * np.eye(n))


def path(n, count):
    """A closed curve around -0.5, long enough for rows to come and go."""
    t = np.arange(count)[:, None]
    return -0.5 + 0.5 * np.sin(0.1 * t + 2 * np.pi * np.arange(n) / n)


def exact_gradient(data, x):
    """The gradient, the active rows and the margin to the nearest kink.

    The active rows come from a finite method (least distance by non-negative least
    squares) and are then verified by the signs of multipliers and slacks; the two
    linear systems are solved to extended precision.
    """
    long = Data(*(part.astype(np.longdouble) for part in data))
    x = x.astype(np.longdouble)
    p, c = long.Q2.T @ x, long.b - long.B @ x
    active = _active_rows(data, np.float64(p), np.float64(c))
    A, B = long.A[active], long.B[active]
    kkt = np.block([[long.H, A.T], [A, np.zeros((len(A), len(A)))]])
    n = x.size
    z = _refined_solve(kkt, np.concatenate([-p, c[active]]))
    y, multipliers = z[:n], z[n:]
    slack = (c - long.A @ y)[~active]
    margin = min(multipliers.min(initial=np.inf), slack.min(initial=np.inf))
    if margin <= 1e-12:
        raise RuntimeError(f"the active set is not verified: margin {margin:.1e}")
    f_y = 0.1 * long.Q1.T @ x + 2 * y + 1
    vw = _refined_solve(kkt, np.concatenate([f_y, np.zeros(len(A))]))
    grad = 2 * x + 0.1 * long.Q1 @ y + 1 - long.Q2 @ vw[:n] - B.T @ vw[n:]
    return np.float64(grad), active, float(margin)


def _active_rows(data, p, c):
    # `H = 2 I`, so with y = z - p/2 this is: the shortest z with A z <= h.
    h = c + data.A @ p / 2
    u, _ = nnls(np.vstack([-data.A.T, -h]), np.eye(len(p) + 1)[-1], maxiter=10**5)
    return u > 1e-12 * u.max(initial=1e-300)


def _refined_solve(matrix, rhs):
    inverse = np.linalg.inv(matrix.astype(float))
    z = np.zeros_like(rhs)
    for _ in range(6):
        z = z + inverse @ (rhs - matrix @ z).astype(float)
    return z
