"""Parameters, variables and constraints go by names: whether these tell them apart."""

import numpy as np
import scipy.sparse as sp

from .._constraints import Box

# What is not the user's goes by these names: variables and rows that cvxpy has added,
# and bounds that variables were made with.
AUXILIARY, BOUNDS = "auxiliary", "bounds"


def checked_leader(cp, follower, leader, upper) -> list:
    leader = [leader] if isinstance(leader, cp.Parameter) else leader
    if not isinstance(leader, list | tuple) or not leader:
        raise ValueError(
            "`leader` must be a list of the cvxpy.Parameters that the leader sets, at "
            f"least one; got {leader!r}."
        )
    for i, one in enumerate(leader):
        if not isinstance(one, cp.Parameter):
            hint = (
                " What the leader sets is a constant to the follower: make it a "
                "cp.Parameter."
                if isinstance(one, cp.Variable)
                else ""
            )
            raise ValueError(
                f"`leader[{i}]` must be a cvxpy.Parameter; got {type(one).__name__}."
                + hint
            )
    for i, one in enumerate(leader):
        if any(one is other for other in leader[:i]):
            raise ValueError(
                f"`leader` has the parameter `{one.name()}` twice; list it once."
            )
    known = {p.id for p in follower.parameters()}
    if hasattr(upper, "parameters"):
        known |= {p.id for p in upper.parameters()}
    for one in leader:
        if one.id not in known:
            there = ", ".join(f"`{p.name()}`" for p in follower.parameters()) or "none"
            raise ValueError(
                f"The leader's parameter `{one.name()}` is not in the follower's "
                f"problem, whose parameters are: {there}. Use the very object that the "
                "problem was made with, or leave it out."
            )
    _check_distinct([p.name() for p in leader], "the leader's parameters")
    return list(leader)


def check_values(follower, leader) -> None:
    """Parameters that nobody sets later must have a value now."""
    theirs = {p.id for p in leader}
    for p in follower.parameters():
        if p.id in theirs:
            continue
        if p.value is None:
            raise ValueError(
                f"Parameter `{p.name()}` has no value. Set `{p.name()}.value = ...` "
                "before `from_cvxpy`, or list it in `leader`."
            )
        value = p.value.toarray() if sp.issparse(p.value) else np.asarray(p.value)
        if not np.all(np.isfinite(value)):
            raise ValueError(
                f"Parameter `{p.name()}` holds a NaN or an infinity. Give it numbers, "
                "or list it in `leader`."
            )


def check_names(follower) -> None:
    names = [v.name() for v in follower.variables()]
    if not names:
        raise ValueError("The follower has no variables; there is nothing to answer.")
    _check_distinct(names, "the variables")
    if AUXILIARY in names:
        raise ValueError(
            f"A variable cannot be called `{AUXILIARY}`, which is what cvxpy's own "
            "variables go by in `y`. Give it another name."
        )


def _check_distinct(names: list[str], whose: str) -> None:
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(
            f"Two of {whose} are called `{twice[0]}`, and `x` and `y` go by names. "
            "Give each a name of its own, as in `cp.Variable(name=...)`."
        )


def constraint_names(follower) -> dict[int, str]:
    names = {}
    for i, constraint in enumerate(follower.constraints):
        label = constraint.label
        names[constraint.id] = f"constraints[{i}]" if label is None else str(label)
    twice = [name for name in names.values() if list(names.values()).count(name) > 1]
    if twice:
        raise ValueError(
            f"Two constraints are labelled `{twice[0]}`, and prices go by labels. Give "
            "each a label of its own with `.set_label(...)`."
        )
    for name in (BOUNDS, AUXILIARY):
        if name in names.values():
            raise ValueError(
                f"A constraint cannot be labelled `{name}`, which rows go by that no "
                "constraint has written down. Give it another label."
            )
    return names


def domain_of(leader) -> Box | None:
    """What the parameters were made with."""
    lower, upper = {}, {}
    for p in leader:
        has = p.attributes
        low, high = has.get("bounds") or (-np.inf, np.inf)
        low = np.maximum(low, 0 if has["nonneg"] or has["pos"] else -np.inf)
        high = np.minimum(high, 0 if has["nonpos"] or has["neg"] else np.inf)
        lower[p.name()] = np.broadcast_to(low, p.shape).astype(float)
        upper[p.name()] = np.broadcast_to(high, p.shape).astype(float)
    ends = (*lower.values(), *upper.values())
    return Box(lower, upper) if any(np.isfinite(end).any() for end in ends) else None
