"""Problems whose objective is an expectation, given by samples."""

import dataclasses
from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, PRNGKeyArray, PyTree

from .._arguments import check_count, check_flag
from .._files.digest import digest
from .._programs.modules import remembered
from .problem import AbstractProblem, Problem
from .samplers import AbstractSampler, Epochs, WithReplacement


class StochasticProblem(AbstractProblem):
    """`min_x E_xi f(x, y*(x); xi)`, given by how a sample becomes a `Problem`.

    - `sample`: `key -> batch`.
    - `instance`: `batch -> Problem`. The batch may enter the upper level alone or the
      lower level too (one box per image of a minibatch).
    - `population`: the problem by which runs are judged and results evaluated. Given
      by `from_data`; without it, one draw stands for all.
    - `absorb`: `(x, aux) -> x` after every step, with the auxiliary output of `upper`:
      for parts of `x` that are set and not optimised, such as running statistics.

    `sample` may be an `AbstractSampler`, which is also told the number of the step.
    """

    sample: Callable
    instance: Callable
    population: Problem | None = None
    always_feasible: bool = eqx.field(static=True, default=False)
    absorb: Callable | None = None

    def __check_init__(self):
        for name in ("sample", "instance", "absorb"):
            part = getattr(self, name)
            if not (callable(part) or (part is None and name == "absorb")):
                raise ValueError(
                    f"`{name}` of a StochasticProblem must be a function; got "
                    f"{type(part).__name__}."
                )
        if not isinstance(self.population, AbstractProblem | None):
            raise ValueError(
                "`population` must be a Problem, by which runs are judged; got "
                f"{type(self.population).__name__}."
            )

    @classmethod
    def from_data(
        cls,
        data: PyTree[Array],
        batch_size: int,
        instance: Callable,
        *,
        epochs: bool = False,
    ):
        """Minibatches of `batch_size` rows of device data.

        Rows are drawn with replacement; with `epochs=True` the steps of a run go
        through all rows in a new order each time (what is left of an epoch after the
        last whole batch is skipped). The population is the instance of all rows at
        once, so `instance` should take means over its batch, not sums.
        """
        try:
            data = jax.tree.map(jnp.asarray, data)
        except (TypeError, ValueError) as error:
            raise ValueError(f"`data` must be arrays of numbers; {error}") from None
        lengths = {leaf.shape[:1] for leaf in jax.tree.leaves(data)}
        if len(lengths) != 1 or () in lengths:
            raise ValueError(
                "`data` must be arrays that share their leading axis; got leading "
                f"axes {sorted(lengths)}."
            )
        if (0,) in lengths:
            raise ValueError(
                "`data` must have at least one row to draw from; got leading axis 0."
            )
        check_count(batch_size, "batch_size")
        check_flag(epochs, "epochs")
        if not callable(instance):
            raise ValueError(
                "`instance` must be a function from a batch to a Problem; got "
                f"{type(instance).__name__}."
            )
        sampler = Epochs if epochs else WithReplacement
        return cls(sampler(data, int(batch_size)), instance, instance(data))

    def draw(self, key, step=None):
        if isinstance(self.sample, AbstractSampler):
            batch = self.sample(key, step)
        else:
            batch = self.sample(key)
        problem = self.instance(batch)
        return problem.assuming_feasible() if self.always_feasible else problem

    @property
    def is_sampled(self):
        return True

    def assuming_feasible(self):
        return dataclasses.replace(self, always_feasible=True)

    def absorbed(self, x, aux):
        return x if self.absorb is None else self.absorb(x, aux)

    def made_by(self) -> tuple | None:
        """A function and arguments that make it, where its `population` follows."""
        if not _is_of_all_rows(self):
            return None
        return _of_all_rows, (
            self.sample, self.instance, self.always_feasible, self.absorb,
        )  # fmt: skip


def _of_all_rows(sample, instance, always_feasible, absorb) -> StochasticProblem:
    """As `from_data` makes it; what was made before serves again, and its programs."""
    name = digest((sample, instance, always_feasible, absorb))
    if name not in _made:
        if len(_made) >= _MOST_MADE:
            _made.clear()
        _made[name] = StochasticProblem(
            sample, instance, instance(sample.data), always_feasible, absorb
        )
    return _made[name]


_made: dict[str, StochasticProblem] = {}
_MOST_MADE = 4


@remembered
def _is_of_all_rows(problem: StochasticProblem) -> bool:
    """Whether the population is the instance of all rows: it computes the same."""
    sample, population = problem.sample, problem.population
    if population is None or not isinstance(sample, WithReplacement | Epochs):
        return False
    return digest(problem.instance(sample.data)) == digest(population)


def representative(problem: AbstractProblem, key: PRNGKeyArray) -> Problem:
    """The deterministic problem by which runs on `problem` are judged."""
    population = getattr(problem, "population", None)
    return problem.draw(key) if population is None else population
