"""
Cleaning labels
===============

Thirty of a hundred training labels are wrong, and nobody knows which. A small clean set
decides how much each training sample counts: the leader chooses a weight between 0 and
1 for each, the follower fits a classifier with these weights.
"""

# %%
# The data are drawn, so that the page needs no download: two clouds of points in the
# plane.

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

import bilevax as bx

jax.config.update("jax_enable_x64", True)
numbers = np.random.default_rng(1)


def cloud(count):
    label = np.where(np.arange(count) % 2, 1.0, -1.0)
    points = numbers.normal(size=(count, 2)) + np.outer(label, [1.3, 0.7])
    return np.c_[points, np.ones(count)], label


points, truth = cloud(100)
wrong = np.sort(numbers.permutation(100)[:30])
label = truth.copy()
label[wrong] *= -1
clean_points, clean_label = cloud(60)
test_points, test_label = cloud(2000)

# %%
# The follower: logistic regression, its coefficients held in a box. The leader: the
# loss on the clean points.


def fit(x, w):
    losses = jnp.logaddexp(0, -label * (points @ w))
    return jnp.mean(x * losses) + 0.005 * jnp.sum(w**2)


def clean_loss(x, w):
    return jnp.mean(jnp.logaddexp(0, -clean_label * (clean_points @ w)))


problem = bx.Problem(
    clean_loss,
    fit,
    bx.Box(jnp.full(3, -3.0), jnp.full(3, 3.0)),
    domain=bx.Box(jnp.zeros(100), jnp.ones(100)),
)
solution = bx.solve(problem, bx.DSBLO(), jnp.full(100, 0.5), key=0, num_starts=1)
weights = np.asarray(solution.x)
start = float(bx.hypergradient(problem, jnp.ones(100)).value)
print(
    f"loss on clean points: {start:.4f} with all weights one, {solution.value:.4f} now"
)


def accuracy(w):
    return np.mean(np.sign(test_points @ np.asarray(w)) == test_label)


everything = bx.hypergradient(problem, jnp.ones(100)).lower.y
print(
    f"test accuracy: {accuracy(everything):.3f} before, {accuracy(solution.y):.3f} now"
)
print(f"median weight: wrong {np.median(weights[wrong]):.2f}, "
      f"right {np.median(np.delete(weights, wrong)):.2f}")  # fmt: skip

# %%
# The follower's answer, checked by SciPy.

from scipy.optimize import minimize  # noqa: E402

objective = jax.jit(jax.value_and_grad(lambda w: fit(solution.x, w)))
peer = minimize(
    lambda w: [np.asarray(part, float) for part in objective(w)],
    np.zeros(3), jac=True, bounds=[(-3, 3)] * 3, options=dict(ftol=1e-15, gtol=1e-12),
)  # fmt: skip
print(f"largest difference {np.max(np.abs(peer.x - solution.y)):.1e}")
F, reference = solution.value, float(clean_loss(solution.x, peer.x))
assert abs(F - reference) < 1e-6

# %%
# Which samples count.

figure, axes = plt.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
right = np.delete(np.arange(100), wrong)
axes[0].hist([weights[right], weights[wrong]], bins=10, label=["right", "wrong"])
axes[0].set(xlabel="weight", ylabel="samples")
axes[0].legend()
axes[1].scatter(*points[:, :2].T, c=label, s=8 + 60 * weights, cmap="coolwarm")
axes[1].set(title="size: weight, colour: given label")
plt.show()

# %%
# For your own data: ``points``, ``label`` and the clean set. With thousands of samples
# draw minibatches of the clean set, :meth:`bilevax.StochasticProblem.from_data`. The
# weights are not unique where samples say the same; judge by the loss.
