"""What is to be done: the runs of a problem before any of them begins."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax.random as jr
import numpy as np
from jax.flatten_util import ravel_pytree
from jaxtyping import PRNGKeyArray, PyTree

from .._arguments import check_count, check_flag, check_number, check_path
from .._constraints import Polyhedron, check_polyhedron
from .._files.checkpoint import check_writable
from .._lower.choose import is_on_host, with_sparse_rows
from .._methods.base import AbstractMethod, refused
from .._methods.ds_blo import DSBLO
from .._problem.chart import Chart, chart_of
from .._problem.checks import checked_point
from .._problem.followers import Followers
from .._problem.host import is_in_host_memory, sees_all
from .._problem.problem import AbstractProblem, Problem
from .._problem.stochastic import representative
from .._programs.quick import once_jit
from .average import Average
from .coupled import answer_from, check_coupled
from .requests import Asking
from .run import Run, Stop
from .solution import Solution
from .starts import enough, first_start, starting_points, usual_count

DEFAULT_STEPS = 300
# Larger problems are not polished unless asked: BFGS keeps a dense matrix (32 MB here).
_POLISH_LIMIT = 2000
# Nor are minibatches, unless of followers of whom all together can be looked at.
_POLISHED_FOLLOWERS = 5000


class Task(NamedTuple):
    """What is solved."""

    problem: AbstractProblem
    x0: PyTree
    key: PRNGKeyArray


class Begun(NamedTuple):
    """The runs of a task, one per start, and the problem by which they are judged.

    `until`: whether ends that came before a run make it superfluous.
    """

    view: Problem
    runs: list[Run]
    certify: float | None
    look_key: PRNGKeyArray
    until: Callable[[list[Solution]], bool]

    @property
    def asking(self) -> list[Asking[Solution]]:
        """The runs as they ask for what they want computed."""
        return [answer_from(run, run.x0, self.certify) for run in self.runs]

    def needed(self, ends: list[Solution]) -> list[Solution]:
        """Those ends before which there were not enough."""
        return [end for i, end in enumerate(ends) if not self.until(ends[:i])]


@dataclass
class Plan:
    """How tasks are solved; see `solve`."""

    method: AbstractMethod
    num_steps: int
    stop: Stop
    starts: Sequence[PyTree] = ()
    num_starts: int | None = 1
    polish: bool | None = None
    certify: float | None = None
    output: str = "last"
    average: Average | None = None
    looks: bool = True
    chunk: int | None = None
    callback: Callable | None = None
    checkpoint: str | os.PathLike | None = None
    together: bool = False

    @property
    def total(self) -> int:
        """Steps of all starts of a task, as far as they are known before it begins."""
        return max(1 + len(self.starts), self.num_starts or 1) * self.num_steps

    def _count(self, problem: AbstractProblem, view: Problem, x) -> int:
        """How many starts; one where it is a single run that is asked for."""
        single = (
            self.starts
            or self.polish is False
            or self.output != "last"
            or not self.looks
            or self.callback is not None
            or self.checkpoint is not None
        )
        return 1 if single else usual_count(problem, view, x)

    def begun(self, task: Task, tick: Callable) -> Begun:
        """The runs of a task, none of which has computed anything yet."""
        problem, x0, key = task
        _check_problem(problem)
        refusal = refused(self.method, problem)
        if refusal is not None:
            raise ValueError(refusal)
        look_key, start_key, key, first_key = _keys(key)
        if is_on_host(problem):
            problem = with_sparse_rows(problem)
        view = representative(problem, look_key)
        if isinstance(view.domain, Polyhedron):
            check_polyhedron(view.domain)
        chart = self._chart(problem)
        starts = self.starts
        if chart is not None:
            x0 = None if x0 is None else chart.u(checked_point(view, x0))
            starts = [chart.u(checked_point(view, start)) for start in starts]
            problem = view = chart.applied(view)
        first = first_start(view, x0)
        count, until = self.num_starts, lambda ends: False
        if count is None:
            count, until = self._count(problem, view, first), enough
        points = starting_points(view, first, starts, count, start_key)
        check_coupled(view, points[0], self.looks, self.output)
        polish, chunk = self.polish, self.chunk
        if polish is None:
            size = ravel_pytree(points[0])[0].size
            small = size <= _POLISH_LIMIT
            whole = isinstance(view, Followers) and len(view) <= _POLISHED_FOLLOWERS
            if is_in_host_memory(problem):
                # Some followers are no reason to leave what all have led to.
                whole = whole and sees_all(problem)
            known = whole if problem.is_sampled else True
            polish = self.looks and known and small
        if chunk is None:
            chunk = _default_chunk(self.num_steps)
        runs = []
        for i, point in enumerate(points):
            path = _numbered(self.checkpoint, i, len(points))
            if path is not None and not os.path.isfile(path):
                check_writable(path)
            run = Run(
                problem=problem,
                view=view,
                method=self.method,
                x0=point,
                key=jr.fold_in(key, i) if i else first_key,
                num_steps=self.num_steps,
                stop=self.stop,
                chunk=min(chunk, self.num_steps),
                output=self.output,
                polish=polish,
                average=self.average,
                looks=self.looks,
                callback=self.callback,
                checkpoint=path,
                tick=tick,
                together=self.together,
                chart=chart,
                all_steps=self.num_steps * len(points),
            )
            runs.append(run)
        return Begun(view, runs, self.certify, look_key, until)

    def _chart(self, problem: AbstractProblem) -> Chart | None:
        """Units for the run, where its coordinates need them and nobody looks on.

        Without a polish it is the method alone that is asked for, as it is.
        """
        watched = (
            self.polish is False
            or self.callback is not None
            or self.certify is not None
            or self.stop.certificate is not None
            or self.average is not None
            or self.output != "last"
            or not self.looks
        )
        return None if watched else chart_of(problem)


@once_jit
def _keys(key):
    """Of the look, of the starts, of all runs, and of the first one."""
    look, starts, runs = jr.split(key, 3)
    return look, starts, runs, jr.fold_in(runs, 0)


def _default_chunk(num_steps: int) -> int:
    """Looks cost some steps each: a long chunk of a long run hides them."""
    return min(max(100, -(-num_steps // 10)), 1000)


def _numbered(checkpoint, i: int, count: int):
    if checkpoint is None or count == 1:
        return checkpoint
    root, ending = os.path.splitext(os.fspath(checkpoint))
    return f"{root}-{i}{ending}"


def _check_problem(problem) -> None:
    """Raise a `ValueError` unless a run can begin."""
    if not isinstance(problem, AbstractProblem):
        raise ValueError(
            "`problem` must be a Problem, Followers or a StochasticProblem; got "
            f"{type(problem).__name__}."
        )


def _checked_method(method) -> AbstractMethod:
    if method is None:
        return DSBLO()
    if not isinstance(method, AbstractMethod):
        got = method.__name__ if isinstance(method, type) else repr(method)
        raise ValueError(f"`method` must be a method such as DSBLO(); got {got}.")
    return method


def planned(
    *,
    method,
    num_steps=None,
    stop=None,
    average=None,
    certify=None,
    looks=True,
    **options,
) -> Plan:
    """The plan that the arguments of `solve` ask for, checked."""
    counts = dict(num_steps=num_steps, chunk=options["chunk"])
    counts["num_starts"] = options["num_starts"]
    for name, count in counts.items():
        if count is not None:
            check_count(count, name)
    check_flag(looks, "looks")
    if options["polish"] is not None:
        check_flag(options["polish"], "polish")
    check_path(options.get("checkpoint"), "checkpoint")
    output, callback = options["output"], options.get("callback")
    if not (isinstance(output, str) and output in ("last", "random")):
        raise ValueError(f"`output` must be 'last' or 'random'; got {output!r}.")
    if not (stop is None or isinstance(stop, Stop)):
        raise ValueError(
            f"`stop` must be a Stop, such as `Stop(seconds=60)`; got {stop!r}."
        )
    if not (callback is None or callable(callback)):
        raise ValueError(
            "`callback` must be a function of (step, x, value, history); got "
            f"{callback!r}."
        )
    if certify is not None:
        check_number(certify, "certify", "a positive radius", np.nextafter(0, 1))
    if average is not None:
        check_number(average, "average", "a decay in [0, 1)", 0, 1)
    if not looks and (options["polish"] or certify is not None):
        raise ValueError(
            "`looks=False` never evaluates F, which `polish` and `certify` need."
        )
    if stop is None:
        stop = Stop() if num_steps is None else Stop(0, 0)
    return Plan(
        method=_checked_method(method),
        num_steps=DEFAULT_STEPS if num_steps is None else num_steps,
        stop=stop,
        average=None if average is None else Average(average),
        certify=certify,
        looks=looks,
        **options,
    )
