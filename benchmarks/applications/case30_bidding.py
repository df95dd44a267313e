"""Strategic bidding in a market of 30 buses (2a, 2b): mark-ups that maximise profit.

    python -m benchmarks.applications.case30_bidding --data FOLDER

A company owns generators and adds a mark-up to their costs; the operator clears the
market at least cost within the limits of the lines. FOLDER holds bus.csv, gen.csv,
branch.csv and reference.json (power-grid-lib case 30, CC BY 4.0). `F` is checked by
DAQP, which is exact at kinks (`pip install daqp`).
"""

import csv
import pathlib

import jax
import jax.numpy as jnp
import numpy as np

import bilevax as bx

from .measured import measured, parsed, reference

STARTS = 8


def table(path: pathlib.Path) -> dict[str, np.ndarray]:
    rows = list(csv.DictReader(path.open()))
    return {name: np.array([float(row[name]) for row in rows]) for name in rows[0]}


class Market:
    """The market as arrays; `y` is generation, then demand, in MW."""

    def __init__(self, folder: pathlib.Path, owned: list[int], free: bool):
        bus, gen, line = (table(folder / f"{n}.csv") for n in ("bus", "gen", "branch"))
        loads = bus["Pd_MW"] > 0
        wanted = bus["Pd_MW"][loads]
        n, lines = len(bus["bus"]), len(line["branch"])
        at_gen = np.eye(n)[gen["bus"].astype(int) - 1].T
        at_load = np.eye(n)[np.flatnonzero(loads)].T
        ends = np.zeros((lines, n))
        ends[np.arange(lines), line["from_bus"].astype(int) - 1] = 1
        ends[np.arange(lines), line["to_bus"].astype(int) - 1] = -1
        flow = ends / line["x_pu"][:, None]
        # Angles are gone; that of the first bus is zero.
        shift = np.zeros((lines, n))
        shift[:, 1:] = flow[:, 1:] @ np.linalg.inv(ends.T[1:] @ flow[:, 1:])
        moved = shift @ np.concatenate([at_gen, -at_load], axis=1)
        limit = 0.75 * line["rateA_MW"]
        low = np.concatenate(
            [np.zeros(len(gen["gen"])) if free else gen["Pmin_MW"], 0 * wanted]
        )
        high = np.concatenate([gen["Pmax_MW"], 1.5 * wanted])
        self.A = np.concatenate([moved, -moved, np.eye(len(low)), -np.eye(len(low))])
        self.b = np.concatenate([limit, limit, high, -low])
        self.balance = np.concatenate([np.ones(len(at_gen.T)), -np.ones(len(wanted))])
        self.slope = 3.4 / (0.2 * wanted)
        self.bend = np.concatenate([2 * gen["c2"], self.slope])
        self.cost = np.concatenate([gen["c1"], np.full(len(wanted), -20.4)])
        self.c2, self.owned = gen["c2"], np.array(owned) - 1
        # The load at the bus of each owned generator.
        buses = gen["bus"][self.owned]
        self.price_at = [int(np.flatnonzero(bus["bus"][loads] == k)[0]) for k in buses]

    def problem(self, most: float) -> bx.Problem:
        m, gens = self, len(self.c2)
        owned, price_at = jnp.asarray(m.owned), jnp.asarray(m.price_at)
        slope, c2, c1 = jnp.asarray(m.slope), jnp.asarray(m.c2), jnp.asarray(m.cost)

        def lower(x, y):
            mark_up = jnp.zeros(len(m.cost)).at[owned].set(x)
            return 0.5 * jnp.sum(m.bend * y**2) + (c1 + mark_up) @ y

        def upper(x, y):
            p, d = y[:gens][owned], y[gens:][price_at]
            price = 20.4 - slope[price_at] * d
            return -jnp.sum(price * p - c2[owned] * p**2 - c1[owned] * p)

        rows = bx.Polyhedron(A=m.A, b=m.b, A_eq=m.balance[None], b_eq=jnp.zeros(1))
        k = len(m.owned)
        return bx.Problem(
            upper, lower, rows, domain=bx.Box(jnp.zeros(k), jnp.full(k, most))
        )

    def checked(self, problem: bx.Problem, x) -> float:
        import daqp

        cost = self.cost.copy()
        cost[self.owned] += x
        rows = np.concatenate([self.A, self.balance[None]])
        high = np.append(self.b, 0.0)
        low = np.append(np.full(len(self.b), -1e30), 0.0)
        sense = np.zeros(len(high), np.int32)
        sense[-1] = 5
        y, _, flag, _ = daqp.solve(np.diag(self.bend), cost, rows, high, low, sense)
        assert flag == 1
        return float(problem.upper(jnp.asarray(x), jnp.asarray(y)))


def main():
    options = parsed(__doc__)
    jax.config.update("jax_enable_x64", True)
    known = reference(options)
    for label, name, free, most in (
        ("2a", "duo", False, 6.0),
        ("2b", "trio", True, 4.0),
    ):
        market = Market(options.data, known[name]["owned_gens"], free)
        label = f"{label} bidding, {name}"
        run(market, market.problem(most), label, most, known[name]["F"], options)


def run(market: Market, problem, name: str, most: float, best: float, options):
    """One instance, however its `problem` is written; `market` checks it."""
    own, x0 = market.problem(most), jnp.zeros(len(market.owned))
    measured(
        name,
        lambda: bx.solve(problem, bx.DSBLO(), x0, key=0, num_starts=STARTS),
        lambda x: market.checked(own, x),
        options,
        best=best,
        bar=1e-6,
        starts=STARTS,
    )


if __name__ == "__main__":
    main()
