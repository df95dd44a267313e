"""The layer: a module of PyTorch around two programs of JAX."""

import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import torch
from jaxtyping import PyTree

from .._implicit.adjoint import AbstractAdjoint
from .._implicit.layer import Answers, Instance, answers, pulled_back
from .._lower.base import AbstractLowerSolver
from .._lower.choose import check_choice
from .._problem.problem import Problem
from .._programs.control import UsualPath
from .._programs.modules import Plain
from .._status import as_status
from .answer import Answer, checked_throw, tell, tell_of_adjoints
from .tensors import checked_tensors, in_double, to_array, to_tensor


def layer(
    instance: Callable | Problem,
    *,
    ndim: PyTree = None,
    throw: Any = "warn",
    fill: float = math.nan,
    solver: AbstractLowerSolver | None = None,
    adjoint: AbstractAdjoint | None = None,
) -> "Layer":
    """A lower level as a layer: `layer(instance)(*parameters)` is an `Answer`.

    - `instance`: a function, written with JAX, from the parameters of one member to its
      lower level: `return objective, constraints` with an objective of `y` alone (and a
      third, `y0`, where the set does not tell the shape of `y`). Or a `Problem`, or a
      function that returns one: its `x` is the first parameter.
    - `ndim`: how many axes each parameter has for one member; a tensor with one more is
      a batch, and one without it is shared by all members. A tuple with one entry per
      parameter, each a number or a tree of numbers like the parameter; without it all
      tensors are those of one member.
    - `throw`: what happens where a member has no answer: "warn" and mask it, True to
      raise a `BilevelError`, False to mask it silently.
    - `fill`: the number in place of a missing answer.
    - `solver`, `adjoint`: as in `hypergradient`.

    Parameters are tensors, or trees of tensors, on a CPU or a CUDA device. All is
    computed in float64; answers have the widest dtype of the tensors, derivatives that
    of each tensor. Make the layer once: another one compiles again.
    """
    return Layer(instance, ndim, throw, fill, solver, adjoint)


class Layer(torch.nn.Module):
    """What `layer` makes. It has no weights, and fits where any module does."""

    def __init__(self, instance, ndim, throw, fill, solver, adjoint):
        super().__init__()
        if isinstance(instance, Problem):
            instance = _Of(instance)
        if not callable(instance):
            raise ValueError(
                "`instance` must be a function from parameters to a lower level, or a "
                f"Problem; got {type(instance).__name__}."
            )
        check_choice(solver, AbstractLowerSolver, "solver", "ActiveSet")
        check_choice(adjoint, AbstractAdjoint, "adjoint", "ConjugateGradient")
        self.instance = Instance(instance, solver, adjoint)
        self.ndim, self.throw = ndim, checked_throw(throw)
        self.fill = float(fill)
        self.usual_path = UsualPath()

    def forward(self, *parameters) -> Answer:
        call = _Call(self, parameters)
        *leaves, prices = _Solve.apply(call, *call.leaves)
        y = jax.tree.unflatten(call.structure, leaves)
        answer = Answer(y, prices, call.status)
        tell(answer, self.throw)
        return answer

    def extra_repr(self) -> str:
        return f"{getattr(self.instance.build, '__name__', '')}, throw={self.throw!r}"


class _Call:
    """One call of a layer: its tensors, which of them are batches, how it ended."""

    structure: Any
    status: Any

    def __init__(self, layer: Layer, parameters: tuple):
        self.layer = layer
        self.leaves = checked_tensors(parameters, "parameters")
        self.tree = jax.tree.structure(parameters)
        own = [leaf.ndim for leaf in self.leaves]
        told = own if layer.ndim is None else _spread(layer.ndim, parameters)
        named = jax.tree_util.tree_flatten_with_path(parameters)[0]
        sizes = {}
        for (path, leaf), axes in zip(named, told, strict=True):
            name = "parameters" + jax.tree_util.keystr(path)
            if leaf.ndim not in (axes, axes + 1):
                raise ValueError(
                    f"`{name}` has {leaf.ndim} axes; by `ndim` that of one member has "
                    f"{axes}, and a batch {axes + 1}."
                )
            if leaf.ndim > axes:
                sizes[name] = leaf.shape[0]
        if len(set(sizes.values())) > 1:
            pairs = ", ".join(f"{name} has {size}" for name, size in sizes.items())
            raise ValueError(
                f"All batches must have as many members; {pairs} along the leading "
                "axis. A tensor without that axis is shared by all members."
            )
        if 0 in sizes.values():
            raise ValueError("A batch must have at least one member; got none.")
        self.batched = bool(sizes)
        # A single member is a batch of one.
        self.axes = [
            0 if leaf.ndim > axes or not sizes else None
            for leaf, axes in zip(self.leaves, told, strict=True)
        ]
        self.dtype = self.leaves[0].dtype
        for leaf in self.leaves:
            self.dtype = torch.promote_types(self.dtype, leaf.dtype)

    def parameters(self, leaves):
        arrays = [to_array(leaf if self.batched else leaf[None]) for leaf in leaves]
        return self.tree.unflatten(arrays)

    def program(self) -> tuple[Instance, PyTree]:
        # One structure for axes and arrays, with None as a leaf of the former.
        return self.layer.instance, self.tree.unflatten(self.axes)

    def solve(self, leaves) -> tuple[Answers, list[torch.Tensor]]:
        with in_double():
            arrays = self.parameters(leaves)
            try:
                found = answers(*self.program(), arrays, self.layer.usual_path)
            except (ValueError, TypeError, IndexError, KeyError) as error:
                raise ValueError(self.doubts(error)) from error
            # Read at once: then nothing is under way that could see tensors change.
            codes = np.asarray(found.codes)
            flat, self.structure = jax.tree.flatten(found.y)
            tensors = [
                to_tensor(leaf, self.dtype) for leaf in (*flat, found.multipliers)
            ]
        self.status = as_status(codes if self.batched else np.asarray(codes[0]))
        if codes.any() and not np.isnan(self.layer.fill):
            tensors = [
                torch.where(leaf.isnan(), self.layer.fill, leaf) for leaf in tensors
            ]
        # Views of one tensor could not be written into.
        return found, tensors if self.batched else [leaf[0].clone() for leaf in tensors]

    def doubts(self, error: Exception) -> str:
        """What the lower level was made of, where making it failed."""
        of_one = [
            tuple(leaf.shape[self.batched and axis is not None :])
            for leaf, axis in zip(self.leaves, self.axes, strict=True)
        ]
        told = "no `ndim` was given" if self.layer.ndim is None else "by `ndim`"
        return (
            f"The lower level of one member, from parameters of shapes "
            f"{self.tree.unflatten(of_one)} ({told}): {error}"
        )

    def pull_back(self, found: Answers, leaves, wanted, cotangents):
        if not self.batched:
            cotangents = [leaf[None] for leaf in cotangents]
        with in_double():
            *ct_y, ct_prices = map(to_array, cotangents)
            pair = self.structure.unflatten(ct_y), ct_prices
            program, arrays = self.program(), self.parameters(leaves)
            grads, fine = pulled_back(*program, wanted, arrays, found, pair)
            fine = np.asarray(fine)
            chosen = [leaf for leaf, w in zip(leaves, wanted, strict=True) if w]
            tensors = iter(
                [
                    to_tensor(grad, leaf.dtype)
                    for grad, leaf in zip(grads, chosen, strict=True)
                ]
            )
        tell_of_adjoints(fine, self.layer.throw)
        shaped = (lambda leaf: leaf) if self.batched else (lambda leaf: leaf[0])
        return [shaped(next(tensors)) if w else None for w in wanted]


class _Solve(torch.autograd.Function):
    @staticmethod
    def forward(ctx, call: _Call, *leaves):
        ctx.call = call
        ctx.found, tensors = call.solve(leaves)
        # Saved by PyTorch, which tells if they were written into meanwhile.
        ctx.save_for_backward(*leaves)
        return tuple(tensors)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, *cotangents):
        wanted = tuple(ctx.needs_input_grad[1:])
        grads = ctx.call.pull_back(ctx.found, ctx.saved_tensors, wanted, cotangents)
        return (None, *grads)


class _Of(Plain):
    """A problem that is there already, as an instance of its `x`."""

    problem: Problem

    def __call__(self, x):
        return self.problem


def _spread(ndim, parameters: tuple) -> list[int]:
    """`ndim` for each leaf: a number counts for the whole tree at its place."""
    if not isinstance(ndim, tuple) or len(ndim) != len(parameters):
        count = len(parameters)
        raise ValueError(
            "`ndim` must be a tuple with one entry per parameter; got "
            f"{ndim!r} for {count} parameter{'s' * (count != 1)}."
        )
    try:
        spread = jax.tree.broadcast(ndim, parameters)
    except ValueError as error:
        raise ValueError(
            f"`ndim` must be numbers in the tree structure of the parameters: {error}"
        ) from None
    return jax.tree.leaves(spread)
