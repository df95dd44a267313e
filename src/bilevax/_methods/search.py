"""What methods that compare values share: `F` on demand, its gradient on demand."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PyTree

from .._implicit.adjoint import default_adjoint
from .._implicit.feasible import moves, onto_allowed
from .._implicit.hypergradient import Evaluation, implicit_gradient
from .._implicit.prices import with_unique_prices
from .._lower.base import Iterations, LowerSolution, all_finite
from .._lower.choose import checked_solver
from .._problem.problem import AbstractProblem, Problem
from .._problem.stochastic import StochasticProblem
from .._programs.arrays import xp
from .._programs.control import loop, run_if
from .._programs.modules import Plain
from .._status import Status, first_failure, gravest


class Work(Plain):
    """Counters of a search, named as in `Record`."""

    lower_solves: Int[Array, ""]
    lower_passes: Int[Array, ""]
    factorisations: Int[Array, ""]
    safeguard: Int[Array, ""]
    gradients: Int[Array, ""]
    recovered: Int[Array, ""]

    def entries(self) -> dict:
        """The counts, ready for `report`: a gradient is one adjoint solve."""
        named = dict(vars(self))
        gradients = named.pop("gradients")
        for name in ("upper_gradients", "hessian_products", "linear_solves"):
            named[name] = gradients
        return named


class Point(Plain):
    """`F` at `x`, which is where it was asked for or the nearest allowed point."""

    x: PyTree[Array]
    value: Float[Array, ""]
    lower: LowerSolution
    work: Work

    @property
    def status(self):
        """As a hypergradient would report it."""
        lower, sane = self.lower, jnp.isfinite(self.value)

        def one(status, shared, weak):
            return first_failure(
                status,
                Status.where(sane, Status.successful, Status.non_finite),
                Status.where(shared, Status.successful, Status.dependent_rows),
                Status.where(jnp.any(weak), Status.kink, Status.successful),
            )

        parts = lower.status, lower.shared_dependence, lower.weak
        many = jnp.ndim(lower.margin) > 0
        return gravest(jax.vmap(one)(*parts)) if many else one(*parts)


def no_work() -> Work:
    """All counters at zero."""
    return Work(*(jnp.asarray(0, int) for _ in range(6)))


def value_at(problem: Problem, x: PyTree[Array], warm: LowerSolution) -> Point:
    """`F` at `x`, or at the nearest allowed point if the lower level is empty there.

    A lower-level solve and no adjoint, unlike `gradient_at`; NaN where it fails.
    """
    solver = checked_solver(problem, None, False)

    def attempt(carry):
        lower, x, work, tries, _ = carry
        if moves(problem):
            x = run_if(tries > 0, lambda x: onto_allowed(problem, x), x)
        lower = solver(problem.localised(x), x, lower)
        lower = with_unique_prices(problem, x, lower)
        spent = Iterations(*map(jnp.sum, lower.iterations))
        work = Work(
            lower_solves=work.lower_solves + lower.kkt_residual.size,
            lower_passes=work.lower_passes + spent.passes,
            factorisations=work.factorisations + spent.factorisations,
            safeguard=work.safeguard + spent.safeguard,
            gradients=work.gradients,
            recovered=jnp.asarray(tries, int),
        )
        empty = jnp.any(lower.status == Status.infeasible)
        return lower, x, work, tries + 1, empty & (tries < 1)

    carry = (warm, x, no_work(), jnp.asarray(0), jnp.asarray(True))
    if moves(problem):
        carry = loop(lambda c: c[-1], attempt, carry, limit=2)
    else:
        carry = attempt(carry)
    lower, x, work = carry[:3]
    value = problem.upper_value(x, lower.y, problem.multipliers_of(lower))[0]
    value = jnp.where(jnp.all(lower.success), value, jnp.nan)
    return Point(x, value, lower, work)


def gradient_if(
    wanted: Bool[Array, ""], problem: Problem, point: Point, otherwise: PyTree[Array]
) -> tuple[PyTree[Array], Bool[Array, ""]]:
    """The gradient of `F` at `point` where `wanted`, and whether it is there."""

    def gradient(_):
        adjoint = problem.adjoint or default_adjoint(point.lower)
        local = problem.localised(point.x)
        return implicit_gradient(local, point.x, point.lower, adjoint).grad

    grad = run_if(wanted, gradient, otherwise)
    fine = wanted & jnp.isfinite(point.value) & all_finite(grad)
    grad = jax.tree.map(lambda new, old: jnp.where(fine, new, old), grad, otherwise)
    return grad, fine


def plus(work: Work, more: Work, gradients: Array) -> Work:
    """The sum of both, and `gradients` taken besides."""
    total = jax.tree.map(jnp.add, work, more)
    return eqx.tree_at(lambda w: w.gradients, total, total.gradients + gradients)


def evaluation(value, grad, lower: LowerSolution, status) -> Evaluation:
    """What `report` reads."""
    return Evaluation(value, None, grad, lower, status, None)


def needs_values(name: str, problem: AbstractProblem) -> str | None:
    """The refusal of a method that compares values of `F`."""
    if isinstance(problem, StochasticProblem):
        return (
            f"{name} compares values of F and needs a deterministic problem; this one "
            "is sampled."
        )
    return None


def select(which: Bool[Array, ""], a: PyTree[Array], b: PyTree[Array]):
    """`a` where `which` holds, else `b`, leaf by leaf."""
    return jax.tree.map(lambda a, b: xp.where(which, a, b), a, b)


def tree_dot(a: PyTree[Array], b: PyTree[Array]) -> Float[Array, ""]:
    """The inner product over all leaves."""
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return jnp.sum(jnp.stack([jnp.sum(u * v) for u, v in pairs]))


def between(a: PyTree[Array], b: PyTree[Array], share) -> PyTree[Array]:
    """`a + share (b - a)`."""
    return jax.tree.map(lambda u, v: u + share * (v - u), a, b)


def shortest_between(a: PyTree[Array], b: PyTree[Array]) -> PyTree[Array]:
    """The point of the segment `[a, b]` that is nearest to zero."""
    gap = jax.tree.map(jnp.subtract, a, b)
    square = tree_dot(gap, gap)
    share = tree_dot(a, gap) / jnp.where(square > 0, square, 1)
    return between(a, b, jnp.clip(share, 0, 1))
