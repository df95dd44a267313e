"""Whether multipliers say what `F` is, where `upper` takes them as prices.

Multipliers `mu` of tight rows `S` that depend on each other are not unique: `mu + z` is
as good, for small `z` with `A_S^T z = 0`. `F` has a value all the same if `f` does not
change along `z`: where two rows hold a variable from both sides, and nobody asks for
their prices. So rows are looked at first, and `f` only where they depend.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from .._constraints import AbstractConstraints, Box, Simplex
from .._lower.active_set import DenseFactor, KeptFactor
from .._lower.base import LowerSolution
from .._lower.followers import in_batches, is_whole
from .._lower.sparse.kkt import SparseFactor
from .._problem.followers import Followers
from .._problem.problem import Problem, bare
from .._programs.arrays import eigh, ravel, sp, xp
from .._programs.control import once, packed, stage, unless_rarely
from .._programs.modules import with_fields
from .._status import Status, as_status, code_of
from .._tolerances import tolerances

# The share of a random vector that must be left for rows to count as dependent.
_LEFT = 1e-6


def with_unique_prices(
    problem: Problem | Followers, x, lower: LowerSolution, whole=None
) -> LowerSolution:
    """`lower`, its status `prices_not_unique` where `F` is not defined for that."""
    if not problem.prices or not lower.multipliers.size:
        return lower
    if isinstance(problem, Followers):
        free = _free_of_each(problem, x, lower)
        unique = jax.vmap(_is_flat)(free, *_pushes_of_all(problem, x, lower, free))
    else:
        whole = once(_whole, problem) if whole is None else whole
        sure = _is_independent(lower) & ~xp.any(lower.weak)
        unique = unless_rarely(
            sure, lambda _: _is_unique(problem, whole, x, lower), xp.asarray(True)
        )
    code = lower.status._value
    wrong = (code == code_of(Status.successful)) & ~unique
    kind = code_of(Status.prices_not_unique)
    return with_fields(lower, status=as_status(xp.where(wrong, kind, code)))


def ambiguous_rows(problem: Problem, x, lower: LowerSolution) -> Bool[Array, " k"]:
    """Rows whose multiplier could be another one."""
    sure = _is_independent(lower) & ~xp.any(lower.weak)
    none = xp.zeros(lower.multipliers.size, bool)
    return unless_rarely(sure, lambda _: _free(problem, x, lower) != 0, none)


def _whole(problem: Problem):
    return packed((bare(problem), None))


def _is_independent(lower: LowerSolution) -> Bool[Array, ""]:
    """Whether the solver knows that the active rows are independent."""
    if isinstance(lower.factor, DenseFactor | KeptFactor):
        return lower.factor.open().rows_inverse.independent
    if isinstance(lower.factor, SparseFactor) and lower.factor.there:
        return xp.asarray(not lower.factor.open_directions()[1])
    return xp.asarray(False)


def _is_unique(problem: Problem, whole, x, lower: LowerSolution) -> Bool[Array, ""]:
    free = _free(problem, x, lower)
    return _is_flat(free, *_pushes(whole, x, lower.y, lower.multipliers, free))


def _is_flat(free, *pushes) -> Bool[Array, ""]:
    """Whether `f` does not change along `free`, by its derivatives at two points."""
    fine = xp.asarray(True)
    for push in pushes:
        # One by one, so that rows of other units have no say.
        terms = push * free
        noise = tolerances(free.dtype).eps ** 0.5 * xp.sum(xp.abs(terms))
        fine = fine & (xp.abs(xp.sum(terms)) <= 1e2 * noise)
    return fine


@stage
def _pushes(whole, x, y, multipliers, free):
    """The derivatives of `f` in the multipliers, here and along `free`."""
    value = lambda mu: whole[0].upper_value(x, y, mu)[0]
    away = multipliers + _step(multipliers, free)
    return jax.grad(value)(multipliers), jax.grad(value)(away)


def _step(multipliers, free):
    """Along `free`, about as long as the multipliers are."""
    size, length = jnp.max(jnp.abs(multipliers)), jnp.max(jnp.abs(free))
    return free * jnp.where(size > 0, size, 1) / jnp.where(length > 0, length, 1)


def _free(problem: Problem, x, lower: LowerSolution) -> Float[Array, " k"]:
    """Some `z` with `A_S^T z = 0`: zero where multipliers are unique, else random."""
    tight, constraints = lower.active | lower.weak, problem.constraints.at(x)
    y = ravel(lower.y)
    probe = xp.cos(0.3 + 2.1 * xp.arange(tight.size)).astype(y.dtype)
    if isinstance(constraints, Box):
        low, high = xp.split(tight, 2)
        both = probe[: y.size] * (low & high)
        return xp.concatenate([both, both])
    if isinstance(constraints, Simplex):
        bounds = tight[: y.size].reshape(-1, constraints.shape[-1])
        every = probe[y.size :] * xp.all(bounds, axis=1)
        return xp.concatenate([xp.repeat(every, constraints.shape[-1]), every])
    if isinstance(lower.factor, SparseFactor):
        return _free_of_sparse(constraints, np.asarray(tight), probe, y.size)
    return _free_of_dense(constraints, tight, probe, y)


def _free_of_dense(constraints: AbstractConstraints, tight, probe, y):
    tol, k = tolerances(y.dtype), tight.size
    A = constraints.matrix(y.size, y.dtype) * constraints.units(y.size, y.dtype)
    norm = xp.sqrt(xp.sum(A**2, axis=1))
    tight = tight & (norm > 0)
    norm = xp.where(norm > 0, norm, 1)
    unit = xp.where(tight[:, None], A / norm[:, None], 0)
    # A unit diagonal for the others keeps them out of the eigenspace of zero.
    others = xp.diag(xp.where(tight, 0, xp.ones_like(norm)))
    values, vectors = eigh(unit @ unit.T + others)
    null = vectors * (values <= tol.dependent * k)
    free = null @ (null.T @ xp.where(tight, probe, 0))
    return xp.where(xp.abs(free) > _LEFT, free / norm, 0)


def _free_of_sparse(constraints: AbstractConstraints, tight, probe, size: int):
    """What least squares cannot meet of a random vector is such a `z`."""
    from scipy.sparse.linalg import lsmr

    A = constraints.sparse_matrix(size).tocsr()[np.flatnonzero(tight)]
    norm = np.sqrt(A.multiply(A).sum(axis=1))
    norm = np.where(norm > 0, norm, 1)
    unit = (sp.diags_array(1 / norm) @ A).tocsr()
    wanted, free = np.asarray(probe, float)[tight], np.zeros(tight.size)
    v = lsmr(unit, wanted, atol=1e-14, btol=1e-14, maxiter=10 * sum(unit.shape))[0]
    left = wanted - unit @ v
    free[tight] = np.where(np.abs(left) > _LEFT, left / norm, 0)
    return free


def _free_of_each(problem: Followers, x, lower: LowerSolution):
    def part(some: Followers, lower):
        def one(d, lower):
            here, none = problem.instance(d), jnp.zeros_like(lower.multipliers)
            sure = _is_independent(lower) & ~jnp.any(lower.weak)
            return unless_rarely(sure, lambda _: _free(here, x, lower), none)

        return jax.vmap(one)(some.data, lower)

    if is_whole(problem):
        return part(problem, lower)
    return in_batches(part, problem, lower)


def _pushes_of_all(problem: Followers, x, lower: LowerSolution, free):
    """The derivatives of `F` in all multipliers, here and along `free`."""
    # What has no answer must not spoil the others.
    fine = lower.success
    mu = jnp.where(fine[:, None], lower.multipliers, 0)
    pick = lambda leaf: jnp.where(
        fine.reshape(fine.shape + (1,) * (leaf.ndim - 1)), leaf, 0
    )
    y = jax.tree.map(pick, lower.y)
    if problem.upper is None:
        value = lambda mu: jnp.sum(jnp.where(fine, problem.own_values(x, y, mu)[0], 0))
    else:
        value = lambda mu: problem.upper_value(x, y, mu)[0]
    away = mu + jax.vmap(_step)(mu, free)
    return jax.grad(value)(mu), jax.grad(value)(away)
