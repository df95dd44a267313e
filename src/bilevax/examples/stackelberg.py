"""
A production game
=================

Two firms sell the same good. The leader chooses its output first; the follower sees it
and answers with its own, up to what its plant can make. This is Stackelberg's game of
1934, and it has a closed form, so it is a good place to begin: every number can be
checked by hand.
"""

# %%
# The price falls with what both bring to the market, ``price = 12 - x - y``. Making a
# unit costs the leader 2 and the follower 3; the follower's plant makes at most 2.5.

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

import bilevax as bx

jax.config.update("jax_enable_x64", True)
DEMAND, OWN_COST, COST, PLANT = 12.0, 2.0, 3.0, 2.5


def profit(x, y):
    """The leader minimises minus its profit."""
    return -jnp.sum((DEMAND - x - y - OWN_COST) * x)


def rival(x, y):
    """The follower minimises minus its own."""
    return -jnp.sum((DEMAND - x - y - COST) * y)


problem = bx.Problem(
    profit,
    rival,
    bx.Box(jnp.zeros(1), jnp.array([PLANT])),
    domain=bx.Box(jnp.zeros(1), jnp.array([DEMAND])),
)
solution = bx.solve(problem, bx.DSBLO(), jnp.array([1.0]), key=0, num_starts=4)
print(f"leader {solution.x[0]:.6f}, follower {solution.y[0]:.6f}")
print(f"profit {-solution.value:.6f}")

# %%
# By hand: unconstrained, the follower answers ``y = (9 - x) / 2``, held between 0 and
# 2.5. While the plant is full (``x <= 4``) the leader earns ``(7.5 - x) x``; after that
# ``(5.5 - x / 2) x``, which is best at ``x = 5.5``: 15.125. Above ``x = 9`` the
# follower is gone and the leader earns ``(10 - x) x``, no more than 9.

F, reference = solution.value, -(5.5 - 5.5 / 2) * 5.5
print(f"closed form {-reference:.6f}, difference {abs(F - reference):.1e}")
assert abs(F - reference) < 1e-8

# %%
# What the leader earns has a kink wherever the follower meets a limit. The multiplier
# of the plant's limit is what one more unit of capacity would be worth to the follower.

xs = np.linspace(0, 12, 241)
curve = jax.vmap(lambda x: bx.hypergradient(problem, x[None], throw=False))(xs)
figure, axes = plt.subplots(1, 3, figsize=(10, 3), layout="constrained")
axes[0].plot(xs, -curve.value)
axes[0].plot(solution.x, -solution.value, "*", markersize=12)
axes[0].set(xlabel="leader's output", title="leader's profit")
axes[1].plot(xs, curve.lower.y[:, 0])
axes[1].set(xlabel="leader's output", title="follower's output")
axes[2].plot(xs, curve.lower.multipliers[:, 1])
axes[2].set(xlabel="leader's output", title="worth of the plant")
plt.show()

# %%
# For your own game: change the two functions. Several products are vectors; shared
# resources of the follower are rows of a :class:`bilevax.Polyhedron`. Several *leaders*
# are another problem, which bilevax does not solve.
