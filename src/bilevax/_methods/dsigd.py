"""DSIGD: descent with an Armijo search on `F` under one tilt of the lower level."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PyTree

from .._implicit.feasible import onto_domain
from .._lower.base import LowerSolution
from .._problem.perturbation import AbstractPerturbation
from .._programs.control import loop
from .._programs.modules import Plain
from .._status import gravest
from .base import AbstractMethod, Number, Scales, draws, number, report, tree_step
from .search import (
    evaluation,
    gradient_if,
    needs_values,
    no_work,
    plus,
    select,
    tree_dot,
    value_at,
)
from .ssigd import one_tilt


class DSIGDState(Plain):
    """`x` with the tilted `F` and its gradient there, and the tilt of the whole run.

    `stalled`: no trial was accepted. Everything being deterministic, none ever will.
    """

    x: PyTree[Array]
    value: Float[Array, ""]
    grad: PyTree[Array]
    lower: LowerSolution
    q: PyTree[Array]
    deviation: Float[Array, ""]
    scales: Scales
    started: Bool[Array, ""]
    stalled: Bool[Array, ""]


class DSIGD(AbstractMethod):
    """Projected gradient descent with backtracking, and a tilt that is drawn once.

    With `s` the first trial step, `z(a) = P(x - a s grad F_q(x))` and `a` the first of
    `1, shrink, shrink^2, ...` that satisfies

        F_q(z(a)) <= F_q(x) + sigma <grad F_q(x), z(a) - x>,

    the next iterate is `z(a)`. Each trial is one lower-level solve. `F_q` has kinks, at
    which the search may run out of trials although `x` is no minimiser; `x` then stays
    where it is for the rest of the run.

    - `step_size`: the `s` of the paper; by default `first_step`, in units of the length
      of the problem over the slope of `F`, both measured at the start.
    - `sigma`: share of the predicted decrease that is asked for.
    - `shrink`: factor between trials; `max_trials`: how many there are.
    - `perturbation`: law of the tilt. By default Gaussian, its deviation `tilt` times
      the force scale of the problem.

    Khanduri, Tsaknakis, Zhang, Liu, Liu, Zhang and Hong, Linearly constrained bilevel
    optimization: a smoothed implicit gradient approach, ICML 2023.

    Reconstruction: the paper was not at hand; the search is the classical one of
    Armijo, and its constants are ours.

    Deviations: trials lie on the projected arc, not on the segment to the projected
    point (the same without a domain); the lower level is solved to rounding, so the
    search has no slack; its rows may move with `x`, and a trial at which it is empty is
    replaced by the nearest point where it is not.
    """

    step_size: Number | None = number(None)
    perturbation: AbstractPerturbation | None = None
    first_step: Number = number(0.5)
    tilt: Number = number(1e-4)
    sigma: Number = number(1e-2)
    shrink: Number = number(0.5)
    max_trials: Number = number(35)

    @property
    def takes_followers(self):
        return True

    def refusal(self, problem):
        return needs_values("DSIGD", problem)

    def init(self, problem, x, lower, scales, *, key):
        q, deviation = one_tilt(self.perturbation, self.tilt, problem, scales, key)
        no, zero = jnp.asarray(False), jax.tree.map(jnp.zeros_like, x)
        value = jnp.zeros_like(scales.slope)
        return DSIGDState(x, value, zero, lower, q, deviation, scales, no, no)

    def step(self, problem, state, *, step, num_steps, key):
        now = problem.draw(draws(key).sample, step).perturbed(state.q)
        first = self.step_size
        if first is None:
            first = self.first_step * state.scales.length / state.scales.slope

        def attempt(carry):
            s, length, trials, work, status, _ = carry
            # The first pass of a run only finds the value and the gradient at `x`.
            trial = s.started
            target = tree_step(s.x, -jnp.where(trial, length, 0), s.grad)
            point = value_at(now, onto_domain(now, target), s.lower)
            predicted = tree_dot(s.grad, jax.tree.map(jnp.subtract, point.x, s.x))
            enough = point.value <= s.value + self.sigma * predicted
            accepted = ~trial | (enough & (predicted < 0))
            grad, fine = gradient_if(accepted, now, point, s.grad)
            new = eqx.tree_at(
                lambda s: (s.x, s.value, s.grad, s.started),
                s,
                (point.x, point.value, grad, jnp.asarray(True)),
            )
            new = select(fine, new, s)
            new = eqx.tree_at(lambda s: s.lower, new, point.lower)
            trials = trials + 1
            failed = (trials >= self.max_trials) | (~trial & ~fine)
            new = eqx.tree_at(lambda s: s.stalled, new, failed & ~(trial & fine))
            work = plus(work, point.work, accepted)
            over = (trial & fine) | failed
            length = jnp.where(trial, length * self.shrink, length)
            return new, length, trials, work, point.status, over

        # A run that has stalled repeats how its last solve ended.
        carry = (state, first, 0, no_work(), gravest(state.lower.status), state.stalled)
        new, _, _, work, status, _ = loop(
            lambda c: ~c[-1],
            attempt,
            jax.tree.map(jnp.asarray, carry),
            limit=self.max_trials + 1,
        )
        record = report(
            problem,
            evaluation(new.value, new.grad, new.lower, status),
            state.lower,
            state.x,
            new.x,
            tilt=state.deviation,
            **work.entries(),
        )
        return new, record
