"""AiPOD: single-loop projected gradients for equality rows (Xiao et al. 2023)."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float, PRNGKeyArray, PyTree

from .._arguments import check_fields
from .._implicit.adjoint import largest_curvature
from .._implicit.feasible import onto_domain
from .._implicit.hypergradient import Evaluation
from .._lower.base import LowerSolution, all_finite
from .._lower.dense import flatten
from .._lower.free import AbstractFreeSubspace, free_subspace
from .._problem.problem import AbstractProblem, Problem
from .._problem.stochastic import representative
from .._programs.modules import Plain
from .._programs.quick import quick_jit
from .._status import Status
from .base import (
    AbstractMethod,
    Number,
    Scales,
    draws,
    falling,
    number,
    report,
    tree_step,
)
from .equality_oracle import only_equalities
from .pigd import positive
from .search import select

# Power iteration comes from below, so the curvature it finds is enlarged.
_CURVATURE_MARGIN = 1.05


class AiPODState(Plain):
    """`x` with its follower `y`, which one step brings nearer to `y*(x)`.

    - `lower`: the solution at the start of the run, for the record.
    - `free`: projections along the rows; the rows do not change.
    - `curvature`: the largest one of `g` at the start, on the free subspace.
    - `lower_step`: the step of `y`, halved when it has led to infinity.
    - `control`: the shift of the gradient that E-AiPOD learns; zero here.
    - `projections`: how many projections on the rows were made.
    """

    x: PyTree[Array]
    y: PyTree[Array]
    lower: LowerSolution
    scales: Scales
    free: AbstractFreeSubspace
    curvature: Float[Array, ""]
    lower_step: Float[Array, ""]
    control: PyTree[Array]
    projections: Array


class AiPOD(AbstractMethod):
    """Alternating projected gradient steps in `y` and in `x`, for `A y + B x = b`.

    With fresh samples for every derivative, step `t` takes `S` times

        y = Q(y - beta grad_y g(x, y)),   Q(y) = y - A^+ (A y + B x - b)

    and then `x+ = P(x - alpha v)`. With `G` the Hessian of `g` in `y` and `w` the
    solution of `G w = grad_y f` on the null space of `A`,

        v = grad_x f - B^T (A^+)^T grad_y f + (B^T (A^+)^T G - g_xy) w

    No lower level is solved: `y` lives along with `x`.

    - `step_size`: constant `alpha`.
    - `first_step`, `decay`: without it, `alpha` is `first_step` times the length over
      the slope of the problem at the start, and `decay` times that at the end.
    - `lower_step`: `beta`; by default one over the largest curvature of `g` on the null
      space of `A` at the start.
    - `lower_steps`: `S`.
    - `neumann`: 0 solves for `w` with the dense Hessian; `N > 0` takes
      `w = (N / l) prod_{i <= j} (I - G_i / l) grad_y f` on the null space with `j`
      uniform below `N`, a fresh sample per factor and `l` the largest curvature.

    Q. Xiao, H. Shen, W. Yin, T. Chen: Alternating projected SGD for
    equality-constrained bilevel optimization, AISTATS 2023.

    Deviations: `y` starts at the solution for the first `x`; `f` and `g` in `v` have
    one fresh sample each; the step of `x` falls by default; a step of `y` that led to
    infinity is taken back and halved. The term with `grad_y f` and `A^+` belongs to the
    gradient, though public code leaves it out.

    Reconstruction: the Neumann estimate.
    """

    step_size: Number | None = number(None)
    first_step: Number = number(0.1)
    decay: Number = number(0.05)
    lower_step: Number | None = number(None)
    lower_steps: int = 5
    neumann: int = 0

    def __check_init__(self):
        check_fields(self)
        if self.lower_steps < 1 or self.neumann < 0:
            raise ValueError(
                "`lower_steps` must be at least 1 and `neumann` at least 0; got "
                f"{self.lower_steps} and {self.neumann}."
            )

    def refusal(self, problem):
        return only_equalities(representative(problem, jr.key(0)), type(self).__name__)

    def init(self, problem, x, lower, scales, *, key):
        return first_state(self, problem, x, lower, scales, on_free=True)

    def step(self, problem, state, *, step, num_steps, key):
        keys = draws(key)
        y_keys, v_key = _keys(keys.sample, self.lower_steps)
        rows = problem.draw(v_key).constraints

        def descend(y, key):
            now = problem.draw(key)
            force = ravel_pytree(lower_gradient(now, state.x, y))[0]
            flat, unravel = ravel_pytree(y)
            flat = flat - state.lower_step * force
            return unravel(onto_rows(rows, state.free, state.x, flat)), None

        y, _ = jax.lax.scan(descend, state.y, y_keys)
        v = Estimator.at(self, problem, state, state.x, y, v_key)
        value, grad = v(state.x)
        eta = upper_step(self, state, step, num_steps)
        x = onto_domain(v.upper, tree_step(state.x, -eta, grad))
        return advanced(
            self, problem, state, x, y, state.control, value, grad, v,
            projections=self.lower_steps,
        )  # fmt: skip


class Estimator(Plain):
    """The gradient of `F` as a function of `x`, for one `y` and one `w`."""

    upper: Problem
    lower: Problem
    free: AbstractFreeSubspace
    y: PyTree[Array]
    w: Float[Array, " n"]
    products: Array
    solves: int

    @classmethod
    def at(cls, method, problem: AbstractProblem, state: AiPODState, x, y, key):
        """With `w` computed at `(x, y)`, from fresh samples."""
        f_key, g_key, series_key = jr.split(key, 3)
        upper, lower = problem.draw(f_key), problem.draw(g_key)
        f_y = ravel_pytree(_upper_gradients(upper, x, y)[1][1])[0]
        flat_lower, _ = flatten(lower, x)
        flat = ravel_pytree(y)[0]
        rest = state.free.project(f_y)
        if not method.neumann:
            w = _dense_solve(flat_lower.hessian(flat), state.free, rest)
            products, solves = jnp.asarray(flat.size), 1
        else:
            w, products = _neumann(problem, state, x, flat, rest, method, series_key)
            solves = 0
        return cls(upper, lower, state.free, y, w, products, solves)

    def __call__(self, x):
        """`f` and the gradient at `x`."""
        value, (f_x, f_y) = _upper_gradients(self.upper, x, self.y)
        lower, _ = flatten(self.lower, x)
        flat, unravel = ravel_pytree(self.y)
        force = ravel_pytree(f_y)[0] - lower.hessian_product(flat, self.w)
        pull = self.free.multipliers(force)
        w = unravel(self.w)

        def cross(x):
            g = lambda y: self.lower.lower_value(x, y)
            along = jax.jvp(g, (self.y,), (w,))[1]
            return along + self.lower.constraints.coupling(x, pull)

        return value, jax.tree.map(jnp.subtract, f_x, jax.grad(cross)(x))


def _upper_gradients(problem: Problem, x, y):
    f = lambda x, y: problem.upper_value(x, y)[0]
    return jax.value_and_grad(f, argnums=(0, 1))(x, y)


def _dense_solve(hessian, free: AbstractFreeSubspace, rest):
    """`P H P w = rest` on the free subspace."""
    eye = jnp.eye(rest.size, dtype=rest.dtype)
    P = jax.vmap(free.project)(eye)
    # A multiple of the identity beside the subspace; any positive one will do.
    beside = jnp.trace(hessian) / rest.size
    factor = jax.scipy.linalg.cho_factor(P @ hessian @ P + beside * (eye - P))
    return free.project(jax.scipy.linalg.cho_solve(factor, rest))


def _neumann(problem, state: AiPODState, x, y, rest, method, key):
    """An estimate of the solution by a product of random length, and that length."""
    terms, bound = method.neumann, _CURVATURE_MARGIN * state.curvature
    length_key, factor_key = jr.split(key)
    length = jr.randint(length_key, (), 0, terms)

    def factor(i, v):
        lower, _ = flatten(problem.draw(jr.fold_in(factor_key, i)), x)
        return v - state.free.project(lower.hessian_product(y, v)) / bound

    return terms / bound * jax.lax.fori_loop(0, length, factor, rest), length


def lower_gradient(problem: Problem, x, y) -> PyTree[Array]:
    """`grad_y g`."""
    return jax.grad(problem.lower_value, argnums=1)(x, y)


def onto_rows(constraints, free: AbstractFreeSubspace, x, y: Float[Array, " n"]):
    """The nearest `y` with `A y + B x = b`."""
    if constraints.num_rows == 0:
        return y
    return y - free.lift(constraints.push(y) - constraints.rhs(x))


def upper_step(method, state: AiPODState, step, num_steps):
    """`alpha` of this step, the same for every estimate, or its mean would be lost."""
    if method.step_size is not None:
        return method.step_size
    reach = falling(method.first_step, method.decay, step, num_steps)
    return reach * state.scales.length / positive(state.scales.slope)


@quick_jit
def first_state(
    method, problem: Problem, x, lower: LowerSolution, scales, *, on_free: bool
) -> AiPODState:
    """The state before the first step.

    Without `on_free` the step of `y` must suit the curvature in all directions.
    """
    flat_lower, _ = flatten(problem, x)
    flat = ravel_pytree(lower.y)[0]
    rows = jnp.ones(problem.constraints.num_rows, bool)
    free = free_subspace(problem.constraints, rows, flat.size, flat.dtype)
    product = lambda d: flat_lower.hessian_product(flat, d)
    inside = largest_curvature(lambda d: free.project(product(free.project(d))), flat)
    everywhere = largest_curvature(product, flat)
    length = method.lower_step
    if length is None:
        length = 1 / (_CURVATURE_MARGIN * (inside if on_free else everywhere))
    return AiPODState(
        x=x,
        y=lower.y,
        lower=lower,
        scales=scales,
        free=free,
        curvature=inside,
        lower_step=jnp.asarray(length, flat.dtype),
        control=jax.tree.map(jnp.zeros_like, lower.y),
        projections=jnp.asarray(0),
    )


def advanced(
    method, problem, state: AiPODState, x, y, control, value, grad, v: Estimator, *,
    projections, upper_steps: int = 1,
):  # fmt: skip
    """The next state and its record; all stays where something is not finite."""
    fine = all_finite((value, grad, x, y, control))
    x, y = select(fine, x, state.x), select(fine, y, state.y)
    control = select(fine, control, state.control)
    status = Status.where(fine, Status.successful, Status.non_finite)
    e = Evaluation(value, None, grad, state.lower, status, None)
    samples = method.lower_steps + 2 + (v.products if method.neumann else 0)
    record = report(
        problem,
        e,
        state.lower,
        state.x,
        x,
        lower_solves=0,
        lower_passes=method.lower_steps,
        factorisations=v.solves,
        safeguard=0,
        upper_gradients=1 + upper_steps,
        # Besides those for `w`, two products in every gradient.
        hessian_products=v.products + 2 * upper_steps,
        linear_solves=v.solves,
        samples=samples if not isinstance(problem, Problem) else 0,
    )
    length = jnp.where(fine, state.lower_step, state.lower_step / 2)
    count = state.projections + projections
    new = eqx.tree_at(
        lambda s: (s.x, s.y, s.control, s.lower_step, s.projections),
        state,
        (x, y, control, length, count),
    )
    return new, record


def _keys(key: PRNGKeyArray, steps: int):
    """One key per step of `y`, and one for the gradient."""
    keys = jr.split(key, steps + 1)
    return keys[:steps], keys[steps]
