"""What every method keeps between steps, and what it reports of each."""

import abc
from typing import Any

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray, PyTree

from .._implicit import Evaluation
from .._lower.base import LowerSolution
from .._problem import AbstractProblem


class Scales(eqx.Module):
    """Natural units of a problem, measured once at the start.

    - `length`: of `x`; how far the first gradient points downhill, or the domain.
    - `slope`: of `F`, the size of its first gradient.
    - `force`: of the gradient of `g` in `y`, the unit of a tilt.
    """

    length: Float[Array, ""]
    slope: Float[Array, ""]
    force: Float[Array, ""]


class Record(eqx.Module):
    """One step in numbers, the same for every method.

    - `value`: the (tilted, sampled) objective where the gradient was taken.
    - `move`: how far `x` really moved, after projection.
    - `momentum_norm`: the size of the direction that decided the step.
    - `oracle_calls`: lower-level solves, each with one gradient.
    - `status`: how the gradient ended, as a number; `Status` names it.
    """

    value: Float[Array, ""]
    gradient_norm: Float[Array, ""]
    momentum_norm: Float[Array, ""]
    move: Float[Array, ""]
    tilt: Float[Array, ""]
    lower_passes: Int[Array, ""]
    factorisations: Int[Array, ""]
    safeguard: Int[Array, ""]
    active_changes: Int[Array, ""]
    oracle_calls: Int[Array, ""]
    recovered: Int[Array, ""]
    status: Int[Array, ""]


class AbstractMethod(eqx.Module):
    """`init` makes a state, `step` advances it; both are traced.

    The first step finds `x` in the state, no gradient and a lower-level solution that
    is blank. Step `t` gets its own key, so a run cut into pieces is the same run.
    """

    @abc.abstractmethod
    def init(self, x: PyTree[Array], lower: LowerSolution, scales: Scales) -> Any:
        """The state before the first step."""

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


def lower_work(e: Evaluation, before: LowerSolution) -> dict:
    """The entries of a record that describe the lower level."""
    work = e.lower.iterations
    return dict(
        value=e.value,
        lower_passes=work.passes,
        factorisations=work.factorisations,
        safeguard=work.safeguard,
        active_changes=jnp.sum(e.lower.active != before.active),
        status=e.status._value,
    )
