"""Random quadratic programs, nice and nasty, and an extended-precision reference."""

import numpy as np

Extended = np.longdouble
KINDS = ("plain", "plain", "plain", "plain", "duplicated", "dependent")


def random_quadratic(rng, n, k, m, kind, condition) -> dict:
    """A feasible program with a coupled, badly scaled polyhedron.

    `kind` says whether rows are copied (and rescaled) or are sums of others.
    """
    basis, _ = np.linalg.qr(rng.normal(size=(n, n)))
    spectrum = np.logspace(0, -np.log10(condition), n) * 10 ** rng.uniform(-2, 2)
    H = (basis * spectrum) @ basis.T
    A = rng.normal(size=(k, n))
    B = rng.normal(size=(k, m)) * (rng.uniform() < 0.7)
    inside, x = rng.normal(size=n), rng.normal(size=m)
    slack = np.where(rng.uniform(size=k) < 0.3, 0, rng.exponential(size=k))
    b = A @ inside + B @ x + slack + 0.1
    if kind == "duplicated" and k > 1:
        for i in rng.integers(0, k, size=max(1, k // 4)):
            j, scale = rng.integers(0, k), 10 ** rng.uniform(-3, 3)
            A[i], B[i], b[i] = scale * A[j], scale * B[j], scale * b[j]
    if kind == "dependent" and k > 2:
        i, j, q = rng.choice(k, 3, replace=False)
        s, t = rng.uniform(0.2, 2, size=2)
        for rows in (A, B, b):
            rows[i] = s * rows[j] + t * rows[q]
    scale = 10 ** rng.uniform(-2, 2, size=k)
    return dict(
        H=(H + H.T) / 2,
        C=rng.normal(size=(n, m)),
        c=rng.normal(size=n) * 10 ** rng.uniform(-1, 1),
        A=A * scale[:, None],
        B=B * scale[:, None],
        b=b * scale,
        R=rng.normal(size=(m, n)),
        p=rng.normal(size=n),
        x=x,
    )


def kkt_residual(data, y, multipliers) -> float:
    """The largest relative violation, evaluated in extended precision.

    Stationarity is relative to |Hy| + |c| + |A^T lambda|, rows to |a_i||y| + |b_i|.
    """
    d = {name: value.astype(Extended) for name, value in data.items()}
    y, lam = y.astype(Extended), multipliers.astype(Extended)
    curved, linear, pull = d["H"] @ y, d["C"] @ d["x"] + d["c"], d["A"].T @ lam
    size = sum(np.abs(part).max() for part in (curved, linear, pull))
    stationarity = np.abs(curved + linear + pull).max() / size
    excess = d["A"] @ y + d["B"] @ d["x"] - d["b"]
    length = np.sqrt((d["A"] ** 2).sum(1) * (y @ y)) + np.abs(d["b"])
    excess = np.where(lam > 0, np.abs(excess), excess)
    return float(max(stationarity, (excess / length).max(), (-lam).max() / size))


def reference(data, active) -> tuple[np.ndarray, np.ndarray]:
    """`y` and the gradient of F on a given active set, in extended precision.

    Of dependent rows a basis is used. Raises if the set is not the optimal one.
    """
    d = {name: value.astype(Extended) for name, value in data.items()}
    rows = _basis(data["A"], np.flatnonzero(active))
    A, B = d["A"][rows], d["B"][rows]
    n, k = len(d["c"]), len(rows)
    matrix = np.zeros((n + k, n + k), Extended)
    matrix[:n, :n], matrix[:n, n:], matrix[n:, :n] = d["H"], A.T, A
    linear = d["C"] @ d["x"] + d["c"]
    y = _solve(matrix, np.concatenate([-linear, d["b"][rows] - B @ d["x"]]))[:n]
    norms = np.sqrt((d["A"] ** 2).sum(1))
    slack = (d["b"] - d["B"] @ d["x"] - d["A"] @ y) / norms
    if slack.min(initial=0) < -1e-9 * (1 + np.abs(y).max()):
        raise AssertionError(f"the active set is wrong: slack {slack.min():.1e}")
    f_y = y + d["R"].T @ d["x"] + d["p"]
    z = _solve(matrix, np.concatenate([f_y, np.zeros(k, Extended)]))
    grad = d["x"] + d["R"] @ y - d["C"].T @ z[:n] - B.T @ z[n:]
    return y, grad


def _basis(A, rows):
    """Rows that span the given ones, the longest remainder first."""
    left = (A[rows] / np.linalg.norm(A[rows], axis=1, keepdims=True)).astype(Extended)
    chosen = []
    for _ in range(min(left.shape)):
        sizes = (left**2).sum(1)
        best = int(np.argmax(sizes))
        if sizes[best] < 1e-18:
            break
        chosen.append(best)
        direction = left[best] / np.sqrt(sizes[best])
        left = left - np.outer(left @ direction, direction)
    return rows[chosen]


def _solve(matrix, rhs):
    """Gaussian elimination with partial pivoting; LAPACK has no extended precision."""
    matrix, rhs = matrix.copy(), rhs.copy()
    n = len(rhs)
    for i in range(n):
        pivot = i + int(np.argmax(np.abs(matrix[i:, i])))
        matrix[[i, pivot]], rhs[[i, pivot]] = matrix[[pivot, i]], rhs[[pivot, i]]
        factor = matrix[i + 1 :, i] / matrix[i, i]
        matrix[i + 1 :, i:] -= np.outer(factor, matrix[i, i:])
        rhs[i + 1 :] -= factor * rhs[i]
    x = np.zeros(n, Extended)
    for i in reversed(range(n)):
        x[i] = (rhs[i] - matrix[i, i + 1 :] @ x[i + 1 :]) / matrix[i, i]
    return x
