"""GAM: descent along the shortest convex combination of gradients near a kink."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Bool, Float, Int, PyTree

from .._arguments import check_fields
from .._implicit.feasible import onto_domain
from .._implicit.hypergradient import Evaluation
from .._lower.active_set import ActiveSet, DenseFactor
from .._lower.base import LowerSolution, all_finite
from .._lower.dense import flatten
from .._lower.dual_active_set import dual_active_set
from .._lower.kkt import KKT, schur
from .._problem.problem import Problem
from .._problem.stochastic import StochasticProblem
from .._programs.control import loop
from .._programs.modules import Plain
from .._status import Status, first_failure
from .._tolerances import tolerances
from .base import AbstractMethod, Number, number, report

# Halvings of a step before the line search gives up.
_TRIALS = 40


class GAMState(Plain):
    """`x`, the lower-level solution there, and the present radius and tolerance.

    A radius below `resolution` is rounding, and the run is over.
    """

    x: PyTree[Array]
    lower: LowerSolution
    eps: Float[Array, ""]
    nu: Float[Array, ""]
    first_trial: Float[Array, ""]
    resolution: Float[Array, ""]


class GAM(AbstractMethod):
    """Descent with the gradients of all active sets that may hold nearby.

    At `x`, multipliers `lambda_j` of active rows and slacks `s_j` of the others move at
    known rates. Rows that could change sides within a distance `eps` are ambiguous,

        I = {j : lambda_j < eps |grad lambda_j|  or  s_j < eps |grad s_j|},

    and every subset of them, joined to the rows that are surely active, is an active
    set with a gradient of its own. With `d` the shortest element of the convex hull of
    these gradients,

        |d| <= nu:  eps, nu <- shrink_eps eps, shrink_nu nu
        otherwise:  x <- P(x - t d),  t the first of 1, beta, beta^2, ... times
                    `step_size` with F(x - t d) <= F(x) - beta t |d|^2.

    - `eps0`, `nu0`: both or none; by default `first_step` in units of the length of
      `x`, and a tenth of the slope.
    - `step_size`: the first trial of the line search; one in the paper, by default
      length over slope.
    - `shrink_eps`, `shrink_nu`, `beta`: factors below one.
    - `max_ambiguous`: rows considered at once, the nearest ones; there are two to this
      power gradients. Where more rows are ambiguous, `eps` counts as the distance to
      the first row that is left out.

    Deterministic problems only: the line search compares values of `F`.

    Paper: Xu, Zhu, "Efficient gradient approximation method for constrained bilevel
    optimization", AAAI 2023.

    Deviations:

    - The number of ambiguous rows is capped, as described.
    - Subsets with linearly dependent rows have no gradient and are left out.
    - With a domain, `x - t d` is projected onto it, `|d|` is replaced by the length of
      the projected step over `t`.
    - Where no trial step is accepted, `eps` shrinks and `x` stays.

    Reconstruction: when `eps` and `nu` shrink.
    """

    eps0: Number | None = number(None)
    nu0: Number | None = number(None)
    step_size: Number | None = number(None)
    shrink_eps: Number = number(0.5)
    shrink_nu: Number = number(0.5)
    beta: Number = number(0.5)
    first_step: Number = number(0.03)
    max_ambiguous: int = 4

    def __check_init__(self):
        check_fields(self)
        if (self.eps0 is None) != (self.nu0 is None):
            raise ValueError("`eps0` and `nu0` belong together: give both or none.")
        if self.max_ambiguous < 1:
            raise ValueError(
                f"`max_ambiguous` must be at least one; got {self.max_ambiguous}."
            )

    def refusal(self, problem):
        if isinstance(problem, StochasticProblem):
            return (
                "GAM needs a deterministic problem; its line search compares values of "
                "F, and those of a StochasticProblem change with the sample."
            )
        return None

    def init(self, problem, x, lower, scales, *, key):
        if lower.factor is None:
            # Large boxes and simplices come without the factor that subsets need.
            lower = eqx.filter_jit(ActiveSet())(problem, x)
        tiny = jnp.finfo(scales.slope.dtype).tiny
        given = lambda value, default: default if value is None else value
        return GAMState(
            x=x,
            lower=lower,
            eps=given(self.eps0, self.first_step * scales.length),
            nu=given(self.nu0, 0.1 * scales.slope),
            first_trial=given(
                self.step_size, scales.length / jnp.maximum(scales.slope, tiny)
            ),
            resolution=tolerances(scales.length.dtype).eps * scales.length,
        )

    def step(self, problem, state, *, step, num_steps, key):
        problem = problem.draw(key)
        lower, x = state.lower, state.x
        near = neighbours(problem, x, lower, state.eps, self.max_ambiguous)
        flat_d = shortest(near.gradients, near.valid)
        flat, unravel = ravel_pytree(x)
        move = lambda t: onto_domain(problem, unravel(flat - t * flat_d))
        length = lambda t: jnp.linalg.norm(ravel_pytree(move(t))[0] - flat)
        size = length(state.first_trial) / state.first_trial
        here = jnp.isfinite(near.value) & jnp.isfinite(size)
        here = here & (state.eps > state.resolution)
        flat_point = here & (size <= state.nu)
        trial = self._trial(problem, state, near.value, move, length)
        search = loop(
            lambda s: here & ~flat_point & ~s.accepted & (s.trials < _TRIALS),
            trial,
            _Trial.before(x, lower, state.first_trial),
            limit=_TRIALS,
        )
        moved = search.accepted
        pick = lambda a, b: jax.tree.map(lambda a, b: jnp.where(moved, a, b), a, b)
        new_x = pick(search.x, x)
        eps = jnp.where(moved | ~here, state.eps, self.shrink_eps * near.eps)
        nu = jnp.where(flat_point, self.shrink_nu * state.nu, state.nu)
        grad = unravel(flat_d)
        status = first_failure(lower.status, near.status)
        record = report(
            problem,
            Evaluation(near.value, None, grad, lower, status, None),
            lower,
            x,
            new_x,
            active_changes=jnp.where(
                moved, jnp.sum(search.lower.active != lower.active), 0
            ),
            lower_solves=search.trials,
            lower_passes=search.passes,
            factorisations=search.factorisations,
            safeguard=search.safeguard,
            hessian_products=near.valid.size,
            linear_solves=near.valid.size + ravel_pytree(x)[0].size,
        )
        new = eqx.tree_at(
            lambda s: (s.x, s.lower, s.eps, s.nu),
            state,
            (new_x, pick(search.lower, lower), eps, nu),
        )
        return new, record

    def _trial(self, problem, state, value, move, length):
        """One trial of the line search."""

        def trial(s: "_Trial") -> "_Trial":
            x = move(s.t)
            lower = ActiveSet()(problem, x, state.lower)
            F = problem.upper_value(x, lower.y)[0]
            target = value - self.beta * length(s.t) ** 2 / s.t
            accepted = lower.success & (F <= target)
            work = _work(lower)
            return _Trial(
                x,
                lower,
                jnp.where(accepted, s.t, self.beta * s.t),
                accepted,
                s.trials + 1,
                s.passes + work[0],
                s.factorisations + work[1],
                s.safeguard + work[2],
            )

        return trial


class _Trial(Plain):
    x: PyTree[Array]
    lower: LowerSolution
    t: Float[Array, ""]
    accepted: Bool[Array, ""]
    trials: Int[Array, ""]
    passes: Int[Array, ""]
    factorisations: Int[Array, ""]
    safeguard: Int[Array, ""]

    @classmethod
    def before(cls, x, lower, t) -> "_Trial":
        zeros = [jnp.zeros_like(part) for part in _work(lower)]
        return cls(x, lower, t, jnp.asarray(False), jnp.asarray(0), *zeros)


def _work(lower: LowerSolution):
    work = lower.iterations
    return work.passes, work.factorisations, work.safeguard


class Neighbours(Plain):
    """Gradients of `F` on the pieces within `eps` of `x`.

    `ambiguous` marks the rows that were varied and `subsets` holds the active rows of
    every piece; pieces may repeat. `eps` is the radius that was really covered.
    """

    value: Float[Array, ""]
    gradients: Float[Array, "m d"]
    subsets: Bool[Array, "m k"]
    valid: Bool[Array, " m"]
    ambiguous: Bool[Array, " k"]
    eps: Float[Array, ""]
    status: Any


def neighbours(
    problem: Problem, x: PyTree[Array], lower: LowerSolution, eps, max_ambiguous: int
) -> Neighbours:
    """The pieces of `F` near `x`, from the exact lower-level solution there."""
    flat, y0 = flatten(problem, x)
    y = ravel_pytree(lower.y)[0].astype(y0.dtype)
    flat_x, unravel_x = ravel_pytree(x)
    kept = lower.factor.open()
    # In the units of the columns, like the factor.
    factor, norm, columns = kept.hessian, kept.norm, kept.columns
    constraints = problem.constraints
    g_y = lambda z: jax.grad(
        lambda y: problem.lower_value(unravel_x(z), flat.unravel(y))
    )(y)
    turn = columns[:, None] * jax.jacfwd(g_y)(flat_x)
    A = columns * constraints.matrix(y.size, y.dtype) / norm[:, None]
    B = constraints.coupling_matrix(x, y.dtype)
    B = jnp.zeros((norm.size, flat_x.size), y.dtype) if B is None else B / norm[:, None]

    inequality = jnp.arange(norm.size) < constraints.num_inequalities
    distance = _distances(lower, kept, turn, A, B)
    distance = jnp.where(inequality, distance, jnp.inf)
    order = jnp.argsort(distance)
    count = min(max_ambiguous, constraints.num_inequalities)
    chosen = order[:count]
    if count < constraints.num_inequalities:
        eps = jnp.minimum(eps, distance[order[count]])
    # A row of weak activity is ambiguous at every radius.
    ambiguous = (distance < eps) | ((distance == 0) & jnp.isfinite(distance))
    varied = jnp.zeros(norm.size, bool).at[chosen].set(True) & ambiguous
    bits = np.array([[i >> j & 1 for j in range(count)] for i in range(2**count)])
    inside = jnp.zeros((2**count, norm.size), bool)
    inside = inside.at[:, chosen].set(jnp.asarray(bits.astype(bool)))
    subsets = (lower.active & ~varied) | (inside & varied)

    (value, f_x), f_y = _upper_parts(problem, x, flat.unravel(y))

    def piece(active):
        kkt = KKT(factor, schur(factor, active))
        v, w = kkt.solve(columns * f_y, jnp.zeros_like(norm))
        return f_x - v @ turn - w @ B, kkt.rows.independent

    gradients, independent = jax.lax.map(piece, subsets)
    valid = independent & jnp.all(jnp.isfinite(gradients), axis=1)
    # With no piece left, the pseudo-inverse of the first is the best there is.
    none = ~jnp.any(valid)
    valid = valid | (none & (jnp.arange(valid.size) == 0))
    status = Status.where(none, Status.dependent_rows, Status.successful)
    sane = all_finite((value, jnp.where(valid[:, None], gradients, 0)))
    status = first_failure(
        Status.where(sane, Status.successful, Status.non_finite), status
    )
    return Neighbours(value, gradients, subsets, valid, varied, eps, status)


def _upper_parts(problem: Problem, x, y):
    value_of = lambda x, y: problem.upper_value(x, y)[0]
    value, (f_x, f_y) = jax.value_and_grad(value_of, argnums=(0, 1))(x, y)
    return (value, ravel_pytree(f_x)[0]), ravel_pytree(f_y)[0]


def _distances(lower: LowerSolution, factor: DenseFactor, turn, A, B):
    """How far `x` must go at least, to first order, until each row changes sides.

    The derivative of the KKT system on the active rows, one column per entry of `x`.
    """
    norm = factor.norm
    columns = lambda top, bottom: factor.solve(-top, -bottom)
    dy, dmu = jax.vmap(columns, in_axes=1, out_axes=1)(turn, B)
    rate = lambda rows: jnp.sqrt(jnp.sum(rows**2, axis=1))
    over = lambda size, rate: jnp.where(
        size > 0,
        size / jnp.where(rate > 0, rate, 1) + jnp.where(rate > 0, 0, jnp.inf),
        0,
    )
    push_back = over(jnp.maximum(lower.multipliers * norm, 0), rate(dmu))
    room = over(jnp.maximum(lower.slack / norm, 0), rate(A @ dy + B))
    distance = jnp.where(lower.active, push_back, room)
    return jnp.where(lower.weak, 0, distance)


def shortest(points: Float[Array, "m d"], valid: Bool[Array, " m"]):
    """The shortest element of the convex hull of the valid points.

    The smallest `(d, tau)` with `<p_i, d> + tau >= 1` for all points is a multiple of
    `(d*, 1)`: by duality `(d, tau) = sum_i w_i (p_i, 1)` with `w >= 0`, and rescaling
    the best combination turns `|d|^2 + tau^2` into an increasing function of `|d*|`.
    This program is strictly convex even where the points depend on each other.
    """
    points = jnp.where(valid[:, None], points, 0)
    scale = jnp.max(jnp.abs(points))
    scale = jnp.where(scale > 0, scale, 1)
    lifted = jnp.concatenate([points / scale, jnp.ones_like(points[:, :1])], axis=1)
    length = jnp.sqrt(jnp.sum(lifted**2, axis=1))
    unit = lifted / length[:, None]
    dual = dual_active_set(
        unit @ unit.T,
        1 / length,
        valid,
        jnp.zeros_like(valid),
    )
    weights = jnp.maximum(dual.mu, 0) / length
    return weights @ points / jnp.sum(weights)
