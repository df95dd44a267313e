"""Boxes under a quadratic with a multiple of the identity: one projection."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float

from .._arguments import as_number, check_fields
from .._constraints import Box
from .._problem.problem import Problem
from .._status import Status, is_traced
from .._tolerances import tolerances
from .base import AbstractLowerSolver, Iterations, LowerSolution, all_finite


class ClosedForm(AbstractLowerSolver):
    """`y* = P(y0 - grad_y g(x, y0) / curvature)` over a box.

    For lower levels whose Hessian in `y` is `curvature` times the identity; that it is
    is not checked, since a check would cost as much as the gradient.
    """

    curvature: Float[Array, ""] = eqx.field(
        converter=as_number, metadata={"number": "constant"}
    )

    def __check_init__(self):
        check_fields(self)
        if not is_traced(self.curvature) and not 0 < float(self.curvature) < jnp.inf:
            raise ValueError(
                "`curvature` is that of a strongly convex lower level, a positive "
                f"number; got {float(self.curvature)}."
            )

    def __call__(self, problem, x, warm=None):
        box = checked_box(problem, "ClosedForm")
        gradient = ravel_pytree(jax.grad(problem.lower_value, argnums=1)(x, problem.y0))
        start, unravel = ravel_pytree(problem.y0)
        curvature = self.curvature.astype(start.dtype)
        ahead = start - gradient[0].astype(start.dtype) / curvature
        return box_solution(box, ahead, curvature, unravel)

    def inside(self, problem, x, y):
        # A quadratic is defined everywhere.
        return all_finite(y)


def checked_box(problem: Problem, solver: str) -> Box:
    """The box of `problem`, or a `ValueError` that names the solver."""
    box = problem.constraints
    if not isinstance(box, Box):
        raise ValueError(
            f"`{solver}` projects onto a Box; got {type(box).__name__} constraints. "
            "Use ActiveSet()."
        )
    return box


def box_solution(box: Box, ahead, curvature, unravel) -> LowerSolution:
    """The solution whose point before the projection is `ahead`."""
    low, high = box.flat_lower(), box.flat_upper()
    y = jnp.clip(ahead, low, high)
    # How far `ahead` lies behind each bound: a multiplier where positive, else a slack.
    behind = jnp.concatenate([low - ahead, ahead - high])
    slack = jnp.concatenate([y - low, high - y])
    scale = jnp.concatenate([jnp.abs(low), jnp.abs(high)])
    scale = jnp.where(jnp.isfinite(scale), scale, 0)
    tol = tolerances(y.dtype)
    noise = tol.safety * tol.eps * (scale + jnp.abs(jnp.concatenate([ahead, ahead])))
    pinned = jnp.tile(low == high, 2)
    active = pinned | (behind > noise)
    weak = ~active & (jnp.abs(behind) <= noise)
    multipliers = curvature * jnp.maximum(behind, 0)
    trust = jnp.where(pinned, jnp.inf, jnp.maximum(multipliers, slack))
    non_finite = ~all_finite(ahead) | jnp.any(jnp.isnan(slack))
    status = Status.where(non_finite, Status.non_finite, Status.successful)
    status = Status.where(jnp.any(low > high), Status.infeasible, status)
    zero = jnp.zeros((), y.dtype)
    return LowerSolution(
        y=unravel(y),
        multipliers=multipliers,
        slack=slack,
        active=active,
        weak=weak,
        shared_dependence=jnp.asarray(True),
        margin=jnp.min(trust, initial=jnp.inf),
        error=zero,
        kkt_residual=zero,
        iterations=Iterations(jnp.asarray(1), jnp.asarray(0), jnp.asarray(0)),
        status=status,
        factor=None,
        layout=box.layout,
    )
