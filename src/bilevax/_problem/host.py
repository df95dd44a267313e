"""Followers whose data stay in the memory of the host, or on disk."""

from collections.abc import Iterator
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from .._programs.modules import Plain, with_fields
from .._status import is_traced
from .followers import Followers
from .samplers import AbstractSampler, Given
from .stochastic import StochasticProblem

# Followers by whom a run is judged where not all can be looked at.
_JUDGES = 1000


class HostFollowers:
    """Many followers of one leader, more than the device has room for.

    - `instance`, `domain`, `always_feasible`: as for `Followers`. Where the domain is
      not given it is that of the first follower.
    - `data`: a pytree of NumPy arrays or memory maps whose leading axis counts the
      followers. It stays where it is: what a step sees travels, and nothing else.

    `minibatch` is the problem for `solve`; `chosen` and `parts` are `Followers` on the
    device, of which `hypergradient` and all else can be asked.
    """

    def __init__(self, instance, data, *, domain=None, always_feasible=False):
        self.data = HostData(data)
        options: Any = dict(domain=domain, always_feasible=always_feasible)
        self._first = Followers(instance, self.data.rows(np.arange(1)), **options)

    def __len__(self) -> int:
        return self.data.count

    def chosen(self, rows) -> Followers:
        """Some of the followers, on the device."""
        rows = np.asarray(rows)
        if rows.ndim != 1 or rows.dtype.kind not in "iu" or not rows.size:
            raise ValueError(
                "`rows` must be the numbers of some followers, a vector of integers; "
                f"got an array of {rows.dtype} with shape {rows.shape}."
            )
        if rows.min() < 0 or rows.max() >= len(self):
            raise ValueError(
                f"`rows` must be at least 0 and less than {len(self)}; got "
                f"{rows.min()} to {rows.max()}."
            )
        data, members = self.data.rows(rows), jnp.asarray(rows)
        return _Minibatch(self._first.replaced(None, None))((data, members))

    def parts(self, size: int) -> Iterator[Followers]:
        """All followers, `size` of them at a time, in their order."""
        _check_size(size, len(self))
        for first in range(0, len(self), size):
            yield self.chosen(np.arange(first, min(first + size, len(self))))

    def minibatch(
        self, size: int, epochs: bool = True, *, judges: int = _JUDGES, seed: int = 0
    ) -> StochasticProblem:
        """The mean over all followers, of whom a step sees `size`.

        With `epochs=True` the steps of a run go through all followers in a new order
        each time, else they are drawn with replacement. Runs are judged by `judges` of
        them, drawn once; `seed` chooses these, and the orders.
        """
        _check_size(size, len(self))
        if not isinstance(judges, int | np.integer) or judges < 1:
            raise ValueError(
                f"`judges` must be a positive number of followers; got {judges!r}."
            )
        random = np.random.default_rng(seed)
        count = min(int(judges), len(self))
        some = np.sort(random.choice(len(self), count, replace=False))
        rows = HostRows(self.data, int(size), bool(epochs), seed)
        kind = self._first.replaced(None, None)
        population: Any = self.chosen(some)
        return StochasticProblem(rows, _Minibatch(kind), population)


class HostData:
    """A pytree of arrays on the host, of which only rows leave it.

    Compared by identity: programs never see what it holds.
    """

    def __init__(self, data):
        leaves, self.structure = jax.tree_util.tree_flatten_with_path(data)
        self.arrays = []
        for path, leaf in leaves:
            name = "data" + jax.tree_util.keystr(path)
            # Not `asarray`, which copies what is no array.
            if not isinstance(leaf, np.ndarray) or leaf.dtype.kind not in "fiub":
                raise ValueError(
                    f"`{name}` must be a NumPy array of numbers or a memory map of one "
                    f"(`np.load(path, mmap_mode='r')`); got {type(leaf).__name__}."
                )
            if not leaf.ndim or len(leaf) != len(leaves[0][1]):
                raise ValueError(
                    f"`{name}` must have the leading axis that counts the followers, "
                    f"as the first array of `data`; got shape {leaf.shape}."
                )
            self.arrays.append(leaf)
        if not self.arrays or not len(self.arrays[0]):
            raise ValueError("`data` must hold at least one follower; got none.")
        self.count = len(self.arrays[0])

    def rows(self, index: np.ndarray):
        """A copy of some rows."""
        return jax.tree.unflatten(
            self.structure, [np.asarray(array[index]) for array in self.arrays]
        )


class HostRows(AbstractSampler):
    """The rows of a step, from host memory; it computes in Python, between programs."""

    data: HostData = eqx.field(static=True)
    batch_size: int = eqx.field(static=True)
    epochs: bool = eqx.field(static=True)
    seed: int = eqx.field(static=True)

    def __call__(self, key, step=None):
        if is_traced((key, step)):
            raise ValueError(
                "Followers in host memory are drawn in Python and cannot be drawn "
                "inside `jit`, `vmap` or `grad`: use `solve`, or `Followers` with data "
                "on the device."
            )
        index = self.index(key, step)
        return self.data.rows(index), index

    def index(self, key, step) -> np.ndarray:
        """The followers of a step, in ascending order: so files are read forwards."""
        if self.epochs and step is not None:
            per_epoch = self.data.count // self.batch_size
            epoch, place = divmod(int(step), per_epoch)
            order = np.random.default_rng([self.seed, epoch]).permutation(
                self.data.count
            )
            first = place * self.batch_size
            return np.sort(order[first : first + self.batch_size])
        numbers = np.asarray(jax.random.key_data(key)).ravel().tolist()
        random = np.random.default_rng(numbers)
        return np.sort(random.integers(0, self.data.count, self.batch_size))


def is_in_host_memory(problem: Any) -> bool:
    """Whether a step of a run must be fed by Python."""
    return isinstance(getattr(problem, "sample", None), HostRows)


def sees_all(problem: Any) -> bool:
    """Whether a run on it is judged by all of its followers."""
    return len(problem.population) == problem.sample.data.count


def fed(problem: Any, key, step: int) -> StochasticProblem:
    """The problem of one step, whose batch is on its way to the device."""
    batch = jax.device_put(problem.sample(key, step))
    return with_fields(problem, sample=Given(batch))


class _Minibatch(Plain):
    """From rows of the data to their followers."""

    kind: Followers

    def __call__(self, rows) -> Followers:
        data, members = jax.tree.map(jnp.asarray, rows)
        y0 = jax.vmap(lambda d: self.kind.instance(d).y0)(data)
        return self.kind.replaced(data, y0, members=members)


def _check_size(size, count: int) -> None:
    if not isinstance(size, int | np.integer) or not 0 < size <= count:
        raise ValueError(
            "`size` must be a number of followers, at least 1 and at most "
            f"{count}; got {size!r}."
        )
