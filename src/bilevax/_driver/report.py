"""What a solution is worth, in a few lines, each only where it says something."""

import textwrap
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.flatten_util import ravel_pytree

from .._constraints import Box, Polyhedron
from .._problem.coordinates import checked_names, coordinate_names
from .._tolerances import tolerances

# Ends of starts that agree to this share of their size are one.
_SAME = 1e-6
# How many names, or different ends, a line shows.
_SHOWN = 6
# Numbers up to which coordinates are named.
_NAMED = 1000
_WIDTH = 88


def report(solution: Any, names: Sequence[str] | None = None) -> str:
    """The report of a `Solution`; `names` are those of the coordinates of `x`."""
    names = checked_names(solution.x, names)
    lines = {
        "F": _value(solution),
        "x": _point(solution.x),
        "upper": _upper(solution),
        "ended": _ended(solution),
        "converged": _converged(solution),
        "starts": _starts(solution.starts),
        "flat": _flat(solution, names),
        "bounds": _bounds(solution, names),
        "next": _next(solution),
    }
    return "\n".join(
        textwrap.fill(
            text,
            _WIDTH,
            initial_indent=f"{label:<11}",
            subsequent_indent=" " * 11,
            break_long_words=False,
            break_on_hyphens=False,
        )
        for label, text in lines.items()
        if text
    )


def holding(domain: Box | Polyhedron | None, x) -> dict[str, str]:
    """The bounds on `x` that hold with equality, by coordinate or row."""
    flat = np.asarray(ravel_pytree(x)[0])
    if domain is None or flat.size > _NAMED:
        return {}
    tol = tolerances(flat.dtype).accept
    near = lambda a, b: np.abs(a - b) <= tol * (1 + np.abs(b))
    if isinstance(domain, Box):
        found, names = {}, coordinate_names(x)
        low, high = (
            np.asarray(ravel_pytree(b)[0]) for b in (domain.lower, domain.upper)
        )
        with np.errstate(invalid="ignore"):
            free = low < high
            for word, bound in (("lower", low), ("upper", high)):
                for k in np.flatnonzero(free & near(flat, bound)):
                    found[names[k]] = f"at its {word} bound {bound[k]:.6g}"
        return found
    rows, rhs = (
        np.asarray(domain.matrix(flat.size, flat.dtype)),
        np.asarray(domain.rhs(x)),
    )
    size = np.linalg.norm(rows, axis=1) * (1 + np.linalg.norm(flat))
    with np.errstate(invalid="ignore"):
        tight = np.abs(rows @ flat - rhs) <= tol * (size + np.abs(rhs))
    tight &= np.arange(len(rhs)) < domain.num_inequalities
    return {f"row {i} of `domain`": "holds" for i in np.flatnonzero(tight)}


def _value(s) -> str:
    text = f"{s.value:.10g}"
    if s.status_name == "successful":
        return text
    if not s.success or s.status_name == "violated":
        return f"{text} ({s.status_name}). {s.message}"
    if s.status_name == "kink":
        return f"{text} (x is on a kink of F, where minimisers often are)"
    return f"{text} ({s.status_name})"


def _point(x) -> str:
    show = lambda leaf: np.array2string(np.asarray(leaf), precision=6, threshold=12)
    with_paths = jax.tree_util.tree_flatten_with_path(x)[0]
    if len(with_paths) == 1 and not with_paths[0][0]:
        return show(with_paths[0][1])
    name = lambda path: jax.tree_util.keystr(path, simple=True, separator=".")
    shown = [f"{name(path)} = {show(leaf)}" for path, leaf in with_paths[:_SHOWN]]
    more = len(with_paths) - _SHOWN
    return ", ".join(shown) + (f", and {more} more" if more > 0 else "")


def _upper(s) -> str:
    """Constraints of the leader that involve `y`."""
    if s.upper is None:
        return ""
    held = [float(m) for m in np.asarray(ravel_pytree(s.upper.multipliers)[0])]
    names = coordinate_names(s.upper.multipliers, "upper_constraints")
    tight = [f"{n} ({m:.4g})" for n, m in zip(names, held, strict=True) if m > 0]
    met = "hold" if s.feasible else f"are violated by {s.violation:.3g}"
    told = f"; tight, with multipliers: {_listed(tight)}" if tight else ""
    return f"the upper constraints {met}{told}"


def _ended(s) -> str:
    parts = [f"{s.stopped}, {_counted(len(s.history), 'step')}"]
    if s.polish is not None:
        before, after = float(s.polish.start_value), float(s.value)
        if _differ(before, after):
            # No sign before a zero.
            ends = f"{before + 0.0:.6g} to {after + 0.0:.6g}"
            parts.append(f"the polish led from {ends}")
    if s.around is not None and s.around.rounds:
        parts.append(
            f"of that {s.around.gained:.3g} by a second look, which found lower points "
            "farther away than any gradient sees"
        )
    return "; ".join(parts)


def _converged(s) -> str:
    if not s.success:
        return ""
    if s.around is None:
        ran_out = "still falling" in s.stopped
        return "yes" if s.converged else "no" if ran_out else "not known"
    look = s.around
    if look.open:
        return (
            f"no: a probe around x was lower still after {look.rounds} second looks, "
            "each of which had led on"
        )
    if s.upper is not None:
        measured = (
            f"gradients of F and of the upper constraints at x combine to "
            f"{s.upper.residual:.1e} (zero where x is stationary)"
        )
        return f"{'yes' if s.converged else 'no'}: {measured}"
    measured = (
        f"gradients within {look.radius:.1g} of x combine to {look.measure:.1e} "
        "(zero where x is stationary)"
    )
    return f"{'yes' if s.converged else 'no'}: {measured}"


def _starts(starts) -> str:
    """How many starts end at which value."""
    if not starts:
        return ""
    groups: list[list[float]] = []
    for value in sorted(float(s.value) for s in starts if s.success):
        if groups and not _differ(groups[-1][0], value):
            groups[-1].append(value)
        else:
            groups.append([value])
    told = [f"{len(group)} at {_apart(group[0], groups)}" for group in groups[:_SHOWN]]
    if told:
        told[0] = told[0].replace(" at ", f" of {len(starts)} starts end at ", 1)
        if len(groups[0]) == 1:
            told[0] = told[0].replace("starts end", "starts ends")
    rest = sum(map(len, groups[_SHOWN:]))
    if rest:
        told.append(f"{rest} higher")
    failed = [s.status_name for s in starts if not s.success]
    if failed:
        kinds = ", ".join(sorted(set(failed)))
        told.append(f"{len(failed)} of {len(starts)} have no answer ({kinds})")
    return ", ".join(told)


def _flat(s, names) -> str:
    if s.around is None or not s.around.flat.any():
        return ""
    reach = s.around.flat
    shown = [f"{names[k]} (within {reach[k]:.2g})" for k in np.flatnonzero(reach)]
    return f"F does not change along {_listed(shown)}"


def _bounds(s, names) -> str:
    called = dict(zip(coordinate_names(s.x), names, strict=True))
    return _listed([f"{called.get(k, k)} {text}" for k, text in s.bounds.items()])


def _next(s) -> str:
    """One piece of advice, the first that fits."""
    if s.status_name == "unbounded" or "attained" in s.stopped:
        return "check the sign of `upper`, or restrict x by `domain`"
    if not s.success:
        return ""
    if "still falling" in s.stopped:
        return "more steps (`num_steps=`), or `polish=True`"
    if "time is spent" in s.stopped:
        return "more seconds (`stop=bx.Stop(seconds=...)`), or go on from solution.x"
    if s.around is None:
        return (
            "" if s.converged else "`polish=True`, or `bx.certify(problem, x, radius)`"
        )
    if not s.converged:
        return (
            "`bx.check(problem, solution.x)` says whether the gradient is right there; "
            "`bx.profile` shows F along a line; or go on from solution.x with a new key"
        )
    ends = [one.value for one in s.starts if one.success]
    best = sum(not _differ(value, s.value) for value in ends)
    if ends and best == 1 and len(ends) > 1:
        return f"only one start came here; try `num_starts={4 * len(ends)}`"
    if s.around.flat.any() and not s.starts:
        return "F is flat here: other starts may end lower (`num_starts=8`)"
    return ""


def _apart(value: float, groups: list[list[float]]) -> str:
    """With as many digits as tell the ends apart."""
    for digits in range(6, 12):
        shown = {f"{group[0]:.{digits}g}" for group in groups}
        if len(shown) == len(groups):
            break
    return f"{value:.{digits}g}"


def _differ(a: float, b: float) -> bool:
    return abs(a - b) > _SAME * max(abs(a), abs(b))


def _listed(things: list[str]) -> str:
    more = len(things) - _SHOWN
    return ", ".join(things[:_SHOWN]) + (f", and {more} more" if more > 0 else "")


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" + ("" if count == 1 else "s")
