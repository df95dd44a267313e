"""Strategic bidding in a market of 30 buses, with nodal prices as multipliers.

    python -m benchmarks.applications.case30_prices --data FOLDER

The model of `case30_bidding.py`, but the leader sees multipliers: what the balance and
the limits of the lines are worth makes the price at each bus. So a company may own
generators where nobody consumes, and `upper` knows nothing of demand curves. FOLDER is
that of `case30_bidding.py`.

At the optimum of the reference prices are compared bus by bus, also with those of a
model with angles and a balance row for each bus, whose multiplier is the price there.
The same model is written by hand as well, as one Polyhedron over one array.
"""

import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np

import bilevax as bx

from .case30_bidding import Market, run, table
from .measured import parsed, reference


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
        # Angles are gone; that of the first bus is zero.
        self.shift = np.zeros((lines, n))
        self.shift[:, 1:] = self.flow[:, 1:] @ np.linalg.inv(self.out[1:, 1:])
        self.limit = np.tile(0.75 * line["rateA_MW"], 2)
        named = [f"{i + 1}-{j + 1}" for i, j in zip(*pairs, strict=True)]
        self.lines = named + [f"{name} backwards" for name in named]
        least = np.zeros(len(gen["gen"])) if free else gen["Pmin_MW"]
        self.low = {"output": least, "demand": 0 * wanted}
        self.high = {"output": gen["Pmax_MW"], "demand": 1.5 * wanted}
        self.slope, self.c1, self.c2 = 3.4 / (0.2 * wanted), gen["c1"], gen["c2"]
        self.owned = jnp.asarray(owned) - 1
        self.owned_buses = jnp.asarray(gen["bus"].astype(int))[self.owned] - 1

    def sets(self) -> bx.Intersection:
        one = lambda matrix: np.ones((1, matrix.shape[1]))
        both = np.concatenate([self.shift, -self.shift])
        return bx.Intersection(
            balance=bx.Polyhedron(
                A_eq={"output": -one(self.at_gen), "demand": one(self.at_load)},
                b_eq=np.zeros(1),
            ),
            lines=bx.Polyhedron(
                A={"output": both @ self.at_gen, "demand": -both @ self.at_load},
                b=self.limit, names=self.lines,
            ),
            bounds=bx.Box(self.low, self.high),
        )  # fmt: skip

    def by_hand(self) -> bx.Polyhedron:
        """The same rows as one matrix; demand first, as JAX ravels by name."""
        moved = self.shift @ np.concatenate([-self.at_load, self.at_gen], axis=1)
        low, high = (
            np.concatenate([side["demand"], side["output"]])
            for side in (self.low, self.high)
        )
        eye = np.eye(len(low))
        balance = np.ones(len(low))
        balance[-len(self.c1) :] = -1
        return bx.Polyhedron(
            A=np.concatenate([moved, -moved, -eye, eye]),
            b=np.concatenate([self.limit, -low, high]),
            A_eq=balance[None], b_eq=np.zeros(1),
        )  # fmt: skip

    def with_angles(self) -> bx.Intersection:
        """A balance for each bus: its multiplier is the price there."""
        n, both = len(self.buses), np.concatenate([self.flow, -self.flow])
        no = {"angle": np.full(n, np.inf)}
        return bx.Intersection(
            balance=bx.Polyhedron(
                A_eq={
                    "demand": self.at_load, "angle": self.out, "output": -self.at_gen,
                },
                b_eq=np.zeros(n), names_eq=self.buses,
            ),
            reference=bx.Polyhedron(A_eq={"angle": np.eye(n)[:1]}, b_eq=np.zeros(1)),
            lines=bx.Polyhedron(A={"angle": both}, b=self.limit, names=self.lines),
            bounds=bx.Box(self.low | {"angle": -no["angle"]}, self.high | no),
        )  # fmt: skip

    def nodal(self, balance, lines):
        """What one more MW at each bus is worth."""
        forward, backward = jnp.split(lines, 2)
        return balance - jnp.asarray(self.shift).T @ (forward - backward)

    def problem(self, most: float, kind: str = "sets") -> bx.Problem:
        owned, buses, lines = self.owned, self.owned_buses, len(self.limit)
        slope, c1, c2 = map(jnp.asarray, (self.slope, self.c1, self.c2))

        def lower(x, y):
            p, d = y["output"], y["demand"]
            cost = jnp.sum(c2 * p**2) + c1.at[owned].add(x) @ p
            return cost + jnp.sum(0.5 * slope * d**2 - 20.4 * d)

        def prices_at(prices):
            if kind == "with angles":
                return prices["balance"]
            if kind == "by hand":
                return self.nodal(prices[-1], prices[:lines])
            return self.nodal(prices["balance"], prices["lines"])

        def upper(x, y, prices):
            p, nodal = y["output"][owned], prices_at(prices)
            profit = jnp.sum(nodal[buses] * p - c2[owned] * p**2 - c1[owned] * p)
            return -profit, nodal

        rows = {
            "sets": self.sets, "by hand": self.by_hand, "with angles": self.with_angles,
        }  # fmt: skip
        y0 = jax.tree.map(np.zeros_like, self.low)
        if kind == "with angles":
            y0["angle"] = np.zeros(len(self.buses))
        k = len(owned)
        return bx.Problem(
            upper, lower, rows[kind](), y0=y0, prices=True,
            domain=bx.Box(jnp.zeros(k), jnp.full(k, most)),
        )  # fmt: skip


def main():
    options = parsed(__doc__, add_options)
    jax.config.update("jax_enable_x64", True)
    known_of = reference(options)
    for label, name, free, most in (
        ("2a", "duo", False, 6.0),
        ("2b", "trio", True, 4.0),
    ):
        known = known_of[name]
        network = Network(options.data, known["owned_gens"], free)
        compared(network, most, known)
        if not options.compare:
            market = Market(options.data, known["owned_gens"], free)
            label = f"{label} with prices, {name}"
            run(market, network.problem(most), label, most, known["F"], options)


def compared(network: Network, most: float, known: dict) -> None:
    """Prices by bus beside those of the reference; one Polyhedron beside the sets."""
    kinds = "sets", "by hand", "with angles"
    problems = {kind: network.problem(most, kind) for kind in kinds}
    at = jnp.asarray(known["x"])
    # At the optimum a line may be at its limit without a price, so beside it, too.
    ours = bx.hypergradient(problems["sets"], at)
    there = {kind: bx.hypergradient(p, 0.99 * at) for kind, p in problems.items()}
    by_bus = dict(zip(network.buses, ours.aux, strict=True))
    wanted = dict(zip(network.buses, known["lmp_all_buses"], strict=True))
    far = lambda a, b: float(jnp.max(jnp.abs(a - b)))
    here, by_hand, angles = (there[kind] for kind in kinds)
    row = dict(
        F=float(ours.value) - known["F"],
        status=bx.status_name(ours.status),
        prices_by_bus=max(abs(float(by_bus[bus]) - wanted[bus]) for bus in by_bus),
        F_by_hand=far(here.value, by_hand.value),
        y_by_hand=max(far(here.lower.y[n], by_hand.lower.y[n]) for n in here.lower.y),
        prices_by_hand=far(here.aux, by_hand.aux),
        gradient_by_hand=far(here.grad, by_hand.grad),
        prices_with_angles=far(here.aux, angles.aux),
        gradient_with_angles=far(here.grad, angles.grad),
        active=[
            name
            for name, on in zip(ours.lower.row_names, ours.lower.active, strict=True)
            if on and name.startswith("lines")
        ],
    )
    print(json.dumps(row), flush=True)


def add_options(parser):
    parser.add_argument("--compare", action="store_true", help="solve nothing")


if __name__ == "__main__":
    main()
