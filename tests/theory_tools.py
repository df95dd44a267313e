"""What the tests of the constants share."""

import math
from typing import Any

import numpy as np

import bilevax as bx
from bilevax import theory

from . import zoo

ROUNDING = 1 + zoo.IDENTITY
NO_ROWS: dict[str, Any] = dict(L_A=0, L_B=0, lambda_min=math.inf)


def norm(part) -> float:
    """The Euclidean norm of a vector, the spectral norm of a matrix."""
    return float(np.linalg.norm(part, 2))


def box(*bounds):
    return bx.Box(*(np.asarray(bound, float) for bound in zip(*bounds, strict=True)))


def constants(**given):
    names = theory.DerivedConstants.__dataclass_fields__
    values: dict[str, Any] = {name: 1.0 for name in names if name != "label"} | given
    return theory.DerivedConstants(**values)
