"""BLOCC: descent on a penalty whose two saddle points give a first-order gradient."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Bool, Float, Int, PyTree

from .._arguments import check_fields
from .._constraints.base import AbstractFixedSet
from .._implicit.adjoint import largest_curvature
from .._implicit.feasible import moves, onto_allowed, onto_domain
from .._implicit.hypergradient import Evaluation
from .._lower.base import LowerSolution, all_finite
from .._lower.choose import default_solver
from .._lower.dense import flatten
from .._problem.problem import Problem
from .._programs.control import loop, run_if
from .._programs.modules import Plain
from .._programs.quick import quick_jit
from .._status import Status, first_failure
from .base import (
    AbstractMethod,
    Number,
    Scales,
    draws,
    falling,
    number,
    report,
    tree_norm,
    tree_step,
)
from .merged import merged


class Saddles(Plain):
    """Solutions of `min g` and `min g + f / gamma`, stacked in this order.

    `multipliers` belong to these objectives; those of `f + gamma g` are `gamma` times
    the second ones. `solution` is what the exact solver left, None after first-order
    steps.
    """

    y: Float[Array, "2 n"]
    multipliers: Float[Array, "2 k"]
    solution: LowerSolution | None


class FirstOrder(Plain):
    """Step sizes of the first-order saddle search, one for each of the two."""

    primal: Float[Array, " 2"]
    dual: Float[Array, " 2"]


class BLOCCState(Plain):
    """`x`, the two saddle points there as a warm start, and units."""

    x: PyTree[Array]
    saddles: Saddles
    lower: LowerSolution
    scales: Scales
    gamma_unit: Float[Array, ""]
    steps: FirstOrder | None


class BLOCC(AbstractMethod):
    """Gradient descent on a penalty function of `x` alone.

    With `v(x)` the optimal value of the lower level, and `h` its rows,

        Phi(x) = min_y { f(x, y) + gamma (g(x, y) - v(x)) : h(x, y) <= 0 }
        x+     = P(x - eta grad Phi(x))

    Two saddle points give the gradient without second derivatives: `(y_g, mu_g)` of
    `g + mu^T h` and `(y_F, mu_F)` of `f + gamma g + mu^T h`, and

        grad Phi = grad_x f(x, y_F) + B^T mu_F
                   + gamma (grad_x g(x, y_F) - grad_x g(x, y_g) - B^T mu_g).

    `Phi` lies below `F` by `O(1 / gamma)`. Where `f + gamma g` is not convex in `y` the
    second saddle point does not exist; the status of the step says so and `x` stays.

    - `gamma`: weight of the penalty, fixed for the whole run as published.
    - `first_gamma`, `gamma_growth`: without `gamma`, it grows geometrically from
      `first_gamma` to `first_gamma * gamma_growth`, in units of `f` over `g`.
    - `step_size`: constant `eta`. Without it, `eta` falls geometrically from
      `first_step` to `first_step * decay`, in units of length over slope.
    - `inner`: "exact" finds the saddle points with the lower-level solver of the
      library, "first-order" with `rounds` accelerated dual ascent steps, each after
      `primal_steps` gradient steps in `y`, from the last saddle points.
    - `primal_step`, `dual_step`: constants of these; by default one over the curvature
      of the objective, and of the dual function, both measured at the start.

    Paper: Jiang, Xiao, Tenorio, Real-Rojas, Marques, Chen, "A primal-dual-assisted
    penalty approach to bilevel optimization with coupled constraints", NeurIPS 2024.

    Deviations:

    - Saddle points are exact by default, and come from the last ones at the same
      weight: `y_F` does not start at `y_g`.
    - By default `gamma` grows and `eta` falls along the run; the paper fixes both.
    - Multipliers of equality rows are free in sign; the paper has inequalities only.
    - With `inner="first-order"`, a set that does not move with `x` (a box, a simplex)
      is projected onto and has no multipliers; they would not enter the gradient.
    - Where the lower level is empty, `x` goes to the nearest point where it is not
      (exact saddle points only; first-order steps do not notice).

    Reconstruction: the acceleration of the dual steps (weights `(j - 1) / (j + 2)`).
    """

    gamma: Number | None = number(None)
    step_size: Number | None = number(None)
    first_step: Number = number(0.1)
    decay: Number = number(1e-2)
    first_gamma: Number = number(10.0)
    gamma_growth: Number = number(1e4)
    inner: str = "exact"
    rounds: int = 50
    primal_steps: int = 20
    primal_step: Number | None = number(None)
    dual_step: Number | None = number(None)

    def __check_init__(self):
        check_fields(self)
        if self.inner not in ("exact", "first-order"):
            raise ValueError(
                f"`inner` must be 'exact' or 'first-order'; got {self.inner!r}."
            )

    def init(self, problem, x, lower, scales, *, key):
        unit = _gamma_unit(problem, x, lower, scales)
        twice = lambda leaf: jnp.stack([leaf, leaf])
        y = ravel_pytree(lower.y)[0]
        solution, steps = None, None
        if self.inner == "exact":
            solution = jax.tree.map(twice, lower)
        else:
            weights = self._weights(self._gamma(unit, 0, 1))
            steps = self._first_order_steps(problem, x, y, weights)
        saddles = Saddles(twice(y), twice(lower.multipliers), solution)
        return BLOCCState(x, saddles, lower, scales, unit, steps)

    def step(self, problem, state, *, step, num_steps, key):
        now = problem.draw(draws(key).sample, step)
        gamma = self._gamma(state.gamma_unit, step, num_steps)
        x, saddles, recovered = self._saddles_at(now, state, self._weights(gamma))
        value, grad = penalty_gradient(now, x, saddles, gamma)
        status = _status(saddles)
        finite = jnp.isfinite(value) & jnp.isfinite(tree_norm(grad))
        status = first_failure(
            status, Status.where(finite, Status.successful, Status.non_finite)
        )
        usable = status == Status.successful
        eta = self.step_size
        if eta is None:
            eta = falling(self.first_step, self.decay, step, num_steps)
            slope = jnp.where(state.scales.slope > 0, state.scales.slope, 1)
            eta = eta * state.scales.length / slope
        direction = jax.tree.map(lambda leaf: jnp.where(usable, -leaf, 0), grad)
        new_x = onto_domain(now, tree_step(x, eta, direction))
        record = report(
            problem,
            Evaluation(value, None, grad, state.lower, status, None),
            state.lower,
            state.x,
            new_x,
            active_changes=_changes(state.saddles, saddles),
            recovered=recovered,
            penalty_solves=1 + recovered,
            upper_gradients=1,
            hessian_products=0,
            linear_solves=0,
            **self._work(saddles),
        )
        # First-order points have no other guard against a NaN.
        saddles = jax.tree.map(
            lambda a, b: jnp.where(usable, a, b), saddles, state.saddles
        )
        new = eqx.tree_at(lambda s: (s.x, s.saddles), state, (new_x, saddles))
        return new, record

    def _gamma(self, unit, step, num_steps):
        if self.gamma is not None:
            return self.gamma
        return unit * falling(self.first_gamma, self.gamma_growth, step, num_steps)

    def _weights(self, gamma):
        return jnp.stack([jnp.zeros_like(gamma), 1 / gamma])

    def _saddles_at(self, problem: Problem, state: BLOCCState, weights):
        x = state.x
        if self.inner != "exact":
            saddles = self._first_order(problem, x, weights, state)
            return x, saddles, jnp.asarray(False)
        if not moves(problem):
            saddles = _exact(problem, x, weights, state.saddles)
            return x, saddles, jnp.asarray(False)

        def attempt(carry):
            x, saddles, tries, _ = carry
            x = run_if(tries > 0, lambda x: onto_allowed(problem, x), x)
            saddles = _exact(problem, x, weights, saddles)
            empty = _status(saddles) == Status.infeasible
            return x, saddles, tries + 1, empty & (tries < 1)

        start = (x, state.saddles, jnp.asarray(0), jnp.asarray(True))
        x, saddles, tries, _ = loop(lambda c: c[-1], attempt, start, limit=2)
        return x, saddles, tries > 1

    def _first_order_steps(self, problem: Problem, x, y, weights) -> FirstOrder:
        curvature = lambda weight: _curvatures(merged(problem, weight), x, y)
        high, low = jax.lax.map(curvature, weights)
        A = problem.constraints.matrix(y.size, y.dtype)
        norm2 = jnp.sum(A**2)
        if A.size:
            norm2 = largest_curvature(lambda v: A.T @ (A @ v), y)
        norm2 = jnp.where(norm2 > 0, norm2, 1)
        primal = 1 / high if self.primal_step is None else 0 * high + self.primal_step
        dual = low / norm2 if self.dual_step is None else 0 * low + self.dual_step
        return FirstOrder(primal, dual)

    def _first_order(self, problem: Problem, x, weights, state: BLOCCState) -> Saddles:
        def search(inputs):
            weight, y, mu, primal, dual = inputs
            return self._max_min(merged(problem, weight), x, y, mu, primal, dual)

        old, steps = state.saddles, state.steps
        assert steps is not None
        y, mu = jax.lax.map(
            search, (weights, old.y, old.multipliers, steps.primal, steps.dual)
        )
        return Saddles(y, mu, None)

    def _max_min(self, problem: Problem, x, y, mu, primal, dual):
        """Accelerated ascent in `mu`, plain descent in `y`."""
        lower, _ = flatten(problem, x)
        constraints = problem.constraints
        if isinstance(constraints, AbstractFixedSet):
            descend = lambda _, y: constraints.project(y - primal * lower.gradient(y))
            steps = self.rounds * self.primal_steps
            return jax.lax.fori_loop(0, steps, descend, y), mu
        A, rhs = constraints.matrix(y.size, y.dtype), constraints.rhs(x)
        equality = jnp.arange(mu.size) >= constraints.num_inequalities
        usable = jnp.isfinite(rhs)
        rhs = jnp.where(usable, rhs, 0)

        def body(j, carry):
            y, mu, before = carry
            ahead = mu + (j - 1) / (j + 2) * (mu - before)
            pull = ahead @ A
            descend = lambda _, y: y - primal * (lower.gradient(y) + pull)
            y = jax.lax.fori_loop(0, self.primal_steps, descend, y)
            new = ahead + dual * jnp.where(usable, A @ y - rhs, 0)
            return y, jnp.where(equality, new, jnp.maximum(new, 0)), mu

        y, mu, _ = jax.lax.fori_loop(1, self.rounds + 1, body, (y, mu, mu))
        return y, mu

    def _work(self, saddles: Saddles) -> dict:
        if saddles.solution is None:
            passes = 2 * self.rounds * self.primal_steps
            return dict(lower_passes=passes, factorisations=0, safeguard=0)
        work = jax.tree.map(jnp.sum, saddles.solution.iterations)
        return dict(
            lower_passes=work.passes,
            factorisations=work.factorisations,
            safeguard=work.safeguard,
        )


def penalty_gradient(problem: Problem, x: PyTree[Array], saddles: Saddles, gamma):
    """`Phi` and its gradient, from the two saddle points at `x`."""
    unravel = ravel_pytree(problem.y0)[1]
    y_g, y_F = unravel(saddles.y[0]), unravel(saddles.y[1])

    def penalty(x):
        # Danskin: `y` and the multipliers are held, rows enter by what moves with `x`.
        f = problem.upper_value(x, y_F)[0]
        gap = problem.lower_value(x, y_F) - problem.lower_value(x, y_g)
        held = saddles.multipliers[1] - saddles.multipliers[0]
        return f + gamma * gap + gamma * problem.constraints.coupling(x, held), (f, gap)

    grad, (f, gap) = jax.grad(penalty, has_aux=True)(x)
    return f + gamma * gap, grad


def _exact(problem: Problem, x, weights, warm: Saddles) -> Saddles:
    solver = default_solver(problem)
    # One after the other through one site of the solver in the program.
    both = jax.lax.map(
        lambda inputs: solver(merged(problem, inputs[0]), x, inputs[1]),
        (weights, warm.solution),
    )
    y = jax.vmap(lambda y: ravel_pytree(y)[0])(both.y)
    return Saddles(y, both.multipliers, both)


def _status(saddles: Saddles) -> Any:
    if saddles.solution is None:
        fine = all_finite((saddles.y, saddles.multipliers))
        return Status.where(fine, Status.successful, Status.non_finite)
    status = saddles.solution.status
    member = lambda i: jax.tree.map(lambda leaf: leaf[i], status)
    return first_failure(member(0), member(1))


def _changes(old: Saddles, new: Saddles) -> Int[Array, ""]:
    if old.solution is None or new.solution is None:
        return jnp.asarray(0)
    changed: Bool[Array, " k"] = old.solution.active[0] != new.solution.active[0]
    return jnp.sum(changed)


def _curvatures(problem: Problem, x, y):
    """The largest and the smallest curvature of the lower level at `y`."""
    lower, _ = flatten(problem, x)
    product = lambda d: lower.hessian_product(y, d)
    high = largest_curvature(product, y)
    low = high - largest_curvature(lambda d: high * d - product(d), y)
    return 1.05 * high, jnp.maximum(low, 1e-6 * high)


@quick_jit
def _gamma_unit(problem: Problem, x, lower: LowerSolution, scales: Scales):
    """The size of `f` over that of `g`: of gradients, curvatures, and along `x`."""
    flat, y = flatten(problem, x)
    y = jnp.where(lower.success, ravel_pytree(lower.y)[0].astype(y.dtype), y)
    upper = lambda y: problem.upper_value(x, flat.unravel(y))[0]
    f_y = jax.grad(upper)
    bend = lambda d: jax.jvp(f_y, (y,), (d,))[1]
    curvature = largest_curvature(lambda d: flat.hessian_product(y, d), y)
    force = jnp.where(scales.force > 0, scales.force, 1)
    units = jnp.stack(
        [
            jnp.linalg.norm(f_y(y)) / force,
            largest_curvature(bend, y) / curvature,
            scales.slope * scales.length * curvature / force**2,
        ]
    )
    unit = jnp.max(jnp.where(jnp.isfinite(units), units, 0))
    return jnp.where(unit > 0, unit, 1)
