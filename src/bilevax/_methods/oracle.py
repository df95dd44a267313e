"""The gradient of `F` where a method asks for it, or as near to there as it exists."""

from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, PyTree

from .._implicit.feasible import moves, onto_allowed
from .._implicit.hypergradient import Evaluation, exact
from .._lower.base import LowerSolution
from .._problem.problem import Problem
from .._programs.arrays import xp
from .._programs.control import (
    in_stages,
    leave_out,
    loop,
    on_host,
    on_usual_path,
    run_if,
)
from .._programs.modules import Plain, made
from .._status import Status, code_of, status_code
from .base import tree_norm


class Oracle(Plain):
    """`e` was taken at `at`; `ahead` is where `x` may go; both allowed points."""

    e: Evaluation
    at: PyTree[Array]
    ahead: PyTree[Array]
    recovered: Bool[Array, ""]

    @property
    def usable(self) -> Bool[Array, ""]:
        """Whether there is a gradient to step along."""
        return xp.isfinite(self.e.value) & xp.isfinite(tree_norm(self.e.grad))


def gradient_at(
    problem: Problem,
    at: PyTree[Array],
    ahead: PyTree[Array],
    warm: LowerSolution,
    evaluate: Callable[..., Evaluation] | None = None,
) -> Oracle:
    """The gradient at `at`, or at the nearest allowed point to `ahead` if none exists.

    `ahead` is the next iterate, with `at` on the way to it; a method that takes the
    gradient at its iterate passes that twice. The allowed set is convex, so both ends
    of a segment being allowed, rounding and the first `x` alone can break the rule.
    `evaluate(x, warm)` replaces the exact hypergradient by another one.
    """
    solve = exact(problem) if evaluate is None else evaluate
    if on_usual_path() or not moves(problem):
        e = solve(at, warm)
        leave_out(code_of(e.status) == code_of(Status.infeasible))
        return made(Oracle, e=e, at=at, ahead=ahead, recovered=xp.asarray(False))

    def attempt(carry):
        e, at, ahead, tries, _ = carry
        at, ahead = run_if(
            tries > 0,
            lambda _: (lambda x: (x, x))(onto_allowed(problem, ahead)),
            (at, ahead),
        )
        e = solve(at, e.lower)
        empty = e.status == Status.infeasible
        return e, at, ahead, tries + 1, empty & (tries < 1)

    if in_stages():
        e = solve(at, warm)
        if status_code(e.status) != status_code(Status.infeasible):
            return made(Oracle, e=e, at=at, ahead=ahead, recovered=np.asarray(False))
        there = on_host(onto_allowed(problem, ahead))
        e = solve(there, warm)
        return made(Oracle, e=e, at=there, ahead=there, recovered=np.asarray(True))
    blank = eqx.filter_eval_shape(solve, at, warm)
    blank = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), blank)
    blank = eqx.tree_at(lambda e: e.lower, blank, warm)
    e, at, ahead, tries, _ = loop(
        lambda c: c[-1], attempt, (blank, at, ahead, 0, jnp.asarray(True)), limit=2
    )
    return Oracle(e, at, ahead, jnp.asarray(tries > 1))
