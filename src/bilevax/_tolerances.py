"""Every numerical threshold of the library, as a function of the dtype."""

import functools
from typing import NamedTuple

import jax.numpy as jnp


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
        safety=16.0,
    )
