"""Sign steps over a box: the attack of adversarial training as its authors run it."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float, Int

from ..._lower.base import AbstractLowerSolver, all_finite
from ..._lower.closed_form import box_solution, checked_box


class SignedSteps(AbstractLowerSolver):
    """`y <- P(y - size * sign(grad_y g))` from `y0`, a fixed number of times.

    Not a solver to rely on: it stops somewhere in the box, and says so by an `error`
    that is infinite. It is what Madry et al. (2018), Zhang et al. (2019) and Wong et
    al. (2020) train with.
    """

    steps: Int[Array, ""] = eqx.field(converter=jnp.asarray)
    size: Float[Array, ""] = eqx.field(converter=lambda s: jnp.asarray(s, float))

    def __call__(self, problem, x, warm=None):
        start, unravel = ravel_pytree(problem.y0)
        box = checked_box(problem, "SignedSteps")
        size = self.size.astype(start.dtype)

        def step(_, carry):
            _, y = carry
            gradient = jax.grad(problem.lower_value, argnums=1)(x, unravel(y))
            ahead = y - size * jnp.sign(ravel_pytree(gradient)[0])
            return ahead, box.project(ahead)

        ahead, _ = jax.lax.fori_loop(0, self.steps, step, (start, start))
        solution = box_solution(box, ahead, 1 / size, unravel)
        unknown = jnp.full_like(solution.error, jnp.inf)
        return eqx.tree_at(
            lambda s: (s.error, s.kkt_residual, s.iterations.passes),
            solution,
            (unknown, unknown, self.steps),
        )

    def inside(self, problem, x, y):
        # The loss of a classifier is defined everywhere.
        return all_finite(y)
