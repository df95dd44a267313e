"""What is compared on what: named problems with starts, named methods, seeds."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jax.flatten_util import ravel_pytree
from jaxtyping import PyTree

from .._arguments import check_number, listed
from .._constraints import Box
from .._methods.base import AbstractMethod
from .._problem.problem import AbstractProblem


@dataclass(frozen=True)
class Case:
    """A problem with its start, or a family of them with one member per seed.

    - `problem`, `x0`: themselves, or functions of the seed. Without `x0` the start is
      drawn from the domain, a bounded `Box`. All methods get the same.
    - `target`: a value of `F` known to be best, or a function of the seed. Gaps are
      measured from it, or from the best value that any method found if that is lower.
    - `signature`: text that changes with the problem where its arrays do not, such as a
      digest of the file that defines it.
    """

    name: str
    problem: AbstractProblem | Callable[[int], AbstractProblem]
    x0: PyTree | Callable[[int], PyTree] | None = None
    target: float | Callable[[int], float] | None = None
    signature: str = ""

    def __post_init__(self):
        for name in ("name", "signature"):
            if not isinstance(getattr(self, name), str):
                raise ValueError(
                    f"`{name}` of a Case must be a text; got {getattr(self, name)!r}."
                )
        if not (isinstance(self.problem, AbstractProblem) or callable(self.problem)):
            raise ValueError(
                f"`problem` of {self.name!r} must be a problem, or a function from a "
                f"seed to one; got {type(self.problem).__name__}."
            )
        if not (self.target is None or callable(self.target)):
            check_number(self.target, "target", "a value of F, or a function of seeds")

    def instance(self, seed: int) -> "Instance":
        """The problem, start and target of one seed."""
        problem, x0, target = self.problem, self.x0, self.target
        if not isinstance(problem, AbstractProblem):
            problem = problem(seed)
        if x0 is None:
            x0 = _drawn_start(self.name, problem, seed)
        elif callable(x0):
            x0 = x0(seed)
        target = target(seed) if callable(target) else target
        return Instance(problem, x0, None if target is None else float(target))


@dataclass(frozen=True)
class Instance:
    """A case at one seed."""

    problem: AbstractProblem
    x0: PyTree
    target: float | None


def as_cases(problems: Mapping[str, Any] | Iterable[Case]) -> list[Case]:
    """Cases from a list of them, or from `{name: problem or (problem, x0)}`."""
    if isinstance(problems, Case):
        problems = [problems]
    if isinstance(problems, Mapping):
        cases = [_as_case(str(name), entry) for name, entry in problems.items()]
    else:
        cases = listed(problems, "problems", "cases")
    for case in cases:
        if not isinstance(case, Case):
            raise ValueError(
                "`problems` must be a list of Cases, or a dictionary from names to "
                f"problems or pairs of problem and x0; got {type(case).__name__}."
            )
    _check_names([case.name for case in cases], "problems")
    return cases


def _as_case(name: str, entry) -> Case:
    if isinstance(entry, Case):
        return entry
    if isinstance(entry, tuple):
        return Case(name, *entry)
    return Case(name, entry)


def as_methods(
    methods: Mapping[str, AbstractMethod] | Iterable[AbstractMethod],
) -> dict[str, AbstractMethod]:
    """Methods by name; those of a list are named by their class."""
    if isinstance(methods, AbstractMethod):
        methods = [methods]
    if isinstance(methods, Mapping):
        pairs = [(str(name), method) for name, method in methods.items()]
    else:
        methods = listed(methods, "methods", "methods")
        pairs = [(type(method).__name__, method) for method in methods]
    for name, method in pairs:
        if not isinstance(method, AbstractMethod):
            got = method.__name__ if isinstance(method, type) else repr(method)
            raise ValueError(
                f"`methods[{name!r}]` must be a method such as DSBLO(); got {got}."
            )
    _check_names([name for name, _ in pairs], "methods")
    return dict(pairs)


def as_seeds(seeds: int | Sequence[int]) -> list[int]:
    """`range(seeds)`, or the seeds themselves."""
    if isinstance(seeds, int | np.integer) and not isinstance(seeds, bool):
        numbers = list(range(seeds))
    else:
        given = listed(seeds, "seeds", "whole numbers")
        for seed in given:
            check_number(seed, "seeds", "a number of seeds or a list of whole numbers")
        numbers = [int(seed) for seed in given]
    if not numbers or len(set(numbers)) != len(numbers):
        raise ValueError(f"`seeds` must be one or more different seeds; got {seeds!r}.")
    return numbers


def _check_names(names: list[str], what: str) -> None:
    if not names:
        raise ValueError(f"`{what}` must not be empty.")
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(
            f"`{what}` must have different names; {', '.join(twice)} came twice. Pass "
            "a dictionary to name them."
        )


def _drawn_start(name: str, problem: AbstractProblem, seed: int) -> PyTree:
    """Uniform in a bounded box."""
    domain = getattr(problem, "domain", None)
    if isinstance(domain, Box):
        low, unravel = ravel_pytree(domain.lower)
        high = ravel_pytree(domain.upper)[0]
        if bool(jnp.all(jnp.isfinite(low) & jnp.isfinite(high))):
            share = jr.uniform(jr.key(seed), low.shape, low.dtype)
            return unravel(low + share * (high - low))
    raise ValueError(
        f"The problem {name!r} needs a start: pass (problem, x0). Only for a problem "
        "whose domain is a bounded Box can one be drawn."
    )
