"""APGD: sign-gradient ascent that sets its own step sizes."""

from dataclasses import replace

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, PyTree, Shaped

from .attack import Attack, Loss, Predict, Target, choose, worst
from .boxes import Images, check_radius, pixel_box, random_start
from .losses import PerImage, cross_entropy
from .restarts import check_steps, restarted

MOMENTUM = 0.75
# A stretch with a smaller share of rises calls for a smaller step.
RISES = 0.75


def checkpoints(steps: int) -> list[int]:
    """The steps `ceil(p_j steps)` after which step sizes are looked at.

    `p_1 = 0.22` and `p_{j+1} = p_j + max(p_j - p_{j-1} - 0.03, 0.06)`, below 1; here in
    hundredths, which are exact. Short runs have fewer: no step is listed twice.
    """
    parts, gap = [22], 22
    while parts[-1] + max(gap - 3, 6) < 100:
        gap = max(gap - 3, 6)
        parts.append(parts[-1] + gap)
    return sorted({-(-part * steps // 100) for part in parts})


def must_halve(
    rises: Int[Array, " B"],
    stretch: Int[Array, ""],
    halved: Bool[Array, " B"],
    improved: Bool[Array, " B"],
) -> Bool[Array, " B"]:
    """Whether a stretch of steps since the last checkpoint speaks for a smaller step.

    Either the loss rose in fewer than 75 percent of its steps, or neither the best loss
    nor (at the last checkpoint) the step has changed.
    """
    return (rises < RISES * stretch) | (~halved & ~improved)


class State(eqx.Module):
    """A climb between two steps; everything but the perturbations is per image."""

    now: Attack
    sign: Images
    previous: Images
    best: Attack
    best_sign: Images
    best_before: PerImage
    found: Attack
    step_size: PerImage
    rises: Int[Array, " B"]
    halved: Bool[Array, " B"]


class APGD(eqx.Module):
    """One climb of Auto-PGD, with no step size to choose.

    From `d_0` random and steps `a = 2 eps`, with `P` onto the pixel box:

        z       = P(d_k + a sign grad loss(x + d_k))
        d_{k+1} = P(d_k + 0.75 (z - d_k) + 0.25 (d_k - d_{k-1})),    d_1 = z

    After the steps that `checkpoints` lists, images for which `must_halve` holds halve
    their step and go on from their best point. Any iterate may change the class.

    Croce and Hein, Reliable evaluation of adversarial robustness with an ensemble of
    diverse parameter-free attacks, ICML 2020.

    Deviation: a checkpoint `w` resets the iterate after `w` steps, where the count of
    rises ends, not the one after it.
    """

    epsilon: Float[Array, ""]
    steps: int = eqx.field(static=True)

    def __init__(self, epsilon, *, steps: int):
        check_steps(steps)
        self.epsilon = jnp.asarray(epsilon, float)
        check_radius(self.epsilon)
        self.steps = steps

    def __call__(self, target: Target, keys: Shaped[PRNGKeyArray, " B"]) -> Attack:
        return self.climb(target, keys).found

    def climb(self, target: Target, keys: Shaped[PRNGKeyArray, " B"]) -> State:
        """The whole last state; its `found` is the answer."""
        low, high = pixel_box(target.images, self.epsilon)
        marks = checkpoints(self.steps)
        # stretches[k]: the length of the stretch that ends after step k, 0 where none.
        # Step 0 evaluates the start; its own stretch sets the counters.
        stretches = np.zeros(self.steps + 1, int)
        stretches[marks] = np.diff(marks, prepend=0)
        stretches[0] = 1
        stretches = jnp.asarray(stretches)

        def step(k, state):
            here = state.now.perturbation
            length = jnp.expand_dims(state.step_size, range(1, here.ndim))
            ahead = jnp.clip(here + length * state.sign, low, high)
            drift = here - state.previous
            mixed = here + MOMENTUM * (ahead - here) + (1 - MOMENTUM) * drift
            ahead = jnp.where(k == 1, ahead, jnp.clip(mixed, low, high))
            now, sign = target.ascent(ahead)
            better = now.loss > state.best.loss
            best, best_sign = choose(better, (now, sign), (state.best, state.best_sign))
            state = replace(
                state,
                now=now,
                sign=sign,
                previous=here,
                best=best,
                best_sign=best_sign,
                found=worst(state.found, now),
                rises=state.rises + (now.loss > state.now.loss),
            )
            return look(state, stretches[k])

        start = random_start(target.images, self.epsilon, keys)
        first = unmoved(target, start, 2 * self.epsilon)
        return jax.lax.fori_loop(0, self.steps + 1, step, first)


def unmoved(target: Target, start: Images, step_size: Float[Array, ""]) -> State:
    """The state before anything is evaluated: worse than any evaluation, no slope.

    A classifier is large; evaluated in the loop alone, it is compiled once.
    """
    loss = jax.eval_shape(target, start).loss
    nothing = Attack(
        robust=jnp.ones(loss.shape, bool),
        perturbation=start,
        loss=jnp.full(loss.shape, -jnp.inf, loss.dtype),
    )
    return State(
        now=nothing,
        sign=jnp.zeros_like(start),
        previous=start,
        best=nothing,
        best_sign=jnp.zeros_like(start),
        best_before=nothing.loss,
        found=nothing,
        step_size=jnp.full(loss.shape, step_size, start.dtype),
        rises=jnp.zeros(loss.shape, int),
        halved=jnp.zeros(loss.shape, bool),
    )


def look(state: State, stretch: Int[Array, ""]) -> State:
    """The state after the checkpoint of a stretch of steps; as it is for length 0."""
    due = stretch > 0
    improved = state.best.loss > state.best_before
    halve = due & must_halve(state.rises, stretch, state.halved, improved)
    now, sign = choose(halve, (state.best, state.best_sign), (state.now, state.sign))
    return replace(
        state,
        now=now,
        sign=sign,
        best_before=jnp.where(due, state.best.loss, state.best_before),
        step_size=jnp.where(halve, state.step_size / 2, state.step_size),
        rises=jnp.where(due, 0, state.rises),
        halved=jnp.where(due, halve, state.halved),
    )


def apgd(
    predict: Predict,
    model: PyTree,
    images: Shaped[Array | np.ndarray, " B *pixels"],
    labels: Int[Array | np.ndarray, " B"],
    *,
    epsilon: float | Float[Array, ""],
    steps: int = 100,
    restarts: int = 1,
    key: PRNGKeyArray,
    loss: Loss = cross_entropy,
) -> Attack:
    """`APGD` from `restarts` random starts.

    An image is robust if its class is right as it is and at every iterate. The loss is
    `cross_entropy`, `dlr`, or `Towards(targeted_dlr, classes)` for a target class per
    image; a targeted climb too succeeds with any wrong class.
    """
    climb = APGD(epsilon, steps=steps)
    return restarted(
        climb, predict, model, images, labels, loss, restarts=restarts, key=key
    )
