"""Runs on problems whose upper constraints involve `y`.

The run is one of the exact penalty `F + sum w_j [c_j]_+ + sum w_k |h_k|`, an ordinary
problem (see `_problem/penalised.py`). Its weights are in the units of the problem at
the start and rise where the end violates its constraint. From there sequential
quadratic programming, and the polish of the penalty with weights just above the
multipliers, take turns. If heavy weights have no effect, the violation alone is
minimised; if that does not vanish either, the status is `upper_infeasible`.
"""

import time
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._constraints import Box
from .._implicit.upper_constraints import shaped, size_of, stacked
from .._judge.certificate import certify as certify_at
from .._judge.multipliers import Multipliers, multipliers_at
from .._methods.sequential import Oracle, Point, restored, sequential
from .._problem.coordinates import coordinate_names
from .._problem.penalised import rows_of, with_penalty
from .._programs.control import on_device
from .._programs.modules import with_fields
from .._status import Status, has_value, message, status_name
from .._tolerances import tolerances
from .report import holding
from .requests import Asking, Request
from .run import Run, evaluate_allowed, plain
from .second_look import second_look
from .solution import Solution, in_units_of_x, polish_rounds, solution_from
from .upper_report import UpperReport

# First weights, in units of the slope of `F` over that of the constraint.
_FIRST_WEIGHT = 2.0
# Pairs of opposite points around the start at which those are measured, too.
_PROBES = 2
# What rounding leaves of zero.
_NOTHING = 1e-20
# Weights of violated constraints grow so many times, by this factor.
_RAISES, _FACTOR = 5, 10.0
# Steps of the method under heavier weights.
_FEW_STEPS = 100
# A relative violation that Newton steps will remove.
_NEARLY = 1e-4
# Turns that sequential quadratic programming and the polish take, and second looks.
_TURNS, _LOOKS = 3, 3
# The radius, in lengths of `x`, of gradients that count for multipliers at a kink.
_RADIUS = 1e-6


def answer_from(run: Run, point, certify) -> Asking[Solution]:
    """The run from one start, whatever constraints the leader has."""
    if not run.view.is_coupled:
        return (yield from solution_from(run, point, certify))
    found = yield from _Coupled(replace(run, chart=None), point).answer(certify)
    return in_units_of_x(run.chart, found)


def check_coupled(view, x, looks: bool, output: str) -> None:
    """Raise a `ValueError` where upper constraints cannot be observed."""
    if not view.is_coupled:
        return
    if not looks or output != "last":
        wanted = "looks=False" if not looks else f"output={output!r}"
        raise ValueError(
            f"`{wanted}` returns an iterate as it is, and the problem has upper "
            "constraints, which are satisfied at the end of a run alone. Leave it out, "
            "or solve `bx.penalised(problem, weight)`."
        )
    rows_of(view).shapes(view, x)


class _Coupled:
    """One start of a problem with upper constraints."""

    def __init__(self, run: Run, point):
        self.run, self.point = run, point
        self.shapes = rows_of(run.view).shapes(run.view, point)
        self.less, self.count = size_of(self.shapes[0]), size_of(self.shapes)
        self.began = time.perf_counter()
        self.oracle = Oracle(
            plain(run.view), point, self.less, np.zeros(self.count), 1.0
        )
        self.start_value = 0.0
        self.oracle.length = self._length(run.view.domain)

    def answer(self, certify) -> Asking[Solution]:
        weights = yield from self._first_weights()
        found = yield from self._descent(weights, self.point, first=True)
        main, raises = found, 0
        while raises < _RAISES and self._asks_for_more(found, p := self._at(found.x)):
            raises += 1
            again = status_name(found.status) == "unbounded"
            over = self._over(p)
            weights = np.where(again | over, _FACTOR * weights, weights)
            start = self.point if again else found.x
            found = yield from self._descent(weights, start)
        if not has_value(found.status):
            return self._unanswered(found, main)
        p = self._at(found.x)
        if self._over(p).any():
            least = yield from self._descent(weights, found.x, share=0.0)
            inside = self._at(least.x)
            if self._over(inside).any():
                p = min(p, inside, key=self.oracle.violation)
            else:
                found = yield from self._descent(weights, least.x)
                p = self._at(found.x) if has_value(found.status) else inside
                p = inside if self._over(p).any() else p
        p, around = yield from self._sharpened(p, weights)
        return (yield from self._solution(p, around, main, raises, certify))

    # The start

    def _length(self, domain) -> float:
        """Of `x`: its own at the start, of the domain, or one."""
        width = 0.0
        if isinstance(domain, Box):
            low, high = self.oracle.flat(domain.lower), self.oracle.flat(domain.upper)
            bounded = np.isfinite(low) & np.isfinite(high)
            width = float(np.linalg.norm((high - low)[bounded])) / 4
        return float(np.linalg.norm(self.oracle.flat(self.point))) or width or 1.0

    def _first_weights(self) -> Asking[np.ndarray]:
        """Weights by which `F` and each constraint weigh alike, around the start.

        At the start alone a constraint may happen to be zero, and flat.
        """
        view, slope, norms = plain(self.run.view), 0.0, np.zeros(self.count)
        numbers = np.random.default_rng(0)
        flat = self.oracle.flat(self.point)
        away = numbers.normal(size=(_PROBES, flat.size)) / np.sqrt(flat.size)
        for move in (np.zeros_like(flat), *away, *-away):
            there = self.oracle.unravel(flat + self.oracle.length * move)
            x, _ = yield from evaluate_allowed(view, there)
            found = yield Request(stacked, (view, x, None, self.count))
            p = self.oracle.point(x, found)
            if p.fine:
                self.oracle.seen(p)
                if not move.any():
                    self.start_value = p.value
                slope = max(slope, float(np.linalg.norm(p.slope)))
                norms = np.maximum(norms, np.linalg.norm(p.jacobian, axis=1))
        known = norms > _NOTHING
        usual = np.median(norms[known]) if known.any() else 1.0
        self.oracle.sizes[self.oracle.sizes < _NOTHING] = 1.0
        return _FIRST_WEIGHT * (slope or 1.0) / np.where(known, norms, usual)

    # Descent on the penalty

    def _penalised(self, run: Run, weights, share: float = 1.0) -> Run:
        weights = jnp.asarray(weights)
        one = lambda problem: with_penalty(problem, share, weights)
        # A problem that is not sampled is the one by which it is judged.
        same = run.problem is run.view
        view = one(run.view)
        return replace(run, view=view, problem=view if same else one(run.problem))

    def _descent(self, weights, start, share=1.0, first=False) -> Asking[Solution]:
        run = self.run
        if not first:
            spent = time.perf_counter() - self.began
            left = replace(run.stop, seconds=max(run.stop.seconds - spent, 0.0))
            run = replace(
                run, stop=left, num_steps=min(_FEW_STEPS, run.num_steps),
                checkpoint=None, callback=None, tick=lambda count: None, x0=start,
            )  # fmt: skip
        return (
            yield from solution_from(self._penalised(run, weights, share), start, None)
        )

    def _at(self, x) -> Point:
        return self.oracle.at(x)

    def _over(self, p: Point) -> np.ndarray:
        """Constraints that are violated by more than Newton steps will mend."""
        return self.oracle.outside(p.rows) / self.oracle.sizes > _NEARLY

    def _asks_for_more(self, found: Solution, p: Point) -> bool:
        if status_name(found.status) == "unbounded":
            return True
        return has_value(found.status) and bool(self._over(p).any())

    # The end

    @property
    def accept(self) -> float:
        """The largest relative violation of an answer."""
        return 10 * tolerances(jax.tree.leaves(self.point)[0].dtype).accept

    def _sharpened(self, p: Point, weights) -> Asking[tuple[Point, Any]]:
        """Exact in the constraints, and lower in `F` where that can be.

        With what a second look has seen around it, of the penalty.
        """
        oracle, sharp = self.oracle, 1e-3 * self.accept
        if not self.run.polish:
            return restored(oracle, p, sharp), None
        least, around = 0.1 * weights, None
        for _ in range(_LOOKS):
            p, weights = yield from self._taking_turns(p, weights, least)
            run = self._penalised(self.run, weights)
            x, e = yield from evaluate_allowed(run.view, oracle.unravel(p.x))
            change = abs(p.value - self.start_value)
            asked = (run.view, x, e, oracle.length, change, run.key)
            seen, near, there = yield from second_look(*asked)
            around = seen.after(around)
            if not seen.open:
                break
            x, *_ = yield from polish_rounds(run, self.first, near, there)
            new = restored(oracle, self._at(x), sharp)
            if not self._is_lower(new, p):
                break
            around, p = around.led_on(p.value - new.value), new
        return p, around

    def _taking_turns(self, p: Point, weights, least) -> Asking[tuple[Point, Any]]:
        """Sequential quadratic programming, and the polish of the penalty."""
        oracle, sharp = self.oracle, 1e-3 * self.accept
        for turn in range(_TURNS):
            found = sequential(oracle, p, weights, self.first, self.accept)
            new = restored(oracle, found.point, sharp)
            better = turn == 0 or self._is_lower(new, p)
            p = new if better else p
            if oracle.violation(p) > self.accept or not better:
                break
            if found.multipliers is not None:
                weights = np.maximum(2 * np.abs(found.multipliers), least)
            run = self._penalised(self.run, weights)
            x, e = yield from evaluate_allowed(run.view, oracle.unravel(p.x))
            x, *_ = yield from polish_rounds(run, self.first, x, e)
            new = restored(oracle, self._at(x), sharp)
            if not self._is_lower(new, p):
                break
            p = new
        return p, weights

    @property
    def first(self) -> float:
        """Of the first steps near the end."""
        return 1e-2 * self.oracle.length

    def _is_lower(self, new: Point, old: Point) -> bool:
        """Whether `new` is feasible and `F` lower there, by more than rounding."""
        if self.oracle.violation(new) > self.accept:
            return False
        if self.oracle.violation(old) > self.accept:
            return True
        return new.value < old.value - 1e-12 * abs(old.value)

    def _solution(self, p: Point, around, main: Solution, raises, certify) -> Asking:
        run = self.run
        x = self.oracle.unravel(p.x)
        self.oracle.seen(p)
        x, e = yield from evaluate_allowed(run.view, x)
        before, seen = yield from evaluate_allowed(run.view, main.stochastic[0])
        report = self._report(p)
        status, answer = e.status, has_value(e.status)
        text = e.message
        if answer and not report.feasible:
            status, answer = Status.upper_infeasible, False
            worst = np.argmax(self.oracle.outside(p.rows) / self.oracle.sizes)
            text = f"{message(status)} {self._told(p, int(worst))}"
        certificate = None
        if certify is not None and answer:
            certificate = certify_at(run.view, x, certify, key=run.key)
        stopped, polished = main.stopped, main.polish
        if raises:
            stopped += f"; the weights of violated constraints rose {raises} times"
        if polished is not None:
            polished = with_fields(polished, x=x, value=e.value, start_value=seen.value)
        x, lower = on_device((x, with_fields(e.lower, factor=None)))
        return replace(
            main,
            x=x,
            y=lower.y,
            value=float(e.value),
            status=status,
            success=answer,
            message=text,
            stopped=stopped,
            stochastic=(before, float(seen.value)),
            polish=polished,
            certificate=certificate,
            lower=lower,
            around=around,
            bounds=holding(run.view.domain, x),
            upper=report,
        )

    def _report(self, p: Point) -> UpperReport:
        feasible = self.oracle.violation(p) <= self.accept
        # Outside there is nothing that multipliers would say.
        found = Multipliers(np.full(self.count, np.nan), np.inf)
        if feasible:
            found = multipliers_at(self.oracle, p, _RADIUS * self.oracle.length)
        parts = lambda flat: tuple(
            shaped(jnp.asarray(part), shapes, ())
            for part, shapes in zip(
                np.split(flat, [self.less]), self.shapes, strict=True
            )
        )
        (c, h), (mu, nu) = parts(p.rows), parts(found.values)
        return UpperReport(
            constraints=c,
            equalities=h,
            multipliers=mu,
            equality_multipliers=nu,
            violation=float(self.oracle.outside(p.rows).max(initial=0)),
            feasible=feasible,
            residual=found.residual,
        )

    def _told(self, p: Point, j: int) -> str:
        """The value of a constraint, by its name."""
        both = ("upper_constraints", "upper_equalities")
        names = [
            name if name.startswith(own) else f"{name}` of `{own}"
            for own, shapes in zip(both, self.shapes, strict=True)
            for name in coordinate_names(shapes, own)
        ]
        return f"Here `{names[j]}` is {p.rows[j]:.3g}."

    def _unanswered(self, found: Solution, main: Solution) -> Solution:
        """The follower has no answer, `F` has no end, or a constraint no value."""
        p = self._at(found.x)
        text = found.message
        undefined = np.flatnonzero(~np.isfinite(p.rows))
        if np.isfinite(p.value) and undefined.size:
            text += " " + self._told(p, int(undefined[0]))
        return replace(
            found, message=text, history=main.history, stochastic=main.stochastic
        )
