"""Strategic bidding in a market of 30 buses, with nodal prices as multipliers.

    python -m benchmarks.applications.case30_prices --data FOLDER

The model of `case30_bidding.py` with a balance for each bus: what one more MW there is
worth is the multiplier of that row, which the leader sees. So a company may own
generators where nobody consumes, and nothing is known of demand curves in `upper`.
FOLDER is that of `case30_bidding.py`. Prices are compared by bus with those of the
reference, and the same model is written once more by hand, as one Polyhedron.
"""

import argparse
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np

import bilevax as bx

from .case30_bidding import STARTS, Market, table
from .measured import measured


class Network:
    """The parts of the market by bus; powers in MW."""

    def __init__(self, folder: pathlib.Path, owned: list[int], free: bool):
        bus, gen, line = (table(folder / f"{n}.csv") for n in ("bus", "gen", "branch"))
        self.buses = [f"bus {int(b)}" for b in bus["bus"]]
        n, lines = len(self.buses), len(line["branch"])
        loads = np.flatnonzero(bus["Pd_MW"] > 0)
        wanted = bus["Pd_MW"][loads]
        self.at_gen = np.eye(n)[gen["bus"].astype(int) - 1].T
        self.at_load = np.eye(n)[loads].T
        ends = np.zeros((lines, n))
        pairs = line["from_bus"].astype(int) - 1, line["to_bus"].astype(int) - 1
        ends[np.arange(lines), pairs[0]], ends[np.arange(lines), pairs[1]] = 1, -1
        self.flow = ends / line["x_pu"][:, None]
        self.out = ends.T @ self.flow
        self.limit = 0.75 * line["rateA_MW"]
        named = [f"{i + 1}-{j + 1}" for i, j in zip(*pairs, strict=True)]
        self.lines = named + [f"{name} backwards" for name in named]
        zeros, angles = np.zeros(len(gen["gen"])), np.full(n, np.inf)
        self.low = {
            "output": zeros if free else gen["Pmin_MW"],
            "demand": 0 * wanted, "angle": -angles,
        }  # fmt: skip
        self.high = {
            "output": gen["Pmax_MW"], "demand": 1.5 * wanted, "angle": angles,
        }  # fmt: skip
        self.slope, self.c1, self.c2 = 3.4 / (0.2 * wanted), gen["c1"], gen["c2"]
        self.owned = jnp.asarray(owned) - 1
        self.owned_buses = jnp.asarray(gen["bus"].astype(int))[self.owned] - 1

    def sets(self) -> bx.Intersection:
        n, flow = len(self.buses), self.flow
        return bx.Intersection(
            balance=bx.Polyhedron(
                A_eq={
                    "demand": self.at_load, "angle": self.out, "output": -self.at_gen,
                },
                b_eq=np.zeros(n), names_eq=self.buses,
            ),
            reference=bx.Polyhedron(A_eq={"angle": np.eye(n)[:1]}, b_eq=np.zeros(1)),
            lines=bx.Polyhedron(
                A={"angle": np.concatenate([flow, -flow])},
                b=np.tile(self.limit, 2), names=self.lines,
            ),
            bounds=bx.Box(self.low, self.high),
        )  # fmt: skip

    def by_hand(self) -> bx.Polyhedron:
        """The same rows as one matrix; `y` in the order of its names."""
        n, flow = len(self.buses), self.flow
        low, high = (
            np.concatenate([side[name] for name in ("angle", "demand", "output")])
            for side in (self.low, self.high)
        )
        eye, wide = np.eye(len(low)), np.zeros((2 * len(flow), len(low) - n))
        lines = np.concatenate([np.concatenate([flow, -flow]), wide], axis=1)
        balance = np.concatenate([self.out, self.at_load, -self.at_gen], axis=1)
        return bx.Polyhedron(
            A=np.concatenate([lines, -eye, eye]),
            b=np.concatenate([np.tile(self.limit, 2), -low, high]),
            A_eq=np.concatenate([balance, eye[:1]]), b_eq=np.zeros(n + 1),
        )  # fmt: skip

    def problem(self, most: float, by_hand: bool = False) -> bx.Problem:
        owned, buses = self.owned, self.owned_buses
        slope, c1, c2 = map(jnp.asarray, (self.slope, self.c1, self.c2))
        first = 2 * len(self.flow) + 2 * sum(map(len, self.low.values()))

        def lower(x, y):
            p, d = y["output"], y["demand"]
            cost = jnp.sum(c2 * p**2) + c1.at[owned].add(x) @ p
            return cost + jnp.sum(0.5 * slope * d**2 - 20.4 * d)

        def upper(x, y, prices):
            nodal = prices[first:] if by_hand else prices["balance"]
            p = y["output"][owned]
            return -jnp.sum(nodal[buses] * p - c2[owned] * p**2 - c1[owned] * p)

        k = len(owned)
        return bx.Problem(
            upper, lower, self.by_hand() if by_hand else self.sets(),
            y0=jax.tree.map(np.zeros_like, self.low), prices=True,
            domain=bx.Box(jnp.zeros(k), jnp.full(k, most)),
        )  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=pathlib.Path, required=True)
    parser.add_argument("--once", action="store_true", help="compare, solve nothing")
    options = parser.parse_args()
    jax.config.update("jax_enable_x64", True)
    reference = json.loads((options.data / "reference.json").read_text())
    for label, name, free, most in (
        ("2a", "duo", False, 6.0),
        ("2b", "trio", True, 4.0),
    ):
        known = reference[name]
        network = Network(options.data, known["owned_gens"], free)
        compared(network, most, known)
        if not options.once:
            market = Market(options.data, known["owned_gens"], free)
            run(network, market, f"{label} with prices, {name}", most, known["F"])


def compared(network: Network, most: float, known: dict) -> None:
    """Prices by bus beside those of the reference; one Polyhedron beside the sets."""
    problem, x = network.problem(most), jnp.asarray(known["x"])
    e = bx.hypergradient(problem, x)
    other = bx.hypergradient(network.problem(most, by_hand=True), x)
    prices = e.lower.prices["balance"]
    by_bus = dict(zip(network.buses, prices, strict=True))
    wanted = dict(zip(network.buses, known["lmp_all_buses"], strict=True))
    # At the optimum a line may be at its limit without a price, so beside it.
    aside = x * 1.01
    grads = [
        bx.hypergradient(p, aside).grad
        for p in (problem, network.problem(most, by_hand=True))
    ]
    largest = lambda a, b: float(jnp.max(jnp.abs(jnp.asarray(a) - jnp.asarray(b))))
    first = len(e.lower.multipliers) - len(network.buses) - 1
    row = dict(
        F=float(e.value) - known["F"],
        prices=max(abs(float(by_bus[bus]) - wanted[bus]) for bus in by_bus),
        F_by_hand=float(abs(e.value - other.value)),
        y_by_hand=max(
            largest(e.lower.y[name], other.lower.y[name]) for name in e.lower.y
        ),
        prices_by_hand=largest(prices, other.lower.multipliers[first:-1]),
        gradient_by_hand=largest(*grads),
        active=[
            name
            for name, on in zip(e.lower.row_names, e.lower.active, strict=True)
            if on and name.startswith("lines")
        ],
    )
    print(json.dumps(row), flush=True)


def run(network: Network, market: Market, name: str, most: float, best: float):
    problem, x0 = network.problem(most), jnp.zeros(len(network.owned))
    by_demand = market.problem(most)
    measured(
        name,
        lambda: bx.solve(problem, bx.DSBLO(), x0, key=0, num_starts=STARTS),
        lambda x: market.checked(by_demand, x),
        best=best,
        bar=1e-6,
        starts=STARTS,
        twice=False,
    )


if __name__ == "__main__":
    main()
