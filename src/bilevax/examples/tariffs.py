"""
A tariff for many households
============================

A retailer posts a price for each of six parts of the day. Every household moves its
load to cheaper hours as far as that is worth the trouble, needs a given amount over the
day, and has a fuse. The retailer's profit is the mean over the households; each is a
follower of its own.
"""

# %%
# Three hundred households, drawn: what they would use at equal prices, how much they
# mind changes, and their fuses.

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

import bilevax as bx

jax.config.update("jax_enable_x64", True)
numbers = np.random.default_rng(0)
HOUSEHOLDS, HOURS = 300, 6
shape = np.array([0.6, 0.9, 1.0, 1.1, 1.6, 0.8])
base = shape * numbers.uniform(0.6, 1.4, size=(HOUSEHOLDS, HOURS))
data = dict(
    base=base,
    stiffness=numbers.uniform(20, 60, size=HOUSEHOLDS),
    fuse=1.15 * base.max(1),
)
wholesale = np.array([18.0, 25.0, 30.0, 34.0, 55.0, 28.0])

# %%
# ``instance`` is the problem of one household; :class:`bilevax.Followers` does the
# rest.


def household(d):
    def discomfort(x, y):
        return x @ y + 0.5 * d["stiffness"] * jnp.sum((y - d["base"]) ** 2)

    def loss(x, y):
        return -(x - wholesale) @ y

    rows = bx.Polyhedron(
        A=jnp.r_[jnp.eye(HOURS), -jnp.eye(HOURS)],
        b=jnp.r_[jnp.full(HOURS, d["fuse"]), -0.5 * d["base"]],
        A_eq=jnp.ones((1, HOURS)),
        b_eq=jnp.sum(d["base"])[None],
    )
    return bx.Problem(loss, discomfort, rows)


# The regulator caps the mean price at 45.
cap = bx.Polyhedron(
    A=np.r_[np.full((1, HOURS), 1 / HOURS), np.eye(HOURS), -np.eye(HOURS)],
    b=np.r_[45.0, np.full(HOURS, 90.0), np.full(HOURS, -10.0)],
)
followers = bx.Followers(household, data, domain=cap)
flat = jnp.full(HOURS, 45.0)
before = bx.hypergradient(followers, flat)
print(f"profit with one price: {-before.value:.4f} per household and day")

# %%
# Steps see 50 households each, all of them once per epoch; the polish sees all.

solution = bx.solve(
    followers.minibatch(50), bx.DSBLO(), flat, key=0, num_steps=100, num_starts=1
)
print("tariff", np.round(solution.x, 2))
print(f"profit {-solution.value:.4f}")
after = bx.hypergradient(followers, solution.x, throw=False)
assert after.value < before.value

# %%
# One household, checked by SciPy; and the price of its daily need, the multiplier of
# its equality row.

from scipy.optimize import minimize  # noqa: E402

one, prices = 7, np.asarray(solution.x)
peer = minimize(
    lambda y: prices @ y + 0.5 * data["stiffness"][one] * np.sum((y - base[one]) ** 2),
    base[one], method="SLSQP", bounds=[(0.5 * b, data["fuse"][one]) for b in base[one]],
    constraints=dict(type="eq", fun=lambda y: y.sum() - base[one].sum()),
    options=dict(ftol=1e-14, maxiter=300),
)  # fmt: skip
print(f"largest difference {np.max(np.abs(peer.x - after.lower.y[one])):.1e}")
need = -float(after.lower.multipliers[one, -1])
print(f"another unit of need costs household {one}: {need:.3f}")
F, reference = float(after.each.value[one]), -(prices - wholesale) @ peer.x
assert abs(F - reference) < 1e-4

# %%

hours = np.arange(HOURS)
figure, axes = plt.subplots(1, 2, figsize=(9, 3), layout="constrained")
axes[0].step(hours, wholesale, where="mid", label="wholesale")
axes[0].step(hours, solution.x, where="mid", label="tariff")
axes[0].set(xlabel="part of the day", ylabel="price")
axes[0].legend()
axes[1].bar(hours - 0.2, np.mean(before.lower.y, 0), 0.4, label="one price")
axes[1].bar(hours + 0.2, np.mean(after.lower.y, 0), 0.4, label="tariff")
axes[1].set(xlabel="part of the day", ylabel="mean load")
axes[1].legend()
plt.show()

# %%
# For your own households: the columns of ``data``, one row each; households of
# different shapes go through ``bx.Followers.padded``. Where they share a feeder they
# see each other, and are one lower level, not many.
