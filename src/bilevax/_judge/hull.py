"""The shortest vector of a convex hull of gradients and a cone."""

import numpy as np

from .._problem.followers import Followers
from .._problem.problem import Problem
from .._programs.control import on_host, stage_by_stage
from .._tolerances import tolerances


def normal_cone(problem: Problem | Followers, x: np.ndarray) -> np.ndarray:
    """Generators of the normal cone of the domain at `x`, as rows."""
    domain = problem.domain
    if domain is None:
        return np.zeros((0, x.size))
    with stage_by_stage():
        domain = on_host(domain)
        A, rhs = domain.matrix(x.size, x.dtype), domain.rhs(x)
    k = domain.num_inequalities
    norm = np.linalg.norm(A, axis=1)
    scale = norm * (np.linalg.norm(x) + 1) + np.abs(np.where(np.isfinite(rhs), rhs, 0))
    tight = np.abs(A @ x - rhs) <= tolerances(x.dtype).accept * scale
    tight[k:] = True
    both = np.concatenate([A[:k][tight[:k]], A[k:], -A[k:]])
    lengths = np.linalg.norm(both, axis=1, keepdims=True)
    return both / np.where(lengths > 0, lengths, 1)


def shortest_in_hull(
    gradients: np.ndarray, cone: np.ndarray
) -> tuple[float, np.ndarray, np.ndarray]:
    """The shortest vector of hull + cone, and the weights in the hull and the cone.

    Non-negative least squares: with columns `(g_i, 1)` and `(n_j, 0)` and the target
    `(0, 1)`, the best weights are a multiple of the wanted ones.
    """
    # A quarter of the time that `import bilevax` would take.
    from scipy.optimize import nnls

    size = np.abs(gradients).max(initial=0)
    if size == 0:
        return 0.0, np.full(len(gradients), 1 / len(gradients)), np.zeros(len(cone))
    matrix = np.vstack(
        [
            np.concatenate([gradients / size, cone]).T,
            np.concatenate([np.ones(len(gradients)), np.zeros(len(cone))]),
        ]
    )
    target = np.zeros(matrix.shape[0])
    target[-1] = 1
    w, _ = nnls(matrix, target, maxiter=50 * matrix.shape[1])
    total = w[: len(gradients)].sum()
    w = w / total
    weights, outwards = w[: len(gradients)], size * w[len(gradients) :]
    shortest = weights @ gradients + outwards @ cone
    return float(np.linalg.norm(shortest)), weights, outwards
