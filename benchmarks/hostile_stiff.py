"""Hostile members whose parts have very different stiffness."""

import numpy as np

from .hostile_draws import in_groups, integers, pulled, times, unimodular, upper_level
from .hostile_layout import M, place


def stiff_quadratic(rng, count):
    """Forces up to 1e12 beside curvatures down to 1e-10, in turned coordinates too."""
    makers = [
        lambda size, n=n, turn=turn: springs(rng, size, n, turn)
        for n in (2, 3, 4)
        for turn in ("none", "integer", "rotation")
    ]
    return in_groups(rng, count, makers)


def stiff_curved(rng, count):
    """The same with soft parts of fourth order and exponentials."""
    makers = [
        lambda size, n=n, turn=turn: springs(rng, size, n, turn, curved=True)
        for n in (2, 3)
        for turn in ("none", "integer", "rotation")
    ]
    return in_groups(rng, count, makers)


def lengths(rng, count):
    """The curved ones beside a coordinate far away, or with bounds far away."""
    makers = [
        lambda size, n=n, far=far: springs(rng, size, n, "none", True, far)
        for n in (2, 3)
        for far in ("answer", "bounds")
    ]
    return in_groups(rng, count, makers)


def springs(rng, count, n, turn, curved=False, far=None):
    """Parts `phi_i(u_i)` of very different stiffness; the first one is the stiff one.

    A row holds the stiff part in half of them, a row each some of the others.
    """
    if turn == "none":
        G = np.tile(np.eye(n), (count, 1, 1))
    elif turn == "integer":
        G = unimodular(rng, count, n)
    else:
        G = np.linalg.qr(rng.normal(size=(count, n, n)))[0]
    exponent = rng.integers(-33, 4, size=(count, 1)) + rng.integers(
        0, 4, size=(count, n)
    )
    exponent[:, 0] = rng.integers(0, 41, size=count)
    if far:
        exponent[:, 0] -= 12
    d = 2.0**exponent
    u = integers(rng, 4, count, n) / 2
    q, h = np.zeros((count, n)), np.zeros((count, n))
    if curved:
        kind = rng.integers(0, 3, size=(count, n))
        kind[:, 0] = 2
        kind[:, 1] = rng.integers(0, 2, size=count)
        q[kind == 0], h[kind == 1] = d[kind == 0], d[kind == 1]
        d = np.where(kind < 2, d * 2.0 ** -rng.integers(0, 11, size=(count, n)), d)
        u[:, 1:] = rng.integers(-24, 25, size=(count, n - 1)) / 8
    held = rng.uniform(size=(count, n)) < 0.5
    side = np.where(rng.uniform(size=(count, n)) < 0.5, -1.0, 1.0)
    force = np.where(held, rng.integers(1, 9, size=(count, n)) * 2.0**exponent, 0)
    z = integers(rng, 8, count, n)
    if far == "answer":
        z[:, 0] *= 2.0 ** rng.integers(0, 20, size=count)
    x, S = integers(rng, 2, count, M), integers(rng, 2, count, n, M)
    A, B = side[:, :, None] * G, integers(rng, 2, count, n, M)
    slack = np.where(held, 0, rng.integers(1, 9, size=(count, n)))
    if far == "bounds":
        slack = slack * 2.0 ** rng.integers(0, 20, size=(count, n))
    with np.errstate(over="ignore"):
        slope = (d * u + q * u**3 + h * np.exp(u.astype(np.longdouble))).astype(float)
    exact = np.full(count, turn != "rotation") & ~(h > 0).any(1)
    part = dict(
        G=G, S=S, d=d, q=q, h=h, A=A, B=B, x=x, z=z, u=u,
        t=times(G, z) - times(S, x) - u,
        f=slope + side * force,
        b=times(A, z) + times(B, x) + slack,
        lam=force, strong=held, weak=np.zeros((count, n), bool),
        exact=exact, stiff=np.ones(count, bool),
    )  # fmt: skip
    return {name: value for name, value in part.items() if name != "u"} | upper_level(
        rng, count, n
    )


def planar(rng, count):
    """One stiff direction and one soft curved one in the plane, at any angle.

    Numbers of every size, and a layout without padding: programs differ in where they
    loop for ever. The truth is the root of one function of one variable.
    """
    angle = rng.uniform(0, 2 * np.pi, size=count) * (rng.uniform(size=count) < 0.6)
    cosine, sine = np.cos(angle), np.sin(angle)
    G = np.stack([np.stack([cosine, sine], 1), np.stack([-sine, cosine], 1)], 1)
    stiff, soft = 10 ** rng.uniform(0, 9, count), 10 ** rng.uniform(-3, 1, count)
    grows = rng.uniform(size=count) < 0.5
    zero = np.zeros(count)
    x = rng.normal(size=(count, M))
    S = np.zeros((count, 2, M))
    S[:, 0, 0], S[:, 1, 1] = 1, rng.normal(size=count) * 2
    d = np.stack([stiff, soft * np.where(grows, 1.0, 1e-3)], 1)
    q = np.stack([zero, np.where(grows, 0, soft)], 1)
    h = np.stack([zero, np.where(grows, soft, 0)], 1)
    f = np.stack([zero, soft * rng.normal(size=count) * 8], 1)
    low, high = np.full(count, -100, np.longdouble), np.full(count, 100, np.longdouble)
    for _ in range(90):
        u = (low + high) / 2
        slope = d[:, 1] * u + q[:, 1] * u**3 + h[:, 1] * np.exp(u) - f[:, 1]
        low, high = np.where(slope < 0, u, low), np.where(slope < 0, high, u)
    along = np.stack([np.minimum(x[:, 0], 1), u + S[:, 1, 1] * x[:, 1]], 1)
    # The inverse of a turn that is one to rounding.
    size = G[:, 0, 0].astype(np.longdouble) ** 2 + G[:, 0, 1].astype(np.longdouble) ** 2
    held = x[:, 0] > 1
    part = dict(
        G=G, S=S, x=x, d=d, q=q, h=h, f=f,
        A=np.stack([G[:, 0], -G[:, 0]], 1), b=np.tile([1.0, 50.0], (count, 1)),
        z=pulled(G.astype(np.longdouble), along) / size[:, None],
        lam=np.stack([np.where(held, stiff * (x[:, 0] - 1), 0), zero], 1),
        strong=np.stack([held, held & False], 1), weak=np.zeros((count, 2), bool),
        exact=np.zeros(count, bool), stiff=np.ones(count, bool),
    )  # fmt: skip
    return place(part | upper_level(rng, count, 2))
