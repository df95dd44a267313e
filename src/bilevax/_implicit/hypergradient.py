"""The hypergradient: `F(x)` and its gradient, with the trust they deserve."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, PyTree

from .._lower.active_set import ActiveSet, blank_solution
from .._lower.base import AbstractLowerSolver, LowerSolution, all_finite, strongly_typed
from .._lower.choose import (
    USUAL_SOLVER,
    check_choice,
    check_warm,
    checked_solver,
    with_sparse_rows,
)
from .._lower.dense import FlatLower, Unravel
from .._lower.sparse.solver import SparseActiveSet
from .._problem.checks import check_functions, checked_point
from .._problem.problem import AbstractLocalLower, Problem, bare
from .._programs.arrays import ravel, xp
from .._programs.control import (
    Packed,
    UsualPath,
    in_stages,
    on_device,
    on_host,
    once,
    packed,
    stage,
    stage_by_stage,
    usual_path,
    usual_path_in_use,
)
from .._programs.modules import Plain, made, remembered, with_fields
from .._programs.quick import in_program, is_plain, quick_jit
from .._programs.room import make_room
from .._programs.threads import few_threads
from .._status import (
    Status,
    as_status,
    code_of,
    have_values,
    message,
    raise_on_failure,
)
from .adjoint import (
    AbstractAdjoint,
    Danskin,
    DenseAdjoint,
    KKTSystem,
    default_adjoint,
)
from .quality import Quality, quality_of


class Evaluation(Plain):
    """`F` at one `x`.

    - `value`, `grad`: NaN where the lower level has no answer.
    - `aux`: the auxiliary output of `upper`.
    - `lower`: the lower-level solution; pass it as `warm` to the next call.
    - `status`: one per batch member. At a kink the value is right and the gradient is
      that of one side.
    - `quality`: condition and bias, on demand.
    """

    value: Float[Array, ""]
    aux: Any
    grad: PyTree[Array]
    lower: LowerSolution
    status: Any
    quality: Quality | None

    @property
    def margin(self) -> Float[Array, ""]:
        """Distance to the nearest kink, in multiplier or slack of unit rows."""
        return self.lower.margin

    @property
    def weakly_active(self) -> Bool[Array, " k"]:
        """Rows that are tight with a multiplier of zero, to rounding."""
        return self.lower.weak

    @property
    def success(self) -> Bool[Array, ""]:
        """Whether `value` is right: at a kink, too, where `grad` is of one side."""
        return have_values(self.status)

    @property
    def message(self) -> str:
        """What is wrong or special here and what to do about it; else empty."""
        return message(self.status)


def hypergradient(
    problem: Problem,
    x: PyTree,
    *,
    solver: AbstractLowerSolver | None = None,
    adjoint: AbstractAdjoint | None = None,
    warm: LowerSolution | None = None,
    quality: bool = False,
    throw: bool = True,
) -> Evaluation:
    """Value and gradient of `F(x) = f(x, y*(x))`: the closed form of `pro:diff`.

    One lower-level solve and one adjoint solve, never a full Jacobian. `warm` takes the
    `lower` of a nearby evaluation. `quality=True` adds the condition of the KKT system
    and a bound on the bias of the gradient, at the price of further solves. A failure
    raises a `BilevelError` with its cause and remedy, unless `throw=False` or the call
    is traced; then `status` tells. A kink is no failure, nor are dependent rows.
    """
    if not isinstance(problem, Problem):
        raise ValueError(
            "`problem` must be a Problem; got "
            f"{type(problem).__name__}. Call `.draw(key)` on a StochasticProblem first."
        )
    x = checked_point(problem, x)
    adjoint = problem.adjoint if adjoint is None else adjoint
    check_choice(adjoint, AbstractAdjoint, "adjoint", "ConjugateGradient")
    dense, given = isinstance(adjoint, DenseAdjoint), solver
    check_warm(problem, warm)
    solver = checked_solver(problem, given, dense, on_host=True)
    if staged(problem, x, solver, adjoint, warm):
        if isinstance(solver, SparseActiveSet):
            problem = with_sparse_rows(problem)
        evaluation = _in_stages(problem, x, solver, adjoint, warm, quality)
    else:
        solver = checked_solver(problem, given, dense)
        if warm is None and isinstance(solver, ActiveSet):
            warm = blank_solution(problem, kept=not in_program())
        evaluation = _as_program(problem, x, solver, adjoint, warm, quality)
    if throw:
        raise_on_failure(evaluation, "The hypergradient")
    return evaluation


def staged(problem: Problem, x, solver, adjoint, warm=None) -> bool:
    """Whether an evaluation runs stage by stage: the usual kind, on plain arrays.

    Decided once per call. Attacks of training are programs, and so is everything on
    devices other than the CPU, where every look at a truth value would wait.
    """
    if in_stages():
        return True
    on_host = isinstance(solver, ActiveSet | SparseActiveSet)
    if not (on_host and isinstance(adjoint, _STAGED)) or isinstance(
        problem.lower, AbstractLocalLower
    ):
        return False
    return not in_program() and is_plain((x, warm)) and _has_plain_arrays(problem)


_STAGED = DenseAdjoint | type(None)
_has_plain_arrays = remembered(is_plain)


def _in_stages(problem, x, solver, adjoint, warm, quality) -> Evaluation:
    if in_stages():
        return evaluate(problem, x, solver, adjoint, warm, quality)
    with stage_by_stage(), few_threads(problem):
        whole = _ready(problem) if solver is USUAL_SOLVER else None
        e = evaluate(problem, x, solver, adjoint, warm, quality, whole)
        # What a program leaves is there already.
        there = isinstance(e.value, jax.Array) and not quality
        return e if there else on_device(e)


@quick_jit
def _as_program(problem, x, solver, adjoint, warm, quality) -> Evaluation:
    check_functions(problem, x)
    return strongly_typed(evaluate(problem, x, solver, adjoint, warm, quality))


def evaluate(
    problem: Problem, x, solver, adjoint, warm, quality: bool = False, whole=None
) -> Evaluation:
    """`F` and its gradient at `x`, with nothing checked and nothing raised."""
    if not in_stages():
        e = _evaluate(problem, x, solver, adjoint, warm)
        return _with_quality(e, problem, x, adjoint) if quality else e
    whole = once(_whole, problem, solver) if whole is None else whole
    path = _usual_path_of(whole, problem, x, warm is None)
    e: Any = None
    left_out: Any = True
    if not isinstance(solver, SparseActiveSet) and path.pays():
        begin = blank_solution(problem) if warm is None else warm
        large = is_large(problem)
        e, left_out = _usually(whole, _packed_adjoint(adjoint), x, begin, large=large)
        path.met(bool(left_out))
    if left_out:
        problem, (x, warm) = _moved(problem), on_host((x, warm))
        e = _evaluate(problem, x, solver, adjoint, warm)
    return _with_quality(e, problem, x, adjoint) if quality else e


@remembered
def _moved(problem: Problem) -> Problem:
    """The problem with NumPy's arrays: the same ones for every call with it."""
    return on_host(problem)


def is_large(problem: Problem) -> bool:
    """Whether an evaluation computes so much that its program is better optimised."""
    n = sum(leaf.size for leaf in jax.tree.leaves(problem.y0))
    return (n + problem.constraints.num_rows) ** 2 >= _LARGE


# Entries of a KKT matrix.
_LARGE = 10_000


def _packed_adjoint(adjoint):
    return _BY_DEFAULT if adjoint is None else packed((adjoint,))


_BY_DEFAULT = Packed((None,))


def _with_quality(e: Evaluation, problem: Problem, x, adjoint) -> Evaluation:
    problem, x, e = on_host((problem, x, e)) if in_stages() else (problem, x, e)
    problem = problem.localised(x)
    whole, lower = once(_whole, problem, USUAL_SOLVER), e.lower
    adjoint = default_adjoint(lower) if adjoint is None else adjoint
    system = _system(problem, x, lower)
    found = quality_of(whole, system, x, lower, adjoint, e.grad)
    return with_fields(e, quality=found)


@usual_path
def _usually(whole, adjoint, x, warm) -> Evaluation:
    (problem, solver), (adjoint,) = whole, adjoint
    return strongly_typed(_evaluate(problem, x, solver, adjoint, warm))


def _evaluate(problem: Problem, x, solver, adjoint: Any, warm: Any) -> Evaluation:
    problem = problem.localised(x)
    whole = once(_whole, problem, solver)
    lower = solver(problem, x, warm)
    if adjoint is None:
        adjoint = default_adjoint(lower)
    found = implicit_gradient(problem, x, lower, adjoint, whole)
    states = (lower.status._value, lower.shared_dependence, lower.weak)
    code, value, grad = _judged(states, found)
    return made(
        Evaluation,
        value=value,
        aux=found.aux,
        grad=grad,
        lower=lower,
        status=as_status(code),
        quality=None,
    )


def _whole(problem: Problem, solver):
    """What stages need to know of a problem."""
    return packed((bare(problem), solver))


@remembered
def _ready(problem: Problem):
    """The same for the usual solver, for every call with this problem."""
    return _whole(problem, USUAL_SOLVER)


def exact(problem: Problem) -> Callable[..., Evaluation]:
    """`(x, warm) -> Evaluation`; in stages nothing is checked again."""
    if not in_stages():
        return lambda x, warm: hypergradient(problem, x, warm=warm, throw=False)
    solver = checked_solver(problem, None, False, on_host=True)
    adjoint = problem.adjoint
    return lambda x, warm: _read(evaluate(problem, x, solver, adjoint, warm))


def _read(e: Evaluation) -> Evaluation:
    """`e` with NumPy's arrays, but for the factor, which the next program takes."""
    factor = e.lower.factor
    e = on_host(with_fields(e, lower=with_fields(e.lower, factor=None)))
    return with_fields(e, lower=with_fields(e.lower, factor=factor))


# So many calls that may each be the only one, and the usual path is compiled.
_OFTEN = 20


def _usual_path_of(whole, problem: Problem, x, cold: bool) -> UsualPath:
    """The usual path; functions are checked where they meet new shapes."""
    leaves, structure = jax.tree.flatten(x)
    key = structure, cold, tuple((leaf.shape, leaf.dtype) for leaf in leaves)
    if key not in whole.form.met:
        make_room()
        check_functions(problem, x)
        whole.form.met[key] = UsualPath(after=_OFTEN)
    return usual_path_in_use() or whole.form.met[key]


def _judged(states, found: "Implicit"):
    """The status; NaN where the lower level has no answer."""
    (code, shared, weak), value, grad = states, found.value, found.grad
    sane = all_finite((value, grad)) & found.inside
    answered = code == code_of(Status.successful)
    # What is not finite is no kink, and the first line that fails is the status.
    for holds, kind in (
        (sane, Status.non_finite),
        (shared, Status.dependent_rows),
        (~xp.any(weak), Status.kink),
        (found.fine, Status.adjoint_limit),
    ):
        so_far = code == code_of(Status.successful)
        code = xp.where(so_far & ~holds, code_of(kind), code)
    or_nan = lambda leaf: xp.where(answered, leaf, xp.nan)
    return code, or_nan(value), jax.tree.map(or_nan, grad)


class Implicit(NamedTuple):
    """`f`, its auxiliary output, the gradient of `F`, and how far to trust it.

    `fine` is about the adjoint solve, `inside` about `y`: whether `g` is defined there.
    """

    value: Float[Array, ""]
    aux: Any
    grad: PyTree[Array]
    fine: Bool[Array, ""]
    inside: Bool[Array, ""]


def implicit_gradient(
    problem: Problem, x, lower: LowerSolution, adjoint: AbstractAdjoint, whole=None
) -> Implicit:
    """The gradient of `F` by the implicit function theorem.

    With `A` the active rows, solve

        [H  A^T] [v]   [grad_y f]
        [A   0 ] [w] = [   0    ]

    and subtract from `grad_x f` the `x`-gradient of `<grad_y g, v> + <w, B x>`.
    `whole` is the problem, ready for stages.
    """
    whole = _whole(problem, USUAL_SOLVER) if whole is None else whole
    if isinstance(adjoint, Danskin):
        value = problem.upper_value
        (value, aux), grad = jax.value_and_grad(value, has_aux=True)(x, lower.y)
        inside = whole[1].inside(problem, x, lower.y)
        return Implicit(value, aux, grad, jnp.asarray(True), inside)
    upper = _upper(whole, x, lower.y)
    system = _system(problem, x, lower)
    top = ravel(upper.f_y).astype(system.y.dtype)
    bottom = xp.zeros_like(lower.multipliers)
    v, w, fine = adjoint.solve(system, lower, top, bottom)
    grad, inside = _pulled_back(whole, x, lower.y, upper.f_x, v, w)
    return Implicit(upper.value, upper.aux, grad, fine, inside)


def _system(problem: Problem, x, lower: LowerSolution) -> KKTSystem:
    y, unravel = ravel(lower.y), once(Unravel.like, problem.y0)
    # In stages of the form that the lower level has, for which a program exists.
    columns = np.ones_like(y) if in_stages() else None
    flat = packed(FlatLower(problem.lower, x, unravel, columns))
    return KKTSystem(problem.constraints, flat, y, lower.active)


class _Upper(NamedTuple):
    value: Float[Array, ""]
    aux: Any
    f_x: PyTree[Array]
    f_y: PyTree[Array]


@stage
def _upper(whole, x, y) -> _Upper:
    """`f` with its gradients."""
    problem, _ = whole
    value = jax.value_and_grad(problem.upper_value, argnums=(0, 1), has_aux=True)
    (value, aux), (f_x, f_y) = value(x, y)
    return _Upper(value, aux, f_x, f_y)


@stage
def _pulled_back(whole, x, y, f_x, v, w):
    problem, solver = whole
    v = Unravel.like(y)(v)

    def cross(x):
        # Reverse over forward: the derivative of `g` along `v`, then its x-gradient.
        along = jax.jvp(lambda y: problem.lower_value(x, y), (y,), (v,))[1]
        return along + problem.constraints.coupling(x, w)

    grad = jax.tree.map(jnp.subtract, f_x, jax.grad(cross)(x))
    return grad, solver.inside(problem, x, y)
