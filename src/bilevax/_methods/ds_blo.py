"""DS-BLO: doubly stochastically perturbed, normalised momentum (`Algo: DS-BLO`)."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Bool, Float, PyTree

from .._feasible import moves, onto_allowed, onto_domain
from .._implicit import hypergradient
from .._lower.base import LowerSolution, run_if
from .._perturbation import AbstractPerturbation, Gaussian
from .._problem import Problem
from .._status import Status
from ..theory.inputs import AlgorithmInputs
from .base import AbstractMethod, Record, Scales, lower_work

# A number, kept as an array.
Number = Any


def _number(default):
    """A field that is an array, so that another value does not recompile."""
    convert = lambda value: None if value is None else jnp.asarray(value, float)
    return eqx.field(default=default, converter=convert)


# Steps over which lengths and tilts fall by their whole factor, at least.
_SHORTEST_FALL = 300


class DSBLOState(eqx.Module):
    """`x`, the momentum, and the last lower-level solution as a warm start.

    The momentum is the weighted mean of gradients whose norm the paper follows along a
    run; as long as no more than `K` steps are taken it is that very quantity.
    """

    x: PyTree[Array]
    momentum: PyTree[Array]
    lower: LowerSolution
    scales: Scales
    started: Bool[Array, ""]


class DSBLO(AbstractMethod):
    """Normalised momentum along gradients of randomly tilted lower levels.

    Step `t`, with a fresh tilt `q` and (for sampled problems) a fresh sample:

        x+   = P(x - m / (gamma1 |m| + gamma2))
        xbar ~ uniform on the segment [x, x+]
        m+   = beta m + (1 - beta) grad F_q(xbar)

    Called without arguments it needs no tuning: step lengths fall geometrically from
    `first_step` to `first_step * decay` times the length scale of the problem (over 300
    steps at least), tilts from `first_tilt` of its force scale, both measured at the
    start. With `gamma1` and `gamma2` given, steps are exactly those of the paper and
    `perturbation` is the law of `q`.

    - `gamma1`, `gamma2`: constants of the step, both or none.
    - `beta`: weight of the old momentum.
    - `perturbation`: law of the tilt; by default Gaussian with a falling deviation.
    - `window`: how many steps before a random one the returned iterate lies
      (`output="random"`); the `K` of `Thm:Main_I`.
    """

    gamma1: Number | None = _number(None)
    gamma2: Number | None = _number(None)
    beta: Number = _number(0.9)
    perturbation: AbstractPerturbation | None = None
    first_step: Number = _number(0.05)
    decay: Number = _number(1e-5)
    first_tilt: Number = _number(1e-3)
    tilt_decay: Number = _number(1e-4)
    window: int = 0

    def __check_init__(self):
        if (self.gamma1 is None) != (self.gamma2 is None):
            raise ValueError(
                "`gamma1` and `gamma2` belong together: give both (the paper's "
                "constants) or none (steps that fall with the run)."
            )

    @classmethod
    def from_theory(
        cls, inputs: AlgorithmInputs, perturbation: AbstractPerturbation
    ) -> "DSBLO":
        """With the constants of `Thm:Main_I`, see `bilevax.theory.algorithm_inputs`.

        They come with a number of steps, `inputs.T`, and are far too careful for
        practice.
        """
        return cls(
            inputs.gamma1,
            inputs.gamma2,
            inputs.beta,
            perturbation=perturbation,
            window=int(inputs.K),
        )

    def init(self, x, lower, scales):
        zeros = jax.tree.map(jnp.zeros_like, x)
        return DSBLOState(x, zeros, lower, scales, jnp.asarray(False))

    def step(self, problem, state, *, step, num_steps, key):
        sample_key, tilt_key, segment_key = jr.split(key, 3)
        problem = problem.draw(sample_key)
        # In a short run steps that fall all the way would die before `x` arrives.
        share = step / jnp.maximum(num_steps, _SHORTEST_FALL)

        m, m_norm = state.momentum, tree_norm(state.momentum)
        length = self._length(m_norm, share, state.scales)
        # The first step stands still: it only finds the first gradient.
        length = jnp.where(state.started, length, 0)
        ahead = self._ahead(problem, state.x, m, length)
        where = jr.uniform(segment_key, (), m_norm.dtype)
        between = jax.tree.map(lambda a, b: a + where * (b - a), state.x, ahead)

        law, deviation = self._law(problem, share, state.scales)
        q = law.sample(problem.y0, key=tilt_key)
        e, x, recovered = _evaluate(
            problem, problem.perturbed(q), between, ahead, state
        )
        usable = jnp.isfinite(e.value) & jnp.isfinite(tree_norm(e.grad))
        beta = jnp.where(state.started, self.beta, 0)
        momentum = jax.tree.map(
            lambda old, new: jnp.where(usable, beta * old + (1 - beta) * new, old),
            m,
            e.grad,
        )
        record = Record(
            gradient_norm=tree_norm(e.grad),
            momentum_norm=m_norm,
            move=tree_norm(jax.tree.map(jnp.subtract, x, state.x)),
            tilt=deviation,
            oracle_calls=1 + jnp.asarray(recovered, int),
            recovered=jnp.asarray(recovered, int),
            **lower_work(e, state.lower),
        )
        new = DSBLOState(x, momentum, e.lower, state.scales, state.started | usable)
        return new, record

    def _ahead(self, problem: Problem, x, m, length):
        """`P(x - length m)`.

        Along the boundary of a domain most of the momentum may point outwards, and a
        step of the right length would hardly move `x`. Without explicit constants such
        a step is stretched, so that what is left of it has the wanted length.
        """
        move = lambda length: onto_domain(
            problem, jax.tree.map(lambda a, b: a - length * b, x, m)
        )
        first = move(length)
        if problem.domain is None or self.gamma1 is not None:
            return first
        left = tree_norm(jax.tree.map(jnp.subtract, first, x))
        want = length * tree_norm(m)
        stretch = want / jnp.maximum(left, 1e-3 * want + jnp.finfo(want.dtype).tiny)
        return move(length * jnp.maximum(stretch, 1))

    def _length(self, m_norm, share, scales: Scales):
        """`1 / (gamma1 |m| + gamma2)`."""
        if self.gamma1 is not None:
            return 1 / (self.gamma1 * m_norm + self.gamma2)
        reach = self.first_step * scales.length * self.decay**share
        # gamma1 = 1 / reach; gamma2 small, so that steps stay as long as `reach` until
        # the momentum has all but died.
        return reach / (m_norm + 1e-4 * scales.slope + jnp.finfo(m_norm.dtype).tiny)

    def _law(self, problem: Problem, share, scales: Scales):
        if self.perturbation is not None:
            return self.perturbation, jnp.asarray(jnp.nan)
        size = ravel_pytree(problem.y0)[0].size
        deviation = self.first_tilt * self.tilt_decay**share
        deviation = deviation * scales.force / jnp.sqrt(size)
        return Gaussian(deviation), deviation


def _evaluate(problem, tilted, between, ahead, state: DSBLOState):
    """The gradient at `between`, or at the nearest allowed point if none exists there.

    Returns the evaluation, where `x` goes, and whether recovery was needed. Both ends
    of the segment are allowed points, unless rounding or the first `x` say otherwise.
    """
    warm = state.lower
    solve = lambda x, warm: hypergradient(tilted, x, warm=warm, throw=False)
    if not moves(problem):
        return solve(between, warm), ahead, jnp.asarray(False)

    def attempt(carry):
        e, between, ahead, tries, _ = carry
        between, ahead = run_if(
            tries > 0,
            lambda _: (lambda x: (x, x))(onto_allowed(problem, ahead)),
            (between, ahead),
        )
        e = solve(between, e.lower)
        empty = e.status == Status.infeasible
        return e, between, ahead, tries + 1, empty & (tries < 1)

    blank = eqx.filter_eval_shape(solve, between, warm)
    blank = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), blank)
    blank = eqx.tree_at(lambda e: e.lower, blank, warm)
    e, _, ahead, tries, _ = jax.lax.while_loop(
        lambda c: c[-1], attempt, (blank, between, ahead, 0, jnp.asarray(True))
    )
    return e, ahead, tries > 1


def tree_norm(tree: PyTree[Array]) -> Float[Array, ""]:
    """The Euclidean norm over all leaves."""
    return jnp.sqrt(sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(tree)))
