"""
A budget for coefficients
=========================

The lasso with a budget: the follower fits a linear model whose coefficients may have a
total size of at most ``x[0]``; the leader chooses that budget, and a ridge, by the
error on other data. The budget is the right side of a row, so its multiplier is a
price: what one more unit of budget would save.
"""

# %%
# Drawn data: 20 features, of which 4 matter.

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

import bilevax as bx

jax.config.update("jax_enable_x64", True)
numbers = np.random.default_rng(3)
FEATURES = 20
truth = np.zeros(FEATURES)
truth[:4] = [1.5, -1.0, 0.7, 0.4]


def draw(count):
    inputs = numbers.normal(size=(count, FEATURES))
    return inputs, inputs @ truth + 0.8 * numbers.normal(size=count)


inputs, target = draw(40)
other_inputs, other_target = draw(40)

# %%
# Absolute values are two parts, ``w = u - v`` with ``u, v >= 0``: then the budget is
# one row.


def split(y):
    return y[:FEATURES] - y[FEATURES:]


def fit(x, y):
    error = jnp.mean((inputs @ split(y) - target) ** 2)
    return 0.5 * error + 0.5 * 10.0 ** x[1] * jnp.sum(y**2)


def other_error(x, y):
    return jnp.mean((other_inputs @ split(y) - other_target) ** 2)


size = 2 * FEATURES
rows = bx.Polyhedron(
    A=np.r_[np.ones((1, size)), -np.eye(size)],
    B=np.r_[[[-1.0, 0.0]], np.zeros((size, 2))],  # sum y - x[0] <= 0
    b=np.zeros(size + 1),
)
domain = bx.Box(jnp.array([0.1, -4.0]), jnp.array([8.0, 1.0]))
problem = bx.Problem(other_error, fit, rows, domain=domain)
solution = bx.solve(problem, bx.DSBLO(), jnp.array([1.0, -1.0]), key=0, num_starts=4)
budget, ridge = np.asarray(solution.x)
coefficients = np.asarray(split(solution.y))
e = bx.hypergradient(problem, solution.x, throw=False)
print(f"budget {budget:.4f}, ridge 10^{ridge:.3f}, error {solution.value:.6f}")
print(f"price of the budget {e.lower.multipliers[0]:.4f}")
print("coefficients that are not zero:", np.flatnonzero(np.abs(coefficients) > 1e-9))

# %%
# The follower's answer, checked by another solver.

from scipy.optimize import minimize  # noqa: E402

objective = jax.jit(jax.value_and_grad(lambda y: fit(solution.x, y)))
peer = minimize(
    lambda y: [np.asarray(part, float) for part in objective(y)],
    np.full(size, 0.01), jac=True, bounds=[(0, None)] * size, method="SLSQP",
    constraints=dict(type="ineq", fun=lambda y: budget - y.sum()),
    options=dict(ftol=1e-14, maxiter=500),
)  # fmt: skip
difference = float(np.max(np.abs(split(peer.x) - coefficients)))
print(f"largest difference {difference:.1e}")
F, reference = solution.value, float(other_error(solution.x, peer.x))
assert abs(F - reference) < 1e-6

# %%
# Coefficients along the budget, and the error above: it has a kink wherever a
# coefficient enters or leaves.

budgets = np.linspace(0.1, 6, 120)
path = jax.vmap(
    lambda b: bx.hypergradient(problem, jnp.array([b, ridge]), throw=False)
)(jnp.asarray(budgets))
figure, axes = plt.subplots(2, 1, figsize=(7, 5), sharex=True, layout="constrained")
axes[0].plot(budgets, path.value)
axes[0].plot(budget, solution.value, "*", markersize=12)
axes[0].set(ylabel="error on other data")
axes[1].plot(budgets, path.lower.y[:, :FEATURES] - path.lower.y[:, FEATURES:])
axes[1].axvline(budget, color="grey", linewidth=0.8)
axes[1].set(xlabel="budget", ylabel="coefficients")
plt.show()

# %%
# For your own data: ``inputs`` and ``target``. Several groups of features get several
# ridges; standardise the features first, so that one budget is fair to all.
