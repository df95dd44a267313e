"""LV-HBA: a single loop on a Lagrangian value function, without second derivatives."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float, PyTree

from .._arguments import check_fields
from .._constraints import Polyhedron
from .._constraints.base import AbstractFixedSet
from .._implicit.adjoint import largest_curvature
from .._implicit.feasible import joint_rows, onto_domain
from .._implicit.hypergradient import Evaluation
from .._implicit.joint import no_upper
from .._lower.active_set import ActiveSet
from .._lower.base import LowerSolution, all_finite
from .._lower.dense import unit_rows
from .._problem.problem import Problem
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
)

# Proximal weights of the value function, in units of the curvature of `g`.
_PROXIMAL = 1.0
# Share of the way to the new multipliers that the slow ones go in one step.
_FOLLOW = 0.3
# Bound on multipliers, in units of the force; only there to catch a divergence.
_BOUND = 1e3


class Constants(Plain):
    """Steps and weights of the iteration in the units of the problem.

    `norm` scales the rows. `x` and `y` have steps of their own because they have units
    of their own; likewise the two parts of the inner saddle point.
    """

    x_step: Float[Array, ""]
    y_step: Float[Array, ""]
    z_step: Float[Array, ""]
    inner_y_step: Float[Array, ""]
    inner_dual_step: Float[Array, ""]
    inverse_g1: Float[Array, ""]
    inverse_g2: Float[Array, ""]
    bound: Float[Array, ""]
    c0: Float[Array, ""]
    norm: Float[Array, " k"]


class LVHBAState(Plain):
    """`(x, y)` in the joint set, the inner saddle point, and slow multipliers."""

    x: PyTree[Array]
    y: Float[Array, " n"]
    inner_y: Float[Array, " n"]
    inner_dual: Float[Array, " k"]
    z: Float[Array, " k"]
    projection: LowerSolution | None
    lower: LowerSolution
    constants: Constants


class LVHBA(AbstractMethod):
    """Projected descent on `F / c + g - v` over all `(x, y)` that satisfy the rows.

    With `h(x, y) = A y + B x - b` and `Z` a box of multipliers, the proximal Lagrangian
    value function is

        v(x, y, z) = min_u max_{m in Z} g(x, u) + <m, h(x, u)>
                                        + |u - y|^2 / (2 g1) - |m - z|^2 / (2 g2)

    and one step, with `C` the set of `(x, y)` that satisfy the rows and the domain, is

        u+ = u - eta (grad_y g(x, u) + A^T m + (u - y) / g1)
        m+ = P_Z(m + eta (h(x, u) - (m - z) / g2))
        dx = grad_x f(x, y) / c_k + grad_x g(x, y) - grad_x g(x, u+) - B^T m+
        dy = grad_y f(x, y) / c_k + grad_y g(x, y) - (y - u+) / g1
        (x, y)+ = P_C((x, y) - alpha (dx, dy))
        z+ = P_Z(z + beta (m+ - z) / g2)

    with `c_k = c0 (k + 1)^p`. Nothing here needs `g` strongly convex. `x` and `y` are
    off by `O(1 / c_k)`, and the larger `c_k`, the slower `x`.

    - `alpha`, `beta`, `eta`, `g1`, `g2`: constants of the paper, all or none.
    - `c0`: with these, one unless given.
    - `p`: exponent, below one half. Without it, `c_k` grows geometrically from `c0` to
      `c0 * growth` along the run.
    - `bound`: the largest multiplier in `Z`.
    - `first_step`: without the constants, how far `F` moves `x` in the first step, in
      units of its length; it decides `c0`.

    Paper: Yao, Yu, Zeng, Zhang, "Constrained bi-level optimization: proximal Lagrangian
    value function approach and Hessian-free algorithm", ICLR 2024.

    Deviations:

    - Without the constants, steps come from curvatures measured at the start: of `g` in
      `y` and across, and of the rows, scaled to unit norm. `x`, `y`, `u` and `m` then
      have steps of their own, and `P_C` is the projection in the metric of the steps.
    - Without `p`, `c_k` grows with the length of the run: the powers of the paper leave
      either a bias or an `x` that hardly moves in runs of some hundred steps.
    - A set that does not move with `x` (a box, a simplex) takes the place of the set
      `Y` of the paper: `u` is projected onto it and it has no multipliers.
    - Multipliers of equality rows lie in `[-bound, bound]`.
    - Starts at the exact answer of the lower level and its multipliers.
    """

    alpha: Number | None = number(None)
    beta: Number | None = number(None)
    eta: Number | None = number(None)
    g1: Number | None = number(None)
    g2: Number | None = number(None)
    c0: Number | None = number(None)
    p: Number | None = number(None)
    growth: Number = number(100.0)
    bound: Number | None = number(None)
    first_step: Number = number(0.1)

    def __check_init__(self):
        check_fields(self)
        given = [
            value is not None
            for value in (self.alpha, self.beta, self.eta, self.g1, self.g2)
        ]
        if any(given) and not all(given):
            raise ValueError(
                "`alpha`, `beta`, `eta`, `g1` and `g2` belong together: give all (the "
                "paper's constants) or none (constants measured on the problem)."
            )

    def init(self, problem, x, lower, scales, *, key):
        y = ravel_pytree(problem.y0)[0]
        rows = _num_rows(problem)
        zeros = jnp.zeros(rows, y.dtype)
        y = jnp.where(lower.success, ravel_pytree(lower.y)[0].astype(y.dtype), y)
        if self.alpha is None:
            constants = _measured(problem, x, y, scales, self.first_step, self.c0)
            if self.bound is not None:
                constants = eqx.tree_at(lambda c: c.bound, constants, self.bound)
        else:
            constants = self._given(zeros)
        multipliers = zeros
        if rows:
            multipliers = jnp.where(
                lower.success, lower.multipliers * constants.norm, 0
            ).astype(y.dtype)
        projection = None
        if isinstance(problem.constraints, Polyhedron) and (
            rows or problem.domain is not None
        ):
            projection = _project(problem, x, y, constants, None)[2]
        return LVHBAState(
            x=x,
            y=y,
            inner_y=y,
            inner_dual=multipliers,
            z=multipliers,
            projection=projection,
            lower=lower,
            constants=constants,
        )

    def step(self, problem, state, *, step, num_steps, key):
        now = problem.draw(draws(key).sample, step)
        s, const = state, state.constants
        unravel = ravel_pytree(now.y0)[1]
        g = lambda x, y: now.lower_value(x, unravel(y))
        f = lambda x, y: now.upper_value(x, unravel(y))[0]
        g_y = jax.grad(g, argnums=1)

        # The inner saddle point: both parts from the old ones.
        inner_gap = (s.inner_y - s.y) * const.inverse_g1
        pull = g_y(s.x, s.inner_y) + inner_gap
        inner_dual = s.inner_dual
        if s.z.size:
            usable, h = _residual(now, s.x, s.inner_y, const.norm)
            pull = pull + now.constraints.pull(s.inner_dual / const.norm)
            rise = h - (s.inner_dual - s.z) * const.inverse_g2
            rise = jnp.where(usable, rise, 0)
            inner_dual = s.inner_dual + const.inner_dual_step * rise
            inner_dual = _into_box(now, inner_dual, const.bound)
        inner_y = s.inner_y - const.inner_y_step * pull
        if isinstance(now.constraints, AbstractFixedSet):
            inner_y = now.constraints.project(inner_y)

        c = const.c0 * self._growth(step, num_steps)
        value, (f_x, f_y) = jax.value_and_grad(f, argnums=(0, 1))(s.x, s.y)
        g_x, g_y_here = jax.grad(g, argnums=(0, 1))(s.x, s.y)

        def value_function(x):
            held = inner_dual / const.norm if s.z.size else None
            coupled = 0.0 if held is None else now.constraints.coupling(x, held)
            return g(x, inner_y) + coupled

        v_x = jax.grad(value_function)(s.x)
        dx = jax.tree.map(lambda f, g, v: f / c + g - v, f_x, g_x, v_x)
        dy = f_y / c + g_y_here - (s.y - inner_y) * const.inverse_g1
        x = jax.tree.map(lambda x, d: x - const.x_step * d, s.x, dx)
        y = s.y - const.y_step * dy
        x, y, projection, status = _project(now, x, y, const, s.projection)
        z = s.z + const.z_step * (inner_dual - s.z) * const.inverse_g2
        z = _into_box(now, z, const.bound)

        moved = (x, y, inner_y, inner_dual, z)
        sane = all_finite(moved)
        status = first_failure(
            status, Status.where(sane, Status.successful, Status.non_finite)
        )
        keep = status == Status.successful
        moved = jax.tree.map(
            lambda new, old: jnp.where(keep, new, old),
            moved,
            (s.x, s.y, s.inner_y, s.inner_dual, s.z),
        )
        # In units of the gradient of `F`, which `c` divides.
        scaled = jax.tree.map(lambda d: c * d, dx)
        work = None if projection is None else projection.iterations
        record = report(
            problem,
            Evaluation(value, None, scaled, s.lower, status, None),
            s.lower,
            s.x,
            moved[0],
            momentum_norm=tree_norm(scaled),
            lower_solves=0,
            penalty_solves=int(work is not None),
            lower_passes=0 if work is None else work.passes,
            factorisations=0 if work is None else work.factorisations,
            safeguard=0 if work is None else work.safeguard,
            hessian_products=0,
            linear_solves=0,
        )
        fields = lambda s: (s.x, s.y, s.inner_y, s.inner_dual, s.z)
        new = eqx.tree_at(fields, state, moved)
        if projection is not None:
            new = eqx.tree_at(lambda s: s.projection, new, projection)
        return new, record

    def _growth(self, step, num_steps):
        if self.p is None:
            return falling(1.0, self.growth, step, num_steps)
        return (step + 1.0) ** self.p

    def _given(self, zeros) -> Constants:
        alpha, eta = jnp.asarray(self.alpha), jnp.asarray(self.eta)
        return Constants(
            x_step=alpha,
            y_step=alpha,
            z_step=jnp.asarray(self.beta),
            inner_y_step=eta,
            inner_dual_step=eta,
            inverse_g1=1 / jnp.asarray(self.g1),
            inverse_g2=1 / jnp.asarray(self.g2),
            bound=jnp.asarray(jnp.inf if self.bound is None else self.bound),
            c0=jnp.asarray(1.0 if self.c0 is None else self.c0),
            norm=jnp.ones_like(zeros),
        )


def _num_rows(problem: Problem) -> int:
    fixed = isinstance(problem.constraints, AbstractFixedSet)
    return 0 if fixed else problem.constraints.num_rows


@quick_jit
def _measured(problem: Problem, x, y, scales: Scales, first_step, c0) -> Constants:
    """Constants for which every part of the iteration is stable.

    With `L` the curvature of `g` in `y`, take `1 / g1 = L` and `1 / g2 = |A|^2 / L`, so
    that in the metric of these the inner saddle operator has a symmetric part between
    1 and 2 and a skew part of norm 1.
    """
    flat_x, unravel_x = ravel_pytree(x)
    unravel = ravel_pytree(problem.y0)[1]
    g_y = lambda x, y: jax.grad(lambda y: problem.lower_value(x, unravel(y)))(y)
    L = largest_curvature(lambda d: jax.jvp(lambda y: g_y(x, y), (y,), (d,))[1], y)
    length = jnp.linalg.norm(y)
    typical = jnp.where(length > 0, scales.force / jnp.where(length > 0, length, 1), 0)
    # Not relative to `typical`: a `y` that is zero up to rounding would make it huge.
    flat = L <= jnp.sqrt(jnp.finfo(y.dtype).tiny)
    L = jnp.where(flat, jnp.where(typical > 0, typical, 1), L)

    def across(d):
        turn = lambda z: g_y(unravel_x(z), y)
        forward, back = jax.jvp(turn, (flat_x,), (d,))[1], jax.vjp(turn, flat_x)[1]
        return back(forward)[0]

    inverse_g1 = _PROXIMAL * L
    norm, rows_norm = jnp.zeros(0, y.dtype), jnp.ones((), y.dtype)
    bend = largest_curvature(across, flat_x) / inverse_g1
    if _num_rows(problem):
        rows = unit_rows(problem.constraints, x, y.size, y.dtype)
        norm = rows.norm
        A = jnp.where(rows.usable[:, None], rows.A, 0)
        rows_norm = jnp.sqrt(largest_curvature(lambda d: A.T @ (A @ d), y))
        # How much the value function bends with `x`: a part from `y` moving freely and
        # one of the other sign from the rows, by the inner saddle system.
        B = problem.constraints.coupling_matrix(x, y.dtype)
        B = 0 if B is None else jnp.where(rows.usable[:, None], B / norm[:, None], 0)
        H = jax.jacfwd(lambda y: g_y(x, y))(y) + inverse_g1 * jnp.eye(y.size)
        turn = jax.jacfwd(lambda z: g_y(unravel_x(z), y))(flat_x)
        both = jnp.linalg.solve(H, jnp.concatenate([turn, A.T], axis=1))
        free, lifted = both[:, : flat_x.size], both[:, flat_x.size :]
        rest = A @ free - B
        gram = A @ lifted + _PROXIMAL * rows_norm**2 / L * jnp.eye(norm.size)
        held = rest.T @ jnp.linalg.solve(gram, rest)
        bend = jnp.maximum(
            largest_curvature(lambda d: turn.T @ (free @ d), flat_x),
            largest_curvature(lambda d: held @ d, flat_x),
        )
    inverse_g2 = _PROXIMAL * rows_norm**2 / L
    # Half of `2 m / l^2` for a monotone operator with modulus `m` and norm `l`.
    modulus, size = _PROXIMAL, (1 + _PROXIMAL) ** 2 + 1
    inner = modulus / size
    still = bend <= jnp.sqrt(jnp.finfo(y.dtype).tiny)
    bend = jnp.where(still, scales.force / scales.length, bend)
    x_step = 0.5 / bend
    travel = first_step * scales.length
    if c0 is None:
        c0 = x_step * scales.slope / jnp.where(travel > 0, travel, 1)
        c0 = jnp.where(c0 > 0, c0, 1)
    force = jnp.where(scales.force > 0, scales.force, 1)
    return Constants(
        x_step=x_step,
        y_step=0.5 / L,
        z_step=_FOLLOW / inverse_g2,
        inner_y_step=inner / L,
        inner_dual_step=inner * L / rows_norm**2,
        inverse_g1=inverse_g1,
        inverse_g2=inverse_g2,
        bound=_BOUND * force,
        c0=jnp.asarray(c0),
        norm=norm,
    )


def _residual(problem: Problem, x, y, norm):
    """Which rows have a bound, and `(A y + B x - b) / norm`."""
    rhs = problem.constraints.rhs(x)
    usable = jnp.isfinite(rhs)
    return usable, (problem.constraints.push(y) - jnp.where(usable, rhs, 0)) / norm


def _into_box(problem: Problem, multipliers, bound):
    equality = jnp.arange(multipliers.size) >= problem.constraints.num_inequalities
    return jnp.clip(multipliers, jnp.where(equality, -bound, 0), bound)


def _project(problem: Problem, x, y, constants: Constants, warm):
    """The nearest point of the joint set, in the metric of the steps."""
    if isinstance(problem.constraints, AbstractFixedSet):
        x = onto_domain(problem, x)
        return x, problem.constraints.project(y), None, Status.successful
    if problem.constraints.num_rows == 0 and problem.domain is None:
        return x, y, None, Status.successful
    flat, unravel = ravel_pytree(x)
    A, b, A_eq, b_eq = joint_rows(problem, x, y.dtype, True)
    target = jnp.concatenate([flat.astype(y.dtype), y])
    # Relative to each other; the larger weight is one.
    weights = jnp.concatenate(
        [
            jnp.full(flat.size, 1.0, y.dtype),
            jnp.full(y.size, constants.x_step / constants.y_step, y.dtype),
        ]
    )
    joint = Problem(
        no_upper,
        _Distance(weights / jnp.max(weights)),
        Polyhedron(A=A, b=b, A_eq=A_eq, b_eq=b_eq),
        y0=target,
    )
    solution = ActiveSet(diagnose=False)(joint, target, warm)
    new = solution.y
    return unravel(new[: flat.size]), new[flat.size :], solution, solution.status


class _Distance(Plain):
    weights: Float[Array, " m"]

    def __call__(self, target, u):
        return 0.5 * jnp.sum(self.weights * (u - target) ** 2)
