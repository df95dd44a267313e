"""The hypergradient: `F(x)` and its gradient, with the trust they deserve."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, PyTree

from .._arguments import check_flag
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
from .._problem.elastic import is_violated
from .._problem.followers import Followers
from .._problem.problem import AbstractLocalLower, Problem, bare
from .._programs.arrays import ravel, xp
from .._programs.control import (
    Packed,
    in_stages,
    on_device,
    on_host,
    once,
    packed,
    run_if,
    stage,
    stage_by_stage,
    usual_path,
    usual_path_in_use,
)
from .._programs.modules import made, remembered, with_fields
from .._programs.quick import in_program, in_transform, is_plain, once_jit, quick_jit
from .._programs.room import make_room
from .._programs.threads import few_threads
from .._status import (
    Status,
    as_status,
    code_of,
    raise_on_failure,
)
from .adjoint import (
    AbstractAdjoint,
    Danskin,
    DenseAdjoint,
    KKTSystem,
    Occasional,
    default_adjoint,
    refuse_danskin,
)
from .evaluation import Evaluation, FollowersEvaluation
from .followers import mean_gradient, mean_quality, summary
from .prices import with_unique_prices
from .quality import quality_of


def hypergradient(
    problem: Problem | Followers,
    x: PyTree,
    *,
    solver: AbstractLowerSolver | None = None,
    adjoint: AbstractAdjoint | None = None,
    warm: LowerSolution | None = None,
    quality: bool = False,
    throw: bool = True,
) -> Evaluation:
    """Value and gradient of `F(x) = f(x, y*(x))`: the closed form of `pro:diff`.

    One lower-level solve and one adjoint solve, never a full Jacobian; of Followers one
    each, and a `FollowersEvaluation`. `warm` takes the `lower` of a nearby evaluation,
    and says that this call is one of many: what they need is then compiled, which
    a single call does without. `quality=True` adds the condition of the KKT system
    and a bound on the bias of the gradient, at the price of further solves. A failure
    raises a `BilevelError` with its cause and remedy, unless `throw=False` or the call
    is traced; then `status` tells. A kink is no failure, nor are dependent rows.
    """
    check_problem(problem)
    check_flag(quality, "quality")
    check_flag(throw, "throw")
    x = checked_point(problem, x)
    adjoint = problem.adjoint if adjoint is None else adjoint
    check_choice(adjoint, AbstractAdjoint, "adjoint", "ConjugateGradient")
    dense, given = isinstance(adjoint, DenseAdjoint), solver
    check_warm(problem, warm)
    solver = checked_solver(problem, given, dense, on_host=True)
    if staged(problem, x, solver, adjoint, warm):
        often = warm is not None
        evaluation = _in_stages(problem, x, solver, adjoint, warm, quality, often)
    else:
        solver = checked_solver(problem, given, dense)
        if warm is None and isinstance(solver, ActiveSet):
            warm = blank_solution(problem, kept=not in_program())
        brief = isinstance(problem, Followers) and jax.default_backend() == "cpu"
        program = _as_brief_program if brief else _as_program
        evaluation = program(problem, x, solver, adjoint, warm, quality)
    if throw:
        raise_on_failure(evaluation, "The hypergradient")
    return evaluation


def check_problem(problem: Any) -> None:
    """Raise a `ValueError` unless `F` can be evaluated."""
    if not isinstance(problem, Problem | Followers):
        raise ValueError(
            "`problem` must be a Problem or Followers; got "
            f"{type(problem).__name__}. Call `.draw(key)` on a StochasticProblem, "
            "and `.parts(size)` on HostFollowers, first."
        )


def looked_at(problem: Problem | Followers, x, often: bool, warm=None) -> Evaluation:
    """`F` within a run; `often`: by what is compiled where many evaluations follow."""
    solver = checked_solver(problem, None, False, on_host=True)
    if not staged(problem, x, solver, problem.adjoint, warm):
        return hypergradient(problem, x, warm=warm, throw=False)
    return _in_stages(problem, x, solver, problem.adjoint, warm, False, often)


def staged(problem: Problem | Followers, x, solver, adjoint, warm=None) -> bool:
    """Whether an evaluation runs stage by stage: the usual kind, on plain arrays.

    Decided once per call. Attacks of training are programs, and so is everything on
    devices other than the CPU, where every look at a truth value would wait.
    """
    if isinstance(problem, Followers):
        return False
    if in_stages():
        return True
    on_host = isinstance(solver, ActiveSet | SparseActiveSet)
    if not (on_host and isinstance(adjoint, _STAGED)) or isinstance(
        problem.lower, AbstractLocalLower
    ):
        return False
    # Of a solution all arrays are alike.
    points = (x, None if warm is None else warm.y)
    alone = not (in_program() or in_transform())
    return alone and is_plain(points) and _has_plain_arrays(problem)


_STAGED = DenseAdjoint | type(None)
_has_plain_arrays = remembered(is_plain)


def _in_stages(problem, x, solver, adjoint, warm, quality, often: bool) -> Evaluation:
    """Stage by stage; `often`: as one of many calls."""
    if isinstance(solver, SparseActiveSet):
        problem = with_sparse_rows(problem)
    if in_stages():
        return evaluate(problem, x, solver, adjoint, warm, quality)
    with stage_by_stage(often), few_threads(problem):
        whole = _ready(problem) if solver is USUAL_SOLVER else None
        e = evaluate(problem, x, solver, adjoint, warm, quality, whole)
        # What a program leaves is there already.
        there = isinstance(e.value, jax.Array) and not quality
        return e if there else on_device(e)


def _program(problem, x, solver, adjoint, warm, quality) -> Evaluation:
    check_functions(problem, x)
    return strongly_typed(evaluate(problem, x, solver, adjoint, warm, quality))


_as_program = quick_jit(_program)
# A batch compiles for five to ten times as long where it is optimised, and runs a fifth
# faster: batched factorisations are libraries' own.
_as_brief_program = once_jit(_program)


def evaluate(
    problem: Problem, x, solver, adjoint, warm, quality: bool = False, whole=None
) -> Evaluation:
    """`F` and its gradient at `x`, with nothing checked and nothing raised."""
    if not in_stages():
        e = _evaluate(problem, x, solver, adjoint, warm)
        return _with_quality(e, problem, x, adjoint) if quality else e
    whole = once(_whole, problem, solver) if whole is None else whole
    _check_new_shapes(whole, problem, x)
    path = usual_path_in_use()
    e: Any = None
    left_out: Any = True
    # That of sparse rows is no program.
    if isinstance(solver, SparseActiveSet):
        path = None
    if path is not None and path.pays():
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


# Entries of a KKT matrix from which optimising a program pays within one run.
_LARGE = 160_000


def _packed_adjoint(adjoint):
    return _BY_DEFAULT if adjoint is None else packed((adjoint,))


_BY_DEFAULT = Packed((None,))


def _with_quality(e: Evaluation, problem: Problem, x, adjoint) -> Evaluation:
    if isinstance(problem, Followers):
        found = mean_quality(problem, x, e.lower, adjoint, e.grad)
        return with_fields(e, quality=found)
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
    if isinstance(problem, Followers):
        return _evaluate_each(problem, x, solver, adjoint, warm)
    problem = problem.localised(x)
    whole = once(_whole, problem, solver)
    lower = with_unique_prices(problem, x, solver(problem, x, warm), whole)
    if adjoint is None:
        adjoint = default_adjoint(lower)
    found = implicit_gradient(problem, x, lower, adjoint, whole)
    code, value, grad = _judged(_states(lower), found)
    if problem.elastic:
        code = _or_violated(code, lower.y)
    return made(
        Evaluation,
        value=value,
        aux=found.aux,
        grad=grad,
        lower=lower,
        status=as_status(code),
        quality=None,
    )


def _evaluate_each(problem: Followers, x, solver, adjoint, warm) -> Evaluation:
    lower = with_unique_prices(problem, x, solver(problem, x, warm))
    found = mean_gradient(problem, x, lower, adjoint, solver)
    codes = jax.vmap(_code_of)(_states(lower), found.sane, found.fine)
    if problem.one.elastic:
        codes = jax.vmap(_or_violated)(codes, lower.y)
    status, each = summary(found, lower, codes)
    or_nan = lambda leaf: jnp.where(jnp.all(lower.success), leaf, jnp.nan)
    return FollowersEvaluation(
        value=or_nan(found.value),
        aux=found.aux,
        grad=jax.tree.map(or_nan, found.grad),
        lower=lower,
        status=status,
        quality=None,
        each=each,
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


def _check_new_shapes(whole, problem: Problem, x) -> None:
    """Functions are checked where they meet new shapes."""
    leaves, structure = jax.tree.flatten(x)
    key = structure, tuple((leaf.shape, leaf.dtype) for leaf in leaves)
    if key not in whole.form.met:
        make_room()
        check_functions(problem, x)
        whole.form.met[key] = True


def status_codes(lower: LowerSolution, sane, fine):
    """The number of the status of an answer, as an evaluation of it alone tells it."""
    return _code_of(_states(lower), sane, fine)


def _states(lower: LowerSolution):
    return lower.status._value, lower.shared_dependence, lower.weak


def _judged(states, found: "Implicit"):
    """The status; NaN where the lower level has no answer."""
    value, grad = found.value, found.grad
    sane = all_finite((value, grad)) & found.inside
    answered = states[0] == code_of(Status.successful)
    code = _code_of(states, sane, found.fine)
    or_nan = lambda leaf: xp.where(answered, leaf, xp.nan)
    return code, or_nan(value), jax.tree.map(or_nan, grad)


def _code_of(states, sane, fine):
    """What is not finite is no kink, and the first line that fails is the status."""
    code, shared, weak = states
    for holds, kind in (
        (sane, Status.non_finite),
        (shared, Status.dependent_rows),
        (~xp.any(weak), Status.kink),
        (fine, Status.adjoint_limit),
    ):
        so_far = code == code_of(Status.successful)
        code = xp.where(so_far & ~holds, code_of(kind), code)
    return code


def _or_violated(code, y):
    """Of an elastic problem, whether its rows are met."""
    broken = (code == code_of(Status.successful)) & is_violated(y)
    return xp.where(broken, code_of(Status.violated), code)


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

        [H  A^T] [v]   [  grad_y f  ]
        [A   0 ] [w] = [grad_lambda f]

    and subtract from `grad_x f` the `x`-gradient of `<grad_y g, v> + <w, B x>`; where
    rows are functions of `x`, of `<grad_y g + A(x)^T lambda, v> + <w, A(x) y - b(x)>`.
    The lower half is zero but for a leader who sees prices: multipliers move with `x`,
    too, and the matrix is that of both. `whole` is the problem, ready for stages.
    """
    if isinstance(problem, Followers):
        solver = checked_solver(problem, None, False)
        mean = mean_gradient(problem, x, lower, adjoint, solver)
        fine, sane = jnp.all(mean.fine), jnp.all(mean.sane)
        return Implicit(mean.value, mean.aux, mean.grad, fine, sane)
    whole = _whole(problem, USUAL_SOLVER) if whole is None else whole
    if isinstance(adjoint, Danskin):
        refuse_danskin(problem)
        value = problem.upper_value
        (value, aux), grad = jax.value_and_grad(value, has_aux=True)(x, lower.y)
        inside = whole[1].inside(problem, x, lower.y)
        return Implicit(value, aux, grad, jnp.asarray(True), inside)
    upper = _upper(whole, x, lower.y, problem.multipliers_of(lower))
    system = _system(problem, x, lower)
    top = ravel(upper.f_y).astype(system.y.dtype)
    bottom = xp.zeros_like(lower.multipliers)
    if problem.prices:
        bottom = xp.where(lower.active, upper.f_mu, bottom)
    v, w, fine = adjoint.solve(system, lower, top, bottom)
    held = xp.where(lower.active, lower.multipliers, 0)
    pulled = lambda f_x: _pulled_back(whole, x, lower.y, f_x, held, v, w)
    if isinstance(adjoint, Occasional):
        left = upper.f_x, whole[1].inside(problem, x, lower.y)
        grad, inside = run_if(adjoint.now, lambda both: pulled(both[0]), left)
    else:
        grad, inside = pulled(upper.f_x)
    return Implicit(upper.value, upper.aux, grad, fine, inside)


def _system(problem: Problem, x, lower: LowerSolution) -> KKTSystem:
    y, unravel = ravel(lower.y), once(Unravel.like, problem.y0)
    # In stages of the form that the lower level has, for which a program exists.
    columns = np.ones_like(y) if in_stages() else None
    flat = packed(FlatLower(problem.lower, x, unravel, columns))
    return KKTSystem(problem.constraints.at(x), flat, y, lower.active)


class _Upper(NamedTuple):
    value: Float[Array, ""]
    aux: Any
    f_x: PyTree[Array]
    f_y: PyTree[Array]
    f_mu: Float[Array, " k"] | None


@stage
def _upper(whole, x, y, multipliers) -> _Upper:
    """`f` with its gradients."""
    problem, _ = whole
    value = jax.value_and_grad(problem.upper_value, argnums=(0, 1, 2), has_aux=True)
    (value, aux), (f_x, f_y, f_mu) = value(x, y, multipliers)
    return _Upper(value, aux, f_x, f_y, f_mu)


@stage
def _pulled_back(whole, x, y, f_x, mu, v, w):
    problem, solver = whole
    v = Unravel.like(y)(v)

    def cross(x):
        # Reverse over forward: the derivative of `g` along `v`, then its x-gradient.
        along = jax.jvp(lambda y: problem.lower_value(x, y), (y,), (v,))[1]
        return along + problem.constraints.drift(x, y, mu, v, w)

    grad = jax.tree.map(jnp.subtract, f_x, jax.grad(cross)(x))
    return grad, solver.inside(problem, x, y)
