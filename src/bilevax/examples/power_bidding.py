"""
Bidding in a power market
=========================

A company owns two generators and bids above their costs. The market operator clears at
least cost, within the limits of the lines, and every bus gets a price: the multiplier
of its balance. Which mark-ups earn most, and what happens to the prices?
"""

# %%
# The network is the IEEE 30-bus system (Alsac and Stott 1974; power-grid-lib/pglib-opf,
# CC BY 4.0), read from a case of MATPOWER. For your own network name your own file.

import importlib.resources

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

import bilevax as bx
from bilevax.readers import read_matpower

jax.config.update("jax_enable_x64", True)
folder = importlib.resources.files("bilevax.examples") / "data"
with importlib.resources.as_file(folder / "case30_as.m") as file:
    case = read_matpower(file)
assert case.cost is not None
c2, c1, c0 = case.cost.T
OWNED = np.array([1, 2])  # the generators at buses 2 and 5
RATING = 0.75  # of the line limits, so that lines matter

# %%
# Loads answer to prices: an elasticity of -0.2 at 3.4 $/MWh. What a load is worth is
# ``top d - slope d^2 / 2``.

at = np.flatnonzero(case.load)
slope, top = 3.4 / (0.2 * case.load[at]), 6 * 3.4

# %%
# The follower chooses generation ``p``, demand ``d`` and angles, all in one vector. The
# balance of a bus says that demand and what flows away equal generation; written in
# this order its multiplier is the price. Angles are held at zero at the reference bus.

units, loads, buses, lines = map(len, (c2, at, case.buses, case.start))
incidence = np.zeros((lines, buses))
incidence[np.arange(lines), case.start] = 1
incidence[np.arange(lines), case.end] -= 1
flow = case.base * incidence / case.reactance[:, None]
others = np.arange(buses) != case.reference
flow = flow[:, others]
makes = np.eye(buses)[:, case.generator_bus]
takes = np.eye(buses)[:, at]
free = np.full(buses - 1, np.inf)
market = bx.Intersection(
    balance=bx.Polyhedron(
        A_eq=np.c_[-makes, takes, incidence.T @ flow], b_eq=np.zeros(buses)
    ),
    lines=bx.Polyhedron(
        A=np.r_[
            np.c_[np.zeros((lines, units + loads)), flow],
            np.c_[np.zeros((lines, units + loads)), -flow],
        ],
        b=RATING * np.r_[case.limit, case.limit],
    ),
    limits=bx.Box(
        np.r_[case.least, np.zeros(loads), -free],
        np.r_[case.most, 1.5 * case.load[at], free],
    ),
)


def clearing(x, y):
    p, d = y[:units], y[units : units + loads]
    bids = jnp.asarray(c1).at[OWNED].add(x)
    return jnp.sum(c2 * p**2 + bids * p) - jnp.sum(top * d - slope * d**2 / 2)


def loss(x, y, prices):
    p = y[OWNED]
    earned = prices["balance"][case.generator_bus[OWNED]] * p
    return -jnp.sum(earned - c2[OWNED] * p**2 - c1[OWNED] * p)


problem = bx.Problem(
    loss,
    clearing,
    market,
    prices=True,
    domain=bx.Box(jnp.zeros(2), jnp.full(2, 6.0)),
)

# %%
# Truthful bids, then the best ones. The valley where one generator is at its least
# output is flat, so several starts.

truthful = bx.hypergradient(problem, jnp.zeros(2))
solution = bx.solve(problem, bx.DSBLO(), jnp.full(2, 1.0), key=0, num_starts=4)
best = bx.hypergradient(problem, solution.x, throw=False)
before, after = truthful.lower.prices["balance"], best.lower.prices["balance"]
print(f"profit {-truthful.value:.6f} $/h truthful, {-solution.value:.6f} with")
print("mark-ups", np.round(solution.x, 6))
for bus in (1, 2, 5, 8, 30):
    k = int(np.flatnonzero(case.buses == bus)[0])
    print(f"price at bus {bus:>2}: {before[k]:.6f} -> {after[k]:.6f}")

# %%
# The market cleared by another solver, SciPy's, at the best bids, without angles: shift
# factors instead. The price of a bus is then what its load is worth at the margin.

from scipy.optimize import minimize  # noqa: E402

shift = case.shift_factors() @ np.c_[makes, -takes]
limit = RATING * case.limit
balance = np.r_[np.ones(units), -np.ones(loads)]
cost = jax.jit(jax.value_and_grad(lambda y: clearing(solution.x, y)))
peer = minimize(
    lambda y: [np.asarray(part, float) for part in cost(y)],
    np.r_[case.least, 0.7 * case.load[at]], jac=True, method="SLSQP",
    bounds=list(zip(np.r_[case.least, np.zeros(loads)],
                    np.r_[case.most, 1.5 * case.load[at]], strict=True)),
    constraints=[
        dict(type="eq", fun=lambda y: balance @ y, jac=lambda y: balance),
        dict(type="ineq", fun=lambda y: np.r_[limit - shift @ y, limit + shift @ y],
             jac=lambda y: np.r_[-shift, shift]),
    ],
    options=dict(ftol=1e-15, maxiter=1000),
)  # fmt: skip
p, d = peer.x[:units], peer.x[units:]
price = {int(bus): top - slope[i] * d[i] for i, bus in enumerate(at)}
paid = np.array([price[int(case.generator_bus[g])] for g in OWNED])
reference = -np.sum(paid * p[OWNED] - c2[OWNED] * p[OWNED] ** 2 - c1[OWNED] * p[OWNED])
F = solution.value
print(f"F {F:.6f}, by SciPy's market {reference:.6f}")
assert abs(F - reference) < 1e-3

# %%

figure, axes = plt.subplots(1, 2, figsize=(10, 3.2), layout="constrained")
axes[0].bar(case.buses - 0.2, before, 0.4, label="truthful")
axes[0].bar(case.buses + 0.2, after, 0.4, label="strategic")
axes[0].set(xlabel="bus", ylabel="price, $/MWh")
axes[0].legend()
marks = jnp.linspace(0, 6, 121)
curve = jax.vmap(
    lambda m: bx.hypergradient(problem, solution.x.at[0].set(m), throw=False)
)(marks)
axes[1].plot(marks, -curve.value)
axes[1].plot(solution.x[0], -solution.value, "*", markersize=12)
axes[1].set(xlabel="mark-up at bus 2, $/MWh", ylabel="profit, $/h")
plt.show()

# %%
# For your own market: the file, ``OWNED``, and what loads are worth. Cases with linear
# costs need a little curvature, or loads that answer. Several companies that all bid
# strategically are several leaders, which bilevax does not solve.
