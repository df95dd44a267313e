"""First-order solver for boxes and simplices at any size; no matrix is ever formed.

Accelerated projected gradient finds the face of the solution, conjugate gradients on
that face finish (the active-set polish), and the two alternate until the KKT residual
is rounding. Everything is products with the Hessian, through `jax.jvp`.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Bool, Float, Int

from .._constraints import Box, Simplex
from .._programs.control import loop, rarely
from .._programs.modules import Plain
from .._status import Status
from .._tolerances import NEAR_ZERO, tolerances
from .base import AbstractLowerSolver, Iterations, LowerSolution
from .dense import FlatLower, flatten, largest, probe, ratio
from .free import free_solve, free_subspace

# Variables up to which a dense solver may take over.
_DENSE = 2000


class ProjectedGradient(AbstractLowerSolver):
    """Accelerated projected gradient with a conjugate-gradient polish.

    - `accuracy`: stop once the estimated `|y - y*|` is below it; the default goes on
      until rounding stops progress.
    - `max_steps`: rounds of gradient steps plus polish.
    - `gradient_steps`: accelerated steps in a round.
    - `cg_steps`: conjugate-gradient steps in a polish.
    - `fallback`: the solver that takes over where this one reaches a limit, up to 2 000
      variables; beyond them matrices are too large.
    """

    accuracy: float | None = None
    max_steps: int = 60
    gradient_steps: int = 40
    cg_steps: int = 500
    fallback: AbstractLowerSolver | None = None

    def __call__(self, problem, x, warm=None):
        solution = self._solve(problem, x, warm)
        other = self.fallback
        if other is None or solution.slack.size > 2 * _DENSE:
            return solution
        again = lambda _: _without_factor(other(problem, x), solution)
        failed = solution.status == Status.iteration_limit
        return rarely(failed, again, solution)

    def _solve(self, problem, x, warm) -> LowerSolution:
        constraints = problem.constraints
        if not isinstance(constraints, Box | Simplex):
            raise ValueError(
                "ProjectedGradient solves lower levels over a Box or a Simplex; got "
                f"{type(constraints).__name__}. Use ActiveSet or InteriorPoint."
            )
        lower, y = flatten(problem, x)
        tol = tolerances(y.dtype)
        if warm is not None:
            y = jnp.where(warm.success, ravel_pytree(warm.y)[0], y)
        y = constraints.project(y)
        curvature = _curvature(lower, y)
        start = _Round(
            face=_face(lower, constraints, y),
            curvature=curvature,
            error=jnp.asarray(jnp.inf, y.dtype),
            done=~jnp.isfinite(curvature) | (curvature <= 0),
            steps=jnp.asarray(0),
            products=jnp.asarray(0),
        )
        end = loop(
            lambda s: ~s.done,
            lambda s: self._round(lower, constraints, s),
            start,
            limit=self.max_steps,
        )
        return _solution(problem, x, lower, end, tol, self.accuracy)

    def _round(self, lower, constraints, s: "_Round") -> "_Round":
        tol = tolerances(s.face.y.dtype)
        y, curvature = _accelerate(
            lower, constraints, s.face, s.curvature, self.gradient_steps, tol.rounding
        )
        face = _better(s.face, _face(lower, constraints, y))
        polished, move, definite = _polish(lower, constraints, face, self.cg_steps)
        new = _better(face, polished)
        shrink = jnp.minimum(1, new.kkt / jnp.where(face.kkt > 0, face.kkt, 1))
        error = jnp.linalg.norm(move) * shrink
        error = error + tol.eps * jnp.linalg.norm(new.y)
        done = (new.kkt <= tol.rounding) | ~definite
        done = done | ((new.kkt <= tol.accept) & (new.kkt > 0.5 * s.face.kkt))
        if self.accuracy is not None:
            done = done | ((error <= self.accuracy) & (new.kkt <= tol.accept))
        return _Round(
            face=new,
            curvature=jnp.where(definite, curvature, -1),
            error=error,
            done=done,
            steps=s.steps + 1,
            products=s.products + self.gradient_steps,
        )


class _Face(Plain):
    """A feasible point, its multipliers, and the bounds that hold it."""

    y: Float[Array, " n"]
    gradient: Float[Array, " n"]
    multipliers: Float[Array, " k"]
    active: Bool[Array, " k"]
    slack: Float[Array, " k"]
    stationarity: Float[Array, " n"]
    force: Float[Array, ""]
    kkt: Float[Array, ""]


class _Round(Plain):
    face: _Face
    curvature: Float[Array, ""]
    error: Float[Array, ""]
    done: Bool[Array, ""]
    steps: Int[Array, ""]
    products: Int[Array, ""]


def _face(lower: FlatLower, constraints, y) -> _Face:
    """Multipliers by least squares on the bounds that `y` meets exactly."""
    gradient, curved = jax.jvp(lower.gradient, (y,), (y,))
    slack = constraints.rhs(None) - constraints.push(y)
    equality = jnp.arange(slack.size) >= constraints.num_inequalities
    gap = largest(jnp.where(equality, slack, 0))[0]
    slack = jnp.where(equality, 0, slack)
    met = equality | (slack <= 0)
    free = free_subspace(constraints, met, y.size, y.dtype)
    multipliers = free.multipliers(-gradient)
    # Bounds that would have to pull are let go; for a simplex this moves the common
    # shift, so it is recomputed for the smaller set.
    active = equality | (met & (multipliers > 0))
    free = free_subspace(constraints, active, y.size, y.dtype)
    multipliers = free.multipliers(-gradient)
    active = equality | (active & (multipliers > 0))
    multipliers = jnp.where(active, multipliers, 0)
    stationarity = gradient + constraints.pull(multipliers)
    parts = (curved, gradient - curved, multipliers, stationarity)
    bend, slope, push, rest = (largest(part)[0] for part in parts)
    force = bend + slope + push
    kkt = ratio(rest, force)
    if constraints.num_equalities:
        length = largest(y)[0] + largest(constraints.rhs(None))[0]
        kkt = jnp.maximum(kkt, ratio(gap, length))
    return _Face(y, gradient, multipliers, active, slack, stationarity, force, kkt)


def _better(old: _Face, new: _Face) -> _Face:
    keep = ~(new.kkt <= old.kkt)
    return jax.tree.map(lambda a, b: jnp.where(keep, a, b), old, new)


def _curvature(lower: FlatLower, y):
    """A first guess of the largest curvature; backtracking corrects it upwards."""

    def body(_, v):
        return lower.hessian_product(y, v / jnp.linalg.norm(v))

    return 1.05 * jnp.linalg.norm(jax.lax.fori_loop(0, 12, body, probe(y)))


def _accelerate(lower, constraints, face: _Face, curvature, num_steps, rounding):
    """Accelerated projected gradient with backtracking and restarts."""

    def step(carry):
        y, ahead, momentum, curvature, count, _ = carry
        value, gradient = jax.value_and_grad(lower.value)(ahead)

        def trial(curvature):
            new = constraints.project(ahead - gradient / curvature)
            d = new - ahead
            model = value + gradient @ d + 0.5 * curvature * (d @ d)
            noise = rounding * jnp.abs(value)
            return new, lower.value(new) <= model + noise

        curvature = loop(lambda c: ~trial(c)[1], lambda c: 2 * c, curvature, limit=10)
        new = trial(curvature)[0]
        grown = 0.5 * (1 + jnp.sqrt(1 + 4 * momentum**2))
        restart = (ahead - new) @ (new - y) > 0
        grown = jnp.where(restart, 1.0, grown)
        weight = jnp.where(restart, 0.0, (momentum - 1) / grown)
        ahead = new + weight * (new - y)
        still = largest(new - y)[0] <= rounding * largest(new)[0]
        return new, ahead, grown, curvature, count + 1, still

    y = face.y
    start = (y, y, jnp.ones((), y.dtype), curvature, 0, jnp.asarray(False))
    end = loop(lambda c: ~c[5], step, start, limit=num_steps)
    return end[0], end[3]


def _polish(lower, constraints, face: _Face, cg_steps):
    """Newton on the face by conjugate gradients, cut back onto the set."""
    free = free_subspace(constraints, face.active, face.y.size, face.y.dtype)

    product = lambda d: lower.hessian_product(face.y, d)
    rest = -free.project(face.gradient)
    rtol = tolerances(rest.dtype).rounding
    d, _ = free_solve(product, free, rest, rtol, cg_steps)
    # Negative curvature along the step: `g` is not convex.
    definite = d @ product(d) >= 0
    before = lower.value(face.y)

    def too_long(step):
        return ~(lower.value(constraints.project(face.y + step * d)) <= before)

    step = loop(too_long, lambda t: 0.5 * t, jnp.ones((), d.dtype), limit=10)
    full = _face(lower, constraints, constraints.project(face.y + d))
    cut = _face(lower, constraints, constraints.project(face.y + step * d))
    # Near the solution values no longer tell; the residual does.
    return _better(cut, full), d, definite


def _without_factor(dense: LowerSolution, like: LowerSolution) -> LowerSolution:
    """The solution of a dense solver in the types of this one."""
    dense = eqx.tree_at(lambda s: s.factor, dense, None, is_leaf=lambda x: x is None)
    cast = lambda new, old: jnp.asarray(new).astype(old.dtype)
    return jax.tree.map(cast, dense, like)


def _solution(
    problem, x, lower: FlatLower, end: _Round, tol, accuracy: float | None
) -> LowerSolution:
    face, constraints = end.face, problem.constraints
    equality = jnp.arange(face.slack.size) >= constraints.num_inequalities
    residual = largest(face.stationarity)[0]
    force_noise = tol.safety * (residual + tol.eps * face.force)
    scale = constraints.rhs_scale(x)
    scale = jnp.where(jnp.isfinite(scale), scale, 0)
    slack_noise = tol.safety * (end.error + tol.eps * scale)
    pinned = _pinned(constraints)
    strong = face.active & (face.multipliers > force_noise)
    strong = equality | pinned | strong
    weak = ~strong & ~(face.slack > slack_noise)
    trust = jnp.where(
        equality | pinned, jnp.inf, jnp.maximum(face.multipliers, face.slack)
    )
    # A residual that is small beside stiff forces says nothing of soft directions.
    length = jnp.linalg.norm(face.y) + NEAR_ZERO * jnp.max(scale, initial=0)
    allowed = jnp.maximum(tol.sure * length, 0.0 if accuracy is None else accuracy)
    far = ~(end.error <= allowed)
    loose = _is_loose(lower, constraints, face)
    status = _status(constraints, x, end, tol, loose, far)
    void = (status != Status.successful) & (status != Status.iteration_limit)
    nan = jnp.asarray(jnp.nan, face.y.dtype)
    return LowerSolution(
        y=lower.unravel(jnp.where(void, nan, face.y)),
        multipliers=jnp.where(void, nan, face.multipliers),
        slack=jnp.where(void, nan, face.slack),
        active=strong,
        weak=weak,
        shared_dependence=jnp.asarray(True),
        margin=jnp.where(void, nan, jnp.maximum(jnp.min(trust, initial=jnp.inf), 0)),
        error=jnp.where(void, nan, end.error),
        kkt_residual=jnp.where(void, nan, face.kkt),
        iterations=Iterations(end.steps, jnp.asarray(0), jnp.asarray(0)),
        status=status,
        factor=None,
        layout=constraints.layout,
    )


def _pinned(constraints):
    """Bounds that leave no room; both of the pair count as active."""
    if isinstance(constraints, Box):
        same = constraints.flat_lower() == constraints.flat_upper()
        return jnp.concatenate([same, same])
    return jnp.zeros(constraints.num_rows, bool)


def _is_loose(lower: FlatLower, constraints, face: _Face):
    """Whether a coordinate between its bounds has no curvature at all.

    A product with numbers that have no pattern shows rows of zeros. On a simplex the
    total may decide such a coordinate.
    """
    if not isinstance(constraints, Box):
        return jnp.asarray(False)
    held = face.active | _pinned(constraints)
    free = ~jnp.any(held.reshape(2, -1), axis=0)
    push = jnp.abs(lower.hessian_product(face.y, jnp.where(free, probe(face.y), 0)))
    none = push <= tolerances(push.dtype).eps ** 2 * largest(push)[0]
    return jnp.any(free & none)


def _status(constraints, x, end: _Round, tol, loose, far):
    if isinstance(constraints, Box):
        empty = jnp.any(constraints.flat_lower() > constraints.flat_upper())
        data = jnp.isnan(constraints.rhs(x))
    else:
        empty = jnp.any(constraints.total < 0)
        data = ~jnp.isfinite(constraints.total)
    inputs = [~jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(x)]
    non_finite = jnp.any(data) | jnp.any(jnp.stack(inputs))
    broken = ~jnp.all(jnp.isfinite(end.face.gradient)) | jnp.isnan(end.curvature)
    cases = (
        (non_finite, Status.non_finite),
        (empty, Status.infeasible),
        (broken, Status.non_finite),
        ((end.curvature <= 0) | loose, Status.not_strongly_convex),
        (~(end.face.kkt <= tol.accept) | far, Status.iteration_limit),
    )
    status = Status.successful
    for failed, kind in reversed(cases):
        status = Status.where(failed, kind, status)
    return status
