"""What every method keeps between steps, and what it reports of each."""

import abc
import operator
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, PyTree

from .._arguments import as_number, check_fields
from .._implicit.hypergradient import Evaluation
from .._lower.base import Iterations, LowerSolution
from .._problem.followers import Followers
from .._problem.problem import AbstractProblem, Problem
from .._problem.stochastic import StochasticProblem
from .._programs.arrays import xp
from .._programs.modules import Plain, made

# A number of a method, kept as an array; see `number`.
Number = Any

# Steps over which lengths and tilts fall by their whole factor, at least: in a shorter
# run steps that fell all the way would die before `x` arrives.
_SHORTEST_FALL = 300
# What is left of the first step at the end of a run where every step sees all of `F`;
# where it sees samples, that over the number of steps.
_DEEP_FALL, _SHALLOW_FALL = 1e-5, 3.0


class Scales(Plain):
    """Natural units of a problem, measured once at the start.

    - `length`: of `x`; how far the first gradient points downhill, or the domain.
    - `slope`: of `F`, the size of its first gradient.
    - `force`: of the gradient of `g` in `y`, the unit of a tilt.
    - `sampled`: whether a step sees a sample of `F` and not all of it.
    """

    length: Float[Array, ""]
    slope: Float[Array, ""]
    force: Float[Array, ""]
    sampled: Bool[Array, ""] = eqx.field(default=False, converter=jnp.asarray)


class Record(Plain):
    """One step in numbers, the same for every method; `report` fills it.

    - `value`: the (tilted, sampled) objective where the gradient was taken.
    - `move`: how far `x` really moved, after projection.
    - `momentum_norm`: the size of the direction that decided the step.
    - `tilt`: the size of the perturbation that was drawn; NaN where its law has none.
    - `recovered`: whether `x` was taken back to where the lower level has a point.
    - `status`: how the gradient ended, as a number; `Status` names it.

    The others count work: lower-level solves with their passes, factorisations and
    steps of the safeguard; gradients of `f`; products with second derivatives of `g`;
    linear solves with them; solves of a penalised, barrier or saddle problem in `y`;
    data samples drawn. `aux` is the auxiliary output of `f`, which the run uses and
    does not keep.
    """

    value: Float[Array, ""]
    gradient_norm: Float[Array, ""]
    momentum_norm: Float[Array, ""]
    move: Float[Array, ""]
    tilt: Float[Array, ""]
    active_changes: Int[Array, ""]
    recovered: Int[Array, ""]
    status: Int[Array, ""]
    lower_solves: Int[Array, ""]
    lower_passes: Int[Array, ""]
    factorisations: Int[Array, ""]
    safeguard: Int[Array, ""]
    upper_gradients: Int[Array, ""]
    hessian_products: Int[Array, ""]
    linear_solves: Int[Array, ""]
    penalty_solves: Int[Array, ""]
    samples: Int[Array, ""]
    aux: Any = None


# The fields of a record that count work.
WORK = (
    "lower_solves",
    "lower_passes",
    "factorisations",
    "safeguard",
    "upper_gradients",
    "hessian_products",
    "linear_solves",
    "penalty_solves",
    "samples",
)


class Draws(Plain):
    """The keys of one step. Methods that share them share their random numbers.

    - `sample`: the data; `tilt`: of the lower level; `segment`: a point between two
      iterates; `direction`: anything drawn in the space of `x`.
    """

    sample: PRNGKeyArray
    tilt: PRNGKeyArray
    segment: PRNGKeyArray
    direction: PRNGKeyArray


class AbstractMethod(Plain):
    """`init` makes a state, `step` advances it; both are traced.

    A state has at least `x` and `lower`, the last lower-level solution (or the first),
    as a warm start. Step `t` gets its own key, so a run cut into pieces is the same
    run.
    """

    def __check_init__(self):
        check_fields(self)

    @abc.abstractmethod
    def init(
        self,
        problem: Problem,
        x: PyTree[Array],
        lower: LowerSolution,
        scales: Scales,
        *,
        key: PRNGKeyArray,
    ) -> Any:
        """The state before the first step.

        `problem` is the deterministic one by which the run is judged, `lower` its
        lower-level solution at `x`; `key` is for draws that last the whole run.
        """

    @abc.abstractmethod
    def step(
        self,
        problem: AbstractProblem,
        state: Any,
        *,
        step: Int[Array, ""],
        num_steps: Int[Array, ""],
        key: PRNGKeyArray,
    ) -> tuple[Any, Record]:
        """One step."""

    @property
    def uses_scales(self) -> bool:
        """Whether `init` needs the scales of the problem; to measure them costs."""
        return True

    @property
    def lag(self) -> int:
        """How many steps before a random one the returned iterate lies."""
        return 0

    @property
    def takes_followers(self) -> bool:
        """Whether it needs no more of a problem than `F`, gradients and answers."""
        return False

    def refusal(self, problem: AbstractProblem) -> str | None:
        """Why this method cannot run on `problem`, in one sentence; None if it can."""
        return None


def _view(problem: AbstractProblem) -> Any:
    """The problem by which runs are judged, or one sample of it."""
    population = getattr(problem, "population", problem)
    return problem.draw(jr.key(0)) if population is None else population


def refused(method: AbstractMethod, problem: AbstractProblem) -> str | None:
    """Why `method` cannot run on `problem`, in one sentence; None if it can."""
    view = _view(problem)
    many = isinstance(view, Followers)
    if many and not method.takes_followers:
        return (
            f"{type(method).__name__} works on the rows of one lower level and cannot "
            "run on Followers; methods that take gradients of F, such as DSBLO, can."
        )
    if not method.takes_followers and getattr(view, "prices", False):
        return (
            f"{type(method).__name__} moves `y` apart from its multipliers and cannot "
            "run where `upper` takes prices; methods that take gradients of F, such as "
            "DSBLO, can."
        )
    constraints = getattr(view, "constraints", None)
    if not method.takes_followers and getattr(constraints, "moving", None) is not None:
        return (
            f"{type(method).__name__} needs rows that are linear in `x` and cannot run "
            "where parts of the constraints are functions of it; methods that take "
            "gradients of F, such as DSBLO, can."
        )
    return method.refusal(problem)


def number(default):
    """A field that is an array, so that another value does not recompile.

    None stays None, and a function (a schedule) stays a function.
    """

    return eqx.field(default=default, converter=as_number, metadata={"number": True})


def at_step(value: Any, step) -> Any:
    """`value`, or what it is at `step` if it is a schedule."""
    return value(step) if callable(value) else value


def draws(key: PRNGKeyArray) -> Draws:
    """The keys of one step, from its own."""
    return Draws(*jr.split(key, 4))


def falling(first, decay, step, num_steps):
    """`first` at the start of a run and `first * decay` at its end, geometrically."""
    return first * decay ** (step / xp.maximum(num_steps, _SHORTEST_FALL))


def falling_steps(first, decay, scales: Scales, step, num_steps):
    """Lengths of steps along a run; `decay` may be None for the default.

    Where steps see samples, geometrically to `3 / num_steps` of the first one and on
    top of that linearly to zero. A deep fall would spend most steps on lengths that
    samples cannot resolve and never arrive; without the line noise would stay.
    """
    deep = falling(first, _DEEP_FALL if decay is None else decay, step, num_steps)
    if decay is not None:
        return deep
    shallow = falling(first, _SHALLOW_FALL / num_steps, step, num_steps)
    return xp.where(scales.sampled, shallow * (1 - step / num_steps), deep)


def tree_norm(tree: PyTree[Array]) -> Float[Array, ""]:
    """The Euclidean norm over all leaves."""
    return xp.sqrt(sum(xp.sum(leaf**2) for leaf in jax.tree.leaves(tree)))


def tree_step(x: PyTree[Array], length, direction: PyTree[Array]) -> PyTree[Array]:
    """`x + length * direction`."""
    return jax.tree.map(lambda a, b: a + length * b, x, direction)


def report(
    problem: AbstractProblem,
    e: Evaluation,
    before: LowerSolution,
    x: PyTree[Array],
    new_x: PyTree[Array],
    *,
    recovered: Any = 0,
    **others,
) -> Record:
    """The record of a step from `x` to `new_x` with one hypergradient `e`.

    `recovered`: whether it took a second solve, at the nearest allowed point.
    `others` replaces entries, for methods that work in another way.
    """
    norm = tree_norm(e.grad)
    work, solves = e.lower.iterations, 1
    if np.ndim(e.lower.margin):
        # Of many followers all work counts.
        work, solves = Iterations(*map(xp.sum, work)), np.size(e.lower.margin)
    entries: dict[str, Any] = dict(
        value=e.value,
        gradient_norm=norm,
        momentum_norm=norm,
        move=tree_norm(jax.tree.map(operator.sub, new_x, x)),
        tilt=xp.zeros_like(norm),
        active_changes=xp.sum(e.lower.active != before.active),
        recovered=recovered,
        status=e.status._value,
        lower_solves=solves * (1 + recovered),
        lower_passes=work.passes,
        factorisations=work.factorisations,
        safeguard=work.safeguard,
        upper_gradients=1,
        hessian_products=solves,
        linear_solves=solves,
        penalty_solves=0,
        samples=int(isinstance(problem, StochasticProblem)),
        aux=e.aux,
    )
    entries |= others
    for name in (*WORK, "recovered"):
        entries[name] = xp.asarray(entries[name], int)
    return made(Record, **entries)
