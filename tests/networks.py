"""Flows on grids: rows of the kind that transport networks have."""

import jax.numpy as jnp
import numpy as np
import scipy.sparse as sp

import bilevax as bx


def grid(side):
    """Tails and heads of the links of a grid, in both directions."""
    nodes = np.arange(side * side).reshape(side, side)
    a = np.r_[nodes[:, :-1].ravel(), nodes[:-1].ravel()]
    b = np.r_[nodes[:, 1:].ravel(), nodes[1:].ravel()]
    return np.r_[a, b], np.r_[b, a]


class Flows:
    """Several goods on one grid, each to its own node; links slow down with the load.

    `x` are tolls on the first links. `power=1` makes the follower quadratic.
    """

    def __init__(self, seed, side=6, goods=3, power=1, trips=0.5):
        rng = np.random.default_rng(seed)
        tail, head = grid(side)
        nodes, links = side * side, len(tail)
        places = np.r_[np.arange(links), np.arange(links)]
        ends = (np.r_[np.ones(links), -np.ones(links)], (np.r_[tail, head], places))
        leaves = sp.csr_array(ends, shape=(nodes, links))
        rows, demand = [], []
        for good in range(goods):
            goal = rng.integers(nodes)
            others = np.flatnonzero(np.arange(nodes) != goal)
            one = sp.csr_array(np.eye(goods)[good : good + 1])
            rows.append(sp.kron(leaves[others], one))
            demand.append(
                rng.uniform(0, 2, nodes - 1) * (rng.uniform(size=nodes - 1) < trips)
            )
        self.A_eq, self.b_eq = sp.vstack(rows).tocsr(), np.concatenate(demand)
        self.time, self.load = rng.uniform(1, 3, links), rng.uniform(0.1, 1, links)
        self.links, self.goods, self.power = links, goods, power
        self.size, self.flat = links * goods, 1e-2

    def total(self, y):
        return y.reshape(self.links, self.goods).sum(1)

    def problem(self, kind=lambda M: M, **options):
        time, load, k = self.time, self.load, self.power

        def lower(x, y):
            V = self.total(y)
            toll = jnp.zeros(self.links).at[: x.size].set(x)
            delay = jnp.sum((time + toll) * V + load * V ** (k + 1) / (k + 1))
            return delay + 0.5 * self.flat * jnp.sum(y**2)

        def upper(x, y):
            V = self.total(y)
            return jnp.sum(V * (time + load * V**k))

        rows = bx.Polyhedron(
            A=kind(-sp.eye_array(self.size).tocsr()), b=np.zeros(self.size),
            A_eq=kind(self.A_eq), b_eq=self.b_eq,
        )  # fmt: skip
        return bx.Problem(upper, lower, rows, **options)

    def quadratic(self, x):
        """`H`, `c` of the follower where it is quadratic."""
        one = np.ones((self.goods, self.goods))
        H = sp.kron(sp.diags_array(self.load), one)
        toll = np.zeros(self.links)
        toll[: x.size] = x
        H = H + self.flat * sp.eye_array(self.size)
        return sp.csc_matrix(H), np.repeat(self.time + toll, self.goods)
