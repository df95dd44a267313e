"""PIGD: inexact gradients at randomly moved points (Kornowski et al. 2024)."""

import operator
from typing import TYPE_CHECKING, Any

import equinox as eqx
import jax
import jax.random as jr
from jaxtyping import Array, PyTree

from .._arguments import check_fields
from .._implicit.feasible import onto_domain
from .._implicit.hypergradient import Evaluation
from .._lower.base import LowerSolution
from .._problem.stochastic import representative
from .._programs.arrays import xp
from .._programs.modules import Plain, with_fields
from .asking import AbstractAskingMethod, Query, share_and_direction
from .base import Number, Scales, at_step, falling, number, tree_norm, tree_step
from .clipped import Drift, standing_still
from .equality_oracle import equality_evaluation, only_equalities
from .optimiser import check_optimiser, optimiser_step
from .penalty_oracle import (
    DEFAULT_PENALTY,
    FirstOrderEvaluation,
    Weights,
    natural_weights,
    penalty_evaluation,
)
from .search import select

if TYPE_CHECKING:
    import optax

# The fixed step of a clipped loop, as a multiple of the longest one along the first
# gradient. Shorter ones swing around a minimum, since nothing brakes the displacement.
_ETA = 3.0


class PIGDState(Plain):
    """`x`, the last lower-level solution, and the weights of the oracle.

    `drift` belongs to the clipped loop; its `mean` is that of the last block of points.
    `memory` is that of the optimiser.
    """

    x: PyTree[Array]
    lower: LowerSolution
    scales: Scales
    weights: Weights | None
    drift: Drift | None
    memory: Any


class PIGD(AbstractAskingMethod):
    """Perturbed inexact gradient descent with a first-order oracle.

    `oracle="penalty"` takes its gradients `v` from `penalty_gradient`, the penalty
    Lagrangian with frozen multipliers and the exact active set; `oracle="equality"`
    from `equality_gradient`, for lower levels with equality rows only;
    `oracle="implicit"` from the closed form, for lower levels too large for the saddle
    problems of the others. Step `t`, with `w` uniform in the unit ball:

        x+ = P(x - eta v(x + delta w))

    `loop="clipped"` is the online-to-nonconvex loop with the same oracle. From `d = 0`,
    with `s` uniform in [0, 1]:

        z = x + s d,   x+ = P(x + d),   d+ = clip_D(d - eta v(z))

    Steps and the radius `delta` fall geometrically along a run unless given; the length
    and slope scales of the problem are measured at the start.

    - `step_size`: constant `eta`, or a schedule.
    - `optimiser`: an `optax.GradientTransformation` that takes the place of the plain
      step (perturbed loop only).
    - `first_step`, `decay`: without `step_size`, `eta` is `first_step` times length
      over slope at the start and `decay` times that at the end; the slope is the first
      or the present one, whichever is larger. In the clipped loop `D` is `first_step`
      times length at the start, `decay` times that at the end, and `eta` three times
      `first_step` times length over slope throughout.
    - `radius`: constant `delta` (perturbed loop only).
    - `first_radius`, `radius_decay`: without it, in units of the length.
    - `clip`: constant `D` of the clipped loop; goes with `step_size`.
    - `block`: steps over which the clipped loop averages its points `z`.
    - `a1`, `a2`: weights of the oracle, see `penalty_gradient`; the equality oracle
      takes `delta = 1 / a1`.
    - `penalty`: without `a1`, the weight in natural units measured at the start; its
      inverse is about the relative bias of the gradient.

    G. Kornowski, S. Padmanabhan, K. Wang, Z. Zhang, S. Sra: First-order methods for
    linearly constrained bilevel optimization, NeurIPS 2024.

    Deviations: the weights are `a1 = penalty`, `a2 = penalty^2` in natural units, and
    fixed; steps and radii fall by default; points are projected on the domain of `x`;
    the last iterate is returned unless a random one is asked for, in the clipped loop
    too, where the theory returns the mean of a random block (`state.drift.mean` is the
    last one); the multipliers and the active set are those of an exact solver.

    Reconstruction: that `w` is uniform in the ball, and the constants of the default
    steps, are ours.
    """

    step_size: Number | None = number(None)
    first_step: Number = number(0.1)
    decay: Number = number(1e-3)
    radius: Number | None = number(None)
    first_radius: Number = number(1e-2)
    radius_decay: Number = number(1e-4)
    clip: Number | None = number(None)
    block: int = 10
    a1: Number | None = number(None)
    a2: Number | None = number(None)
    penalty: Number = number(DEFAULT_PENALTY)
    oracle: str = "penalty"
    loop: str = "perturbed"
    optimiser: "optax.GradientTransformation | None" = None

    def __check_init__(self):
        check_fields(self)
        if self.oracle not in ("penalty", "equality", "implicit"):
            raise ValueError(
                f"`oracle` is 'penalty', 'equality' or 'implicit'; got {self.oracle!r}."
            )
        if self.optimiser is not None:
            check_optimiser(self.optimiser)
        if self.optimiser is not None and self.loop == "clipped":
            raise ValueError('`optimiser` does not go with `loop="clipped"`.')
        if self.loop not in ("perturbed", "clipped"):
            raise ValueError(f"`loop` is 'perturbed' or 'clipped'; got {self.loop!r}.")
        check_clip(self, self.loop == "clipped")
        if self.a1 is None and self.a2 is not None:
            raise ValueError("`a2` needs `a1`: give both, `a1` alone or none.")

    @property
    def uses_scales(self):
        given = self.optimiser is not None or self.step_size is not None
        return not (given and self.radius is not None and self.oracle == "implicit")

    @property
    def takes_followers(self):
        return self.oracle == "implicit"

    def refusal(self, problem):
        if self.oracle != "equality":
            return None
        return only_equalities(
            representative(problem, jr.key(0)), 'PIGD(oracle="equality")'
        )

    def init(self, problem, x, lower, scales, *, key):
        if self.oracle == "implicit":
            weights = None
        elif self.a1 is None:
            weights = _weights(problem, x, lower.y, self.penalty, scales.force)
        else:
            a2 = self.a1**2 if self.a2 is None else self.a2
            weights = Weights(self.a1, a2)
        drift = standing_still(x) if self.loop == "clipped" else None
        memory = None if self.optimiser is None else self.optimiser.init(x)
        return PIGDState(x, lower, scales, weights, drift, memory)

    @property
    def takes_stages(self):
        # The other oracles solve problems of their own, as programs.
        return self.oracle == "implicit"

    def ask(self, problem, state, *, step, num_steps, key):
        scales = state.scales
        reach = falling(self.first_step, self.decay, step, num_steps)
        share, w = share_and_direction(state.x, scales.length, key)
        if state.drift is not None:
            at, ahead = state.drift.propose(problem, state.x, share)
            return Query(at, ahead, more=(reach, None))
        radius = self.radius
        if radius is None:
            radius = falling(self.first_radius, self.radius_decay, step, num_steps)
            radius = radius * scales.length
        at = onto_domain(problem, tree_step(state.x, radius, w))
        return Query(at, state.x, more=(reach, at_step(self.step_size, step)))

    def tell(self, problem, state, query, oracle):
        e, usable, scales = oracle.e, oracle.usable, state.scales
        reach, eta = query.more
        grad = jax.tree.map(lambda g: xp.where(usable, g, 0), e.grad)
        drift, memory = state.drift, state.memory
        if self.optimiser is not None:
            x, memory = optimiser_step(
                self.optimiser, problem, memory, oracle.ahead, grad, usable
            )
        elif drift is None:
            eta = gradient_step(reach, scales, grad) if eta is None else eta
            x = onto_domain(problem, tree_step(oracle.ahead, -eta, grad))
        else:
            x = select(usable | oracle.recovered, oracle.ahead, state.x)
            clip, eta = clipped_lengths(self, scales, reach, scales.slope)
            moved = jax.tree.map(operator.sub, x, state.x)
            drift = drift.update(moved, oracle.at, grad, usable, eta, clip, self.block)
        new = with_fields(state, x=x, drift=drift, memory=memory)
        return new, _inner_work(e, oracle.recovered)

    def gradient_of(self, problem, state):
        weights = state.weights
        if weights is None:
            return None
        if self.oracle == "penalty":
            return lambda x, warm: penalty_evaluation(problem, x, weights, warm)
        return lambda x, warm: equality_evaluation(problem, x, 1 / weights.a1, warm)


@eqx.filter_jit
def _weights(problem, x, y, penalty, force):
    return natural_weights(problem, x, y, penalty, force)


def _inner_work(e: Evaluation, recovered) -> dict:
    """Counts of a first-order evaluation, which solves a second problem in `y`."""
    if not isinstance(e, FirstOrderEvaluation):
        return {}
    work, inner = e.lower.iterations, e.inner.iterations
    return dict(
        lower_passes=work.passes + inner.passes,
        factorisations=work.factorisations + inner.factorisations,
        safeguard=work.safeguard + inner.safeguard,
        upper_gradients=1 + inner.passes + inner.safeguard,
        hessian_products=0,
        linear_solves=0,
        penalty_solves=1 + recovered,
    )


def check_clip(method, clipped: bool) -> None:
    """Raise a `ValueError` unless `clip` and `step_size` make a clipped loop."""
    if not clipped and method.clip is not None:
        raise ValueError('`clip` belongs to `loop="clipped"`.')
    if clipped and (method.clip is None) != (method.step_size is None):
        raise ValueError(
            "`clip` and `step_size` belong together: give both or none (lengths that "
            "fall with the run)."
        )
    if method.block < 1:
        raise ValueError(f"`block` must be at least 1; got {method.block}.")


def clipped_lengths(method, scales: Scales, reach, bound):
    """`D` and `eta` of a clipped loop whose gradients are of the size `bound`."""
    if method.clip is not None:
        return method.clip, method.step_size
    eta = _ETA * method.first_step * scales.length / positive(bound)
    return reach * scales.length, eta


def gradient_step(reach, scales: Scales, grad: PyTree[Array]):
    """A step that moves no further than `reach` times the length of the problem."""
    slope = xp.maximum(scales.slope, tree_norm(grad))
    return reach * scales.length / positive(slope)


def positive(value):
    """`value`, or one where it is zero."""
    return xp.where(value > 0, value, 1)
