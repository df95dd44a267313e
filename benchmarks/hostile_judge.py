"""The truth beside the answer: exact certificates, what the data decide, verdicts."""

import numpy as np

from .hostile_draws import pulled, times
from .hostile_layout import K, L, N, posed, taken

Extended = np.longdouble
RIGHT, FLAGGED, REFUSED, WRONG = "right", "flagged", "refused", "wrong"
HAS_VALUE = ("successful", "kink", "dependent_rows", "adjoint_limit")
# Relative, in natural units. An answer may also be off by TRUST times what rounding of
# the data can do to it, which is what any stable method leaves. Data decide an answer
# that their rounding moves by less than the tolerance, with the same split of the rows.
# In float32 the library accepts relative residuals of 1e-4.
TOLERANCE = {np.float64: 1e-6, np.float32: 1e-3}
TRUST = 1e3
SHIFT = 256


# Certificates -----------------------------------------------------------------------


def whole(part):
    """`part * 2^SHIFT` as integers of any size; raises where that is not whole."""
    mantissa, exponent = np.frexp(part)
    mantissa = (mantissa * 2.0**53).astype(np.int64).astype(object)
    power = exponent.astype(int) - 53 + SHIFT
    if (power < 0).any():
        raise ValueError("a number is too small for fixed point")
    return mantissa * 2 ** power.astype(object)


def certify(members) -> np.ndarray:
    """Whether the truth satisfies the KKT conditions of the posed data exactly.

    In integers, without rounding. For members that are feasible and marked `exact`.
    """
    m = taken(members, members["exact"] & members["feasible"])
    if not len(m["x"]):
        return np.zeros(0, bool)
    data = posed(m)
    finite = np.isfinite(data["b"])
    data["b"] = np.where(finite, data["b"], 0)
    d = {name: whole(part) for name, part in data.items()}
    y, lam, mu = (
        whole(v) for v in (m["z"] / m["s"], m["lam"] / m["rho"], m["mu"] / m["sigma"])
    )
    one = 2**SHIFT
    mul = lambda matrix, vector: np.matmul(matrix, vector[:, :, None])[:, :, 0]
    turn = lambda matrix: np.swapaxes(matrix, 1, 2)
    u = mul(d["G"], y) - mul(d["S"], d["x"]) - d["t"] * one
    slope = d["d"] * u * one**4 + d["q"] * u**3 - d["f"] * one**6
    force = mul(d["H"], y) + mul(d["C"], d["x"]) + d["c"] * one
    force = force + mul(turn(d["A"]), lam) + mul(turn(d["E"]), mu)
    stationary = (force * one**6 + mul(turn(d["G"]), slope) == 0).all(1)
    room = d["b"] * one - mul(d["A"], y) - mul(d["B"], d["x"])
    held = m["strong"] | m["weak"]
    rows = np.where(held, room == 0, ~finite | (room > 0)).all(1)
    balance = (mul(d["E"], y) + mul(d["D"], d["x"]) == d["e"] * one).all(1)
    signs = np.where(m["strong"], m["lam"] > 0, m["lam"] == 0).all(1)
    return stationary & rows & balance & signs & ~(m["h"] > 0).any(1)


def consistent(members) -> np.ndarray:
    """Whether the truth meets the KKT conditions to rounding, in extended precision.

    For all feasible members, also those that are not exact.
    """
    m = taken(members, members["feasible"])
    held = m["strong"] | m["weak"]
    finite = np.isfinite(m["b"])
    m = {
        name: part if part.dtype == bool else part.astype(Extended)
        for name, part in m.items()
    }
    z, x = m["z"], m["x"]
    u = times(m["G"], z) - times(m["S"], x) - m["t"]
    growth = m["h"] * np.exp(np.where(m["h"] > 0, u, 0))
    slope = m["d"] * u + m["q"] * u**3 + growth - m["f"]
    pieces = m["d"] * (np.abs(u) + 64) + m["q"] * np.abs(u) ** 3 + growth
    pieces = pieces + 3 * m["q"] * u**2 * 64 + growth * 64 + np.abs(m["f"])
    parts = [
        times(m["H"], z), times(m["C"], x), m["c"],
        pulled(m["A"], m["lam"]), pulled(m["E"], m["mu"]),
    ]  # fmt: skip
    sizes = sum(np.abs(part) for part in parts) + pulled(np.abs(m["G"]), pieces)
    force = sum(parts) + pulled(m["G"], slope)
    stationary = (np.abs(force) <= 1e-12 * (sizes + ~m["stiff"][:, None])).all(1)
    room = np.where(finite, m["b"], 0) - times(m["A"], z) - times(m["B"], x)
    reach = times(np.abs(m["A"]), np.abs(z)) + np.where(finite, np.abs(m["b"]), 0) + 1
    tight = np.abs(room) <= 1e-12 * reach
    rows = np.where(held, tight, ~finite | (room > 1e-9 * reach)).all(1)
    balance = times(m["E"], z) + times(m["D"], x) - m["e"]
    return stationary & rows & (np.abs(balance) <= 1e-11).all(1)


# References -------------------------------------------------------------------------


def solve(matrix, rhs):
    """Batched Gaussian elimination with pivoting, in extended precision."""
    matrix = np.concatenate([matrix, rhs], axis=2).astype(Extended)
    matrix /= np.abs(matrix[:, :, : matrix.shape[1]]).max(2, keepdims=True)
    every, size = np.arange(len(matrix)), matrix.shape[1]
    for i in range(size):
        pivot = i + np.abs(matrix[:, i:, i]).argmax(1)
        matrix[every, i], matrix[every, pivot] = (
            matrix[every, pivot],
            matrix[every, i].copy(),
        )
        matrix[:, i, i:] /= matrix[:, i, i, None]
        factor = matrix[:, :, i].copy()
        factor[:, i] = 0
        matrix[:, :, i:] -= factor[:, :, None] * matrix[:, i, None, i:]
    return matrix[:, :, size:]


def basis(A, E, strong):
    """Strong rows and equality rows that span all of them, for each member."""
    rows = np.concatenate([np.where(strong[:, :, None], A, 0), E], axis=1)
    left = rows / np.maximum(np.linalg.norm(rows, axis=2, keepdims=True), 1e-300)
    chosen = np.zeros(rows.shape[:2], bool)
    every = np.arange(len(rows))
    for _ in range(N):
        sizes = np.linalg.norm(left, axis=2)
        best = sizes.argmax(1)
        good = sizes[every, best] > 1e-9
        chosen[every[good], best[good]] = True
        unit = left[every, best] / np.maximum(sizes[every, best], 1e-300)[:, None]
        left = (
            left - good[:, None, None] * times(left, unit)[:, :, None] * unit[:, None]
        )
    return chosen


def reference(m, eps: float) -> dict:
    """Value and gradient of F at the truth, and how far rounding of the data moves it.

    Unknowns are `(z, w, lambda)` with `w_i = phi_i''(u_i) du_i`, so that stiff and soft
    parts are never added. Uncertainties are componentwise bounds: `|K^-1|` times `eps`
    times the sizes of all terms.
    """
    m = {name: part.astype(Extended) for name, part in m.items()} | {
        name: m[name] for name in ("strong", "weak", "sets")
    }
    count, total = len(m["z"]), 2 * N + K + L
    z, x = m["z"], m["x"]
    u = times(m["G"], z) - times(m["S"], x) - m["t"]
    growth = m["h"] * np.exp(np.where(m["h"] > 0, u, 0))
    bend = m["d"] + 3 * m["q"] * u**2 + growth
    twist = 6 * np.abs(m["q"] * u) + growth
    rows = np.concatenate([m["A"], m["E"]], axis=1)
    moves = np.concatenate([m["B"], m["D"]], axis=1)
    force = np.concatenate([m["lam"], m["mu"]], axis=1)
    limits = np.concatenate([np.where(np.isfinite(m["b"]), m["b"], 0), m["e"]], axis=1)
    chosen = basis(m["A"].astype(float), m["E"].astype(float), m["strong"])

    matrix = np.zeros((count, total, total), Extended)
    first, second, third = slice(N), slice(N, 2 * N), slice(2 * N, total)
    soft = bend > 0
    matrix[:, first, first] = m["H"]
    matrix[:, second, first] = np.where(soft[:, :, None], m["G"], 0)
    matrix[:, first, second] = np.swapaxes(matrix[:, second, first], 1, 2)
    diagonal = np.where(soft, -1 / np.where(soft, bend, 1), 1)
    matrix[:, second, second] = diagonal[:, :, None] * np.eye(N)
    matrix[:, third, first] = np.where(chosen[:, :, None], rows, 0)
    matrix[:, first, third] = np.swapaxes(matrix[:, third, first], 1, 2)
    matrix[:, third, third] = np.where(chosen, 0, 1)[:, :, None] * np.eye(K + L)
    inverse = solve(matrix, np.broadcast_to(np.eye(total), matrix.shape))
    identity = np.abs(matrix @ inverse - np.eye(total)).max((1, 2))

    # What rounding of every datum can do to the answer.
    a, size = np.abs(inverse), {name: np.abs(part) for name, part in m.items()}
    pieces = m["d"] * np.abs(u) + m["q"] * np.abs(u) ** 3 + growth + size["f"]
    terms = times(size["H"], size["z"]) + times(size["C"], size["x"]) + size["c"]
    terms = terms + pulled(size["G"], pieces)
    terms = terms + pulled(np.abs(rows), np.abs(force))
    shift = times(size["G"], size["z"]) + times(size["S"], size["x"]) + size["t"]
    reach = times(np.abs(rows), size["z"]) + times(np.abs(moves), size["x"])
    reach = reach + np.abs(limits)
    noise = np.concatenate(
        [terms, np.where(soft, shift, 0), np.where(chosen, reach, 0)], axis=1
    )
    moved = eps * times(a, noise)
    z_noise = moved[:, :N]

    # The derivative of the answer along each x_j, and the gradient of F.
    pushed = np.concatenate(
        [
            -m["C"],
            np.where(soft[:, :, None], m["S"], 0),
            np.where(chosen[:, :, None], -moves, 0),
        ],
        axis=1,
    )
    along = inverse @ pushed
    f_z = pulled(m["R"], x) + m["p"] + m["P"] * z
    grad = x + times(m["R"], z) + pulled(along[:, :N], f_z)
    u_noise = times(size["G"], z_noise) + eps * shift
    wobble = eps + np.where(soft, twist / np.where(soft, bend, 1), 0) * u_noise
    relative = np.full((count, total), eps, Extended)
    relative[:, second] = wobble
    wrong = np.abs(matrix) @ np.abs(along) + np.abs(pushed)
    along_noise = a @ (relative[:, :, None] * wrong)
    f_size = pulled(size["R"], size["x"]) + size["p"] + size["P"] * size["z"]
    grad_size = size["x"] + times(size["R"], size["z"])
    grad_size = grad_size + pulled(np.abs(along[:, :N]), f_size)
    grad_noise = times(size["R"], z_noise) + pulled(along_noise[:, :N], f_size)
    grad_noise = grad_noise + pulled(np.abs(along[:, :N]), size["P"] * z_noise)
    value = 0.5 * (x**2).sum(1) + (x * times(m["R"], z)).sum(1)
    value = value + (m["p"] * z).sum(1) + 0.5 * (m["P"] * z**2).sum(1)
    value_size = 0.5 * (x**2).sum(1) + (f_size * size["z"]).sum(1)

    length = 1 + np.abs(z).max(1)
    both, own = np.concatenate([rows, moves], axis=2), rows
    # Where strong and weak rows were not told apart, all tight rows count.
    counted = m["strong"] | (m["weak"] & ~m["sets"][:, None])
    held = np.concatenate([counted, np.ones((count, L), bool)], axis=1)
    used = [np.where(held[:, :, None], part, 0).astype(float) for part in (both, own)]
    ranks = [np.linalg.matrix_rank(part) for part in used]

    # Whether rounding could change the split of the rows.
    force_noise = np.where(chosen, moved[:, third], 0)[:, :K]
    room = m["b"] - times(m["A"], z) - times(m["B"], x)
    room_noise = times(size["A"], z_noise) + eps * reach[:, :K]
    loose = ~(m["strong"] | m["weak"])
    unique = ranks[1] == counted.sum(1) + (m["E"] != 0).any(2).sum(1)
    firm = ~unique[:, None] | ~m["strong"] | (force_noise < 0.1 * m["lam"])
    firm = firm.all(1) & np.where(loose, room_noise < 0.1 * room, True).all(1)
    out = dict(
        value=value, value_size=1 + value_size, grad=grad, grad_size=1 + grad_size,
        value_noise=(f_size * z_noise).sum(1), grad_noise=grad_noise,
        z_noise=z_noise, force_noise=force_noise, length=length, terms=terms.max(1),
        shared=ranks[0] == ranks[1],
        unique=unique,
        known=identity < 1e-6,
        firm=firm,
    )  # fmt: skip
    return {
        name: part if part.dtype == bool else part.astype(float)
        for name, part in out.items()
    }


# Verdicts ---------------------------------------------------------------------------


def judge(m, out, dtype=np.float64) -> dict:
    """One verdict, its reason and `decided` for each member."""
    eps, tol = float(np.finfo(dtype).eps), TOLERANCE[dtype]
    with np.errstate(all="ignore"):
        r = reference(m, eps)
        return _judge(m, out, r, tol)


def _judge(m, out, r, tol):
    status = out["status"]
    z = out["y"] * m["s"]
    lam = out["multipliers"][:, :K] * m["rho"]
    mu = out["multipliers"][:, K:] * m["sigma"]
    active, weak = out["active"][:, :K], out["weak"][:, :K]
    length = r["length"][:, None]
    decided = (r["z_noise"] <= tol * length).all(1) & r["firm"]

    def close(error, size, noise):
        return np.abs(error) <= tol * size + TRUST * noise

    # Entry by entry: one far away excuses no other.
    y_fine = close(z - m["z"], 1 + np.abs(m["z"]), r["z_noise"]).all(1)
    value_fine = close(out["value"] - r["value"], r["value_size"], r["value_noise"])
    grad_fine = close(out["grad"] - r["grad"], r["grad_size"], r["grad_noise"]).all(1)

    # Multipliers: their own size where they are unique, what they leave where not. Rows
    # that are called weak claim none.
    own = np.where(m["stiff"][:, None], m["lam"], r["terms"][:, None])
    alone = (close(lam - m["lam"], own, r["force_noise"]) | weak).all(1)
    left = pulled(m["A"], lam - m["lam"]) + pulled(m["E"], mu - m["mu"])
    open_rows = np.where(weak[:, :, None], m["A"], 0)
    explained = times(np.linalg.pinv(open_rows), times(open_rows, left))
    balanced = (np.abs(left - explained) <= tol * r["terms"][:, None]).all(1)
    slack = TRUST * r["force_noise"].max(1)[:, None]
    signs = (weak | (lam >= -tol * r["terms"][:, None] - slack)).all(1)
    lam_fine = np.where(r["unique"], alone, balanced & signs)

    # Rows that are called active are tight, and no tight row is called inactive.
    tight = m["strong"] | m["weak"]
    sane = (~active | tight).all(1) & (~tight | active | weak).all(1)
    # Beside weak rows no choice of multipliers that are not unique is the best one.
    free = ~r["unique"] & m["weak"].any(1)
    split = (~weak | tight).all(1) & (free | (~m["strong"] | active).all(1))
    split &= ~(m["weak"] & active).any(1)
    smooth = ~m["weak"].any(1) & r["shared"]

    valued, success = np.isin(status, HAS_VALUE), status == "successful"
    empty = status == "infeasible"
    unsure = ~r["firm"]
    checks = [
        (~m["feasible"] & empty, RIGHT, ""),
        (~m["feasible"] & valued, WRONG, "a value where there is none"),
        (~m["feasible"], REFUSED, ""),
        (empty, WRONG, "feasible, called infeasible"),
        (~valued, REFUSED, ""),
        (~y_fine, WRONG, "y"),
        (~value_fine, WRONG, "value"),
        (~lam_fine, WRONG, "multipliers"),
        (m["sets"] & ~unsure & ~sane, WRONG, "tight rows"),
        (m["sets"] & ~unsure & success & ~smooth, WRONG, "a kink not seen"),
        (success & smooth & ~grad_fine, WRONG, "gradient"),
        (~success & smooth & m["sets"], FLAGGED, ""),
        (m["sets"] & ~unsure & ~split, FLAGGED, "another split"),
        (np.ones(len(z), bool), RIGHT, ""),
    ]
    conditions = [check[0] for check in checks]
    verdict = np.select(conditions, [check[1] for check in checks], "")
    reason = np.select(conditions, [check[2] for check in checks], "")
    reason = np.where(verdict == REFUSED, status, reason)
    reason = np.where((verdict == FLAGGED) & (reason == ""), status, reason)
    decided = np.where(m["feasible"], decided, True)
    verdict = np.where(r["known"] | ~m["feasible"], verdict, "no reference")
    scale = m["s"] * 0 + length
    error = np.max(np.abs(z - m["z"]) / scale, axis=1)
    return dict(
        verdict=verdict, reason=reason, decided=decided, error=error, status=status,
        smooth=smooth, value=r["value"], grad=r["grad"],
    )  # fmt: skip
