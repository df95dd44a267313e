"""An equality-constrained problem with a closed form, and runs that keep iterates."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np

import bilevax as bx
from bilevax._driver.run import start
from bilevax._implicit.hypergradient import hypergradient
from bilevax._methods.base import Scales


class NoisyUpper(eqx.Module):
    """`|x - 1|^2 / 2 + |y - 2|^2 / 2`, tilted."""

    shift: jax.Array

    def __call__(self, x, y):
        square = 0.5 * jnp.sum((x - 1) ** 2) + 0.5 * jnp.sum((y - 2) ** 2)
        return square + self.shift @ jnp.concatenate([x, y])


class NoisyLower(eqx.Module):
    """`|y - x|^2 / 2`, tilted."""

    shift: jax.Array

    def __call__(self, x, y):
        return 0.5 * jnp.sum((y - x) ** 2) + self.shift @ y


class Affine:
    """T3: `A y + H x = 0` with uniform data; `x*` solves a linear system."""

    def __init__(self, seed: int = 0, n: int = 10, rows: int = 4):
        rng = np.random.default_rng(seed)
        A, H = rng.uniform(size=(rows, n)), rng.uniform(size=(rows, n))
        self.n = n
        self.rows = bx.Polyhedron(A_eq=A, B_eq=H, b_eq=np.zeros(rows))
        self.problem = self.instance(np.zeros(3 * n))
        inverse = np.linalg.pinv(A)
        J = np.eye(n) - inverse @ A - inverse @ H
        ones = np.ones(n)
        self.best = np.linalg.solve(np.eye(n) + J.T @ J, ones + 2 * J.T @ ones)

    def instance(self, noise) -> bx.Problem:
        noise = jnp.asarray(noise)
        upper, lower = noise[: 2 * self.n], noise[2 * self.n :]
        return bx.Problem(NoisyUpper(upper), NoisyLower(lower), self.rows)

    def noisy(self, deviation: float) -> bx.StochasticProblem:
        """Normal noise on every gradient, of `f` and of `g`."""
        sample = lambda key: deviation * jr.normal(key, (3 * self.n,))
        return bx.StochasticProblem(sample, self.instance, self.problem)

    def error(self, x):
        """The distance to `x*`, relative."""
        gap = np.linalg.norm(np.asarray(x) - self.best, axis=-1)
        return gap / np.linalg.norm(self.best)


def states(problem, method, x0, num_steps, seeds, keep=lambda state: state.x):
    """What `keep` takes of the states of one run per seed, and their records."""
    view = getattr(problem, "population", None) or problem
    x = jnp.asarray(x0)
    e = hypergradient(view, x)
    scales = Scales(*(jnp.asarray(1.0) for _ in range(3)))
    first = start(view, method, x, e, scales, jr.key(0))
    return _states(problem, method, first, num_steps, jnp.arange(seeds), keep)


@eqx.filter_jit
def _states(problem, method, first, num_steps, seeds, keep):
    arrays, rest = eqx.partition(first, eqx.is_array)

    def run(seed):
        def step(arrays, t):
            state, record = method.step(
                problem, eqx.combine(arrays, rest), step=t,
                num_steps=jnp.asarray(num_steps), key=jr.fold_in(jr.key(seed), t),
            )  # fmt: skip
            return eqx.filter(state, eqx.is_array), (keep(state), record)

        return jax.lax.scan(step, arrays, jnp.arange(num_steps))[1]

    return jax.vmap(run)(seeds)
