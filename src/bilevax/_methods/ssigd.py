"""SSIGD: stochastic gradient steps on `F` under one tilt of the lower level."""

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import jax.random as jr
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float, PRNGKeyArray, PyTree

from .._arguments import check_fields
from .._implicit.feasible import onto_domain
from .._lower.base import LowerSolution
from .._problem.perturbation import AbstractPerturbation, Gaussian
from .._problem.problem import Problem
from .._programs.modules import Plain, with_fields
from .asking import AbstractAskingMethod, Query
from .base import Number, Scales, at_step, falling, number, tree_step
from .optimiser import check_optimiser, optimiser_step
from .search import select

if TYPE_CHECKING:
    import optax


class SSIGDState(Plain):
    """`x`, the tilt of the whole run and its size, and a warm start.

    `tilt_key` finds the tilts of the members of a minibatch again; `memory` is that of
    the optimiser.
    """

    x: PyTree[Array]
    lower: LowerSolution
    q: PyTree[Array] | None
    deviation: Float[Array, ""]
    scales: Scales
    tilt_key: PRNGKeyArray
    memory: Any


class SSIGD(AbstractAskingMethod):
    """Projected stochastic gradient steps with a tilt that is drawn once.

    With `q` drawn before the first step and a fresh sample at step `t`:

        x+ = P(x - eta_t grad F_q(x))

    The tilt makes the multipliers of active rows positive almost surely, so that the
    gradient exists at a given `x`. It moves the kinks and with them the answer, by an
    amount proportional to `|q|`.

    - `step_size`: a constant `eta_t`, as in the paper, or a schedule. By default steps
      fall geometrically from `first_step` to `first_step * decay`, in units of the
      length of the problem over the slope of `F`, both measured at the start.
    - `optimiser`: an `optax.GradientTransformation` that takes the place of the plain
      step.
    - `perturbation`: law of the tilt. By default Gaussian, its deviation `tilt` times
      the force scale of the problem.

    Where the lower level is that of a minibatch (`Problem.members`), every member of
    the data has a tilt of its own, the same whenever it is drawn.

    Khanduri, Tsaknakis, Zhang, Liu, Liu, Zhang and Hong, Linearly constrained bilevel
    optimization: a smoothed implicit gradient approach, ICML 2023.

    Deviations: the lower level is solved to rounding, not to a set accuracy; its rows
    may move with `x`, and where it is empty `x` first goes back to the nearest point
    where it is not; the sample may enter the lower level too; step sizes fall and the
    tilt has a scale by default; the last iterate is returned unless the run asks for a
    random one.
    """

    step_size: Number | None = number(None)
    perturbation: AbstractPerturbation | None = None
    first_step: Number = number(0.1)
    decay: Number = number(1e-2)
    tilt: Number = number(1e-4)
    optimiser: "optax.GradientTransformation | None" = None

    def __check_init__(self):
        check_fields(self)
        if self.optimiser is not None:
            check_optimiser(self.optimiser)

    @property
    def uses_scales(self):
        stepping = self.optimiser is None and self.step_size is None
        return stepping or self.perturbation is None

    def init(self, problem, x, lower, scales, *, key):
        law, deviation = tilt_law(self.perturbation, self.tilt, problem, scales)
        single = problem.members is None
        q = law.sample(problem.y0, key=key) if single else None
        memory = None if self.optimiser is None else self.optimiser.init(x)
        return SSIGDState(x, lower, q, deviation, scales, key, memory)

    def ask(self, problem, state, *, step, num_steps, key):
        q = self._members_tilt(problem, state) if state.q is None else state.q
        length = at_step(self.step_size, step)
        if self.optimiser is None and length is None:
            length = falling(self.first_step, self.decay, step, num_steps)
            length = length * state.scales.length / state.scales.slope
        return Query(state.x, state.x, q, length)

    def tell(self, problem, state, query, oracle):
        (grad, usable), memory = (oracle.e.grad, oracle.usable), state.memory
        if self.optimiser is None:
            ahead = tree_step(oracle.ahead, -query.more, grad)
            x = select(usable, onto_domain(problem, ahead), oracle.ahead)
        else:
            x, memory = optimiser_step(
                self.optimiser, problem, memory, oracle.ahead, grad, usable
            )
        return with_fields(state, x=x, memory=memory), dict(tilt=state.deviation)

    def _members_tilt(self, problem: Problem, state: SSIGDState):
        law, _ = tilt_law(self.perturbation, self.tilt, problem, state.scales)
        one = jax.tree.map(lambda leaf: leaf[0], problem.y0)
        of_member = lambda i: law.sample(one, key=jr.fold_in(state.tilt_key, i))
        return jax.vmap(of_member)(problem.members)


def one_tilt(
    law: AbstractPerturbation | None,
    share: Number,
    problem: Problem,
    scales: Scales,
    key: PRNGKeyArray,
) -> tuple[PyTree[Array], Float[Array, ""]]:
    """The tilt of a whole run and its deviation, NaN where the law has none."""
    law, deviation = tilt_law(law, share, problem, scales)
    return law.sample(problem.y0, key=key), deviation


def tilt_law(
    law: AbstractPerturbation | None, share: Number, problem: Problem, scales: Scales
) -> tuple[AbstractPerturbation, Float[Array, ""]]:
    """The law of the tilt, by default in natural units, and its deviation."""
    if law is not None:
        return law, jnp.asarray(jnp.nan)
    size = ravel_pytree(problem.y0)[0].size
    deviation = share * scales.force / jnp.sqrt(size)
    return Gaussian(deviation), deviation
