"""One lower-level solver for many followers: one batch, or a batch after the other."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from .._problem.followers import Followers
from .._programs.modules import with_fields
from .base import AbstractLowerSolver, LowerSolution


class EachFollower(AbstractLowerSolver):
    """`solver` for every follower; solutions have a leading axis.

    Where followers are solved a batch after the other their factors are forgotten.
    """

    solver: AbstractLowerSolver

    def __call__(self, problem: Any, x, warm=None):
        def solve(part: Followers, warm):
            def one(d, tilt, warm):
                return self.solver(part.follower(d, tilt).localised(x), x, warm)

            return jax.vmap(one)(part.data, part.tilt, warm)

        def forgetful(part, warm):
            return without_factor(solve(part, warm))

        if is_whole(problem):
            return solve(problem, warm)
        return in_batches(forgetful, problem, warm)

    def inside(self, problem: Any, x, y):
        def one(d, tilt, y):
            here = problem.follower(d, tilt).localised(x)
            return self.solver.inside(here, x, y)

        return jax.vmap(one)(problem.data, problem.tilt, y)


def is_whole(problem: Followers) -> bool:
    """Whether all followers are one batch."""
    return problem.batch is None or problem.batch >= len(problem)


def without_factor(lower: LowerSolution) -> LowerSolution:
    return with_fields(lower, factor=None)


def in_batches(function: Callable, problem: Followers, *others: PyTree) -> Any:
    """`function(followers, *others)`, a batch of followers after the other.

    What it returns has a leading axis. The last batch is filled up with its last
    follower, so that all are computed by one program.
    """
    count, size = len(problem), problem.batch
    assert size is not None
    index = jnp.arange(-(-count // size) * size).reshape(-1, size)

    def part(rows):
        rows = jnp.minimum(rows, count - 1)
        mine = jax.tree.map(lambda leaf: leaf[rows], others)
        return function(problem.chosen(rows), *mine)

    found = jax.lax.map(part, index)
    return jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:])[:count], found)
