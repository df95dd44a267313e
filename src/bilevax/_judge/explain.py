"""Which assumptions of the theory hold at a point, in numbers and in words."""

from dataclasses import dataclass, replace
from typing import Any, cast

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from jaxtyping import PyTree

from .._implicit.hypergradient import Evaluation, check_problem, hypergradient
from .._implicit.upper_constraints import constraint_gradients
from .._lower.choose import is_on_host
from .._lower.dense import flatten
from .._lower.sparse.hessian import SparseHessian
from .._problem.checks import checked_point
from .._problem.followers import Followers
from .._problem.problem import Problem
from .._programs.control import packed, stage_by_stage
from .._status import has_value
from .._tolerances import tolerances
from .matrices import (
    least_eigenvalue,
    least_singular_value,
    row_lengths,
    with_column,
)

# Linear programs for compactness: two per variable.
_COMPACT_LIMIT = 100
# Of many followers, how many are looked at.
_LOOKED_AT = 8


@dataclass(frozen=True)
class Finding:
    """One assumption: whether it holds here (None: not known), a number, and advice."""

    assumption: str
    needed_for: str
    holds: bool | None
    number: float
    text: str


@dataclass(frozen=True)
class Explanation:
    """All findings at one `x`; printing gives a table."""

    findings: tuple[Finding, ...]
    evaluation: Evaluation

    @property
    def holds(self) -> bool:
        """Whether nothing that is known fails."""
        return all(finding.holds is not False for finding in self.findings)

    def __str__(self):
        sign = {True: "yes", False: "NO", None: "?"}
        return "\n".join(
            f"{sign[f.holds]:>3}  {f.assumption} ({f.needed_for}): {f.text}"
            for f in self.findings
        )


def explain(problem: Problem | Followers, x: PyTree) -> Explanation:
    """Check the assumptions of `pro:diff` and of the convergence theorems at `x`.

    Of many followers those are looked at that have no answer or are nearest to a kink,
    and each assumption is reported for the one of them that is worst off.
    """
    check_problem(problem)
    x = checked_point(problem, x)
    e = hypergradient(problem, x, throw=False)
    if isinstance(problem, Followers):
        return _of_the_worst(problem, x, e)
    return Explanation(_findings(problem, x, e), e)


def _of_the_worst(problem: Followers, x, e: Evaluation) -> Explanation:
    """The findings of some followers, the worst of each kind."""
    margins = np.nan_to_num(np.asarray(e.lower.margin), nan=-np.inf)
    looked_at = np.argsort(margins, kind="stable")[:_LOOKED_AT]
    found = []
    for i in looked_at.tolist():
        one = problem[i]
        alone = hypergradient(one, x, throw=False)
        found.append([(f, i) for f in _findings(one, x, alone)])
    share = f"follower {{}} of {len(problem)}, the worst of {len(found)} looked at"
    worst = []
    for kind in zip(*found, strict=True):
        finding, i = min(kind, key=lambda pair: _RANK[pair[0].holds])
        text = f"{share.format(i)}: {finding.text}"
        worst.append(replace(finding, text=text))
    defined = replace(worst[0], number=float(e.value))
    if has_value(e.status):
        defined = replace(defined, text=f"F(x) = {float(e.value):.6g}")
    else:
        defined = replace(defined, holds=False, text=e.message)
    return Explanation((defined, *worst[1:]), e)


# What fails comes before what is not known.
_RANK = {False: 0, None: 1, True: 2}


def _findings(problem: Problem, x, e: Evaluation) -> tuple[Finding, ...]:
    constraints: Any = problem.constraints.at(x)
    n = ravel_pytree(problem.y0)[0].size
    sparse = is_on_host(problem)
    if sparse:
        A = constraints.sparse_matrix(n).tocsr()
    else:
        A = np.asarray(constraints.matrix(n, jnp.result_type(float)))
    rhs = np.asarray(constraints.rhs(x), float)
    k = constraints.num_inequalities
    return (
        _defined(e),
        *_upper_constraints(problem, x),
        _sparse_convexity(problem, x, e) if sparse else _convexity(problem, x, e, A),
        _slater(A, rhs, k),
        _sparse_independence(A, e) if sparse else _independence(A, e),
        _complementarity(e),
        _compactness(A, rhs, k),
        *_beyond_the_paper(problem),
    )


def _beyond_the_paper(problem: Problem) -> list[Finding]:
    """What the theory of the paper is not about, and what holds all the same."""
    still = (
        "F is differentiable where LICQ, strict complementarity and strong convexity "
        "hold (the implicit function theorem); the convergence theorem of the paper "
        "does not cover it"
    )
    found = []
    if problem.constraints.moving is not None:
        text = f"parts of the constraints are functions of `x`: {still}"
        found.append(Finding("linear coupling", "Thm:Main", None, np.nan, text))
    if problem.prices:
        text = f"`upper` takes prices: {still}"
        found.append(Finding("upper of x and y", "Thm:Main", None, np.nan, text))
    return found


def _defined(e: Evaluation) -> Finding:
    fine = has_value(e.status)
    text = f"F(x) = {float(e.value):.6g}" if fine else e.message
    return Finding("F is defined", "everything", fine, float(e.value), text)


def _upper_constraints(problem: Problem, x) -> tuple[Finding, ...]:
    if not problem.is_coupled:
        return ()
    found = constraint_gradients(problem, x, throw=False)
    violation = float(found.violation)
    holds = violation <= 10 * tolerances(found.value.dtype).accept
    text = f"the largest violation is {violation:.3g}"
    if not holds:
        text += "; `solve` looks for an x where they hold, with multipliers"
    return (
        Finding("the upper constraints hold", "the leader", holds, violation, text),
    )


def _convexity(problem: Problem, x, e: Evaluation, A) -> Finding:
    y = e.lower.y
    if not bool(jnp.all(jnp.isfinite(ravel_pytree(y)[0]))):
        y = problem.y0
    hessian = _hessian(problem, x, y)
    values = np.linalg.eigvalsh(hessian)
    noise = len(values) * tolerances(hessian.dtype).eps * values[-1]
    least = float(values[0])
    holds: bool | None = bool(least > noise)
    text = f"mu_g = {least:.3g} at this point (smallest eigenvalue of the Hessian)"
    if not holds and has_value(e.status):
        from scipy.linalg import null_space

        # The answer is unique all the same, but a tilt may find an edge to go along.
        free = null_space(A[np.asarray(e.lower.active)])
        along = np.linalg.eigvalsh(free.T @ hessian @ free)
        enough = f"is {along[0]:.3g}" if len(along) else "has nothing left to bend"
        holds = None
        text += f"; along what active constraints leave open it {enough}"
    elif not holds:
        text += "; add 0.5 * mu * |y|^2 to `lower`"
    return Finding("ass:str_cvx_h, strong convexity", "pro:diff", holds, least, text)


def _hessian(problem: Problem, x, y) -> np.ndarray:
    @eqx.filter_jit
    def hessian(problem, x, y):
        return flatten(problem, x)[0].hessian(ravel_pytree(y)[0])

    return np.asarray(hessian(problem, x, y))


def linprog(*arguments, **named):
    """SciPy's, imported late: it would take a quarter of `import bilevax`."""
    from scipy.optimize import linprog

    return linprog(*arguments, **named)


def _slater(A, rhs, k) -> Finding:
    """The largest distance by which all inequality rows can be met at once."""
    norm = row_lengths(A)
    finite = np.isfinite(rhs[:k])
    if not finite.any():
        text = "there are no inequality rows"
        return Finding("ass:feas, Slater point", "Thm:Main", True, np.inf, text)
    n, equal = A.shape[1], A.shape[0] > k
    out = linprog(
        np.r_[np.zeros(n), -1],
        A_ub=with_column(A[:k][finite], norm[:k][finite]),
        b_ub=rhs[:k][finite],
        A_eq=with_column(A[k:], np.zeros(A.shape[0] - k)) if equal else None,
        b_eq=rhs[k:] if equal else None,
        bounds=[(None, None)] * n + [(None, 1.0)],
    )
    slack = -out.fun if out.status == 0 else -np.inf
    holds = bool(slack > 0)
    shown = "at least 1" if slack >= 1 else f"{slack:.3g}"
    text = f"some y keeps a distance of {shown} from every row"
    if not holds:
        text = (
            "no y meets all rows with room to spare"
            + (f" (best: {slack:.3g})" if np.isfinite(slack) else "; the set is empty")
            + "; relax `b`, or move `x` away from the edge of the allowed set"
        )
    return Finding("ass:feas, Slater point", "Thm:Main", holds, float(slack), text)


def _independence(A, e: Evaluation) -> Finding:
    tight = np.asarray(e.lower.active | e.lower.weak)
    rows = A[tight]
    if len(rows) == 0:
        text = "no row is active"
        return Finding("ass:rank, LICQ", "pro:diff", True, np.inf, text)
    rows = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    least = np.linalg.svd(rows, compute_uv=False)
    least = float(least[-1]) if len(rows) <= rows.shape[1] else 0.0
    holds = least > np.sqrt(tolerances(A.dtype).eps)
    text = f"{len(rows)} tight rows, smallest singular value {least:.3g} (unit rows)"
    if not holds:
        text += f": {_names(e, np.flatnonzero(tight))}"
        shared = bool(e.lower.shared_dependence)
        text += (
            "; they depend, but so do the rows of B: the gradient is still right"
            if shared
            else "; they depend and B does not share it: x is at a kink or an edge"
        )
    return Finding("ass:rank, LICQ", "pro:diff", bool(holds), least, text)


def _sparse_convexity(problem: Problem, x, e: Evaluation) -> Finding:
    """The same from the entries of a sparse Hessian."""
    name, y = "ass:str_cvx_h, strong convexity", ravel_pytree(e.lower.y)[0]
    if not bool(jnp.all(jnp.isfinite(y))):
        y = ravel_pytree(problem.y0)[0]
    with stage_by_stage():
        H: Any = SparseHessian(packed(flatten(problem, x)[0])).at(np.asarray(y))
    least = np.nan if H is None else least_eigenvalue(H)
    H = cast(Any, H)
    if np.isnan(least):
        text = "the smallest eigenvalue of the sparse Hessian was not found"
        return Finding(name, "pro:diff", None, least, text)
    noise = H.shape[0] * tolerances(np.float64).eps * abs(H).max()
    holds: bool | None = bool(least > noise)
    text = f"mu_g = {least:.3g} at this point (smallest eigenvalue of the Hessian)"
    if not holds and has_value(e.status):
        holds = None
        text += "; its factor with the active rows leaves no direction open"
    elif not holds:
        text += "; add 0.5 * mu * |y|^2 to `lower`"
    return Finding(name, "pro:diff", holds, least, text)


def _sparse_independence(A, e: Evaluation) -> Finding:
    """The same from the factor of the sparse solve; the number comes by Lanczos."""
    name, tight = "ass:rank, LICQ", np.asarray(e.lower.active | e.lower.weak)
    rows = A[np.flatnonzero(tight)]
    if not rows.shape[0]:
        return Finding(name, "pro:diff", True, np.inf, "no row is active")
    least = least_singular_value(rows)
    text = (
        f"{rows.shape[0]} tight rows, smallest singular value {least:.3g} (unit rows)"
    )
    # Squares of singular values have half of the digits.
    holds = bool(least > tolerances(np.float64).eps ** 0.25)
    if not holds:
        shared = bool(e.lower.shared_dependence)
        text += (
            "; they depend, or nearly so, but the gradient is right"
            if shared
            else "; they depend and B does not share it: x is at a kink or an edge"
        )
    return Finding(name, "pro:diff", holds, least, text)


def _complementarity(e: Evaluation) -> Finding:
    margin = float(e.margin)
    weak = np.flatnonzero(np.asarray(e.lower.weak))
    holds = weak.size == 0 and not np.isnan(margin)
    text = f"margin {margin:.3g} (smallest of max(multiplier, slack))"
    if weak.size:
        text += (
            f"; {_listed(e, weak)} weakly active: perturb the lower level (DSBLO does)"
        )
    return Finding("strict complementarity", "pro:diff", holds, margin, text)


def _listed(e: Evaluation, rows) -> str:
    """`row lines[7] is`, `rows lines[7], lines[8] are`."""
    shown = _names(e, rows)
    return f"rows {shown} are" if len(rows) > 1 else f"row {shown} is"


def _names(e: Evaluation, rows) -> str:
    names = e.lower.row_names
    shown = ", ".join(names[i].removeprefix("row ") for i in rows[:8])
    return shown + ", ..." * (len(rows) > 8)


def _compactness(A, rhs, k) -> Finding:
    """Bounded iff no direction leads out of the set for ever."""
    name, use = "ass:sets, bounded lower set", "Thm:Main"
    n = A.shape[1]
    keep = np.r_[np.isfinite(rhs[:k]), np.ones(len(rhs) - k, bool)]
    if n > _COMPACT_LIMIT:
        text = f"not checked for more than {_COMPACT_LIMIT} variables"
        return Finding(name, use, None, np.nan, text)
    less, equal = A[:k][keep[:k]], A[k:]
    for i in range(n):
        for sign in (1.0, -1.0):
            c = np.zeros(n)
            c[i] = -sign
            out = linprog(
                c,
                A_ub=less if less.shape[0] else None,
                b_ub=np.zeros(less.shape[0]) if less.shape[0] else None,
                A_eq=equal if equal.shape[0] else None,
                b_eq=np.zeros(equal.shape[0]) if equal.shape[0] else None,
                bounds=[(-1, 1)] * n,
            )
            if out.status == 0 and -out.fun > 1e-9:
                text = (
                    f"the set of y is unbounded (entry {i}); constants of the theory "
                    "then hold on a region you state, see bilevax.theory"
                )
                return Finding(name, use, False, np.inf, text)
    return Finding(name, use, True, 0.0, "the set of y is bounded")
