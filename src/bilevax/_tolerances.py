"""Every numerical threshold of the library, as a function of the dtype.

Those below are the same in every dtype; they belong to the lower level.
"""

import functools
from typing import NamedTuple

import jax.numpy as jnp

# Units of columns: sweeps of Curtis and Reid's method. They are powers of two, so that
# scaling rounds nothing, and coarse ones: problems without units stay as they are.
UNIT_SWEEPS, UNIT_BITS = 6, 10

# Line search: share of the predicted decrease that a step must achieve (Armijo), and
# rounding errors of the merit function that it may lose.
ARMIJO, MERIT_ROUNDINGS = 1e-4, 16
# After a cut, the share of the violation that the next step aims at.
REACH_CUT = 0.25
# The proximal term shrinks after a full step and grows after a cut.
PROXIMAL_FALL, PROXIMAL_RISE, PROXIMAL_LEAST = 0.25, 4.0, 1e-6
# A certificate of Farkas holds for points that many lengths of the data away.
FARKAS_REACH = 1e4
# A row leaves the working set for a dependent one if its share exceeds so many
# `dependent`.
GIVES_WAY = 64

# Where a bound holds a coordinate, curvature below the first share of the largest may
# be none. The second is lent, as a share of what a force over a length would need.
FAINT, AUGMENTED = 1e-8, 1e-4
# Rounding of the test whether a matrix may be semidefinite.
MINORS = 1.001
# Lengths of the problem that a step may be long to count as one of it.
LONG_STEP = 100.0
# Share of the length of the problem at which a flat coordinate must bend.
FAR = 1e-2
# The share of the length of the rows that counts as a length of an answer near zero.
NEAR_ZERO = 1e-3
# A step may exceed what rounding makes of it so many times and still be rounding.
STEP_ROUNDINGS = 4
# Points beside an answer at which the rounding of its gradient is measured.
SAMPLES = 6
# Passes without progress end after so many, if they leave more than this share.
PATIENCE, DECLINE = 3, 0.5


class Tolerances(NamedTuple):
    """Thresholds that scale with the unit round-off `eps`.

    - `rounding`: a relative residual that arithmetic alone explains.
    - `accept`: the largest relative KKT residual a solved lower level may have.
    - `stale`: a pass that leaves more than this share of the residual used a wrong
      Hessian, so the next pass factors again.
    - `regularise`: added to the unit diagonal of the row Gram matrix so that dependent
      active rows factor; iterative refinement removes its effect.
    - `dependent`: eigenvalues of the Gram matrix of unit rows below this are zero.
    - `definite`: pivots of the Hessian below this share of its diagonal are zero.
    - `sure`: a share of the length of the problem by which an answer may be uncertain.
    - `weight`: of a quadratic term in a linear program: small, and rounding smaller.
    - `safety`: factor between an error estimate and the margin we trust.
    """

    eps: float
    rounding: float
    accept: float
    stale: float
    regularise: float
    dependent: float
    definite: float
    sure: float
    weight: float
    safety: float


@functools.lru_cache
def tolerances(dtype) -> Tolerances:
    """The ladder for one floating dtype (float64: accept is 1e-9, float32: 1e-4)."""
    eps = float(jnp.finfo(dtype).eps)
    return Tolerances(
        eps=eps,
        rounding=128 * eps,
        accept=1e-9 if eps < 1e-12 else 1e-4,
        stale=1e-3,
        regularise=64 * eps,
        dependent=8192 * eps,
        definite=16 * eps,
        sure=1e-6 if eps < 1e-12 else 1e-2,
        weight=eps**0.25,
        safety=16.0,
    )
