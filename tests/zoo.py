"""Small problems with known answers, and the tolerance ladder of the suite."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

import bilevax as bx

# The ladder. A test that needs a looser rung says why.
IDENTITY = 1e-12
EXACT = 1e-9
REFERENCE = 1e-7
DIFFERENCES = 1e-6


class QuadraticLower(eqx.Module):
    """`y^T H y / 2 + y^T (C x + c)`; a Module, so that equal shapes compile once."""

    H: jax.Array
    C: jax.Array
    c: jax.Array

    def __call__(self, x, y):
        return 0.5 * y @ (self.H @ y) + y @ (self.C @ x + self.c)


class QuadraticUpper(eqx.Module):
    """`x^T x / 2 + x^T R y + |y|^2 / 2 + p^T y`."""

    R: jax.Array
    p: jax.Array

    def __call__(self, x, y):
        return 0.5 * x @ x + x @ (self.R @ y) + 0.5 * y @ y + self.p @ y


def quadratic_problem(data: dict) -> bx.Problem:
    """The bilevel problem of one dictionary from `tests.quadratics`."""
    return bx.Problem(
        QuadraticUpper(data["R"], data["p"]),
        QuadraticLower(data["H"], data["C"], data["c"]),
        bx.Polyhedron(data["A"], data["B"], data["b"]),
    )


# Formulas have names here: a problem that is made again is then the same program.


def answer(x, y):
    return jnp.sum(y)


def inner_kink(x, y):
    return jnp.sum(x**2 / 4 + x / 2 - y)


def outer_kink(x, y):
    return jnp.sum(x**2 / 4 - x / 2 + y)


def still(x, y):
    return 0.5 * jnp.sum(y**2)


class Clipped(eqx.Module):
    """The follower `y*(x) = min(x, 0)` of the kink tables, in one dimension."""

    def __call__(self, x, y):
        return 0.5 * jnp.sum((y - x) ** 2)


def clipped(copies: int = 1) -> bx.Problem:
    """`y <= 0`, written `copies` times."""
    rows = bx.Polyhedron(A=np.ones((copies, 1)), b=np.zeros(copies))
    return bx.Problem(answer, Clipped(), rows)


def t1() -> bx.Problem:
    """The analytic kink: F = x^2/4 + |x|/2, minimised at 0."""
    rows = bx.Polyhedron(A=np.ones((1, 1)), b=np.zeros(1))
    return bx.Problem(inner_kink, Clipped(), rows)


def t1b() -> bx.Problem:
    """The same F with a coupled row: y >= x."""
    rows = bx.Polyhedron(A=-np.ones((1, 1)), B=np.ones((1, 1)), b=np.zeros(1))
    return bx.Problem(outer_kink, still, rows)


class T2Upper(eqx.Module):
    Q: jax.Array

    def __call__(self, x, y):
        return x @ x + 0.1 * x @ self.Q @ y + y @ y + jnp.sum(x) + jnp.sum(y)


class T2Lower(eqx.Module):
    Q: jax.Array

    def __call__(self, x, y):
        return x @ x + x @ self.Q @ y + y @ y


def t2(n: int = 10, k: int = 5, seed: int = 0, tight: bool = True) -> bx.Problem:
    """The paper's numerical family; `tight` moves `b` so that rows are active."""
    rng = np.random.default_rng(seed)
    Q1, Q2 = rng.uniform(size=(n, n)), rng.uniform(size=(n, n))
    A, B = rng.uniform(size=(k, n)), rng.uniform(size=(k, n))
    b = rng.uniform(size=k) - (2 if tight else 0)
    return bx.Problem(
        T2Upper(jnp.asarray(Q1)), T2Lower(jnp.asarray(Q2)), bx.Polyhedron(A, B, b)
    )


def central_differences(function, x, step=1e-6):
    """The gradient of a scalar function of a vector, by central differences."""
    return np.array(
        [
            (function(x + step * d) - function(x - step * d)) / (2 * step)
            for d in np.eye(len(x))
        ]
    )
