"""How a solve can end: one enumeration, each member a cause and a remedy."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer


class Status(eqx.Enumeration):
    """Ways to end. Lives on device, one per batch member; `message` gives the text."""

    successful = ""
    non_finite = (
        "A NaN or an infinity reached the lower level: in `x`, in the data of the "
        "problem, in an upper constraint, or in a value or derivative of `lower` or "
        "`upper` at the start. Check the inputs; if `lower` is defined on part of "
        "space only (logarithms, roots), pass a `y0` inside that part."
    )
    not_strongly_convex = (
        "The Hessian of `lower` in `y` is not positive definite, at its start `y0` or "
        "at the follower's answer, in directions that active constraints leave open, "
        "so that answer may not be unique. Check the sign of its quadratic part, pass "
        "a `y0` where `lower` is curved, or add `0.5 * mu * |y|^2` with a small `mu` "
        "to `lower`."
    )
    infeasible = (
        "No `y` satisfies the lower-level constraints at this `x`, so `F(x)` is not "
        "defined here. Move `x`, restrict it with `domain`, or relax `b`."
    )
    iteration_limit = (
        "The lower-level solver stopped before its KKT residual fell below the "
        "accepted level. Try another one (`solver=bx.ActiveSet()` where it was "
        "ProjectedGradient, `bx.InteriorPoint()` where it was ActiveSet), raise its "
        "iteration limits, rescale a badly scaled `lower`, or use float64."
    )
    dependent_rows = (
        "The active rows of `A` are linearly dependent and the rows of `B` do not "
        "share the dependence: `x` is at a kink of `F` or at the edge of the set of "
        "`x` with a non-empty lower level, and no gradient exists. The one returned "
        "ignores the conflict; move `x` or perturb the problem."
    )
    kink = (
        "A lower-level row is tight with a multiplier of zero (to rounding), so `F` "
        "has a kink at this `x`: minimisers often sit at one. `F` is right; the "
        "gradient is that of one side, where the weakly active rows are inactive "
        "unless `lower` is flat without them. For a smooth neighbour perturb the lower "
        "level with `problem.perturbed(q)`."
    )
    adjoint_limit = (
        "The adjoint linear solve of the hypergradient stopped before its residual "
        "was small. Allow it more steps, or use a dense back end."
    )
    unbounded = (
        "F falls without bound: it goes on falling along a ray to 1e8 times the length "
        "scale of the problem and beyond, by no less with every doubling, so there is "
        "no best `x`. Check the sign of `upper`, restrict `x` with `domain`, or add a "
        "term to `upper` that grows with `x`."
    )
    upper_infeasible = (
        "No point was found that satisfies the upper constraints: from here no small "
        "move of `x` lowers their violation, however much it weighs. They mean "
        "`c(x, y*(x)) <= 0` with the follower's answer: check their signs (for a >= b "
        "return b - a). Else try more `starts` or `num_starts`, relax the constraints, "
        "or take one `x` at which they hold as a start."
    )
    prices_not_unique = (
        "Tight rows of the lower level depend on each other, so multipliers are not "
        "unique at this `x`, and `upper(x, y, prices)` is not the same for all of "
        "them: `F(x)` is not defined here. Remove rows that say the same as others, or "
        "use prices of other rows in `upper`."
    )
    lost = (
        "The run was given to an `executor` and did not come back, twice: its process "
        "died or could not do it. Give workers more memory or time, look into their "
        "logs, or do this run alone without `executor` to see what happens."
    )
    violated = (
        "The rows of this elastic lower level cannot all be met at this `x`, or the "
        "price of violating them is below their multipliers. `F` and its gradient are "
        "right for the elastic problem. Raise `elastic`, relax `b`, or move `x`."
    )


class BilevelError(RuntimeError):
    """A failed solve, raised when `throw=True`; `status` and `result` say more."""

    def __init__(self, text: str, status: Any, result: Any = None):
        super().__init__(text)
        self.status = status
        self.result = result


_NAMES = {
    int(np.asarray(item._value)): name for name, item in Status._name_to_item.items()
}


def code_of(status) -> Any:
    """The number that stands for a status."""
    number = status._value
    return number if isinstance(number, Tracer) else np.asarray(number)


_STRUCTURE = jax.tree.structure(Status.successful)


def as_status(code):
    """The status with a number that may be traced."""
    return jax.tree.unflatten(_STRUCTURE, [code])


def first_failure(*statuses):
    """The first status that is not `successful`, member by member."""
    result = statuses[0]
    for status in statuses[1:]:
        result = Status.where(result == Status.successful, status, result)
    return result


def message(status) -> str:
    """The advice for a concrete status; for a batch, one line per failing kind."""
    codes = np.asarray(status._value)
    if codes.ndim == 0:
        return Status._index_to_message[int(codes)]
    lines = []
    for code in sorted(set(codes.ravel().tolist()) - {0}):
        members = np.flatnonzero(codes.ravel() == code)
        shown = ", ".join(map(str, members[:8])) + (", ..." if len(members) > 8 else "")
        text = Status._index_to_message[code]
        lines.append(f"{len(members)} of {codes.size} ({shown}) {_NAMES[code]}: {text}")
    return "\n".join(lines)


def status_code(status: Any) -> int:
    """The number of a concrete scalar status, as records keep it."""
    return int(np.asarray(status._value))


def status_name(status) -> Any:
    """The short name of a concrete status; for a batch, a NumPy array of names."""
    codes = np.asarray(status._value)
    if codes.ndim == 0:
        return _NAMES[int(codes)]
    return np.array([_NAMES[code] for code in codes.ravel().tolist()]).reshape(
        codes.shape
    )


# Where `F` is right, the gradient or not. Kinks are among these: minimisers sit there.
_WITH_VALUE = ("successful", "violated", "kink", "dependent_rows", "adjoint_limit")


def has_value(status) -> bool:
    """Whether `F` is right where a concrete status was met."""
    return status_name(status) in _WITH_VALUE


def have_values(status):
    """`has_value` on device, member by member."""
    fine = [status == getattr(Status, name) for name in _WITH_VALUE]
    return jnp.any(jnp.stack(fine), axis=0)


# From the best end to the worst; all others are worse.
_MILD = np.zeros(len(_NAMES), int) + len(_WITH_VALUE)
for _place, _name in enumerate(_WITH_VALUE):
    _MILD[status_code(getattr(Status, _name))] = _place


def gravest(status):
    """The worst of a batch, or the status itself."""
    codes = jnp.ravel(jnp.asarray(status._value))
    return as_status(codes[jnp.argmax(jnp.asarray(_MILD)[codes])])


def is_traced(tree) -> bool:
    """Whether any leaf is a tracer, so that nothing can be decided on its value."""
    return any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(tree))


def raise_on_failure(result, what: str):
    """Raise the advice of `result.status` where it is concrete and no answer.

    A gradient whose linear solve stopped early is none, though `F` is right.
    """
    if is_traced(result.status):
        return
    codes = np.ravel(result.status._value)
    if not codes.any():
        return
    names = {_NAMES[code] for code in codes.tolist()}
    if names <= set(_WITH_VALUE) - {"adjoint_limit"}:
        return
    told = getattr(result, "message", None)
    text = told if isinstance(told, str) and told else message(result.status)
    raise BilevelError(f"{what} failed. {text}", result.status, result)
