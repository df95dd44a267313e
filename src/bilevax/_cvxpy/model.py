"""The arrays of a model as functions of JAX."""

import math

import equinox as eqx
import jax.numpy as jnp
import numpy as np
import scipy.sparse as sp
from jaxtyping import Array, Float, Int

from .._constraints import Polyhedron
from .._programs.modules import Plain
from .canonical import Affine, Canonical

# The share of entries up to which a matrix counts as sparse.
SPARSE = 0.1


class Numbers(Plain):
    """Numbers that are affine in the leader's `p`."""

    constant: Float[Array, " k"]
    rows: Int[Array, " s"]
    columns: Int[Array, " s"]
    slopes: Float[Array, " s"]

    def __init__(self, numbers: Affine):
        slope = sp.coo_array(numbers.slope)
        self.constant, self.slopes = (
            jnp.asarray(numbers.constant),
            jnp.asarray(slope.data),
        )
        self.rows = jnp.asarray(slope.row, jnp.int32)
        self.columns = jnp.asarray(slope.col, jnp.int32)

    def __call__(self, p):
        if not self.slopes.size:
            return self.constant
        return (
            jnp.asarray(self.constant).at[self.rows].add(self.slopes * p[self.columns])
        )


class Product(Plain):
    """`M(p) v` for a matrix with entries that are affine in `p`."""

    entries: Numbers
    left: Int[Array, " s"]
    right: Int[Array, " s"]
    dense: Float[Array, "k n"] | None
    rows: int = eqx.field(static=True)

    def __init__(self, entries: Affine, left, right, shape):
        self.dense, self.rows = None, shape[0]
        if not entries.moves and len(left) > SPARSE * math.prod(shape):
            whole = sp.csr_array((entries.constant, (left, right)), shape=shape)
            self.dense = jnp.asarray(whole.toarray())
            left, right = left[:0], right[:0]
            entries = entries.rows(left)
        self.entries = Numbers(entries)
        self.left = jnp.asarray(left, jnp.int32)
        self.right = jnp.asarray(right, jnp.int32)

    def __call__(self, p, v):
        if self.dense is not None:
            return self.dense @ v
        return (
            jnp.zeros(self.rows, v.dtype)
            .at[self.left]
            .add(self.entries(p) * v[self.right])
        )


class Objective(Plain):
    """`0.5 z^T P z + q^T z + d` of the raveled `x` and `y`.

    Entries of `z` that are defined by others are behind those of `y`.
    """

    P: Product
    q: Numbers
    d: Numbers
    defined: Product
    offset: Numbers
    scale: Float[Array, " k"]
    x: tuple = eqx.field(static=True)

    def __init__(self, form: Canonical, order, x):
        n, more = form.n, form.defined
        left, right = (order[places] for places in form.P_places)
        self.P = Product(form.P, left, right, (n, n))
        self.q = Numbers(form.q.rows(np.argsort(order)))
        self.d = Numbers(form.q.rows([n]))
        shape = len(more.entries), n - len(more.entries)
        row, column = more.A_places
        self.defined = Product(more.A, row, order[column], shape)
        self.offset, self.scale = Numbers(more.b), jnp.asarray(more.scale)
        self.x = tuple((name, value.shape) for name, value in sorted(x.items()))

    def raveled(self, x):
        """The leader's parameters in the order of the slopes."""
        return jnp.concatenate([jnp.ravel(x[name]) for name, _ in self.x])

    def __call__(self, x, y):
        p = self.raveled(x)
        z = jnp.concatenate([jnp.ravel(y[name]) for name in sorted(y)])
        if self.scale.size:
            known = self.defined(p, z) + self.offset(p)
            z = jnp.concatenate([z, -known / self.scale])
        return 0.5 * z @ self.P(p, z) + self.q(p) @ z + self.d(p)[0]


class Model(Plain):
    """A whole follower as a function of its parameters, rows that turn included."""

    objective: Objective
    A: Numbers
    row: Int[Array, " s"]
    column: Int[Array, " s"]
    b: Numbers
    y0: dict
    equations: tuple = eqx.field(static=True)

    def __init__(self, form: Canonical, order, y0, leader):
        self.objective = Objective(form, order, {p.name(): p for p in leader})
        self.A, self.b = Numbers(form.A), Numbers(form.b)
        row, column = form.A_places
        self.row = jnp.asarray(row, jnp.int32)
        self.column = jnp.asarray(order[column], jnp.int32)
        self.y0 = {name: jnp.asarray(value) for name, value in y0.items()}
        self.equations = tuple(form.equations.tolist())

    def __call__(self, x):
        """The objective and the set of one member, for its parameters by name."""
        p = self.objective.raveled(x)
        size = sum(value.size for value in self.y0.values())
        # `A z + b = 0` or `>= 0`.
        A = jnp.zeros((len(self.equations), size)).at[self.row, self.column]
        A, b, equal = A.add(self.A(p)), self.b(p), np.array(self.equations, bool)
        parts = {}
        if (~equal).any():
            parts |= dict(A=-A[~equal], b=b[~equal])
        if equal.any():
            parts |= dict(A_eq=A[equal], b_eq=-b[equal])
        return lambda y: self.objective(x, y), Polyhedron(**parts), self.y0
