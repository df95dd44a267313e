"""What of a cvxpy model is no quadratic program with linear constraints, by expression.

The smallest expression that is to blame is looked for, since a model has many.
"""

from typing import Any


def check_class(cp: Any, follower: Any) -> None:
    """Raise a `ValueError` that names what is outside of the class."""
    if not isinstance(follower, cp.Problem):
        raise ValueError(
            "`follower` must be a cvxpy.Problem, as in "
            "`cp.Problem(cp.Minimize(...), [...])`; got "
            f"{type(follower).__name__}."
        )
    for variable in follower.variables():
        _check_variable(variable)
    for parameter in follower.parameters():
        if parameter.is_complex():
            raise ValueError(
                f"Parameter `{parameter.name()}` is complex; write its real and its "
                "imaginary part as two real parameters."
            )
    _check_rules(follower)
    _check_objective(follower.objective)
    seen = set()
    for i, constraint in enumerate(follower.constraints):
        if constraint.id in seen:
            raise ValueError(
                f"constraints[{i}], {said(constraint)}, is there twice, so its price "
                "is not unique. Leave one out."
            )
        seen.add(constraint.id)
        _check_constraint(cp, i, constraint)


_KINDS = ("symmetric", "hermitian", "diag", "PSD", "NSD", "sparsity")


def _check_variable(variable) -> None:
    name, has = variable.name(), variable.attributes
    if has["boolean"] or has["integer"]:
        kind = "boolean" if has["boolean"] else "integer"
        raise ValueError(
            f"Variable `{name}` is {kind}: the answer of such a follower jumps, and "
            "has no derivative. Relax it to a continuous variable with bounds."
        )
    if variable.is_complex():
        raise ValueError(
            f"Variable `{name}` is complex; write its real and its imaginary part as "
            "two real variables."
        )
    for kind in _KINDS:
        if has.get(kind) is not None and has.get(kind) is not False:
            raise ValueError(
                f"Variable `{name}` was made with `{kind}`. Make it a plain variable "
                "and say the same by linear constraints, if they can say it."
            )


def _check_rules(follower) -> None:
    """Convexity, and convexity for all values of the parameters."""
    objective = follower.objective
    parts = [("The objective", objective.expr, objective)]
    for i, constraint in enumerate(follower.constraints):
        parts.append((f"constraints[{i}]", constraint, constraint))
    for where, tree, rule in parts:
        if not rule.is_dcp():
            raise ValueError(
                f"{where}, {said(tree)}, breaks the rules of convex programming "
                "(DCP): the follower must minimise a convex or maximise a concave "
                "quadratic under linear constraints. See cvxpy's `is_dcp`."
            )
        if not rule.is_dcp(dpp=True):
            culprit = _smallest(rule, lambda e: not e.is_dcp(dpp=True))
            raise ValueError(
                f"{where} does not depend on its parameters by the rules of DPP, "
                f"because of {said(culprit)}. Keep products of parameters, and "
                "functions of them, out of the model: make each of them a parameter of "
                "its own, and compute it from the leader's choice."
            )


def _check_objective(objective) -> None:
    if not objective.expr.is_qpwa():
        culprit = _smallest(objective, lambda e: not e.is_qpwa())
        raise ValueError(
            f"The objective is not quadratic because of {said(culprit)}; a follower "
            "from cvxpy has a linear, quadratic or piecewise linear objective. Write "
            "others with JAX, as `lower` of a Problem."
        )


def _check_constraint(cp, i: int, constraint) -> None:
    linear = cp.constraints.Zero, cp.constraints.NonNeg, cp.constraints.NonPos
    if isinstance(constraint, (cp.constraints.Equality, *linear)):
        return
    if isinstance(constraint, cp.constraints.Inequality):
        if all(side.is_affine() for side in constraint.args):
            return
        if all(side.is_pwl() for side in constraint.args):
            culprit = _smallest(constraint, lambda e: not e.is_affine())
            raise ValueError(
                f"constraints[{i}], {said(constraint)}, is not linear because of "
                f"{said(culprit)}. Write it as linear constraints, as in "
                "`[y <= c, y >= -c]` for `cp.abs(y) <= c` and one for each argument of "
                "a `cp.maximum`, or put it into the objective as a penalty. (Inside, "
                "nothing would decide the variables that cvxpy adds.)"
            )
        culprit = _smallest(constraint, lambda e: not e.is_pwl())
        raise ValueError(
            f"constraints[{i}], {said(constraint)}, is not linear because of "
            f"{said(culprit)}: it is another cone than those of linear equations and "
            "inequalities. Approximate it by linear ones, or put it into the objective "
            "as a quadratic penalty."
        )
    kind = type(constraint).__name__
    raise ValueError(
        f"constraints[{i}], {said(constraint)}, is of the cone {kind}; a follower from "
        "cvxpy has linear equations and inequalities."
    )


def _smallest(expression, is_wrong):
    """The expression within this one that is wrong while all of its own are not."""
    for argument in expression.args:
        if is_wrong(argument):
            return _smallest(argument, is_wrong)
    return expression


def said(expression) -> str:
    """An expression in one line."""
    text = " ".join(str(expression).split())
    return f"`{text}`" if len(text) <= 80 else f"`{text[:77]}...`"
