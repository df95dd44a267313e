"""`F` and its gradient over many followers: one adjoint solve for each of them."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Bool, Float, PyTree

from .._lower.base import LowerSolution, all_finite
from .._lower.followers import in_batches, is_whole
from .._problem.followers import Followers
from .._programs.modules import Plain, with_fields
from .._status import Status, as_status, gravest, have_values
from .adjoint import Danskin, default_adjoint, kkt_system, refuse_danskin
from .evaluation import Each
from .quality import Quality, quality_of


class Mean(NamedTuple):
    """`F` and its gradient, as `Implicit`, but with trust for each follower.

    `value` and `grad` are of the mean over followers that have an answer.
    """

    value: Float[Array, ""]
    values: Float[Array, " followers"] | None
    aux: Any
    grad: PyTree[Array]
    fine: Bool[Array, " followers"]
    sane: Bool[Array, " followers"]


def mean_gradient(
    problem: Followers, x, lower: LowerSolution, adjoint: Any, solver: Any
) -> Mean:
    """The gradient of `F` by one adjoint solve per follower.

    The right side of follower `i` is the derivative of `F` in `y_i`; the derivative of
    `F` in `x` itself counts once.
    """
    answered = lower.success
    if isinstance(adjoint, Danskin):
        refuse_danskin(problem)
    if problem.upper is None:
        problem, lower = _without_failures(problem, lower, answered)
    value, values, aux, f_x, f_ys, f_mus = _upper(problem, x, lower, answered)
    whole = is_whole(problem)

    def adjoints(part: Followers, lower, f_ys, f_mus):
        if not whole:
            # The factor was forgotten; from the answer it takes one pass.
            lower = solver(part, x, lower)
        return jax.vmap(lambda *one: _adjoint(part, adjoint, x, *one))(
            part.data, part.tilt, lower, f_ys, f_mus
        )

    apart = adjoints if whole else lambda *a: in_batches(adjoints, *a)
    v, w, fine = apart(problem, lower, f_ys, f_mus)
    masked = lambda leaf: jnp.where(_beside(answered, leaf), leaf, 0)
    v, w = jax.tree.map(masked, v), masked(w)
    held = masked(jnp.where(lower.active, lower.multipliers, 0))

    def pulled(x):
        """What the answers add, whose gradient in `x` is wanted."""

        def one(d, tilt, y, mu, v, w):
            here = problem.follower(d, tilt).with_local_lower(x)
            along = jax.jvp(lambda y: here.lower_value(x, y), (y,), (v,))[1]
            return along + here.constraints.drift(x, y, mu, v, w)

        answers = lower.y, held, v, w
        return jnp.sum(jax.vmap(one)(problem.data, problem.tilt, *answers))

    grad = jax.tree.map(jnp.subtract, f_x, jax.grad(pulled)(x))
    sane = solver.inside(problem, x, lower.y) & jax.vmap(all_finite)(f_ys)
    if values is not None:
        sane = sane & jnp.isfinite(values)
    return Mean(value, values, aux, grad, fine, sane)


def _adjoint(problem: Followers, adjoint, x, d, tilt, lower: LowerSolution, f_y, f_mu):
    """`v` and `w` of one follower, and whether their residual is small."""
    here = problem.follower(d, tilt).localised(x)
    adjoint = default_adjoint(lower) if adjoint is None else adjoint
    flat, unravel = ravel_pytree(lower.y)
    top = ravel_pytree(f_y)[0].astype(flat.dtype)
    system = kkt_system(here, x, flat, lower.active)
    bottom = jnp.zeros_like(lower.multipliers)
    bottom = bottom if f_mu is None else jnp.where(lower.active, f_mu, bottom)
    v, w, fine = adjoint.solve(system, lower, top, bottom)
    return unravel(v), w, fine


def _without_failures(problem: Followers, lower: LowerSolution, answered):
    """The same, with a follower that has an answer in place of each that has none.

    Then nothing that is not a number reaches the others; the substitutes do not count.
    """
    stand_in = jnp.argmax(answered)

    def pick(leaf):
        return jnp.where(_beside(answered, leaf), leaf, leaf[stand_in])

    data, y, multipliers = jax.tree.map(
        pick, (problem.data, lower.y, lower.multipliers)
    )
    here = problem.replaced(data, problem.y0, problem.tilt, problem.members)
    return here, with_fields(lower, y=y, multipliers=multipliers)


def _upper(problem: Followers, x, lower: LowerSolution, answered):
    """`F`, the followers' own values, auxiliary output, and the derivatives of `F`."""

    def mean(x, ys, multipliers):
        if problem.upper is not None:
            value, aux = problem.upper_value(x, ys, multipliers)
            return value, (None, aux)
        values, aux = problem.own_values(x, ys, multipliers)
        count = jnp.maximum(jnp.sum(answered), 1)
        value = jnp.sum(jnp.where(answered, values, 0)) / count
        return value, (jnp.where(answered, values, jnp.nan), aux)

    gradient = jax.value_and_grad(mean, argnums=(0, 1, 2), has_aux=True)
    answers = lower.y, problem.multipliers_of(lower)
    (value, (values, aux)), (f_x, f_ys, f_mus) = gradient(x, *answers)
    return value, values, aux, f_x, f_ys, f_mus


def summary(mean: Mean, lower: LowerSolution, codes) -> tuple[Any, Each]:
    """One status for all followers, the gravest, and what is known of each."""
    unknown = jnp.where(jnp.any(lower.success), 0, jnp.nan)
    others = jax.tree.map(lambda leaf: leaf + unknown, (mean.value, mean.grad))
    status, each = (
        gravest(as_status(codes)),
        Each(mean.values, as_status(codes), others),
    )
    # What no follower explains comes from `upper` alone.
    lost = have_values(status) & ~all_finite((mean.value, mean.grad))
    return Status.where(lost, Status.non_finite, status), each


def mean_quality(problem: Followers, x, lower: LowerSolution, adjoint, grad) -> Quality:
    """The worst condition, and a bias to which every follower adds its own.

    What the answer of one follower changes in the derivatives of another, through an
    `upper` of all answers, is left out.
    """
    own = problem.upper is None
    slopes = jax.grad(lambda at: problem.upper_value(x, *at)[0])(
        (lower.y, problem.multipliers_of(lower))
    )

    def of_part(part: Followers, lower, slopes):
        def one(d, tilt, lower, slope):
            here = part.follower(d, tilt).localised(x)
            if not own:
                y, mu = slope
                prices = here.prices_for_upper(y, mu)
                here = with_fields(here, upper=_Linear((y, *prices)))
            how = default_adjoint(lower) if adjoint is None else adjoint
            system = kkt_system(here, x, lower.y, lower.active)
            return quality_of((here, None), system, x, lower, how, grad)

        return jax.vmap(one)(part.data, part.tilt, lower, slopes)

    found = (
        of_part(problem, lower, slopes)
        if is_whole(problem)
        else in_batches(of_part, problem, lower, slopes)
    )
    total = jnp.mean if own else jnp.sum
    bound = jnp.all(found.bias_is_bound) & own
    return Quality(jnp.max(found.condition), total(found.bias), bound)


class _Linear(Plain):
    """`<slope, answer>`, an upper level as one follower changes it."""

    slope: PyTree[Array]

    def __call__(self, x, *answer):
        terms = jax.tree.map(lambda s, y: jnp.sum(s * y), self.slope, answer)
        return sum(jax.tree.leaves(terms))


def _beside(mask, leaf):
    """`mask` with as many axes as `leaf`."""
    return mask.reshape(mask.shape + (1,) * (leaf.ndim - mask.ndim))
