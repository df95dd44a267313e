"""`solve`: run a method, watch it, and say how good the result is.

The loop over steps is compiled. Everything a person sees (progress, callbacks, looks at
the true `F`, early stopping, checkpoints) happens in Python between chunks of steps.
"""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, PRNGKeyArray, PyTree

from . import _checkpoint as checkpoints
from ._certificate import Certificate, certify as certify_at
from ._constraints import Box
from ._feasible import moves, onto_allowed, onto_domain
from ._history import History, blank_records, from_arrays, to_arrays
from ._implicit import Evaluation, hypergradient
from ._methods.base import AbstractMethod
from ._methods.ds_blo import DSBLO
from ._polish import Polish, polish as polish_from
from ._problem import AbstractProblem, Problem, checked_point
from ._progress import progress_bar
from ._quick import quick_jit
from ._scales import measure_scales
from ._status import BilevelError, has_value, message, status_name

DEFAULT_STEPS = 300
# Larger problems are not polished unless asked: BFGS keeps a dense matrix.
_POLISH_LIMIT = 1000


@dataclass(frozen=True)
class Stop:
    """When to end before `num_steps`; looked at between chunks.

    - `momentum`: `|m|` below this share of the first gradient. Not used where there is
      a domain, on whose boundary gradients do not vanish.
    - `move`: steps of `x` below this share of the length scale of the problem.
    - `seconds`: time spent.
    - `certificate`: `(delta_bar, eps)`: the Goldstein measure at radius `delta_bar` is
      at most `eps`.
    """

    momentum: float = 1e-9
    move: float = 1e-12
    seconds: float = float("inf")
    certificate: tuple[float, float] | None = None


@dataclass
class Solution:
    """The end of a run.

    - `x`, `y`, `value`: the point, the follower's answer and `F`, from an unperturbed,
      tightly solved lower level.
    - `status`, `message`, `success`: of that evaluation. A kink is a success, since
      minimisers of `F` sit there.
    - `history`: the run in numbers.
    - `stochastic`: `x` and `F` before the polish; `polish`: what the polish did.
    - `certificate`: how far `x` is from stationary, where asked for.
    - `stopped`: why the run ended.
    - `starts`: one solution per start, where there were several; this is the best.
    """

    x: PyTree[Array]
    y: PyTree[Array]
    value: float
    status: Any
    success: bool
    message: str
    history: History
    stopped: str
    stochastic: tuple[PyTree[Array], float]
    polish: Polish | None = None
    certificate: Certificate | None = None
    starts: list["Solution"] = field(default_factory=list)

    @property
    def status_name(self) -> str:
        return status_name(self.status)


def solve(
    problem: AbstractProblem,
    method: AbstractMethod | None = None,
    x0: PyTree | None = None,
    *,
    key: PRNGKeyArray,
    num_steps: int | None = None,
    throw: bool = True,
    starts: Sequence[PyTree] = (),
    num_starts: int = 1,
    polish: bool | None = None,
    certify: float | None = None,
    output: str = "last",
    stop: Stop | None = None,
    chunk: int = 100,
    progress: bool = False,
    callback: Callable | None = None,
    checkpoint: str | os.PathLike | None = None,
) -> Solution:
    """Minimise `F` from `x0` with `method` (by default `DSBLO()`).

    - `num_steps`: steps of the method; by default 300, with early stopping.
    - `starts`, `num_starts`: further starting points, or how many starts in all, the
      rest drawn from the domain (without one, around `x0`). The best result counts.
    - `polish`: whether a deterministic descent on `F` follows; by default for
      deterministic problems with at most 1000 entries of `x`.
    - `certify`: a radius at which to measure stationarity of the result.
    - `output`: "last", or "random" for an iterate drawn as in `Thm:Main_I`.
    - `stop`: early stopping; `chunk`: steps between two looks at the run.
    - `progress`: a bar; `callback(step, x, value, history)` after every chunk, a true
      result ends the run.
    - `checkpoint`: a file to write after every chunk. If it exists, the run continues
      from it and ends exactly as if it had never been interrupted.

    Where the lower level is empty, `x` goes to the nearest point where it is not. A
    result that is no answer raises a `BilevelError`, unless `throw=False`.
    """
    _check_arguments(problem, method, x0, num_steps, chunk, output, num_starts)
    method = DSBLO() if method is None else method
    stop = (Stop() if num_steps is None else Stop(0, 0)) if stop is None else stop
    num_steps = DEFAULT_STEPS if num_steps is None else num_steps
    look_key, start_key, key = jr.split(key, 3)
    view = _view(problem, look_key)
    points = _starting_points(view, x0, starts, num_starts, start_key)
    if polish is None:
        size = ravel_pytree(points[0])[0].size
        polish = isinstance(problem, Problem) and size <= _POLISH_LIMIT
    total = len(points) * num_steps
    solutions = []
    with progress_bar(total, enabled=progress) as advance:
        for i, point in enumerate(points):
            path = _numbered(checkpoint, i, len(points))
            run = _Run(
                problem=problem,
                view=view,
                method=method,
                key=jr.fold_in(key, i),
                num_steps=num_steps,
                stop=stop,
                chunk=min(chunk, max(num_steps, 1)),
                output=output,
                callback=callback,
                checkpoint=path,
                advance=advance,
            )
            solutions.append(_finish(run, *run.go(point), polish, certify))
    best = min(solutions, key=_rank)
    if len(solutions) > 1:
        best = replace(best, starts=solutions)
    if throw and not best.success:
        raise BilevelError(f"The solve failed. {best.message}", best.status, best)
    return best


def _rank(solution: Solution):
    value = float(solution.value)
    return (not solution.success, value if np.isfinite(value) else np.inf)


@dataclass
class _Run:
    """One start: everything that does not change while it runs."""

    problem: AbstractProblem
    view: Problem
    method: AbstractMethod
    key: PRNGKeyArray
    num_steps: int
    stop: Stop
    chunk: int
    output: str
    callback: Callable | None
    checkpoint: Any
    advance: Callable

    def go(self, x0):
        """All chunks. Returns `x`, the evaluation there, history, reason, length."""
        began = time.perf_counter()
        x0 = _like(x0, x0)
        x, e = evaluate_allowed(self.view, x0)
        if not has_value(e.status):
            return x, e, History(), "no start", 1.0
        scales = measure_scales(self.view, x, e)
        # Without weak types, or the second chunk would compile anew.
        state = _like(*[self.method.init(x, e.lower, scales)] * 2)
        kept, chosen = x, self._chosen_step()
        history, step, spent = History().evaluated(0, e.value, 0.0), 0, 0.0
        if self.checkpoint is not None and os.path.exists(self.checkpoint):
            state, kept, x, history, step, spent = self._restore(state, kept, x)
            x, e = evaluate_allowed(self.view, x)
            self.advance(step)
        reason, best = "all steps taken", (x, e)
        while step < self.num_steps:
            last = min(step + self.chunk, self.num_steps)
            state, kept, records = _advance(
                self.problem, self.method, self.chunk, state, kept, self.key,
                jnp.asarray(step), jnp.asarray(last), jnp.asarray(self.num_steps),
                jnp.asarray(chosen),
            )  # fmt: skip
            history = history.extended(records, last - step)
            self.advance(last - step)
            step = last
            x, e = evaluate_allowed(self.view, state.x)
            seconds = spent + time.perf_counter() - began
            history = history.evaluated(step, e.value, seconds)
            if has_value(e.status) and e.value <= best[1].value:
                best = (x, e)
            if self.checkpoint is not None:
                self._save(state, kept, best[0], history, step, seconds)
            early = self._reason_to_stop(x, e, history, scales, seconds)
            if self.callback is not None and self.callback(step, x, e.value, history):
                early = "the callback asked"
            if early:
                reason = early
                self.advance(self.num_steps - step)
                break
        if self.output == "random":
            x, e = evaluate_allowed(self.view, kept)
        elif step:
            x, e = evaluate_allowed(self.view, state.x)
        if not has_value(e.status):
            reason = "the last iterate has no answer, the best one seen is returned"
            x, e = best
        return x, e, history, reason, float(scales.length)

    def _chosen_step(self) -> int:
        """The step whose `x` is kept for `output="random"` (`Thm:Main_I`)."""
        drawn = jr.randint(jr.fold_in(self.key, self.num_steps), (), 0, self.num_steps)
        return max(0, int(drawn) - getattr(self.method, "window", 0))

    def _reason_to_stop(self, x, e, history, scales, seconds) -> str | None:
        momentum = history["momentum_norm"][-1]
        move = np.max(history["move"][-self.chunk :])
        if self.view.domain is None and momentum < self.stop.momentum * scales.slope:
            return "the momentum vanished"
        if move < self.stop.move * scales.length:
            return "the steps vanished"
        if seconds > self.stop.seconds:
            return "the time is spent"
        if self.stop.certificate is not None:
            radius, eps = self.stop.certificate
            found = certify_at(self.view, x, radius, key=self.key)
            if found.measure <= eps:
                return f"certified: {found.measure:.1e} at radius {radius:g}"
        return None

    def _meta(self) -> dict:
        return dict(
            jax=jax.__version__,
            method=f"{self.method!r} {checkpoints.fingerprint(self.method)}",
            problem=checkpoints.fingerprint(self.problem),
            num_steps=self.num_steps,
            chunk=self.chunk,
            key=np.asarray(jr.key_data(self.key)).tolist(),
        )

    def _save(self, state, kept, best, history, step, seconds):
        arrays = checkpoints.flatten((state, kept, best), "state_")
        arrays |= to_arrays(history)
        meta = self._meta() | {"step": step, "spent": seconds}
        checkpoints.save(self.checkpoint, arrays, meta)

    def _restore(self, state, kept, best):
        arrays, meta = checkpoints.load(self.checkpoint)
        checkpoints.check_same(self.checkpoint, meta, self._meta())
        like = (state, kept, best)
        state, kept, best = checkpoints.unflatten(arrays, "state_", like)
        return state, kept, best, from_arrays(arrays), meta["step"], meta["spent"]


@quick_jit
def _advance(problem, method, size, state, kept, key, first, last, total, chosen):
    """Steps `first` to `last`, at most `size` of them."""

    def step(state, t):
        return method.step(
            problem, state, step=t, num_steps=total, key=jr.fold_in(key, t)
        )

    dynamic, static = eqx.partition(state, eqx.is_array)
    shapes = eqx.filter_eval_shape(step, state, first)[1]

    def body(carry):
        dynamic, kept, records, t = carry
        state, record = step(eqx.combine(dynamic, static), t)
        records = jax.tree.map(
            lambda column, entry: column.at[t - first].set(entry), records, record
        )
        kept = jax.tree.map(lambda a, b: jnp.where(t == chosen, a, b), state.x, kept)
        return _like(eqx.filter(state, eqx.is_array), dynamic), kept, records, t + 1

    dynamic, kept, records, _ = jax.lax.while_loop(
        lambda c: c[3] < last, body, (dynamic, kept, blank_records(shapes, size), first)
    )
    return eqx.combine(dynamic, static), kept, records


def _like(new, old):
    """`new` with the dtypes of `old`, and no weak types."""
    return jax.tree.map(lambda a, b: jax.lax.convert_element_type(a, b.dtype), new, old)


def evaluate_allowed(problem: Problem, x) -> tuple[Any, Evaluation]:
    """`F` at `x`, or at the nearest `x` that is allowed; which one comes first."""
    x = onto_domain(problem, x)
    e = hypergradient(problem, x, throw=False)
    if status_name(e.status) == "infeasible" and moves(problem):
        x = onto_allowed(problem, x)
        e = hypergradient(problem, x, throw=False)
    return x, e


def _finish(run: _Run, x, e, history, stopped, length, polish, certify) -> Solution:
    stochastic = (x, float(e.value))
    polished = None
    if polish and has_value(e.status):
        first = 1e-3 * jnp.asarray(length, ravel_pytree(x)[0].dtype)
        polished = polish_from(run.view, x, e.lower, first)
        polished = eqx.tree_at(lambda p: p.start_value, polished, e.value)
        new_x, new = evaluate_allowed(run.view, polished.x)
        if has_value(new.status) and new.value <= e.value:
            x, e = new_x, new
    if moves(run.view) and status_name(e.status) == "dependent_rows":
        # At the edge of the set of `x` with a non-empty lower level: a hair inside, or
        # another solver would find it empty.
        inside = onto_allowed(run.view, x)
        new = hypergradient(run.view, inside, throw=False)
        if has_value(new.status):
            x, e = inside, new
    answer = has_value(e.status)
    certificate = None
    if certify is not None and answer:
        certificate = certify_at(run.view, x, certify, key=run.key)
    return Solution(
        x=x,
        y=e.lower.y,
        value=float(e.value),
        status=e.status,
        success=answer,
        message=message(e.status),
        history=history,
        stopped=stopped,
        stochastic=stochastic,
        polish=polished,
        certificate=certificate,
    )


def _view(problem: AbstractProblem, key) -> Problem:
    """The deterministic problem by which a run is judged."""
    population = getattr(problem, "population", None)
    return problem.draw(key) if population is None else population


def _starting_points(problem: Problem, x0, starts, num_starts, key):
    first = checked_point(problem, x0)
    points = [first, *(checked_point(problem, point) for point in starts)]
    flat, unravel = ravel_pytree(first)
    for i in range(num_starts - len(points)):
        points.append(unravel(_random_start(problem, flat, jr.fold_in(key, i))))
    return points


def _random_start(problem: Problem, flat, key):
    """Uniform in a bounded box; along free coordinates normal around `x0`."""
    spread = jnp.maximum(jnp.linalg.norm(flat) / np.sqrt(flat.size), 1.0)
    point = flat + spread * jr.normal(key, flat.shape, flat.dtype)
    domain = problem.domain
    if not isinstance(domain, Box):
        return point
    low, high = ravel_pytree(domain.lower)[0], ravel_pytree(domain.upper)[0]
    bounded = jnp.isfinite(low) & jnp.isfinite(high)
    share = jr.uniform(jr.fold_in(key, 0), flat.shape, flat.dtype)
    inside = jnp.where(bounded, low, 0) + share * jnp.where(bounded, high - low, 0)
    return jnp.where(bounded, inside, jnp.clip(point, low, high))


def _numbered(checkpoint, i: int, count: int):
    if checkpoint is None or count == 1:
        return checkpoint
    root, ending = os.path.splitext(os.fspath(checkpoint))
    return f"{root}-{i}{ending}"


def _check_arguments(problem, method, x0, num_steps, chunk, output, num_starts):
    if not isinstance(problem, AbstractProblem):
        raise ValueError(
            "`problem` must be a Problem or a StochasticProblem; got "
            f"{type(problem).__name__}."
        )
    if method is not None and not isinstance(method, AbstractMethod):
        got = method.__name__ if isinstance(method, type) else repr(method)
        raise ValueError(f"`method` must be a method such as DSBLO(); got {got}.")
    if x0 is None:
        raise ValueError("`x0` is needed: the point to start from.")
    for name, number in dict(
        num_steps=num_steps, chunk=chunk, num_starts=num_starts
    ).items():
        if number is not None and (number != int(number) or number < 1):
            raise ValueError(f"`{name}` must be a positive integer; got {number!r}.")
    if output not in ("last", "random"):
        raise ValueError(f"`output` must be 'last' or 'random'; got {output!r}.")
