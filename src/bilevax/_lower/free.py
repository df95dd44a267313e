"""The free subspace `{d : A_S d = 0}` of an active set, by products alone."""

import abc
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import lineax as lx
from jaxtyping import Array, Bool, Float

from .._constraints import AbstractConstraints, Box, Simplex
from .._programs.arrays import xp
from .._programs.modules import Plain
from .._tolerances import tolerances


class AbstractFreeSubspace(Plain):
    """Projector on the free subspace, and least squares beside it."""

    @abc.abstractmethod
    def project(self, d: Float[Array, " n"]) -> Float[Array, " n"]:
        """The part of `d` in the free subspace."""

    @abc.abstractmethod
    def lift(self, bottom: Float[Array, " k"]) -> Float[Array, " n"]:
        """The shortest `d` with `A_S d = bottom_S`."""

    @abc.abstractmethod
    def multipliers(self, force: Float[Array, " n"]) -> Float[Array, " k"]:
        """`w`, zero off `S`, with `A_S^T w` nearest to `force`."""


def free_subspace(
    constraints: AbstractConstraints, active: Bool[Array, " k"], size: int, dtype
) -> AbstractFreeSubspace:
    """The free subspace of `active`, with the structure of the set where it has one."""
    if isinstance(constraints, Box):
        low, high = xp.split(active, 2)
        return _BoxFree(low, high)
    if isinstance(constraints, Simplex):
        bound = active[: constraints.num_inequalities]
        return _SimplexFree(bound.reshape(-1, constraints.shape[-1]))
    A = xp.where(active[:, None], constraints.matrix(size, dtype), 0)
    if A.shape[0] == 0:
        return _RowsFree(A, xp.zeros((0, 0), dtype))
    norm = xp.sqrt(xp.sum(A**2, axis=1))
    norm = xp.where(norm > 0, norm, 1)
    unit = A / norm[:, None]
    cutoff = tolerances(dtype).dependent * A.shape[0]
    gram = xp.linalg.pinv(unit @ unit.T, cutoff, hermitian=True)
    return _RowsFree(A, gram / (norm[:, None] * norm))


def free_solve(
    product: Callable, free: AbstractFreeSubspace, rest, rtol: float, max_steps: int
):
    """`P H P d = rest` on the free subspace by conjugate gradients, and its residual.

    `product` multiplies with `H`; `rest` lies in the subspace.
    """

    # The identity beside the free subspace keeps the operator definite.
    def operator(d):
        inside = free.project(d)
        return free.project(product(inside)) + (d - inside)

    # Entries of `rest` off the subspace are zero, and lineax measures each entry on
    # its own scale: without an absolute part it would divide by zero and stop.
    atol: Any = rtol * jnp.max(jnp.abs(rest))
    out = lx.linear_solve(
        lx.FunctionLinearOperator(
            operator,
            jax.ShapeDtypeStruct(rest.shape, rest.dtype),
            lx.positive_semidefinite_tag,
        ),
        rest,
        lx.CG(rtol=rtol, atol=atol, max_steps=max_steps),
        throw=False,
    )
    return free.project(out.value), jnp.linalg.norm(operator(out.value) - rest)


class _BoxFree(AbstractFreeSubspace):
    low: Bool[Array, " n"]
    high: Bool[Array, " n"]

    def project(self, d):
        return xp.where(self.low | self.high, 0, d)

    def lift(self, bottom):
        low, high = xp.split(bottom, 2)
        return xp.where(self.high, high, xp.where(self.low, -low, 0))

    def multipliers(self, force):
        low = xp.where(self.low, -force, 0)
        high = xp.where(self.high, force, 0)
        both = xp.where(self.low & self.high, 0.5, 1.0)
        return xp.concatenate([low * both, high * both])


class _SimplexFree(AbstractFreeSubspace):
    bound: Bool[Array, "s n"]

    def _mean(self, d):
        free = ~self.bound
        count = xp.maximum(xp.sum(free, axis=1), 1)
        return xp.sum(xp.where(free, d, 0), axis=1) / count

    def project(self, d):
        rows = d.reshape(self.bound.shape)
        rows = xp.where(self.bound, 0, rows - self._mean(rows)[:, None])
        return rows.reshape(-1)

    def lift(self, bottom):
        size = self.bound.size
        fixed = xp.where(self.bound, -bottom[:size].reshape(self.bound.shape), 0)
        missing = bottom[size:] - xp.sum(fixed, axis=1)
        free = ~self.bound
        share = missing / xp.maximum(xp.sum(free, axis=1), 1)
        return xp.where(free, share[:, None], fixed).reshape(-1)

    def multipliers(self, force):
        rows = force.reshape(self.bound.shape)
        sums = self._mean(rows)
        low = xp.where(self.bound, sums[:, None] - rows, 0)
        return xp.concatenate([low.reshape(-1), sums])


class _RowsFree(AbstractFreeSubspace):
    A: Float[Array, "k n"]
    gram_inverse: Float[Array, "k k"]

    def project(self, d):
        return d - (self.gram_inverse @ (self.A @ d)) @ self.A

    def lift(self, bottom):
        return (self.gram_inverse @ bottom) @ self.A

    def multipliers(self, force):
        return self.gram_inverse @ (self.A @ force)
