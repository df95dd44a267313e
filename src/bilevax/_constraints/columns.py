"""Units of the columns: rows that mix variables of different units say what they are.

Rows are scaled to unit norm, which is no help where `y` is in kilometres and seconds
beside millimetres: the largest column then decides alone, and the others drown in its
rounding. With logarithms, `log|A_ij| + r_i + c_j` is made as small as it can be in the
mean (Curtis and Reid 1972), one row and one column after the other. Rows with a single
entry agree with every unit and have no say; neither has curvature, since stiff beside
soft is no matter of units.
"""

from jax.core import Tracer
from jaxtyping import Array, Float

from .._programs.arrays import xp
from .._programs.control import loop, on_device, on_host, run_if, stage_by_stage
from .._tolerances import UNIT_BITS, UNIT_SWEEPS


def units_of_columns(A: Float[Array, "k n"]) -> Float[Array, " n"]:
    """What to multiply each column with; most by one.

    It belongs to the rows, so it is found once, where they are made.
    """
    if not isinstance(A, Tracer):
        with stage_by_stage():
            return on_device(_units(on_host(A)))
    return _units(A)


def _units(A):
    ones = xp.ones(A.shape[1], A.dtype)
    return run_if(_may_have_units(A), lambda _: _curtis_reid(A), ones)


def _may_have_units(A: Float[Array, "k n"]):
    """Whether entries of some row of unit norm differ by more than a step."""
    size = xp.abs(A)
    largest = xp.max(size, axis=1, keepdims=True, initial=0)
    return xp.any((size > 0) & (size < 2.0 ** (-UNIT_BITS / 2) * largest))


def _curtis_reid(A: Float[Array, "k n"]) -> Float[Array, " n"]:
    size = xp.abs(A)
    entries = (size > 0) & xp.isfinite(size)
    entries = entries & (xp.sum(entries, axis=1) > 1)[:, None]
    logs = xp.where(entries, xp.log2(xp.where(entries, size, 1)), 0)
    per_row = xp.maximum(xp.sum(entries, axis=1), 1)
    per_column = xp.sum(entries, axis=0)

    def sweep(state):
        count, columns = state
        rows = xp.sum(xp.where(entries, logs + columns, 0), axis=1) / per_row
        left = xp.where(entries, logs - rows[:, None], 0)
        return count + 1, -xp.sum(left, axis=0) / xp.maximum(per_column, 1)

    none = (xp.asarray(0), xp.zeros(A.shape[1], A.dtype))
    _, columns = loop(lambda s: s[0] < UNIT_SWEEPS, sweep, none, limit=UNIT_SWEEPS)
    # A zero for all where no column has a say: the median of nothing is a warning.
    say = (per_column > 0) | ~xp.any(per_column > 0)
    middle = xp.nanmedian(xp.where(say, columns, xp.nan))
    steps = xp.round((columns - middle) / UNIT_BITS)
    exponent = UNIT_BITS * xp.where((per_column > 0) & xp.isfinite(steps), steps, 0)
    return xp.exp2(exponent).astype(A.dtype)
