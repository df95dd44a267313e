"""The step `x - m / (gamma1 |m| + gamma2)` that DS-BLO and stochastic INGD share."""

import operator
from collections.abc import Callable

import jax
from jaxtyping import Array, PyTree

from .._implicit.feasible import onto_domain
from .._problem.problem import Problem
from .._programs.arrays import xp
from .._programs.modules import Plain
from .base import (
    Number,
    Scales,
    at_step,
    falling_steps,
    tree_norm,
    tree_step,
)


class NormalisedStep(Plain):
    """With explicit constants, or with lengths that fall along the run."""

    gamma1: Number | None
    gamma2: Number | Callable | None
    first_step: Number
    decay: Number | None

    def length(self, m_norm, scales: Scales, step, num_steps):
        """`1 / (gamma1 |m| + gamma2)`."""
        if self.gamma1 is not None:
            return 1 / (self.gamma1 * m_norm + at_step(self.gamma2, step))
        reach = self.reach(scales, step, num_steps)
        # gamma1 = 1 / reach; gamma2 small, so that steps stay as long as `reach` until
        # the momentum has all but died.
        return reach / (m_norm + 1e-4 * scales.slope + xp.finfo(m_norm.dtype).tiny)

    def reach(self, scales: Scales, step, num_steps):
        """The length of a step without explicit constants."""
        first, decay = self.first_step, self.decay
        return scales.length * falling_steps(first, decay, scales, step, num_steps)

    def ahead(
        self, problem: Problem, x: PyTree[Array], m: PyTree[Array], length
    ) -> PyTree[Array]:
        """`P(x - length m)`.

        Along the boundary of a domain most of the momentum may point outwards, and a
        step of the right length would hardly move `x`. Without explicit constants such
        a step is stretched, so that what is left of it has the wanted length.
        """
        move = lambda length: onto_domain(problem, tree_step(x, -length, m))
        first = move(length)
        if problem.domain is None or self.gamma1 is not None:
            return first
        left = tree_norm(jax.tree.map(operator.sub, first, x))
        want = length * tree_norm(m)
        stretch = want / xp.maximum(left, 1e-3 * want + xp.finfo(want.dtype).tiny)
        return move(length * xp.maximum(stretch, 1))
