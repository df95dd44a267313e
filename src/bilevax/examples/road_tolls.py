"""
Tolls on a road network
=======================

Drivers choose routes by time and toll; the more drive on a road, the longer it takes.
The city may charge on two roads and wants the least total time on the road. Without
tolls everybody takes the short way through the centre, which is then slow for all.
"""

# %%
# A made-up town of nine junctions, in the TNTP format in which road networks are
# exchanged. For a network of your own name its files; Sioux Falls and others are in the
# Transportation Networks collection, for research.

import importlib.resources

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import scipy.sparse as sp
from matplotlib.colors import Normalize

import bilevax as bx
from bilevax.readers import read_tntp

jax.config.update("jax_enable_x64", True)
folder = importlib.resources.files("bilevax.examples") / "data"
with importlib.resources.as_file(folder) as place:
    files = [place / f"town_{part}.tntp" for part in ("net", "trips", "node")]
    town = read_tntp(*files)
print(
    f"{town.nodes} junctions, {town.links} roads, {town.trips.sum():g} thousand trips"
)

# %%
# The follower's variables are flows by road and destination. At every junction but the
# destination what leaves is what arrives and what begins there. Drivers minimise the
# total delay plus tolls, which makes no route better than the one that is taken
# (Wardrop); a little curvature makes the split by destination unique.

goals = np.flatnonzero(town.trips.sum(0))
rows, begins = [], []
for k, goal in enumerate(goals):
    others = np.arange(town.nodes) != goal
    one = np.eye(len(goals))[k : k + 1]
    rows.append(sp.kron(town.incidence().toarray()[others], one))
    begins.append(town.trips[others, goal])
size = town.links * len(goals)
balance = bx.Polyhedron(A_eq=sp.vstack(rows).toarray(), b_eq=np.concatenate(begins))
flows = bx.Intersection(balance=balance, roads=bx.Box(np.zeros(size), np.inf))

TOLLED = [(4, 5), (2, 5)]
tolled = np.array(
    [
        [(i, j) == pair for pair in TOLLED]
        for i, j in zip(town.tail, town.head, strict=True)
    ],
    float,
)


def on_roads(y):
    return y.reshape(town.links, len(goals)).sum(1)


def drive(x, y):
    v = on_roads(y)
    return town.total_delay(v) + (tolled @ x) @ v + 0.5e-2 * jnp.sum(y**2)


def time_of_all(x, y):
    v = on_roads(y)
    return v @ town.time(v)


problem = bx.Problem(
    time_of_all, drive, flows, domain=bx.Box(jnp.zeros(2), jnp.full(2, 15.0))
)
free = bx.hypergradient(problem, jnp.zeros(2))
solution = bx.solve(problem, bx.DSBLO(), jnp.zeros(2), key=0, num_starts=2)
print(f"total time {free.value:.4f} without tolls, {solution.value:.4f} with", end=" ")
print(dict(zip(TOLLED, np.round(solution.x, 4).tolist(), strict=True)))

# %%
# The multiplier of the balance of a junction is what one more trip from there costs its
# driver, in minutes and tolls.

cost = np.asarray(solution.prices["balance"]).reshape(len(goals), -1)
for k, goal in enumerate(goals):
    others = np.flatnonzero(np.arange(town.nodes) != goal)
    told = ", ".join(f"{i + 1}: {-c:.2f}" for i, c in zip(others, cost[k], strict=True))
    print(f"to {goal + 1} from {told}")

# %%
# Drivers at these tolls, by another solver.

from scipy.optimize import minimize  # noqa: E402

objective = jax.jit(jax.value_and_grad(lambda y: drive(solution.x, y)))
A, b = np.asarray(balance.A_eq), np.asarray(balance.b_eq)
peer = minimize(
    lambda y: [np.asarray(part, float) for part in objective(y)],
    np.asarray(free.lower.y), jac=True, method="SLSQP", bounds=[(0, None)] * size,
    constraints=dict(type="eq", fun=lambda y: A @ y - b, jac=lambda y: A),
    options=dict(ftol=1e-14, maxiter=1000),
)  # fmt: skip
F, reference = solution.value, float(time_of_all(solution.x, peer.x))
print(f"F {F:.8f}, by SciPy's drivers {reference:.8f}")
assert abs(F - reference) < 1e-4 * F

# %%
# Width is flow, colour is flow over capacity, numbers are tolls.


def draw(axes, y, tolls, title):
    v = np.asarray(on_roads(y))
    load, places = v / town.capacity, np.asarray(town.places)
    for a in range(town.links):
        start, end = places[town.tail[a] - 1], places[town.head[a] - 1]
        along = (end - start) / np.linalg.norm(end - start)
        aside = 0.05 * np.array([along[1], -along[0]])
        if v[a] > 1e-6:
            axes.annotate(
                "", end + aside - 0.1 * along, start + aside + 0.1 * along,
                arrowprops=dict(
                    arrowstyle="-|>", linewidth=0.5 + 3 * v[a],
                    color=plt.cm.viridis_r(min(load[a] / 1.6, 1.0)),
                ),
            )  # fmt: skip
        toll = float(tolled[a] @ tolls)
        if toll > 1e-6:
            axes.text(*((start + end) / 2 + 3 * aside), f"{toll:.1f}", color="#b00",
                      bbox=dict(color="white", alpha=0.8, pad=1))  # fmt: skip
    axes.plot(*places.T, "o", color="white", markeredgecolor="black", markersize=14)
    for i, place in enumerate(places):
        axes.text(*place, str(i + 1), ha="center", va="center", fontsize=8)
    axes.set(title=title, aspect="equal", xlim=(-0.3, 2.3), ylim=(-0.3, 2.3))
    axes.axis("off")


figure, axes = plt.subplots(1, 2, figsize=(9, 4.5), layout="constrained")
draw(axes[0], free.lower.y, np.zeros(2), f"no toll: {free.value:.2f}")
draw(axes[1], solution.y, np.asarray(solution.x), f"best tolls: {solution.value:.2f}")
colours = plt.cm.ScalarMappable(Normalize(0, 1.6), "viridis_r")
figure.colorbar(colours, ax=axes, label="flow over capacity", shrink=0.7)
plt.show()

# %%
# For your own network: the files, ``TOLLED`` and the bounds. Thousands of flows are
# fine with sparse rows (leave out ``toarray``); see the page on sparse rows.
