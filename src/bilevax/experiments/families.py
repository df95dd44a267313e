"""The random family of section 4.1, with functions that recompile for no new data."""

from dataclasses import dataclass

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from .._compare.cases import Case
from .._constraints import Polyhedron
from .._problem.problem import Problem

FAMILIES = ("uniform", "tight")
# Rows of the lower level at each dimension of the paper.
ROWS = {10: 5, 50: 10}


class Upper(eqx.Module):
    """`|x|^2 + 0.1 x^T Q1 y + |y|^2 + 1^T x + 1^T y`."""

    Q1: Float[Array, "d n"]

    def __call__(self, x, y):
        square = jnp.sum(x**2) + jnp.sum(y**2)
        return square + 0.1 * x @ (self.Q1 @ y) + jnp.sum(x) + jnp.sum(y)


class Lower(eqx.Module):
    """`|x|^2 + x^T Q2 y + |y|^2`."""

    Q2: Float[Array, "d n"]

    def __call__(self, x, y):
        return jnp.sum(x**2) + x @ (self.Q2 @ y) + jnp.sum(y**2)


@dataclass(frozen=True)
class Member:
    """One instance: `family` is "uniform" or "tight" (rows that bind)."""

    family: str
    size: int
    seed: int

    @property
    def problem(self) -> Problem:
        """Entries uniform in [0, 1), drawn in the order Q1, Q2, A, B, b.

        The paper does not state a range. With this one no row is active at the
        minimiser, so the tight family, with `b` lowered by two, is the one to look at.
        """
        if self.family not in FAMILIES:
            raise ValueError(f"`family` is 'uniform' or 'tight'; got {self.family!r}.")
        n, k = self.size, ROWS.get(self.size, max(1, self.size // 5))
        rng = np.random.default_rng(self.seed)
        Q1, Q2 = rng.random((n, n)), rng.random((n, n))
        A, B, b = rng.random((k, n)), rng.random((k, n)), rng.random(k)
        if self.family == "tight":
            b = b - 2
        return Problem(
            Upper(jnp.asarray(Q1)), Lower(jnp.asarray(Q2)), Polyhedron(A, B, b)
        )


def family_case(name: str) -> Case:
    """A family by its name on the command line, "tight-10" for one; starts at 1."""
    family, _, size = name.partition("-")
    if family not in FAMILIES or not size.isdecimal() or int(size) < 1:
        raise ValueError(
            f"{name!r} is no family of problems: write uniform-10, tight-50 or such, "
            "with the number of variables after the dash. A file must end in .py."
        )
    return Case(
        name, lambda seed: Member(family, int(size), seed).problem, np.ones(int(size))
    )
