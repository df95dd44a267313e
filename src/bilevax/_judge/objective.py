"""`F` and its gradient as SciPy's optimisers call them: flat vectors of NumPy."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from jaxtyping import PyTree

from .._constraints import Box
from .._implicit.hypergradient import hypergradient
from .._problem.checks import checked_point
from .._problem.followers import Followers, check_drawn
from .._problem.problem import Problem
from .._status import BilevelError, has_value, status_name


class ScipyObjective:
    """`fun, jac = objective`, and what else an optimiser of SciPy wants to know.

    - `fun(v)`, `jac(v)`: `F` and its gradient at a flat vector of float64. One
      evaluation serves both, and the last one is kept.
    - `x0`: the start as a flat vector; `bounds`: pairs for `minimize`, None where there
      is no box; `point(v)`: a vector as the tree that `x` is.
    - `evaluations`: how many there were; `failures`: points at which `F` has no value,
      with the status. There `fun` is infinite and `jac` zero, from which line searches
      step back; with `throw=True` a `BilevelError` is raised instead.
    """

    fun: Callable[[Any], float]
    jac: Callable[[Any], np.ndarray]

    def __init__(self, problem: Problem | Followers, x0: PyTree, throw: bool):
        flat, self.point = ravel_pytree(x0)
        self.problem, self.throw = problem, throw
        self.x0 = np.asarray(flat, np.float64)
        self.dtype = flat.dtype
        self.bounds = _bounds(problem.domain)
        self.evaluations = 0
        self.failures: list[tuple[np.ndarray, str]] = []
        self._last: tuple[bytes, float, np.ndarray] | None = None
        self._warm: Any = None
        self.fun = lambda v: self._at(v)[1]
        self.jac = lambda v: self._at(v)[2].copy()

    def __iter__(self) -> Iterator[Callable]:
        return iter((self.fun, self.jac))

    def _at(self, v) -> tuple[bytes, float, np.ndarray]:
        v = np.array(v, np.float64)
        if v.shape != self.x0.shape:
            raise ValueError(
                f"the objective takes vectors of {self.x0.size} numbers, one for each "
                f"in x; got shape {v.shape}."
            )
        name = v.tobytes()
        if self._last is None or self._last[0] != name:
            self._last = (name, *self._evaluated(v))
        return self._last

    def _evaluated(self, v: np.ndarray) -> tuple[float, np.ndarray]:
        x = self.point(jnp.asarray(v, self.dtype))
        e = hypergradient(self.problem, x, warm=self._warm, throw=False)
        self.evaluations += 1
        status = status_name(e.status)
        if not has_value(e.status) or not np.isfinite(e.value):
            if self.throw:
                raise BilevelError(f"F has no value. {e.message}", e.status, e)
            self.failures.append((v, status))
            return np.inf, np.zeros_like(v)
        # A follower of the next point starts from the answer to this one.
        self._warm = e.lower
        return float(e.value), np.asarray(ravel_pytree(e.grad)[0], np.float64)


def scipy_objective(
    problem: Problem | Followers, x0: PyTree | None = None, *, throw: bool = False
) -> ScipyObjective:
    """`fun, jac = bx.scipy_objective(problem, x0)` for `scipy.optimize.minimize`.

    `x0` tells what `x` looks like; it may be left out where `domain` is a `Box`. Rows
    of a polyhedral domain are not passed on: give them to SciPy yourself. Most of its
    methods take `F` to be smooth and stop at the first kink; `bx.solve` goes on.
    """
    check_drawn(problem)
    if x0 is None:
        if not isinstance(problem.domain, Box):
            raise ValueError(
                "`x0` is needed: without a Box as `domain` nothing says what `x` looks "
                "like."
            )
        inside = lambda a, b: jnp.clip(jnp.zeros_like(a), a, b)
        x0 = jax.tree.map(inside, problem.domain.lower, problem.domain.upper)
    return ScipyObjective(problem, checked_point(problem, x0), throw)


def _bounds(domain) -> list[tuple[float | None, float | None]] | None:
    if not isinstance(domain, Box):
        return None
    low, high = (np.asarray(ravel_pytree(b)[0]) for b in (domain.lower, domain.upper))
    finite = lambda bound: float(bound) if np.isfinite(bound) else None
    return [(finite(a), finite(b)) for a, b in zip(low, high, strict=True)]
