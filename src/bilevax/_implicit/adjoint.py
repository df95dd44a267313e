"""Linear systems of the implicit function theorem, in three back ends.

With `H` the Hessian of `g` in `y` and `A_S` the active rows, each of them solves

    [H    A_S^T] [v]   [top   ]
    [A_S   0   ] [w] = [bottom]

once: with the factor that the lower-level solver left behind, by conjugate gradients on
the free subspace, or by a Neumann series there. The matrix is symmetric, so one solve
serves the gradient (adjoint) and the tangent alike.
"""

import abc
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Bool, Float

from .._arguments import as_number, check_fields
from .._constraints import AbstractConstraints
from .._lower.base import LowerSolution
from .._lower.dense import curvature, flatten, largest, probe, random_signs, ratio
from .._lower.free import free_solve, free_subspace
from .._lower.sparse.hessian import SparseHessian
from .._lower.sparse.kkt import SparseFactor
from .._problem.problem import Problem
from .._programs.arrays import sp, xp
from .._programs.control import in_stages, loop, rarely, unless_rarely
from .._programs.modules import Plain
from .._status import is_traced
from .._tolerances import tolerances


class KKTSystem(NamedTuple):
    """The KKT matrix at one point, as products."""

    constraints: AbstractConstraints
    lower: Any
    y: Float[Array, " n"]
    active: Bool[Array, " k"]

    def __call__(self, v, w):
        """The product; rows off the active set are the identity, up to sign."""
        top, pulled, pushed = self.products(v, w)
        if w.size == 0:
            return top, w
        return top + pulled, jnp.where(self.active, pushed, -w)

    def products(self, v, w):
        """`H v`, `A_S^T w` and `A v`."""
        bent = curvature(self.lower, self.y, v)
        if w.size == 0:
            return bent, xp.zeros_like(bent), w
        held = self.constraints.pull(xp.where(self.active, w, 0))
        return bent, held, self.constraints.push(v)


def kkt_system(problem: Problem, x, y, active) -> KKTSystem:
    """The KKT matrix of `problem` at `(x, y)` with the given active rows."""
    lower, _ = flatten(problem, x)
    return KKTSystem(problem.constraints.at(x), lower, ravel_pytree(y)[0], active)


class AbstractAdjoint(Plain):
    """A way to solve the KKT system of a lower-level solution."""

    def __check_init__(self):
        check_fields(self)

    @abc.abstractmethod
    def solve(
        self, system: KKTSystem, solution: LowerSolution, top, bottom
    ) -> tuple[Float[Array, " n"], Float[Array, " k"], Bool[Array, ""]]:
        """`v`, `w` and whether the residual is small."""

    def free(self, system: KKTSystem, solution: LowerSolution) -> Callable:
        """The projector on the free subspace."""
        size, dtype = system.y.size, system.y.dtype
        return free_subspace(system.constraints, system.active, size, dtype).project

    def inverse(self, system: KKTSystem, solution: LowerSolution) -> Callable:
        """`v` as a function of `top`, for `bottom = 0`; a few digits are enough."""
        bottom = xp.zeros_like(solution.multipliers)
        return lambda top: self.solve(system, solution, top, bottom)[0]


class DenseAdjoint(AbstractAdjoint):
    """The factor of the lower-level solve, with iterative refinement."""

    max_steps: int = 12

    def solve(self, system, solution, top, bottom):
        factor, active = solution.factor.open(), solution.active
        side, v, w = _solved(factor, active, top, bottom)

        def attempt(v, w) -> Attempt:
            return _attempted(factor, active, side, v, w, system.products(v, w))

        def refine(best: Attempt) -> Attempt:
            return _kept(best, attempt(*_improved(factor, active, best)))

        first = attempt(v, w)
        # Dependent rows leave an error that one refinement at least must remove.
        first = first._replace(going=first.going | ~factor.rows_inverse.exact)
        best = loop(lambda a: a.going, refine, first, limit=self.max_steps - 1)
        best = unless_rarely(best.fine, lambda a: _explained(factor, a), best)
        tol = tolerances(top.dtype)
        blurred = tol.safety * tol.eps * factor.hessian.inflation > tol.sure
        best = rarely(blurred, lambda a: _unblurred(factor, active, a), best)
        return best.v, best.w, best.fine

    def inverse(self, system, solution):
        factor, active = solution.factor.open(), solution.active
        bottom = xp.zeros_like(solution.multipliers)
        return lambda top: _solved(factor, active, top, bottom)[1]


class Attempt(NamedTuple):
    """A solution of the KKT system, what it misses, and how much that is.

    `relative` compares rows with the length of `v`, `noise` with what the forces could
    move. All in unit rows and in the units of the columns, like the factor.
    """

    v: Float[Array, " n"]
    w: Float[Array, " k"]
    pull: Float[Array, " n"]
    ahead: Float[Array, " k"]
    force: Float[Array, ""]
    relative: Float[Array, ""]
    noise: Float[Array, ""]
    going: Bool[Array, ""]
    fine: Bool[Array, ""]


def _solved(factor, active, top, bottom):
    """The right side in the units of the factor, and the solution in natural ones."""
    top, bottom = factor.columns * top, xp.where(active, bottom / factor.norm, 0)
    v, w = factor.solve(top, bottom)
    return (top, bottom), factor.columns * v, xp.where(active, w / factor.norm, 0)


def _improved(factor, active, best: Attempt):
    dv, dw = factor.solve(best.pull, best.ahead)
    dw = xp.where(active, dw / factor.norm, 0)
    return best.v + factor.columns * dv, best.w + dw


def _attempted(factor, active, side, v, w, products) -> Attempt:
    (top, bottom), (bent, held, pushed) = side, products
    columns, stiffness = factor.columns, factor.hessian.stiffness
    tol = tolerances(top.dtype)
    curved, held = columns * bent, columns * held
    pull = top - curved - held
    ahead = xp.where(active, bottom - pushed / factor.norm, 0)
    wrong, *sizes = largest(pull, curved, held, top)
    force = sizes[0] + sizes[1] + sizes[2]
    relative = noise = ratio(wrong, force)
    if w.size:
        gap, reach = largest(ahead)[0], force / stiffness
        length = xp.linalg.norm(v / columns) + tol.eps**0.5 * reach
        relative = xp.maximum(relative, ratio(gap, length))
        noise = xp.maximum(noise, ratio(gap, reach))
    going = ~(relative <= tol.rounding)
    fine = (relative <= tol.accept) | (noise <= tol.rounding)
    return Attempt(v, w, pull, ahead, force, relative, noise, going, fine)


def _kept(old: Attempt, new: Attempt) -> Attempt:
    """The better of two, which is refined further as long as errors are halved."""
    # At a vertex `v` vanishes, and only the second measure can still fall.
    halved = (new.relative <= 0.5 * old.relative) | (new.noise <= 0.5 * old.noise)
    kept = jax.tree.map(lambda a, b: xp.where(halved, a, b), new, old)
    return kept._replace(going=new.going & halved)


def _explained(factor, best: Attempt) -> Attempt:
    """What rounding alone does to `H v`, through the diagonal of `H`."""
    tol, diagonal = tolerances(best.v.dtype), factor.hessian.diagonal
    spread = xp.sqrt(diagonal)
    v = best.v / factor.columns
    effect = tol.rounding * xp.max(spread) * (spread @ xp.abs(v))
    limit = tol.accept + ratio(effect, best.force)
    return best._replace(fine=best.relative <= limit)


def _unblurred(factor, active, best: Attempt) -> Attempt:
    """Fine only if rounding of `H v` leaves `v` alone where `H` is nearly singular.

    Beside a stiff direction that is no coordinate the soft ones are known that well.
    """
    tol, diagonal = tolerances(best.v.dtype), factor.hessian.diagonal
    spread, v = xp.sqrt(diagonal), best.v / factor.columns
    terms = spread * (factor.hessian.coupled * (spread @ xp.abs(v)))
    terms = tol.eps * (diagonal * xp.abs(v) + terms)
    # Of two no stiff direction swallows both.
    terms = xp.stack([terms, random_signs(v) * terms])
    dv, _ = factor.solve(terms, xp.zeros((2, best.w.size), terms.dtype))
    dv = xp.max(xp.abs(dv), axis=0)
    error, size, bent, reach = largest(dv, v, spread * dv, spread * v)
    fine = (error <= tol.sure * size) & (bent <= tol.sure * reach)
    return best._replace(fine=best.fine & fine)


class SparseAdjoint(AbstractAdjoint):
    """The factor of the sparse solve, refined with products of the Hessian at `y`."""

    max_steps: int = 12

    def solve(self, system, solution, top, bottom):
        factor = solution.factor
        if not factor.there:
            nan = xp.full_like(top, xp.nan)
            return nan, xp.full_like(bottom, xp.nan), xp.asarray(False)
        v, w, fine = self._refined(factor, system, top, bottom)
        if not fine:
            # Of a Hessian too far from that at `y`.
            factor = factor.at(SparseHessian(system.lower).at(system.y))
            if factor.there:
                v, w, fine = self._refined(factor, system, top, bottom)
        return v.astype(top.dtype), w.astype(bottom.dtype), xp.asarray(fine)

    def free(self, system, solution):
        """By the factor with the identity in place of the Hessian."""
        factor = solution.factor.at(sp.eye_array(system.y.size, format="csr"))
        nothing = np.zeros(len(factor.active))
        return lambda d: factor.solve(np.asarray(d, float), nothing)[0].astype(d.dtype)

    def _refined(self, factor: SparseFactor, system: KKTSystem, top, bottom):
        tol, norm = tolerances(top.dtype), factor.fixed.norm
        active, v, w = factor.active, 0 * top, 0 * bottom
        pull, ahead = top, xp.where(active, bottom, 0)
        best = v, w, xp.inf
        for _ in range(self.max_steps):
            dv, dw, _ = factor.solve(pull, ahead / norm)
            v, w = v + dv, w + dw / norm
            bent, held, pushed = system.products(v, w)
            pull, ahead = top - bent - held, xp.where(active, bottom - pushed, 0)
            wrong, *sizes = (float(xp.max(xp.abs(a))) for a in (pull, bent, held, top))
            wrong = ratio(wrong, sum(sizes))
            if w.size:
                length = xp.linalg.norm(v) + tol.eps**0.5 * sum(sizes) / factor.size
                wrong = max(wrong, ratio(float(xp.max(xp.abs(ahead / norm))), length))
            # A NaN compares false.
            falls = wrong <= 0.5 * best[2]
            best = (v, w, wrong) if wrong < best[2] else best
            if not falls or wrong <= tol.rounding:
                break
        return best[0], best[1], bool(best[2] <= tol.accept)


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

    weight: Float[Array, ""] = eqx.field(
        converter=as_number, metadata={"number": "constant"}
    )

    def __check_init__(self):
        check_fields(self)
        if not is_traced(self.weight) and not 0 < float(self.weight) < jnp.inf:
            raise ValueError(
                f"`weight` must be a positive number; got {float(self.weight)}."
            )

    def solve(self, system, solution, top, bottom):
        constraints, active = system.constraints, system.active
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


def refuse_danskin(problem) -> None:
    """Raise a `ValueError` where `upper` takes prices, which `Danskin` holds fixed."""
    if problem.prices:
        raise ValueError(
            "Danskin() takes the answer of the lower level as fixed, and `upper` takes "
            "prices, which move with `x`. Leave `adjoint` out."
        )


class Occasional(AbstractAdjoint):
    """Another adjoint, `times` as large where `now` holds, and nothing where not.

    Where `now` is drawn with the probability `1 / times` the mean over the draws is the
    whole adjoint; where it does not hold, the mixed derivative of `g` is not computed.
    """

    adjoint: AbstractAdjoint
    now: Bool[Array, ""]
    times: int

    def solve(self, system, solution, top, bottom):
        v, w, fine = self.adjoint.solve(system, solution, top, bottom)
        scaled = lambda part: jnp.where(self.now, self.times * part, 0)
        return scaled(v), scaled(w), fine


def largest_curvature(operator, like, steps: int = 30):
    """The largest eigenvalue of a symmetric operator, by power iteration."""
    tiny = jnp.finfo(like.dtype).tiny

    def body(_, v):
        return operator(v / xp.maximum(xp.linalg.norm(v), tiny))

    v = operator(probe(like))
    if in_stages():
        for i in range(steps):
            v = body(i, v)
    else:
        v = jax.lax.fori_loop(0, steps, body, v)
    return xp.maximum(xp.linalg.norm(v), tiny)


def _reduce(system: KKTSystem, top, bottom):
    """Meet the rows with the shortest step; what is left lives on the free subspace."""
    free = free_subspace(system.constraints, system.active, top.size, top.dtype)
    shift = free.lift(bottom) if bottom.size else jnp.zeros_like(top)
    rest = free.project(top - system.lower.hessian_product(system.y, shift))
    return free, shift, rest


def _recover(system: KKTSystem, free, top, v):
    force = top - system.lower.hessian_product(system.y, v)
    return free.multipliers(force)


def default_adjoint(solution: LowerSolution) -> AbstractAdjoint:
    """Dense where the solver left a factor, conjugate gradients elsewhere."""
    if isinstance(solution.factor, SparseFactor):
        return _SPARSE
    return ConjugateGradient() if solution.factor is None else _DENSE


_DENSE, _SPARSE = DenseAdjoint(), SparseAdjoint()
