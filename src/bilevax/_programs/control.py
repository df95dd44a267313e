"""Stages, and branches and loops that know whether they are part of a program.

A stage is a function from arrays to arrays that knows functions of the problem. It is
compiled on its own when a call runs stage by stage, and a part of the program when it
does not. Stage by stage, all else is NumPy (see `arrays.py`), and branches and loops
are Python's own `if` and `while`: what is not needed is not even compiled. In a program
they are loops of XLA with three rules, which keep a batch from waiting for members that
asked for nothing:

- whether to go on is decided once, in the body, and carried. A condition that is
  computed again for the batch may round differently there than in the body, and a
  member that both would like to leave to the other is then waited for for ever;
- a loop inside a branch or a loop runs for members that are inside, and no others;
- every loop has a limit.

Between the two stands the usual path: a program without the branches that are `rarely`
needed, and with the answer whether one of them was. A call that runs stage by stage
takes it where many evaluations follow, and goes stage by stage where that was so.

Which of these ways a call goes is decided at its entry by the call alone, never by what
a process did before: the ways agree to rounding, and one call has one answer.
"""

import contextlib
import contextvars
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Bool

# Whether the members of a batch are inside the branch or loop that is being traced.
_inside = contextvars.ContextVar("inside", default=None)
# What is known of the call that runs stage by stage, a `_Call`; None elsewhere.
_stages = contextvars.ContextVar("stages", default=None)
# While the usual path is traced: the predicates of branches that were left out.
_left_out = contextvars.ContextVar("left_out", default=None)


@contextlib.contextmanager
def _set(variable, value):
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def stage_by_stage(often: bool = False):
    """A context in which predicates are decided in Python, and `xp` is NumPy.

    `often`: whether so many evaluations follow that compiling their usual path pays.
    """
    stack = contextlib.ExitStack()
    stack.enter_context(_set(_stages, _Call({}, UsualPath() if often else None)))
    # As in a program, a NaN is a value.
    stack.enter_context(np.errstate(all="ignore"))
    return stack


class UsualPath:
    """How often a call took the usual path, and how often something was missing."""

    def __init__(self):
        self.taken, self.missed = 0, 0

    def pays(self) -> bool:
        return self.missed < _MISSES or 2 * self.missed < self.taken

    def met(self, missed: bool) -> None:
        self.taken += 1
        self.missed += missed


# Misses in a row before the usual path counts as none.
_MISSES = 8


class _Call(NamedTuple):
    """What a call has computed once, and its usual path where that is taken."""

    memory: dict
    path: UsualPath | None


def usual_path_in_use() -> UsualPath | None:
    """What is known of the usual path where many evaluations follow; else None."""
    call = _stages.get()
    return None if call is None else call.path


def in_stages() -> bool:
    """Whether the call that is under way runs stage by stage."""
    return _stages.get() is not None


def once(function: Callable, *things) -> Any:
    """`function(*things)`, computed once in a call that runs stage by stage."""
    call = _stages.get()
    if call is None:
        return function(*things)
    memory = call.memory
    key = (function, *(t if isinstance(t, _KNOWN_BY_VALUE) else id(t) for t in things))
    if key not in memory:
        if len(memory) >= _MOST:
            memory.clear()
        # With the things, which keep their identity as long as they live.
        memory[key] = (things, function(*things))
    return memory[key][1]


_KNOWN_BY_VALUE = (int, np.dtype, type(None))
_MOST = 64


def stage(function: Callable, optimise: bool = True) -> Callable:
    """`function` as a stage; its arguments and results are pytrees of arrays."""

    @functools.wraps(function)
    def part(*arguments):
        with alone():
            return function(*map(opened, arguments))

    @functools.cache
    def compiled():
        return jax.jit(part, compiler_options=compiler_options(optimise))

    @functools.wraps(function)
    def call(*arguments):
        if in_stages():
            return on_host(compiled()(*arguments))
        return function(*map(opened, arguments))

    return call


def brief_stage(function: Callable) -> Callable:
    """A `stage` that computes next to nothing, such as random numbers."""
    return stage(function, optimise=False)


def usual_path(function: Callable) -> Callable[..., tuple[Any, Any]]:
    """`function` without its rare branches, and whether one of them was needed.

    A program of its own like a `stage`, but with JAX's arrays as results. Where much is
    computed (`large`) it is optimised, which takes longer to compile.
    """
    part = without_rare_branches(lambda *packed: function(*map(opened, packed)))

    @functools.cache
    def compiled(large: bool):
        return jax.jit(part, compiler_options=compiler_options(optimise=large))

    return lambda *arguments, large: compiled(large)(*arguments)


def without_rare_branches(function: Callable) -> Callable[..., tuple[Any, Any]]:
    """`function` on its usual path, and whether something was missing; for `vmap` too,
    where that is told of each member."""

    def part(*arguments):
        left_out: list = []
        with alone(), _set(_left_out, left_out):
            return function(*arguments), _any(left_out)

    return part


def usual_steps(evaluate: Callable, step: Callable) -> Callable[..., tuple[Any, Any]]:
    """Many steps as one program, up to the first that needs a rare branch.

    `evaluate(constants, state)` is that part of a step that may need one, and
    `step(constants, state, found)` gives the next state and whether to go on. The
    program gives the state before the step that it could not take, and whether there is
    such a step.
    """

    def part(constants, state):
        constants, form = opened(constants), state.form

        def trip(carry):
            with _set(_left_out, []):
                found = evaluate(constants, form.opened(carry[2]))
                stuck = _any(_left_out.get())

            def taken(arrays):
                new, go = step(constants, form.opened(arrays), found)
                return go, like(new, arrays)

            go, after = choose(stuck, lambda arrays: (~stuck, arrays), taken, carry[2])
            return go & ~stuck, stuck, after

        with alone():
            no, start = jnp.asarray(False), list(map(jnp.asarray, state.arrays))
            carry = jax.lax.while_loop(lambda c: c[0], trip, (~no, no, start))
        return Packed.of(form, carry[2]), carry[1]

    def like(new, arrays):
        pairs = zip(Packed(new).arrays, arrays, strict=True)
        return [cast(leaf, old) for leaf, old in pairs]

    @functools.cache
    def compiled():
        return jax.jit(part, compiler_options=compiler_options(optimise=False))

    return lambda constants, state: compiled()(Packed(constants), Packed(state))


def cast(leaf, like):
    """`leaf` in the dtype of `like`."""
    if jnp.issubdtype(like.dtype, jax.dtypes.prng_key):
        return leaf
    return jax.lax.convert_element_type(leaf, like.dtype)


def choose(predicate, function, other, operand):
    """`function(operand)` or `other(operand)` in a program that is never mapped.

    Nothing else is computed then, and nothing selected entry by entry.
    """
    return jax.lax.cond(predicate, function, other, operand)


def on_usual_path() -> bool:
    """Whether the program that is being traced leaves rare branches out."""
    return _left_out.get() is not None


def _any(predicates) -> Any:
    return functools.reduce(jnp.logical_or, predicates, jnp.asarray(False))


def on_host(tree):
    """`tree` with NumPy's arrays instead of JAX's; keys stay what they are."""
    return jax.tree.map(_on_host, tree)


def _on_host(leaf):
    if isinstance(leaf, jax.Array) and isinstance(leaf.dtype, np.dtype):
        return np.asarray(leaf)
    return leaf


def on_device(tree):
    """`tree` with JAX's arrays instead of NumPy's."""
    leaves, structure = jax.tree.flatten(tree)
    where = [i for i, x in enumerate(leaves) if isinstance(x, np.ndarray | np.generic)]
    if not where:
        return tree
    # All at once, and without a program for each shape.
    moved = jax.device_put([leaves[i] for i in where])
    for i, leaf in zip(where, moved, strict=True):
        leaves[i] = leaf
    return structure.unflatten(leaves)


class Packed:
    """A pytree that holds functions, flattened once, to be handed to many stages."""

    def __init__(self, tree: Any):
        leaves, structure = jax.tree.flatten(tree)
        which = tuple(map(eqx.is_array, leaves))
        self.arrays = tuple(leaf for leaf, it in zip(leaves, which, strict=True) if it)
        others = (leaf for leaf, it in zip(leaves, which, strict=True) if not it)
        self.form = _form(structure, which, tuple(others))

    @classmethod
    def of(cls, form: "_Form", arrays) -> "Packed":
        """With the arrays of another one of the same form."""
        packed = object.__new__(cls)
        packed.form, packed.arrays = form, tuple(arrays)
        return packed

    def open(self) -> Any:
        return self.form.opened(self.arrays)


class _Form:
    """What is not an array in a `Packed`; one object for all that are equal."""

    def __init__(self, structure, which, others):
        self.structure, self.which, self.others = structure, which, others
        # What is known of the functions: shapes with which they were checked, and where
        # a sparse Hessian has entries.
        self.met: dict = {}

    def opened(self, arrays) -> Any:
        arrays, others = iter(arrays), iter(self.others)
        leaves = [next(arrays if it else others) for it in self.which]
        return self.structure.unflatten(leaves)


@functools.lru_cache(maxsize=4096)
def _form(structure, which, others) -> _Form:
    return _Form(structure, which, others)


jax.tree_util.register_pytree_node(
    Packed, lambda packed: (packed.arrays, packed.form), Packed.of
)


def packed(tree: Any) -> Any:
    """`tree` ready for stages; in a program as it is."""
    if isinstance(tree, Packed) or not in_stages():
        return tree
    return Packed(tree)


def opened(tree: Any) -> Any:
    return tree.open() if isinstance(tree, Packed) else tree


# XLA's older emitters make a program of hundreds of small kernels in half of the time,
# and the programs run as fast.
_OPTIONS = {"xla_cpu_use_fusion_emitters": False}
# Half of the time again, for programs that run up to one and a half times as long; they
# are too small to be cut into parts that are compiled at the same time.
_NOT_OPTIMISED = {
    "xla_backend_optimization_level": 0,
    "xla_cpu_parallel_codegen_split_count": 1,
}


@functools.cache
def compiler_options(optimise: bool = True) -> dict | None:
    """The options, where this version of XLA knows them."""
    options = _OPTIONS if optimise else _OPTIONS | _NOT_OPTIMISED
    try:
        jax.jit(lambda x: x, compiler_options=options)(0.0)
    except Exception:  # of a kind that depends on the version
        return None
    return options


@contextlib.contextmanager
def alone():
    """A context for functions whose trace is kept and used again elsewhere."""
    with _set(_stages, None), _set(_inside, None), _set(_left_out, None):
        yield


def run_if(predicate: Bool[Array, ""], function, operand: Any) -> Any:
    """`function(operand)` where `predicate` holds, else `operand`.

    In a program a loop of at most one trip: under vmap its body runs only if some
    member needs it, whereas `lax.cond` would make every member pay.
    """
    if _decided(predicate):
        return function(operand) if predicate else operand

    def inside(wanted, operand):
        with _set(_inside, wanted), _collecting() as left_out:
            return function(operand), left_out()

    wanted = _wanted(predicate)
    if on_usual_path():
        # Never mapped, and cheaper to compile than a loop.
        operand, left_out = choose(
            wanted,
            lambda operand: inside(wanted, operand),
            lambda operand: (operand, _nothing_left_out()),
            operand,
        )
        leave_out(left_out)
        return operand
    # What `function` closes over does not change in the loop, so XLA would move all the
    # work on it out of the loop again; the barrier ties it to the predicate.
    closed = eqx.filter_closure_convert(inside, wanted, operand)
    arrays, rest = eqx.partition(closed, eqx.is_array)

    def body(carry):
        wanted, arrays_now, (operand, _) = jax.lax.optimization_barrier(
            (carry[0], arrays, carry[1])
        )
        return jnp.asarray(False), eqx.combine(arrays_now, rest)(wanted, operand)

    start = (wanted, (operand, _nothing_left_out()))
    operand, left_out = jax.lax.while_loop(lambda c: c[0], body, start)[1]
    leave_out(left_out)
    return operand


def rarely(predicate: Bool[Array, ""], function, operand: Any) -> Any:
    """`run_if` for what is rarely needed: no part of the usual path."""
    if _left_out.get() is None:
        return run_if(predicate, function, operand)
    leave_out(predicate)
    return operand


def unless_rarely(predicate: Bool[Array, ""], function, operand):
    """`run_unless` for what is rarely needed: no part of the usual path."""
    if _left_out.get() is None:
        return run_unless(predicate, function, operand)
    leave_out(~predicate)
    return operand


def leave_out(predicate) -> None:
    """Note a branch that is no part of the usual path, or several."""
    left_out = _left_out.get()
    if left_out is not None and predicate is not None:
        left_out.append(predicate)


def _nothing_left_out():
    return None if _left_out.get() is None else jnp.asarray(False)


@contextlib.contextmanager
def _collecting():
    """Within a loop: what is left out there leaves the loop as a part of its state."""
    if _left_out.get() is None:
        yield lambda: None
        return
    with _set(_left_out, []):
        yield lambda: _any(_left_out.get())


def run_unless(predicate: Bool[Array, ""], function, operand):
    """`function(operand)` where `predicate` does not hold, else `operand`."""
    if _decided(predicate):
        return operand if predicate else function(operand)
    return run_if(~predicate, function, operand)


def choose_rarely(predicate: Bool[Array, ""], function, other, operand):
    """`function(operand)` where `predicate` holds, which is rare; else `other`."""
    if _decided(predicate):
        return function(operand) if predicate else other(operand)
    return run_if(~predicate, other, rarely(predicate, function, operand))


def loop(condition, body, state: Any, limit: Any) -> Any:
    """`state = body(state)` while `condition(state)`, at most `limit` times."""
    go = condition(state)
    if _decided(go):
        for _ in range(limit):
            if not go:
                break
            state = body(state)
            go = condition(state)
        return state

    def trip(carry):
        go, count, _, state = carry
        with _set(_inside, go), _collecting() as left_out:
            state = body(state)
            go, left_out = condition(state) & (count + 1 < limit), left_out()
        # The rest would be for nothing.
        go = go if left_out is None else go & ~left_out
        return go, count + 1, left_out, state

    go = _wanted(go) & (limit > 0)
    carry = (go, jnp.asarray(0), _nothing_left_out(), state)
    *_, left_out, state = jax.lax.while_loop(lambda c: c[0], trip, carry)
    leave_out(left_out)
    return state


def _decided(predicate) -> bool:
    return in_stages() and not isinstance(predicate, Tracer)


def _wanted(predicate):
    wanted = jnp.asarray(predicate)
    around = _inside.get()
    return wanted if around is None else wanted & around
