"""Tolls on the roads of Sioux Falls (1a, 1b, 1c): least total time on the road.

    python -m benchmarks.applications.sioux_falls_tolls --data FOLDER [--only 1b]

Drivers choose routes by time plus toll; `y` are flows per road and destination, in
thousand vehicles, `x` tolls in minutes: on all 76 roads, on four roads in both
directions, or on two roads of those who drive to one node. FOLDER holds links.csv,
demand.csv and reference.json (bstabler/TransportationNetworks; not for packages). `F`
is checked by Newton's method over quadratic programs of Clarabel.
"""

import csv
import json
import pathlib
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import scipy.sparse as sp

import bilevax as bx

from .measured import measured, parsed, reference

DELAY = 0.15
ROADS = [(6, 8), (10, 15), (10, 16), (13, 24)]
GATES = [(16, 10), (17, 10)]
# Where a quasi-Newton method with exact gradients stops from zero tolls.
FROM_ZERO = 7_232_281 / 7_194_256.053 - 1


class City:
    """The network; `goals` are the nodes people drive to, `eps` keeps `y` unique."""

    def __init__(self, folder: pathlib.Path, goals: list[int] | None, eps: float):
        links = list(csv.DictReader((folder / "links.csv").open()))
        column = lambda name: np.array([float(link[name]) for link in links])
        self.tail, self.head = column("tail").astype(int), column("head").astype(int)
        self.capacity, self.free = (
            column("capacity_veh") / 1e3,
            column("free_flow_time"),
        )
        nodes, self.links, self.eps = self.tail.max(), len(links), eps
        trips = np.zeros((nodes, nodes))
        for row in csv.DictReader((folder / "demand.csv").open()):
            pair = int(row["origin"]) - 1, int(row["destination"]) - 1
            trips[pair] = float(row["trips_veh"]) / 1e3
        goals = list(range(1, nodes + 1)) if goals is None else goals
        self.goals = len(goals)
        at = np.arange(self.links)
        leaves = np.zeros((nodes, self.links))
        leaves[self.tail - 1, at], leaves[self.head - 1, at] = 1, -1
        rows, demand = [], []
        for i, goal in enumerate(goals):
            # The row of the goal follows from the others.
            others = np.flatnonzero(np.arange(nodes) != goal - 1)
            one = sp.csr_array(np.eye(self.goals)[i : i + 1])
            rows.append(sp.kron(sp.csr_array(leaves[others]), one))
            demand.append(trips[others, goal - 1])
        self.balance, self.demand = sp.vstack(rows).tocsr(), np.concatenate(demand)

    def between(self, pairs, both: bool) -> np.ndarray:
        """The matrix from tolls on roads to tolls on links."""
        T = np.zeros((self.links, len(pairs)))
        for j, (a, b) in enumerate(pairs):
            there = (self.tail == a) & (self.head == b)
            back = (self.tail == b) & (self.head == a)
            T[there | (back & both), j] = 1
        return T

    def problem(self, T, most: float) -> bx.Problem:
        free, capacity, T = map(jnp.asarray, (self.free, self.capacity, T))
        n = self.links * self.goals

        def lower(x, y):
            v = y.reshape(self.links, self.goals)
            V = v.sum(1)
            delay = free * (V + DELAY * V**5 / (5 * capacity**4))
            return jnp.sum(delay + (T @ x) * V) + 0.5 * self.eps * jnp.sum(v**2)

        def upper(x, y):
            V = y.reshape(self.links, self.goals).sum(1)
            return 1000 * jnp.sum(V * free * (1 + DELAY * (V / capacity) ** 4))

        rows = bx.Polyhedron(
            A=-sp.eye_array(n), b=jnp.zeros(n), A_eq=self.balance, b_eq=self.demand
        )
        k = T.shape[1]
        domain = bx.Box(jnp.zeros(k), jnp.full(k, most))
        return bx.Problem(upper, lower, rows, domain=domain)

    def checked(self, problem: bx.Problem, T, x) -> float:
        """`F` by Newton's method; totals of the links are variables of their own."""
        import clarabel as peer

        clarabel: Any = peer

        n, m = self.links * self.goals, self.links
        sums = sp.kron(sp.eye_array(m), np.ones((1, self.goals)))
        equal = sp.block_array([[self.balance, None], [sums, -sp.eye_array(m)]])
        less = sp.hstack([-sp.eye_array(n), sp.csr_array((n, m))])
        A = sp.csc_matrix(sp.vstack([equal, less]))
        b = np.concatenate([self.demand, np.zeros(m + n)])
        cones = [
            clarabel.ZeroConeT(self.links + len(self.demand)),
            clarabel.NonnegativeConeT(n),
        ]
        settings = clarabel.DefaultSettings()
        settings.verbose = False
        settings.tol_gap_abs = settings.tol_gap_rel = settings.tol_feas = 1e-11
        V, y, moved = self.capacity, np.zeros(n), np.inf
        for _ in range(40):
            slope = self.free * (1 + DELAY * (V / self.capacity) ** 4) + T @ x
            bend = 4 * DELAY * self.free * V**3 / self.capacity**4
            P = sp.diags_array(np.concatenate([np.full(n, self.eps), bend]))
            q = np.concatenate([np.zeros(n), slope - bend * V])
            solver = clarabel.DefaultSolver(
                sp.csc_matrix(P), q, A, b, cones, settings
            )  # fmt: skip
            y = np.array(solver.solve().x)[:n]
            new = y.reshape(m, self.goals).sum(1)
            moved = np.abs(new - V).max()
            V = np.maximum(new, 0)
            if moved < 1e-9:
                break
        assert moved < 1e-6, moved
        return float(problem.upper(jnp.asarray(x), jnp.asarray(y)))


def add(parser):
    parser.add_argument("--only", choices=("1a", "1b", "1c"))
    told = "time one hypergradient of 1b beside InteriorPoint, and nothing else"
    parser.add_argument("--one", action="store_true", help=told)


def main():
    options = parsed(__doc__, add)
    jax.config.update("jax_enable_x64", True)
    known = reference(options)
    city = lambda goals, eps: City(options.data, goals, eps)
    every, four = city(None, 1e-3), known["four_roads"]["F"]
    commute = city([10], 1e-2)
    first_best, gates = known["first_best"]["F"], known["commute"]["F"]
    zero = np.eye(every.links)
    if options.one:
        return one(every.problem(every.between(ROADS, True), 40.0))
    cases = (
        ("1c", commute, commute.between(GATES, False), 20.0, gates, 1e-6, 8),
        ("1b", every, every.between(ROADS, True), 40.0, four, 2e-5, 1),
        ("1a from zero tolls", every, zero, 60.0, first_best, FROM_ZERO, 1),
        ("1a", every, zero, 60.0, first_best, 1e-3, 8),
    )
    for label, network, T, most, best, bar, starts in cases:
        if options.only in (None, label.split()[0]):
            run(label, network, T, most, best, bar, starts, options)


def one(problem: bx.Problem) -> None:
    """CPU seconds of one hypergradient of 1b: cold, warm, and by `InteriorPoint`."""

    def seconds(x, **options):
        began = time.process_time()
        e = bx.hypergradient(problem, x, **options)
        jax.block_until_ready(e.grad)
        return time.process_time() - began, e

    x = jnp.array([0.1, 0.4, 6.4, 7.1])
    first, start = seconds(x)
    cold, _ = seconds(x)
    seconds(x + 0.01, warm=start.lower)
    warm = min(seconds(x + 0.02, warm=start.lower)[0] for _ in range(5))
    dense = bx.InteriorPoint()
    seconds(x, solver=dense)
    slow, other = seconds(x, solver=dense)
    gap = abs(float(other.value) / float(start.value) - 1)
    row = dict(first=first, cold=cold, warm=warm, interior_point=slow)
    row = {name: round(value, 4) for name, value in row.items()}
    print(json.dumps(row | dict(ratio=round(slow / warm), difference=gap)), flush=True)


def run(label, network: City, T, most, best, bar, starts, options):
    problem, x0 = network.problem(T, most), jnp.zeros(T.shape[1])
    measured(
        f"{label} Sioux Falls",
        lambda: bx.solve(problem, bx.DSBLO(), x0, key=0, num_starts=starts),
        lambda x: network.checked(problem, T, x),
        options,
        best=best,
        bar=bar,
        starts=starts,
    )


if __name__ == "__main__":
    main()
