"""Linear systems of the implicit function theorem, in three back ends.

With `H` the Hessian of `g` in `y` and `A_S` the active rows, each of them solves

    [H    A_S^T] [v]   [top   ]
    [A_S   0   ] [w] = [bottom]

once: with the factor that the lower-level solver left behind, by conjugate gradients on
the free subspace, or by a Neumann series there. The matrix is symmetric, so one solve
serves the gradient (adjoint) and the tangent alike.
"""

import abc

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Bool, Float

from ._free import free_solve, free_subspace
from ._lower.base import LowerSolution, run_if
from ._lower.dense import FlatLower, flatten, kkt_solve, largest, ratio
from ._problem import Problem
from ._status import is_traced
from ._tolerances import tolerances


class KKTSystem(eqx.Module):
    """The KKT matrix at one point, as products."""

    problem: Problem
    lower: FlatLower
    y: Float[Array, " n"]
    active: Bool[Array, " k"]

    def __call__(self, v, w):
        """The product; rows off the active set are the identity, up to sign."""
        constraints = self.problem.constraints
        top = self.lower.hessian_product(self.y, v)
        if w.size == 0:
            return top, w
        top = top + constraints.pull(jnp.where(self.active, w, 0))
        return top, jnp.where(self.active, constraints.push(v), -w)


def kkt_system(problem: Problem, x, y, active) -> KKTSystem:
    """The KKT matrix of `problem` at `(x, y)` with the given active rows."""
    lower, _ = flatten(problem, x)
    return KKTSystem(problem, lower, ravel_pytree(y)[0], active)


class AbstractAdjoint(eqx.Module):
    """A way to solve the KKT system of a lower-level solution."""

    @abc.abstractmethod
    def solve(
        self, system: KKTSystem, solution: LowerSolution, top, bottom
    ) -> tuple[Float[Array, " n"], Float[Array, " k"], Bool[Array, ""]]:
        """`v`, `w` and whether the residual is small."""


class DenseAdjoint(AbstractAdjoint):
    """The factor of the lower-level solve, with iterative refinement."""

    max_steps: int = 12

    def solve(self, system, solution, top, bottom):
        factor, norm = solution.factor.hessian, solution.factor.norm
        rows_inverse, active = solution.factor.rows_inverse, system.active
        constraints = system.problem.constraints
        tol = tolerances(top.dtype)
        # In unit rows, like the factor.
        bottom = jnp.where(active, bottom / norm, 0)

        def attempt(v, w) -> Attempt:
            curved = system.lower.hessian_product(system.y, v)
            pull, ahead = top - curved, bottom
            held = jnp.zeros_like(curved)
            if w.size:
                held = constraints.pull(jnp.where(active, w / norm, 0))
                pull = pull - held
                pushed = constraints.push(v) / norm
                ahead = jnp.where(active, bottom - pushed, 0)
            wrong, *sizes = largest(pull, curved, held, top)
            force = sizes[0] + sizes[1] + sizes[2]
            relative = noise = ratio(wrong, force)
            if w.size:
                gap, reach = largest(ahead)[0], force / factor.stiffness
                length = jnp.linalg.norm(v) + jnp.sqrt(tol.eps) * reach
                relative = jnp.maximum(relative, ratio(gap, length))
                noise = jnp.maximum(noise, ratio(gap, reach))
            return Attempt(v, w, pull, ahead, force, relative, noise)

        def refine(carry):
            old, steps, _ = carry
            dv, dw = kkt_solve(factor, rows_inverse, old.pull, old.ahead)
            new = attempt(old.v + dv, old.w + dw)
            # At a vertex `v` vanishes, and only the second measure can still fall.
            halved = (new.relative <= 0.5 * old.relative) | (
                new.noise <= 0.5 * old.noise
            )
            kept = jax.tree.map(lambda a, b: jnp.where(halved, a, b), new, old)
            return kept, steps + 1, (new.relative <= tol.rounding) | ~halved

        first = attempt(*kkt_solve(factor, rows_inverse, top, bottom))
        # Dependent rows leave an error that one refinement at least must remove.
        done = (first.relative <= tol.rounding) & rows_inverse.exact
        best, _, _ = jax.lax.while_loop(
            lambda c: ~c[2] & (c[1] < self.max_steps), refine, (first, 1, done)
        )

        def explained(_):
            # What rounding alone does to `H v`, through the diagonal of `H`.
            spread = jnp.sqrt(factor.diagonal)
            effect = tol.rounding * jnp.max(spread) * (spread @ jnp.abs(best.v))
            return best.relative <= tol.accept + ratio(effect, best.force)

        fine = (best.relative <= tol.accept) | (best.noise <= tol.rounding)
        fine = run_if(~fine, explained, fine)
        return best.v, jnp.where(active, best.w / norm, 0), fine


class Attempt(eqx.Module):
    """A solution of the KKT system, what it misses, and how much that is.

    `relative` compares rows with the length of `v`, `noise` with what the forces could
    move.
    """

    v: Float[Array, " n"]
    w: Float[Array, " k"]
    pull: Float[Array, " n"]
    ahead: Float[Array, " k"]
    force: Float[Array, ""]
    relative: Float[Array, ""]
    noise: Float[Array, ""]


class ConjugateGradient(AbstractAdjoint):
    """Conjugate gradients on the free subspace; no matrix is formed.

    `rtol` defaults to what the dtype can reach.
    """

    rtol: float | None = None
    max_steps: int = 2000

    def solve(self, system, solution, top, bottom):
        free, shift, rest = _reduce(system, top, bottom)
        rtol = self.rtol or 100 * tolerances(top.dtype).rounding

        product = lambda d: system.lower.hessian_product(system.y, d)
        inside, wrong = free_solve(product, free, rest, rtol, self.max_steps)
        v = shift + inside
        accept = jnp.maximum(tolerances(top.dtype).accept, 10 * rtol)
        fine = wrong <= accept * jnp.linalg.norm(rest)
        return v, _recover(system, free, top, v), fine


class Neumann(AbstractAdjoint):
    """The series `step * sum_j (I - step P H P)^j` with a chosen number of terms.

    Cheap and biased: the error falls like `(1 - step mu)^terms`. The default `step` is
    one over the largest curvature on the free subspace, by power iteration.
    """

    terms: int = 10
    step: float | None = None

    def solve(self, system, solution, top, bottom):
        free, shift, rest = _reduce(system, top, bottom)

        def operator(d):
            return free.project(system.lower.hessian_product(system.y, d))

        step = self.step
        if step is None:
            step = 1 / (1.05 * largest_curvature(operator, rest))
        total, _ = jax.lax.fori_loop(
            0,
            self.terms,
            lambda _, c: (c[0] + step * c[1], c[1] - step * operator(c[1])),
            (jnp.zeros_like(rest), rest),
        )
        v = shift + total
        return v, _recover(system, free, top, v), jnp.all(jnp.isfinite(v))


class ScaledIdentity(AbstractAdjoint):
    """The Hessian taken to be `weight` times the identity, on the free subspace.

    Exact where `g` has that Hessian. With another `weight` the share of the gradient
    that comes through the lower level is scaled on purpose.
    """

    weight: Float[Array, ""] = eqx.field(converter=lambda w: jnp.asarray(w, float))

    def __check_init__(self):
        if not is_traced(self.weight) and not 0 < float(self.weight) < jnp.inf:
            raise ValueError(
                f"`weight` must be a positive number; got {float(self.weight)}."
            )

    def solve(self, system, solution, top, bottom):
        constraints, active = system.problem.constraints, system.active
        free = free_subspace(constraints, active, top.size, top.dtype)
        shift = free.lift(bottom) if bottom.size else jnp.zeros_like(top)
        weight = self.weight.astype(top.dtype)
        v = shift + free.project(top / weight - shift)
        return v, free.multipliers(top - weight * v), jnp.asarray(True)


class Danskin(AbstractAdjoint):
    """The answer of the lower level is held fixed; the gradient is `grad_x f`.

    Right where the lower level maximises what the upper one minimises (`g = -f`): a
    small change of `y` then changes nothing to first order. No KKT system is solved.
    """

    def solve(self, system, solution, top, bottom):
        return jnp.zeros_like(top), jnp.zeros_like(bottom), jnp.asarray(True)


def largest_curvature(operator, like, steps: int = 30):
    """The largest eigenvalue of a symmetric operator, by power iteration."""
    n = like.size
    start = jnp.cos(1.0 + 2.4 * jnp.arange(n)).astype(like.dtype)
    start = operator(start)

    def body(_, v):
        return operator(v / jnp.maximum(jnp.linalg.norm(v), jnp.finfo(v.dtype).tiny))

    return jnp.maximum(
        jnp.linalg.norm(jax.lax.fori_loop(0, steps, body, start)),
        jnp.finfo(like.dtype).tiny,
    )


def _reduce(system: KKTSystem, top, bottom):
    """Meet the rows with the shortest step; what is left lives on the free subspace."""
    free = free_subspace(system.problem.constraints, system.active, top.size, top.dtype)
    shift = free.lift(bottom) if bottom.size else jnp.zeros_like(top)
    rest = free.project(top - system.lower.hessian_product(system.y, shift))
    return free, shift, rest


def _recover(system: KKTSystem, free, top, v):
    force = top - system.lower.hessian_product(system.y, v)
    return free.multipliers(force)


def default_adjoint(solution: LowerSolution) -> AbstractAdjoint:
    """Dense where the solver left a factor, conjugate gradients elsewhere."""
    return ConjugateGradient() if solution.factor is None else DenseAdjoint()
