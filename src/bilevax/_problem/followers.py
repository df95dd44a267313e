"""Many followers of one leader, independent of each other once `x` is given."""

from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PyTree

from .._arguments import check_flag
from .._constraints import Box, Polyhedron, tree_as_float
from .._programs.modules import Plain, with_fields
from .._status import is_traced
from .checks import check_like, checked_domain, scalar
from .padding import padded
from .perturbation import tree_add
from .problem import AbstractProblem, Problem
from .samplers import Epochs, WithReplacement
from .stochastic import StochasticProblem

# Entries of all answers up to which there is a way back from an empty lower level.
_WAY_BACK = 1000


class Followers(AbstractProblem):
    """`min_x F(x)` with `F` the mean over followers of `f_i(x, y_i*(x))`.

    - `instance`: `instance(d)` is the `Problem` of the follower with data `d`.
    - `data`: a pytree of arrays whose leading axis counts the followers.
    - `upper`: `(x, ys, data) -> F` of all answers at once, where followers matter to
      the leader together; without it, each one's own `upper` counts, in the mean. Where
      the instances have `prices=True` it is `(x, ys, prices, data) -> F`.
    - `domain`: the set for `x`. It is the leader's: given here, or by all instances
      alike.
    - `batch`: how many followers are solved at a time where all do not fit at once.

    Given `x`, no follower sees another. Their lower levels are solved as one batch; `y`
    is that of one follower with a leading axis, and so is a tilt.
    """

    instance: Callable
    data: PyTree[Array]
    upper: Callable | None
    y0: PyTree[Array]
    tilt: PyTree[Array] | None
    domain: Box | Polyhedron | None
    always_feasible: bool = eqx.field(static=True)
    solver: Any
    adjoint: Any
    members: Int[Array, " followers"] | None
    batch: int | None = eqx.field(static=True)

    def __init__(
        self,
        instance,
        data,
        *,
        upper=None,
        domain=None,
        always_feasible=False,
        batch=None,
    ):
        if not callable(instance):
            raise ValueError(
                "`instance` must be a function from the data of one follower to its "
                f"Problem; got {type(instance).__name__}."
            )
        if not (upper is None or callable(upper)):
            raise ValueError(
                "`upper` must be a function of `(x, ys, data)`, or None for the mean "
                f"of the followers' own; got {type(upper).__name__}."
            )
        if not (
            batch is None
            or (isinstance(batch, int | np.integer) and batch is not True and batch > 0)
        ):
            raise ValueError(
                "`batch` must be a positive number of followers, or None for all at "
                f"once; got {batch!r}."
            )
        self.instance, self.upper = instance, upper
        self.data = checked_data(data)
        one: Any = self.one
        if not isinstance(one, Problem):
            raise ValueError(
                "`instance(d)` must return a Problem, the one of a single follower; "
                f"got {type(one).__name__}."
            )
        if one.is_coupled:
            raise ValueError(
                "Followers take no `upper_constraints`: they would be one for each "
                "follower. Put a penalty into `upper(x, ys, data)`, or write all "
                "followers as one Problem."
            )
        self.y0 = jax.vmap(lambda d: self.instance(d).y0)(self.data)
        self.tilt, self.members = None, None
        self.domain = _domain_of_all(self, one, checked_domain(domain))
        check_flag(always_feasible, "always_feasible")
        self.always_feasible = bool(always_feasible) or one.always_feasible
        self.solver, self.adjoint = one.solver, one.adjoint
        self.batch = None if batch is None else int(batch)

    @classmethod
    def padded(cls, instance, data, **options) -> "Followers":
        """Followers of different sizes, from a sequence with the data of each.

        `instance(d)` is called with the data of each follower as they are, for its
        sizes and its constraints (a Box or a Polyhedron), and for its functions with
        arrays that are filled up with zeros to the largest shape. `y` is filled up as
        well: added entries are zero in every answer, bound by nothing, and `upper` and
        `lower` must not change with zeros at the end of `y` and of the data. (A mean
        over an axis does: divide a sum by a number among the data instead.)
        """
        if not isinstance(data, Sequence) or len(data) == 0:
            raise ValueError(
                "`data` must be a list with the data of each follower, at least one; "
                f"got {type(data).__name__}."
            )
        if not callable(instance):
            raise ValueError(
                "`instance` must be a function from the data of one follower to its "
                f"Problem; got {type(instance).__name__}."
            )
        return cls(*padded(instance, data), **options)

    def __len__(self) -> int:
        return jax.tree.leaves(self.data)[0].shape[0]

    def __bool__(self) -> bool:
        return True

    def __getitem__(self, i: int) -> Problem:
        """The problem of follower `i` alone, with the domain of all."""
        if not (isinstance(i, int | np.integer) and -len(self) <= i < len(self)):
            raise IndexError(f"there is no follower {i} among {len(self)}.")
        row, tilt = jax.tree.map(lambda leaf: leaf[i], (self.data, self.tilt))
        return with_fields(self.follower(row, tilt), domain=self.domain)

    @property
    def one(self) -> Problem:
        """The first follower, for what all have in common: shapes, kinds, choices."""
        return self.instance(jax.tree.map(lambda leaf: leaf[0], self.data))

    @property
    def rows_move(self) -> bool:
        """Whether there may be no answer somewhere, and a way back from there.

        The way back is one dense program over all answers, so there is none for many.
        """
        return self.one.rows_move and self.size <= _WAY_BACK

    @property
    def size(self) -> int:
        """How many numbers all answers are."""
        return sum(leaf.size for leaf in jax.tree.leaves(self.y0))

    def check_x(self, x) -> None:
        self.one.check_x(x)

    def follower(self, d, tilt) -> Problem:
        """The problem of the follower with data `d` under its part of the tilt."""
        problem = self.instance(d)
        return problem if tilt is None else problem.perturbed(tilt)

    def draw(self, key, step=None):
        return self

    def assuming_feasible(self):
        return with_fields(self, always_feasible=True)

    def localised(self, x):
        """Local models are built by the followers themselves."""
        return self

    def perturbed(self, q: PyTree[Array]) -> "Followers":
        """The same followers, each with its part of `<q, y>` added to its objective."""
        q = tree_as_float(q, "q")
        check_like(q, self.y0, "q", "y")
        q = q if self.tilt is None else tree_add(self.tilt, q)
        return with_fields(self, tilt=q)

    @property
    def prices(self) -> bool:
        """Whether the leader sees the followers' multipliers."""
        return self.one.prices

    def multipliers_of(self, lower) -> Float[Array, "followers k"] | None:
        """As of a `Problem`."""
        return lower.multipliers if self.prices else None

    def any_multipliers(self) -> Float[Array, "followers k"] | None:
        one = self.one.any_multipliers()
        return None if one is None else jnp.zeros((len(self), one.size), one.dtype)

    def own_values(
        self, x, ys, multipliers=None
    ) -> tuple[Float[Array, " followers"], Any]:
        """The followers' own `f_i(x, y_i)`, and their auxiliary outputs."""
        own = lambda d, y, mu: self.instance(d).upper_value(x, y, mu)
        return jax.vmap(own)(self.data, ys, multipliers)

    def upper_value(self, x, ys, multipliers=None) -> tuple[Float[Array, ""], Any]:
        """`F` for these answers, and auxiliary output."""
        if self.upper is None:
            values, aux = self.own_values(x, ys, multipliers)
            return jnp.mean(values), aux
        prices = self.one.prices_for_upper(ys, multipliers)
        out = self.upper(x, ys, *prices, self.data)
        value, aux = out if isinstance(out, tuple) and len(out) == 2 else (out, None)
        return scalar(value, "upper"), aux

    def lower_value(self, x, ys) -> Float[Array, ""]:
        """The sum of all lower objectives: its minimiser is that of each."""
        one = lambda d, q, y: self.follower(d, q).localised(x).lower_value(x, y)
        return jnp.sum(jax.vmap(one)(self.data, self.tilt, ys))

    def chosen(self, rows: Int[Array, " some"]) -> "Followers":
        """Some of the followers."""
        take = lambda tree: jax.tree.map(lambda leaf: leaf[rows], tree)
        return self.replaced(*map(take, (self.data, self.y0, self.tilt, self.members)))

    def replaced(self, data, y0, tilt=None, members=None) -> "Followers":
        """Other followers of the same kind; nothing is checked."""
        return with_fields(self, data=data, y0=y0, tilt=tilt, members=members)

    def minibatch(self, size: int, epochs: bool = True) -> StochasticProblem:
        """The same `F`, of which a step sees `size` followers.

        With `epochs=True` the steps of a run go through all followers in a new order
        each time (what is left of an epoch after the last whole batch is skipped), else
        they are drawn with replacement. Runs are judged by all followers.
        """
        if self.upper is not None:
            raise ValueError(
                "`minibatch` needs an F that is the mean of the followers' own "
                "`upper`: what `upper(x, ys, data)` makes of all answers cannot be "
                "told from some. Put it into the `upper` of `instance`."
            )
        whole = isinstance(size, int | np.integer) and size is not True
        if not (whole and 0 < size <= len(self)):
            raise ValueError(
                "`size` must be a number of followers, at least 1 and at most "
                f"{len(self)}; got {size!r}."
            )
        sampler = Epochs if epochs else WithReplacement
        rows = (self.data, self.y0, jnp.arange(len(self)))
        drawn = _Minibatch(self.replaced(None, None))
        # A tilt that is drawn once for a run belongs to the follower.
        all_of_them = with_fields(self, members=jnp.arange(len(self)))
        return StochasticProblem(sampler(rows, int(size)), drawn, all_of_them)


class _Minibatch(Plain):
    """From rows of the data to their followers."""

    kind: Followers

    def __call__(self, rows) -> Followers:
        data, y0, members = rows
        return self.kind.replaced(data, y0, members=members)


def checked_data(data) -> PyTree[Array]:
    """`data` as arrays with one leading axis, or a `ValueError` that names the leaf."""
    leaves, structure = jax.tree_util.tree_flatten_with_path(data)
    arrays, first = [], None
    for path, leaf in leaves:
        name = "data" + jax.tree_util.keystr(path)
        try:
            array = jnp.asarray(leaf)
        except (TypeError, ValueError) as error:
            raise ValueError(f"`{name}` must be an array of numbers; {error}") from None
        if array.ndim == 0:
            raise ValueError(
                f"`{name}` must have a leading axis that counts the followers; got a "
                "single number. What all followers share belongs into `instance`."
            )
        first = (name, len(array)) if first is None else first
        if len(array) != first[1]:
            raise ValueError(
                f"`{name}` must have the leading axis of `{first[0]}`, one entry per "
                f"follower; expected {first[1]}, got {len(array)}."
            )
        arrays.append(array)
    if first is None or first[1] == 0:
        raise ValueError("`data` must hold at least one follower; got none.")
    return jax.tree.unflatten(structure, arrays)


def _domain_of_all(problem: Followers, one: Problem, given):
    """The leader's domain, or a `ValueError` where followers tell different ones."""
    told = one.domain
    if told is None:
        return given
    if given is not None and not _same(given, told):
        raise ValueError(
            "`domain` is the leader's, and the instances give another one. Give it "
            "once: as `Followers(..., domain=)`, or by all instances alike."
        )
    if not is_traced(problem.data):
        domains = jax.vmap(lambda d: problem.instance(d).domain)(problem.data)
        for leaf in jax.tree.leaves(domains):
            differs = np.any(np.asarray(leaf != leaf[:1]).reshape(len(leaf), -1), 1)
            if differs.any():
                raise ValueError(
                    "`domain` is the leader's, but that of follower "
                    f"{int(np.argmax(differs))} is not that of follower 0. Give it "
                    "once, as `Followers(..., domain=)`, and put what each follower "
                    "needs into its own constraints."
                )
    return told


def _same(a, b) -> bool:
    if is_traced((a, b)):
        return True
    if jax.tree.structure(a) != jax.tree.structure(b):
        return False
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all(np.array_equal(u, v) for u, v in pairs)


def check_drawn(problem: Any) -> None:
    """Raise a `ValueError` unless `F` has a value that needs no sample."""
    if not isinstance(problem, Problem | Followers):
        raise ValueError(
            "`problem` must be a Problem or Followers; got "
            f"{type(problem).__name__}. Call `.draw(key)` on a StochasticProblem first."
        )
