"""Sets that hold at once, each with a name."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from .._programs.arrays import sp, xp
from .._programs.modules import with_fields
from .base import AbstractConstraints
from .columns import units_of_columns
from .layout import Layout
from .polyhedron import MOST_DENSE, Polyhedron


class Intersection(AbstractConstraints):
    """Sets over the same `y` that all hold, by name.

        bx.Intersection(
            balance=bx.Polyhedron(A_eq=incidence, b_eq=demand),
            lines=bx.Polyhedron(A=flows, b=capacity, names=line_names),
            bounds=bx.Box(0.0, largest),
        )

    Rows are the inequality rows of all sets in their order, then the equality rows of
    all. Multipliers, slacks and active rows come back by these names: `lower.prices`,
    `lower.named("slack")`.

    What a name gives: of a Polyhedron one entry per row, and where it has both kinds
    `{"A": ..., "A_eq": ...}`; of a Box `{"lower": ..., "upper": ...}`, each like `y`;
    of a Simplex `{"lower": ..., "sums": ...}`.
    """

    sets: tuple[AbstractConstraints, ...]
    names: tuple[str, ...] = eqx.field(static=True)
    columns: Float[Array, " n"] | None

    def __init__(self, **sets: AbstractConstraints):
        if not sets:
            raise ValueError(
                "`Intersection` needs at least one set, as in "
                "`Intersection(bounds=Box(lower, upper))`; got none."
            )
        for name, one in sets.items():
            if isinstance(one, AbstractConstraints) and not isinstance(
                one, Intersection
            ):
                continue
            raise ValueError(
                f"`{name}` must be a Polyhedron, a Box or a Simplex; got "
                f"{type(one).__name__}. Write all sets of an intersection side by side."
            )
        self.sets, self.names = tuple(sets.values()), tuple(sets)
        self.columns = None
        self.start()
        self.columns = _units(self.sets)

    def __getitem__(self, name: str) -> AbstractConstraints:
        """The set of that name."""
        return self.sets[self.names.index(name)]

    @property
    def num_inequalities(self):
        return sum(one.num_inequalities for one in self.sets)

    @property
    def num_equalities(self):
        return sum(one.num_equalities for one in self.sets)

    @property
    def moves(self):
        return any(one.moves for one in self.sets)

    @property
    def has_functions(self):
        return any(one.has_functions for one in self.sets)

    @property
    def moving(self):
        return self if any(one.moving is not None for one in self.sets) else None

    @property
    def turns(self):
        return any(one.turns for one in self.sets)

    def at(self, x):
        if not self.has_functions:
            return self
        return self._with(tuple(one.at(x) for one in self.sets))

    def evaluated(self, x):
        return self._with(tuple(one.evaluated(x) for one in self.sets))

    def fitted(self, y):
        return self._with(tuple(one.fitted(y) for one in self.sets))

    def _with(self, sets) -> "Intersection":
        units = _units(sets) if self.columns is None or self.turns else self.columns
        return with_fields(self, sets=sets, columns=units)

    def row_arrays(self):
        return [leaf for one in self.sets for leaf in one.row_arrays()]

    @property
    def layout(self):
        pairs = zip(self.names, self.sets, strict=True)
        return Layout.joined({name: one.layout for name, one in pairs})

    def start(self):
        """Of the set that says most: a Box or a Simplex knows the structure of `y`."""
        starts = {
            name: one.start() for name, one in zip(self.names, self.sets, strict=True)
        }
        known = {name: like for name, like in starts.items() if like is not None}
        if not known:
            return None
        tells = [n for n in known if not isinstance(self[n], Polyhedron)]
        first = (tells or list(known))[0]
        like = known[first]
        if not tells and isinstance(like, dict):
            # Columns by name: each tells of some entries.
            for other in known.values():
                like = {**other, **like} if isinstance(other, dict) else like
        for name in known:
            try:
                self[name].check_y(like)
            except ValueError as error:
                raise ValueError(
                    f"`{name}` and `{first}` must be sets over the same `y`: {error}"
                ) from None
        dtype = jnp.result_type(*jax.tree.leaves(known))
        return jax.tree.map(lambda leaf: xp.asarray(leaf, dtype), like)

    def check_y(self, y):
        for name, one in zip(self.names, self.sets, strict=True):
            try:
                one.check_y(y)
            except ValueError as error:
                raise ValueError(f"`{name}` does not fit `y0`: {error}") from None

    def matrix(self, size, dtype):
        return self._stacked(
            [one.matrix(size, dtype) for one in self.sets], xp.concatenate
        )

    def sparse_matrix(self, size):
        join = lambda parts: sp.vstack(parts, format="csr")
        parts = [one.sparse_matrix(size).tocsr() for one in self.sets]
        return self._stacked(parts, join)

    def entries(self, size):
        return sum(one.entries(size) for one in self.sets)

    def with_sparse_rows(self):
        return with_fields(
            self, sets=tuple(one.with_sparse_rows() for one in self.sets)
        )

    def units(self, size, dtype):
        if self.columns is None:
            return xp.ones(size, dtype)
        return xp.asarray(self.columns, dtype)

    def push(self, d):
        return self._stacked([one.push(d) for one in self.sets], xp.concatenate)

    def pull(self, mu):
        pulls = [one.pull(part) for one, part in self._apart(mu) if part.size]
        return sum(pulls) if pulls else xp.zeros((), mu.dtype)

    def rhs(self, x):
        return self._stacked([one.rhs(x) for one in self.sets], xp.concatenate)

    def rhs_scale(self, x):
        return self._stacked([one.rhs_scale(x) for one in self.sets], xp.concatenate)

    def coupling(self, x, mu):
        return sum(one.coupling(x, part) for one, part in self._apart(mu))

    def drift(self, x, y, mu, v, w):
        pairs = zip(self._apart(mu), self._apart(w), strict=True)
        return sum(one.drift(x, y, mu, v, w) for (one, mu), (_, w) in pairs)

    def motion_along(self, x, direction):
        parts = [one.motion_along(x, direction) for one in self.sets]
        return self._stacked(parts, xp.concatenate)

    def coupling_matrix(self, x, dtype, y=None):
        parts = [one.coupling_matrix(x, dtype, y) for one in self.sets]
        if all(part is None for part in parts):
            return None
        size = next(part.shape[1] for part in parts if part is not None)
        parts = [
            xp.zeros((one.num_rows, size), dtype) if part is None else part
            for one, part in zip(self.sets, parts, strict=True)
        ]
        return self._stacked(parts, xp.concatenate)

    def check_x(self, x):
        for name, one in zip(self.names, self.sets, strict=True):
            try:
                one.check_x(x)
            except ValueError as error:
                raise ValueError(f"`{name}` does not fit `x`: {error}") from None

    def _stacked(self, parts: list[Any], join) -> Any:
        """Inequality rows of all, then equality rows of all."""
        counts = [one.num_inequalities for one in self.sets]
        less = [part[:k] for part, k in zip(parts, counts, strict=True)]
        return join(less + [part[k:] for part, k in zip(parts, counts, strict=True)])

    def _apart(self, mu):
        """Each set with its own rows of `mu`."""
        less, equal, found = 0, self.num_inequalities, []
        for one in self.sets:
            ends = less + one.num_inequalities, equal + one.num_equalities
            part = xp.concatenate([mu[less : ends[0]], mu[equal : ends[1]]])
            found.append((one, part))
            less, equal = ends
        return found


def _units(sets) -> Float[Array, " n"] | None:
    """Units of the columns that all polyhedra together call for; bounds have no say."""
    parts = [one for one in sets if isinstance(one, Polyhedron)]
    parts = [one for one in parts if one.columns is not None]
    if len(parts) < 2:
        return parts[0].columns if parts else None
    size = parts[0].columns.size  # pyright: ignore[reportOptionalMemberAccess]
    dtype = jnp.result_type(*(one.columns.dtype for one in parts))  # pyright: ignore
    if sum(one.num_rows for one in parts) * size > MOST_DENSE:
        return jnp.ones(size, dtype)
    return units_of_columns(jnp.concatenate([one.matrix(size, dtype) for one in parts]))
