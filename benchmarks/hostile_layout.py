"""One layout for every member: arrays of one size, in natural units and as posed.

A member is

    min_y  y^T H y / 2 + y^T (C x + c) + sum_i phi_i(u_i),    u = G y - S x - t,
    phi(u) = d u^2 / 2 + q u^4 / 4 + h exp(u) - f u,
    A y + B x <= b,   E y + D x = e,

with `F(x) = x^T x / 2 + x^T R y + p^T y + sum_i P_i y_i^2 / 2`. Natural units are those
in which the truth is made of small numbers. A posed member has `y = z / s` and rows
times `rho` (equalities `sigma`), all powers of two, so that posing it is exact.
"""

import numpy as np

N, K, L, M = 6, 12, 3, 2  # variables, inequality rows, equality rows, entries of x

SHAPES = dict(
    H=(N, N), C=(N, M), c=(N,),
    G=(N, N), S=(N, M), t=(N,), d=(N,), q=(N,), h=(N,), f=(N,),
    A=(K, N), B=(K, M), b=(K,), E=(L, N), D=(L, M), e=(L,),
    R=(M, N), p=(N,), P=(N,), x=(M,),
)  # fmt: skip
TRUTH = dict(
    z=(N,), lam=(K,), mu=(L,), s=(N,), rho=(K,), sigma=(L,),
    strong=(K,), weak=(K,), rows=(K,),
    feasible=(), sets=(), exact=(), stiff=(), size=(),
)  # fmt: skip
FLAGS = ("strong", "weak", "rows", "feasible", "sets", "exact", "stiff")


def blank(count: int) -> dict:
    """`count` members without rows, in natural units; the answer is zero."""
    parts = {name: np.zeros((count, *shape)) for name, shape in SHAPES.items()}
    parts |= {name: np.zeros((count, *shape)) for name, shape in TRUTH.items()}
    parts |= {name: np.zeros((count, *TRUTH[name]), bool) for name in FLAGS}
    parts["b"][:] = np.inf
    for name in ("s", "rho", "sigma"):
        parts[name][:] = 1
    for name in ("feasible", "sets", "exact"):
        parts[name][:] = True
    return parts


def place(natural: dict, rng=None) -> dict:
    """Members of a smaller size in arrays of the full size, inequality rows shuffled.

    Variables that are added have the curvature of the others and the answer zero.
    """
    count, n = natural["z"].shape
    out = blank(count)
    k = natural["A"].shape[1] if "A" in natural else 0
    order = np.tile(np.arange(K), (count, 1))
    if rng is not None:
        order[:, :k] = rng.permuted(order[:, :k], axis=1)
    for name, part in natural.items():
        part = np.asarray(part)
        out[name][tuple(slice(0, size) for size in part.shape)] = part
    out["rows"][:, :k] = True
    for name in ("A", "B", "b", "lam", "strong", "weak", "rows", "rho"):
        index = order if out[name].ndim == 2 else order[:, :, None]
        out[name] = np.take_along_axis(out[name], index, axis=1)
    diagonal = np.einsum("bii->bi", out["H"])
    curvature = diagonal + np.einsum("bij,bi->bj", out["G"] ** 2, out["d"])
    seen = np.where(curvature[:, :n] > 0, curvature[:, :n], 1)
    typical = 2.0 ** np.round(np.log2(seen).mean(1))
    for i in range(n, N):
        out["H"][:, i, i] = typical
    out["size"][:] = n
    return out


def posed(natural: dict) -> dict:
    """The data of the members as the solver sees them."""
    d = {name: natural[name].copy() for name in SHAPES}
    s, rho, sigma = natural["s"], natural["rho"], natural["sigma"]
    for name in ("A", "E", "G", "R", "H"):
        d[name] = d[name] * s[:, None, :]
    for name in ("H", "C"):
        d[name] = d[name] * s[:, :, None]
    d["c"], d["p"], d["P"] = d["c"] * s, d["p"] * s, d["P"] * s**2
    for name, scale in (("A", rho), ("B", rho), ("E", sigma), ("D", sigma)):
        d[name] = d[name] * scale[:, :, None]
    d["b"], d["e"] = d["b"] * rho, d["e"] * sigma
    return d


def trimmed(data: dict, size: tuple) -> dict:
    """Posed members without padding: the first variables and rows alone."""
    sizes = dict(zip((N, K, L), size, strict=True)) | {M: M}
    # `M` is no other size, so that a size names its axis.
    out = {
        name: data[name][:, *(slice(sizes[axis]) for axis in shape)]
        for name, shape in SHAPES.items()
    }
    if not out["B"].any():
        out["B"] = out["B"][:, :, :0]
    return out


def restored(out: dict, size: tuple) -> dict:
    """Answers for trimmed members in the full layout."""
    n, k, equal = size
    out, count = dict(out), len(out["y"])
    for name in ("multipliers", "active", "weak"):
        part = np.zeros((count, K + L), out[name].dtype)
        part[:, :k] = out[name][:, :k]
        part[:, K : K + equal] = out[name][:, k:]
        out[name] = part
    out["y"] = np.concatenate([out["y"], np.zeros((count, N - n))], axis=1)
    return out


def joined(parts: list) -> dict:
    """Members one after the other."""
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def taken(members: dict, index) -> dict:
    """Some of the members."""
    return {name: part[index] for name, part in members.items()}
