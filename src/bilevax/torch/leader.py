"""The hypergradient of a problem at a leader's tensor."""

from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import torch
from jaxtyping import PyTree

from .._implicit.evaluation import Evaluation
from .._implicit.hypergradient import hypergradient as _hypergradient
from .._problem.followers import Followers
from .._problem.problem import Problem
from .tensors import checked_tensors, in_double, to_array, to_tensor


class LeaderValue(NamedTuple):
    """`F` at one `x`, as tensors.

    - `value`: `F`; `value.backward()` leads to `x` by the hypergradient.
    - `grad`: the hypergradient, of the structure of `x`.
    - `y`, `prices`: the follower's answer and its multipliers, without history.
    - `evaluation`: everything else, as `bx.hypergradient` returns it.
    """

    value: torch.Tensor
    grad: PyTree
    y: PyTree
    prices: Any
    evaluation: Evaluation

    @property
    def status(self) -> Any:
        return self.evaluation.status

    @property
    def message(self) -> str:
        """What is wrong or special here and what to do about it; else empty."""
        return self.evaluation.message


def hypergradient(problem: Problem | Followers, x: PyTree, **options) -> LeaderValue:
    """`F` and its gradient at a tensor, or tree of tensors, `x`.

    The problem is written with JAX, both levels of it; options are those of
    `bx.hypergradient`. Computed in float64, given back in the dtype of `x`.
    """
    leaves = checked_tensors(x, "x")
    structure = jax.tree.structure(x)
    with in_double():
        if isinstance(problem, Problem | Followers):
            problem = jax.tree.map(_double, problem)
        arrays = structure.unflatten(map(to_array, leaves))
        e = _hypergradient(problem, arrays, **options)
        dtype = leaves[0].dtype
        back = lambda tree: jax.tree.map(lambda leaf: to_tensor(leaf, dtype), tree)
        grads = [
            to_tensor(grad, leaf.dtype)
            for grad, leaf in zip(jax.tree.leaves(e.grad), leaves, strict=True)
        ]
        value, y, prices = back((e.value, e.lower.y, e.lower.multipliers))
    value = _Known.apply(value, grads, *leaves)
    return LeaderValue(value, structure.unflatten(grads), y, prices, e)


class _Known(torch.autograd.Function):
    """A value whose gradient is known already."""

    @staticmethod
    def forward(ctx, value, grads, *leaves):
        ctx.grads = grads
        return value.clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, cotangent):
        return None, None, *(cotangent * grad for grad in ctx.grads)


def _double(leaf):
    return leaf.astype(jnp.float64) if eqx.is_inexact_array(leaf) else leaf
