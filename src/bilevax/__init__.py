"""Constrained bilevel optimisation in JAX."""

from ._adjoint import (
    ConjugateGradient as ConjugateGradient,
    DenseAdjoint as DenseAdjoint,
    Neumann as Neumann,
)
from ._constraints import Box as Box, Polyhedron as Polyhedron, Simplex as Simplex
from ._implicit import Evaluation as Evaluation, hypergradient as hypergradient
from ._lower.active_set import ActiveSet as ActiveSet
from ._lower.base import LowerSolution as LowerSolution
from ._lower.interior_point import InteriorPoint as InteriorPoint
from ._lower.projected import ProjectedGradient as ProjectedGradient
from ._perturbation import (
    Gaussian as Gaussian,
    TruncatedGaussian as TruncatedGaussian,
    UniformBall as UniformBall,
)
from ._problem import Problem as Problem, StochasticProblem as StochasticProblem
from ._quality import Quality as Quality
from ._solution_map import solution_map as solution_map
from ._status import (
    BilevelError as BilevelError,
    Status as Status,
    status_name as status_name,
)

__version__ = "0.1.0"
