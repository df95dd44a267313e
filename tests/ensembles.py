"""Many runs of one method at once, for statements about averages."""

from dataclasses import dataclass
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np

import bilevax as bx
from bilevax._methods.base import Scales

from . import zoo


@dataclass
class Ensemble:
    """Per run: the last state, the mean of a measure over iterates, and work.

    `busy` counts the steps that took a gradient.
    """

    state: Any
    mean: np.ndarray
    gradients: np.ndarray
    busy: np.ndarray


def ensemble(problem, method, x0, count, num_steps, measure=None) -> Ensemble:
    """`count` runs with explicit constants (all scales are one)."""
    view = problem.draw(jr.key(0))
    lower = bx.hypergradient(view, x0, throw=False).lower
    keys = jr.split(jr.key(0), count)
    num_steps = jnp.asarray(num_steps)
    state, *rest = _runs(problem, view, method, x0, lower, keys, num_steps, measure)
    return Ensemble(state, *map(np.asarray, rest))


@eqx.filter_jit
def _runs(problem, view, method, x0, lower, keys, num_steps, measure):
    one = jnp.ones(())
    measure = measure or (lambda x: jnp.zeros(()))

    def run(key):
        state = method.init(view, x0, lower, Scales(one, one, one), key=key)

        def body(t, carry):
            state, total, gradients, busy = carry
            state, record = method.step(
                problem, state, step=t, num_steps=num_steps, key=jr.fold_in(key, t)
            )
            taken = record.upper_gradients
            total = total + measure(state.x)
            return state, total, gradients + taken, busy + (taken > 0)

        start = (state, measure(x0), 0, 0)
        state, total, gradients, busy = jax.lax.fori_loop(0, num_steps, body, start)
        return state, total / (num_steps + 1), gradients, busy

    return jax.vmap(run)(keys)


class Noise(eqx.Module):
    """Normal with deviation 0.1."""

    def __call__(self, key):
        return 0.1 * jr.normal(key)


class NoisyKink(eqx.Module):
    noise: jax.Array

    def __call__(self, x, y):
        return x[0] ** 2 / 4 + x[0] / 2 - y[0] + self.noise * x[0]


def noisy_kink(noise) -> bx.Problem:
    """The analytic kink on [-5, 5], with `noise` added to its gradient."""
    rows = bx.Polyhedron(A=np.ones((1, 1)), b=np.zeros(1))
    return bx.Problem(NoisyKink(noise), zoo.Clipped(), rows, domain=interval(-5, 5))


class Still(eqx.Module):
    """A lower level that does nothing: `y* = 0`."""

    def __call__(self, x, y):
        return 0.5 * jnp.sum(y**2)


class Weighted(eqx.Module):
    weights: jax.Array

    def __call__(self, x, y):
        return jnp.sum(self.weights * jnp.abs(x))


def weighted_l1() -> bx.Problem:
    """`sum_i (i / 10) |x_i|` in ten dimensions."""
    return bx.Problem(Weighted(jnp.arange(1, 11) / 10), Still(), y0=np.zeros(1))


def interval(low, high) -> bx.Box:
    return bx.Box(np.array([float(low)]), np.array([float(high)]))
