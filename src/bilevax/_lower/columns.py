"""Units of the columns: rows that mix variables of different units say what they are.

Rows are scaled to unit norm, which is no help where `y` is in kilometres and seconds
beside millimetres: the largest column then decides alone, and the others drown in its
rounding. With logarithms, `log|A_ij| + r_i + c_j` is made as small as it can be in the
mean (Curtis and Reid 1972), one row and one column after the other. Rows with a single
entry agree with every unit and have no say; neither has curvature, since stiff beside
soft is no matter of units.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

_SWEEPS = 6
# Units are powers of two, so that scaling rounds nothing, and coarse ones, so that
# programs without units stay as they are.
_STEP = 10


def may_have_units(A: Float[Array, "k n"]):
    """Whether entries of some row of unit norm differ by more than a step."""
    size = jnp.abs(A)
    return jnp.any((size > 0) & (size < 2.0 ** (-_STEP / 2)))


def units_of_columns(A: Float[Array, "k n"]) -> Float[Array, " n"]:
    """What to multiply each column with; most by one."""
    size = jnp.abs(A)
    entries = (size > 0) & jnp.isfinite(size)
    entries = entries & (jnp.sum(entries, axis=1) > 1)[:, None]
    logs = jnp.where(entries, jnp.log2(jnp.where(entries, size, 1)), 0)
    per_row = jnp.maximum(jnp.sum(entries, axis=1), 1)
    per_column = jnp.sum(entries, axis=0)

    def sweep(_, columns):
        rows = jnp.sum(jnp.where(entries, logs + columns, 0), axis=1) / per_row
        left = jnp.where(entries, logs - rows[:, None], 0)
        return -jnp.sum(left, axis=0) / jnp.maximum(per_column, 1)

    columns = jax.lax.fori_loop(0, _SWEEPS, sweep, jnp.zeros(A.shape[1], A.dtype))
    middle = jnp.nanmedian(jnp.where(per_column > 0, columns, jnp.nan))
    steps = jnp.round((columns - middle) / _STEP)
    exponent = _STEP * jnp.where((per_column > 0) & jnp.isfinite(steps), steps, 0)
    return jnp.exp2(exponent)
