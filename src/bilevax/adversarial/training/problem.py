"""Adversarial training as a bilevel problem with one box per image.

    min_theta  mean_i CE(theta; image_i + delta_i*(theta)) + decay / 2 |theta|^2
    delta*(theta) minimises the attack objective over the box of each image

`theta` is the whole model; running statistics of batch norm are leaves of it that no
gradient reaches and that every step sets (`absorb`).
"""

import abc
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array, Float

from ..._constraints import Box
from ..._implicit.adjoint import (
    ConjugateGradient,
    Danskin,
    Occasional,
    ScaledIdentity,
)
from ..._lower.closed_form import ClosedForm
from ..._lower.projected import ProjectedGradient
from ..._methods.base import Number, number
from ..._problem.problem import Problem
from ..._problem.stochastic import StochasticProblem
from ..attacks.boxes import pixel_box
from ..attacks.losses import cross_entropy, kl_divergence
from ..data.batches import Batch, ImageBatches
from ..networks.network import statistics_mask
from .lower_level import AttackLoss, LinearisedAttack, RegularisedAttack
from .signed_steps import SignedSteps


# A whole number that is traced, so that another value does not recompile.
def _count(default: int) -> Any:
    return eqx.field(converter=jnp.asarray, default=default)


class AbstractInstance(eqx.Module):
    """`batch -> Problem`; what the ways to train share."""

    epsilon: eqx.AbstractVar[Number]
    weight_decay: eqx.AbstractVar[Number]
    label_smoothing: eqx.AbstractVar[float]

    @abc.abstractmethod
    def __call__(self, batch: Batch) -> Problem:
        """The problem of one batch."""

    def box(self, batch: Batch) -> Box:
        low, high = pixel_box(batch.images, self.epsilon.astype(batch.images.dtype))
        return Box(low, high)

    def upper(self, batch: Batch, box: Box) -> "RobustLoss":
        return RobustLoss(batch, box, self.weight_decay, self.label_smoothing)


class Bilevel(AbstractInstance):
    """The attack as a strongly convex lower level, its answer differentiated.

    - `attack_step`: length `a` of a plain step of the attack; the curvature of the
      lower level is `1 / a`.
    - `implicit_weight`: the Hessian `lambda` in the implicit gradient. With None it is
      the curvature, as the calculus asks for; with that the network has been seen to
      write labels into the perturbation through its own input gradient and to lose all
      robustness, so watch the run (see `collapsed`).
    - `implicit_every`: N keeps the implicit term of one batch in N, drawn by the key of
      the batch, and takes it N times; the mixed derivative of the others is not
      computed. The mean over keys is the gradient, its variance is larger.
    - `steps`, `sign_step`: of the first attack, see `LinearisedAttack`.
    - `linearised`: False keeps the loss and its curvature; the lower level is then
      solved by projected gradients, its derivative by conjugate gradients.
    """

    epsilon: Number = number(8 / 255)
    attack_step: Number = number(5000 / 255)
    implicit_weight: Number | None = number(10.0)
    implicit_every: int = eqx.field(static=True, default=1)
    steps: Any = _count(1)
    sign_step: Number | None = number(None)
    weight_decay: Number = number(5e-4)
    label_smoothing: float = eqx.field(static=True, default=0.0)
    linearised: bool = eqx.field(static=True, default=True)

    def __call__(self, batch: Batch) -> Problem:
        box = self.box(batch)
        start = uniform_start(batch, box, self.epsilon)
        loss = AttackLoss(batch.images, batch.labels)
        curvature = 1 / self.attack_step
        lower: Any
        if self.linearised:
            lower = LinearisedAttack(
                loss, start, box.lower, box.upper, curvature, self.steps, self.sign_step
            )
            solver = ClosedForm(curvature)
        else:
            lower = RegularisedAttack(loss, start, curvature)
            solver = ProjectedGradient()
        adjoint: Any = ConjugateGradient()
        if self.linearised or self.implicit_weight is not None:
            weight = curvature if self.implicit_weight is None else self.implicit_weight
            adjoint = ScaledIdentity(weight)
        if self.implicit_every > 1:
            # Another draw than that of the start of the attack.
            key = jr.fold_in(batch.key, 1)
            now = jr.bernoulli(key, 1 / self.implicit_every)
            adjoint = Occasional(adjoint, now, self.implicit_every)
        return Problem(
            self.upper(batch, box),
            lower,
            box,
            y0=start,
            always_feasible=True,
            solver=solver,
            adjoint=adjoint,
            members=batch.rows,
        )


class Madry(AbstractInstance):
    """Sign steps on the loss itself, then an ordinary gradient: AT, and Fast-AT.

    A. Madry, A. Makelov, L. Schmidt, D. Tsipras, A. Vladu: Towards deep learning models
    resistant to adversarial attacks, ICLR 2018. With one step of 1.25 epsilon it is
    E. Wong, L. Rice, J. Z. Kolter: Fast is better than free, ICLR 2020.
    """

    epsilon: Number = number(8 / 255)
    steps: Any = _count(10)
    step_size: Number = number(2 / 255)
    weight_decay: Number = number(5e-4)
    label_smoothing: float = eqx.field(static=True, default=0.0)

    def __call__(self, batch: Batch) -> Problem:
        box = self.box(batch)
        return Problem(
            self.upper(batch, box),
            AttackLoss(batch.images, batch.labels),
            box,
            y0=uniform_start(batch, box, self.epsilon),
            always_feasible=True,
            solver=SignedSteps(self.steps, self.step_size),
            adjoint=Danskin(),
            members=batch.rows,
        )


class Trades(AbstractInstance):
    """`CE(clean) + beta KL(clean, attacked)`, attacked along the divergence.

    H. Zhang, Y. Yu, J. Jiao, E. P. Xing, L. El Ghaoui, M. I. Jordan: Theoretically
    principled trade-off between robustness and accuracy, ICML 2019. As there, the
    attack starts from small normal noise and sees running statistics.
    """

    epsilon: Number = number(8 / 255)
    beta: Number = number(6.0)
    steps: Any = _count(10)
    step_size: Number = number(2 / 255)
    weight_decay: Number = number(5e-4)
    label_smoothing: float = eqx.field(static=True, default=0.0)

    def __call__(self, batch: Batch) -> Problem:
        box = self.box(batch)
        dtype = batch.images.dtype
        start = 1e-3 * jr.normal(batch.key, batch.images.shape, dtype)
        return Problem(
            TradesLoss(self.upper(batch, box), self.beta),
            AttackLoss(batch.images, batch.labels, kind="kl", training=False),
            box,
            y0=jnp.clip(start, box.lower, box.upper),
            always_feasible=True,
            solver=SignedSteps(self.steps, self.step_size),
            adjoint=Danskin(),
            members=batch.rows,
        )


class RobustLoss(eqx.Module):
    """Mean cross-entropy on attacked images, plus weight decay.

    Its auxiliary output: the batch statistics that were seen, and per step the loss
    without the decay, the accuracy under the training attack, and the share of pixels
    whose perturbation is off its bounds.
    """

    batch: Batch
    box: Box
    weight_decay: Float[Array, ""]
    label_smoothing: float = eqx.field(static=True)

    def __call__(self, model, delta):
        logits, seen = model(self.batch.images + delta, training=True)
        loss = jnp.mean(cross_entropy(logits, self.batch.labels, self.label_smoothing))
        return self.finish(model, delta, logits, loss, (seen,))

    def finish(self, model, delta, logits, loss, seen):
        """The value and auxiliary output of a loss at attacked `logits`."""
        right = jnp.argmax(logits, axis=-1) == self.batch.labels
        free = (self.box.lower < delta) & (delta < self.box.upper)
        aux = dict(
            seen=seen,
            loss=loss,
            accuracy=jnp.mean(right, dtype=loss.dtype),
            free=jnp.mean(free, dtype=loss.dtype),
        )
        return loss + decayed(model, self.weight_decay), aux


class TradesLoss(eqx.Module):
    """The upper level of TRADES."""

    robust: RobustLoss
    beta: Float[Array, ""]

    def __call__(self, model, delta):
        batch = self.robust.batch
        clean, clean_seen = model(batch.images, training=True)
        logits, seen = model(batch.images + delta, training=True)
        smoothing = self.robust.label_smoothing
        natural = jnp.mean(cross_entropy(clean, batch.labels, smoothing))
        gap = jnp.mean(kl_divergence(clean, logits))
        loss = natural + self.beta.astype(gap.dtype) * gap
        return self.robust.finish(model, delta, logits, loss, (clean_seen, seen))


def decayed(model, weight_decay):
    """`weight_decay / 2` times the squared norm of all weights, statistics left out."""
    weights = eqx.filter(model, statistics_mask(model), inverse=True)
    leaves = [jnp.sum(leaf**2) for leaf in jax.tree.leaves(weights)]
    total = sum(leaves)
    return 0.5 * weight_decay.astype(leaves[0].dtype) * total


def uniform_start(batch: Batch, box: Box, epsilon) -> Float[Array, "batch h w c"]:
    """Perturbations drawn uniformly in the ball, clipped to the box."""
    shape, dtype = batch.images.shape, batch.images.dtype
    ball = epsilon.astype(dtype) * jr.uniform(batch.key, shape, dtype, -1, 1)
    return jnp.clip(ball, box.lower, box.upper)


def absorb(model, aux):
    """The model with its running statistics moved towards those a step has seen."""
    for seen in aux["seen"]:
        model = model.absorb(seen)
    return model


def adversarial_problem(
    batches: ImageBatches, instance: AbstractInstance
) -> StochasticProblem:
    """The problem of training on `batches` in the way of `instance`."""
    return StochasticProblem(batches, instance, absorb=absorb)
