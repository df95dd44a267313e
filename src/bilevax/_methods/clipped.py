"""The clipped online-to-nonconvex loop that several methods share."""

import jax
from jaxtyping import Array, Bool, Float, Int, PyTree

from .._implicit.feasible import onto_domain
from .._problem.problem import Problem
from .._programs.arrays import xp
from .._programs.modules import Plain, made
from .base import tree_norm, tree_step


class Drift(Plain):
    """The displacement of the next step, and means of points over blocks of steps.

    With a displacement `d`, clip `D`, step `eta` and `s` uniform in [0, 1]:

        z  = x + s d,   x+ = x + d,   d+ = clip_D(d - eta grad(z))

    `mean` is the mean of `z` over the last complete block, the output of the theory.
    """

    displacement: PyTree[Array]
    total: PyTree[Array]
    count: Int[Array, ""]
    mean: PyTree[Array]

    def propose(self, problem: Problem, x: PyTree[Array], share):
        """`z` and `x+`, both in the domain."""
        ahead = onto_domain(problem, tree_step(x, 1, self.displacement))
        between = jax.tree.map(lambda a, b: a + share * (b - a), x, ahead)
        return between, ahead

    def update(
        self,
        moved: PyTree[Array],
        at: PyTree[Array],
        grad: PyTree[Array],
        usable: Bool[Array, ""],
        eta: Float[Array, ""],
        clip: Float[Array, ""],
        block: int,
    ) -> "Drift":
        """After a step that really went along `moved`, with `grad` taken at `at`.

        What a projection has cut off a displacement does not come back, and after a
        failure the next step stands still.
        """
        new = jax.tree.map(
            lambda d, g: xp.where(usable, d - eta * g, 0 * d), moved, grad
        )
        norm = tree_norm(new)
        shrink = xp.where(norm > clip, clip / xp.where(norm > 0, norm, 1), 1)
        total = tree_step(self.total, 1, at)
        count = self.count + 1
        full = count >= block
        mean = jax.tree.map(lambda t, m: xp.where(full, t / count, m), total, self.mean)
        return made(
            Drift,
            displacement=jax.tree.map(lambda d: shrink * d, new),
            total=jax.tree.map(lambda t: xp.where(full, 0 * t, t), total),
            count=xp.where(full, 0, count),
            mean=mean,
        )


def standing_still(x: PyTree[Array]) -> Drift:
    """The drift before the first step."""
    zeros = jax.tree.map(xp.zeros_like, x)
    return Drift(zeros, zeros, xp.asarray(0), x)
