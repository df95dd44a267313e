"""What every constraint set offers, and the checks that they share."""

import abc
import math
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PyTree

from .._programs.arrays import sp, xp
from .._programs.control import packed
from .._programs.modules import Plain, with_fields
from .layout import Layout, Part
from .moving import (
    check_functions_of,
    drift,
    motion,
    motion_along,
    numbers_at,
    pull_of_rhs,
)
from .sparse import is_sparse


class AbstractConstraints(Plain):
    """A set for `y`, affine in `y`, and in `x` where no part is a function of it."""

    @property
    @abc.abstractmethod
    def num_inequalities(self) -> int:
        """Inequality rows; multipliers list them first."""

    @property
    @abc.abstractmethod
    def num_equalities(self) -> int:
        """Equality rows; multipliers list them last."""

    @abc.abstractmethod
    def start(self) -> PyTree[Array] | None:
        """A point that fixes structure, shape and dtype of `y`, or None."""

    @abc.abstractmethod
    def matrix(self, size: int, dtype) -> Float[Array, "k n"]:
        """All rows as a dense matrix, for the solvers that factor."""

    def sparse_matrix(self, size: int) -> Any:
        """All rows as a matrix of SciPy in double precision."""
        return sp.csr_array(np.asarray(self.matrix(size, float)))

    @abc.abstractmethod
    def push(self, d: Float[Array, " n"]) -> Float[Array, " k"]:
        """`A d` for a flat `d`, without forming `A` where it has structure."""

    @abc.abstractmethod
    def pull(self, mu: Float[Array, " k"]) -> Float[Array, " n"]:
        """`A^T mu`."""

    @abc.abstractmethod
    def rhs(self, x: PyTree[Array]) -> Float[Array, " k"]:
        """`b - B x`, inequality rows first."""

    @abc.abstractmethod
    def rhs_scale(self, x: PyTree[Array]) -> Float[Array, " k"]:
        """`|b| + |B| |x|`, what the rounding of `rhs` is relative to."""

    @abc.abstractmethod
    def coupling(self, x: PyTree[Array], mu: Float[Array, " k"]) -> Float[Array, ""]:
        """`<mu, B x>`; its gradient in `x` is `B^T mu`."""

    @abc.abstractmethod
    def coupling_matrix(
        self, x: PyTree[Array], dtype, y: Float[Array, " n"] | None = None
    ) -> Float[Array, "k m"] | None:
        """`B` over the raveled `x`, or None where the set does not move.

        Of rows that are functions of `x` the derivative of `A(x) y - b(x)` at `x`,
        which needs `y` where `A` is one of them.
        """

    @abc.abstractmethod
    def check_x(self, x: PyTree[Array]) -> None:
        """Raise a `ValueError` if `x` does not fit the coupling."""

    @property
    def moves(self) -> bool:
        """Whether the set moves with `x`, so that it may be empty somewhere."""
        return False

    @property
    def has_functions(self) -> bool:
        """Whether some part is a function of `x`, so that there are no numbers yet."""
        return False

    @property
    def moving(self) -> Any:
        """The set with functions of `x` that this is, or was; None where `x` enters by
        `B` alone, if at all."""
        return self if self.has_functions else getattr(self, "source", None)

    @property
    def turns(self) -> bool:
        """Whether `A` is a function of `x`."""
        return False

    def at(self, x: PyTree[Array]) -> "AbstractConstraints":
        """The set of numbers at `x`, which still knows how it moves."""
        if not self.has_functions:
            return self
        return with_fields(numbers_at(self, x), source=self)

    def evaluated(self, x: PyTree[Array]) -> Any:
        """`at`, which forgets how it moves."""
        return self

    def fitted(self, y: PyTree[Array]) -> "AbstractConstraints":
        """The same set for a `y` of this structure, where it did not know that."""
        return self

    def motion_along(self, x, direction) -> Float[Array, " k"]:
        """How `A y - b` changes as `x` moves along a direction; rows do not turn."""
        if self.moving is not None:
            return motion_along(packed((self.moving,)), x, direction)
        start = jax.tree.map(lambda leaf: 0 * leaf, direction)
        return self.rhs(start) - self.rhs(direction)

    def drift(self, x, y, mu, v, w) -> Float[Array, ""]:
        """`<w, A(x) y - b(x)> + <v, A(x)^T mu>`, up to what does not move with `x`."""
        if self.moving is None:
            return self.coupling(x, w)
        return drift(self.moving, x, y, mu, v, w)

    def row_arrays(self) -> list[Array]:
        """The arrays that the rows are made of; `b` is none of them."""
        return [leaf for leaf in jax.tree.leaves(self) if eqx.is_array(leaf)]

    @property
    def layout(self) -> Layout:
        """What the rows are called."""
        return Layout((Part(self.num_inequalities, self.num_equalities),))

    def units(self, size: int, dtype) -> Float[Array, " n"]:
        """The units in which the entries of `y` are computed."""
        return xp.ones(size, dtype)

    def entries(self, size: int) -> int:
        """How many entries of the rows are not zero."""
        return self.num_rows * size

    def with_sparse_rows(self) -> "AbstractConstraints":
        """The same set, its rows kept by their entries where it keeps a matrix."""
        return self

    def check_y(self, y: PyTree[Array]) -> None:
        """Raise a `ValueError` if `y` is not one that the set is about."""
        like = self.start()
        if like is not None:
            check_like(y, like, "y0", "constraints")

    @property
    def num_rows(self) -> int:
        return self.num_inequalities + self.num_equalities


class AbstractFixedSet(AbstractConstraints):
    """A set that does not move with `x`, and that one can project onto."""

    @abc.abstractmethod
    def project(self, y: Float[Array, " n"]) -> Float[Array, " n"]:
        """The nearest point of the set, for a flat `y`."""

    def rhs_scale(self, x):
        return xp.abs(self.rhs(x))

    def coupling(self, x, mu):
        if self.moving is None:
            return xp.zeros((), mu.dtype)
        return pull_of_rhs(self.moving, x, mu)

    def coupling_matrix(self, x, dtype, y=None):
        if self.moving is None:
            return None
        return xp.asarray(motion(packed((self.moving,)), x, None), dtype)

    def check_x(self, x):
        check_functions_of(self, x)

    def row_arrays(self):
        return []


def as_float(value, name: str, ndim: int | None = None) -> Array:
    """`value` as a floating array of `ndim` axes, or a `ValueError` that names it."""
    if ndim is None and isinstance(value, jax.Array):
        # Called for every `x`: what is one already is not asked twice.
        if jnp.issubdtype(value.dtype, jnp.floating):
            return value
    if is_sparse(value):
        raise ValueError(
            f"`{name}` is sparse ({type(value).__name__}), and a dense array is needed "
            "here: pass `.toarray()` of SciPy's or `.todense()` of JAX's. Sparse may "
            "be `A`, `B`, `A_eq` and `B_eq` of a Polyhedron for `y`."
        )
    try:
        array = jnp.asarray(value)
    except (TypeError, ValueError) as error:
        raise ValueError(f"`{name}` must be an array of numbers; {error}") from None
    if not jnp.issubdtype(array.dtype, jnp.floating):
        if jnp.issubdtype(array.dtype, jnp.complexfloating):
            raise ValueError(f"`{name}` must be real; got dtype {array.dtype}.")
        array = array.astype(jnp.result_type(float))
    if ndim is not None and array.ndim != ndim:
        kind = {1: "a vector", 2: "a matrix"}[ndim]
        raise ValueError(f"`{name}` must be {kind}; got an array of {array.shape}.")
    return array


def tree_as_float(tree, name: str):
    """`as_float` on every leaf; a list or tuple of plain numbers is one vector."""
    return jax.tree.map(lambda leaf: as_float(leaf, name), tree, is_leaf=_is_one)


def _is_one(value) -> bool:
    """Whether it is one array, though JAX would take it apart."""
    return _is_vector(value) or is_sparse(value)


def _is_vector(value) -> bool:
    """Whether `value` is a non-empty list of Python numbers, or of such lists."""
    return (
        isinstance(value, list | tuple)
        and len(value) > 0
        and all(isinstance(v, int | float) or _is_vector(v) for v in value)
    )


def check_like(tree, like, name: str, like_name: str) -> None:
    """Raise a `ValueError` if `tree` differs from `like` in structure or shapes."""
    leaves, structure = jax.tree.flatten(tree)
    wanted, expected = jax.tree.flatten(like)
    if structure != expected:
        raise ValueError(
            f"`{name}` must have the tree structure of `{like_name}`; expected "
            f"{expected}, got {structure}."
        )
    if list(map(jnp.shape, leaves)) != list(map(jnp.shape, wanted)):
        shapes = [jax.tree.map(jnp.shape, one) for one in (like, tree)]
        raise ValueError(
            f"`{name}` must have the shapes of `{like_name}`; expected "
            f"{shapes[0]}, got {shapes[1]}."
        )


def check_not_empty(tree, name: str) -> None:
    """Raise a `ValueError` if the arrays of `tree` have no entry between them."""
    if not any(math.prod(leaf.shape) for leaf in jax.tree.leaves(tree)):
        raise ValueError(
            f"`{name}` must hold at least one number; got "
            f"{jax.tree.map(jnp.shape, tree)}. None counts as no array at all."
        )
