"""Models of cvxpy as layers, with the calling convention of cvxpylayers."""

import math
from typing import Any

import numpy as np
import torch

from .._cvxpy.model import Model
from .._cvxpy.names import AUXILIARY
from .._cvxpy.problem import cvxpy_itself, read
from .answer import Answer
from .module import Layer
from .tensors import in_double


class Variables(tuple):
    """The variables that were asked for, a tensor each, and how they came about.

    `prices` are the multipliers by the names of constraints, in the signs and shapes of
    `dual_value`; `status`, `success` and `message` are those of an `Answer`.
    """

    prices: dict[str, torch.Tensor]
    answer: Answer

    @classmethod
    def of(cls, values, prices, answer) -> "Variables":
        found = cls(values)
        found.prices, found.answer = prices, answer
        return found

    @property
    def status(self) -> Any:
        """How each member ended."""
        return self.answer.status

    @property
    def success(self) -> torch.Tensor:
        """Whether there is an answer, member by member."""
        return self.answer.success

    @property
    def message(self) -> str:
        """What is wrong or special, with the members it is about; else empty."""
        return self.answer.message


class CvxpyLayer(Layer):
    """What `cvxpy_layer` makes."""

    def __init__(self, problem, parameters, variables, throw, fill, options):
        cp = cvxpy_itself()
        leader, form, y0, order = read(cp, problem, parameters)
        # Numbers of the model, too, in double precision.
        with in_double():
            model = Model(form, order, y0, leader)
        ndim = ({p.name(): p.ndim for p in leader},)
        super().__init__(model, ndim, throw, fill, *options)
        self.given = [(p.name(), p.shape) for p in leader]
        self.wanted = _checked_variables(problem, variables)
        self.equations = form.equations
        self.groups = form.groups[: form.num_named]
        assert AUXILIARY not in self.wanted

    def forward(self, *parameters) -> Variables:
        if len(parameters) != len(self.given):
            raise ValueError(
                f"The layer takes {len(self.given)} tensors, for the parameters "
                f"{', '.join(name for name, _ in self.given)}; got {len(parameters)}."
            )
        for (name, shape), tensor in zip(self.given, parameters, strict=True):
            here = getattr(tensor, "shape", None)
            if here is not None and tuple(here[len(here) - len(shape) :]) != shape:
                raise ValueError(
                    f"The tensor for the parameter `{name}` must have its shape, "
                    f"{shape}, or that behind one axis of members; got {tuple(here)}."
                )
        names = [name for name, _ in self.given]
        answer = super().forward(dict(zip(names, parameters, strict=True)))
        values = [answer.y[name] for name in self.wanted]
        return Variables.of(values, self._by_name(answer.prices), answer)

    def _by_name(self, prices: torch.Tensor) -> dict[str, torch.Tensor]:
        # Of the solver: inequality rows, then equality rows.
        place = np.argsort(np.argsort(self.equations, kind="stable"))
        batch = prices.shape[:-1]
        return {
            g.name: prices[..., place[g.rows].tolist()].reshape(*batch, *g.shape)
            for g in self.groups
        }

    def extra_repr(self) -> str:
        return f"{[name for name, _ in self.given]} -> {self.wanted}"


def cvxpy_layer(
    problem: Any,
    parameters: list,
    variables: list,
    *,
    throw: Any = "warn",
    fill: float = math.nan,
    solver: Any = None,
    adjoint: Any = None,
) -> CvxpyLayer:
    """A model of cvxpy as a layer, called as those of cvxpylayers are.

    `cvxpy_layer(problem, parameters, variables)(*tensors)` is a tuple with a tensor for
    each of `variables`; tensors have the shapes of the parameters, or a leading axis of
    members before them. The tuple also has `prices` by the names of constraints,
    `status`, `success` and `message`. `problem` is a quadratic program with linear
    constraints, as in `bx.from_cvxpy`; parameters may multiply variables in the
    constraints, too. Further options as in `layer`.
    """
    return CvxpyLayer(problem, parameters, variables, throw, fill, (solver, adjoint))


def _checked_variables(problem, variables) -> list[str]:
    if not isinstance(variables, list | tuple) or not variables:
        raise ValueError(
            "`variables` must be a list of variables of the problem, at least one; got "
            f"{variables!r}."
        )
    known = {v.id: v.name() for v in problem.variables()}
    for i, variable in enumerate(variables):
        if getattr(variable, "id", None) not in known:
            raise ValueError(
                f"`variables[{i}]` is not a variable of the problem; these are "
                f"{', '.join(known.values())}."
            )
    return [known[v.id] for v in variables]
