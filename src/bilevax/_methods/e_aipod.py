"""E-AiPOD: AiPOD that projects only now and then (Xiao et al. 2023)."""

import jax
import jax.numpy as jnp
import jax.random as jr
from jax.flatten_util import ravel_pytree

from .._arguments import check_fields
from .._implicit.feasible import onto_domain
from .aipod import (
    AiPOD,
    Estimator,
    _keys,
    advanced,
    first_state,
    lower_gradient,
    onto_rows,
    upper_step,
)
from .base import Number, draws, number, tree_step


class EAiPOD(AiPOD):
    """AiPOD whose inner steps project with probability `p` only.

    A control variate `r`, zero at the start and never reset, stands in for the pull of
    the rows. Each of the `S` inner steps takes `z = y - beta (grad_y g - r)` and then,

        with probability p:  y = Q(z - (beta / p) r),   r = r + (p / beta) (y - z)
        otherwise:           y = z

    Then `w` is computed once, `x` makes `T` gradient steps with it, and is projected on
    its domain once. With `p = 1` and `T = 1` this is AiPOD.

    - `probability`: `p`.
    - `upper_steps`: `T`.
    - `lower_step`: `beta`; by default one over the largest curvature of `g` in all
      directions, since steps leave the rows.

    The other fields, the paper, the deviations and the reconstruction are those of
    `AiPOD`. Between projections `y` breaks its rows; the values a run reports come from
    an exact lower level all the same.
    """

    probability: Number = number(0.3)
    upper_steps: int = 1

    def __check_init__(self):
        check_fields(self)
        if self.upper_steps < 1:
            raise ValueError(
                f"`upper_steps` must be at least 1; got {self.upper_steps}."
            )

    def init(self, problem, x, lower, scales, *, key):
        return first_state(self, problem, x, lower, scales, on_free=False)

    def step(self, problem, state, *, step, num_steps, key):
        keys = draws(key)
        y_keys, v_key = _keys(keys.sample, self.lower_steps)
        coins = jr.bernoulli(keys.segment, self.probability, (self.lower_steps,))
        rows = problem.draw(v_key).constraints
        beta, p = state.lower_step, self.probability
        y, unravel = ravel_pytree(state.y)
        control = ravel_pytree(state.control)[0]

        def descend(carry, draw):
            y, r = carry
            key, projects = draw
            now = problem.draw(key)
            force = ravel_pytree(lower_gradient(now, state.x, unravel(y)))[0]
            z = y - beta * (force - r)
            on_rows = onto_rows(rows, state.free, state.x, z - beta / p * r)
            y = jnp.where(projects, on_rows, z)
            return (y, r + p / beta * (y - z)), None

        (y, control), _ = jax.lax.scan(descend, (y, control), (y_keys, coins))
        y, control = unravel(y), unravel(control)
        v = Estimator.at(self, problem, state, state.x, y, v_key)
        eta = upper_step(self, state, step, num_steps)

        def climb_down(x, _):
            value, grad = v(x)
            return tree_step(x, -eta, grad), (value, grad)

        x, (values, grads) = jax.lax.scan(
            climb_down, state.x, None, length=self.upper_steps
        )
        x = onto_domain(v.upper, x)
        value, grad = jax.tree.map(lambda leaf: leaf[0], (values, grads))
        return advanced(
            self, problem, state, x, y, control, value, grad, v,
            projections=jnp.sum(coins), upper_steps=self.upper_steps,
        )  # fmt: skip
