"""What methods, solvers, adjoints, sets and laws of your own are made of.

A class of your own that implements one of the abstract ones here goes wherever the
library's own go: a method into `solve`, `tune` and `compare`, a lower-level solver and
an adjoint into `Problem`, `hypergradient` and `solution_map`, a law into the methods
that draw tilts. docs/own_method.md has a worked example.
"""

from ._constraints.base import (
    AbstractConstraints as AbstractConstraints,
    AbstractFixedSet as AbstractFixedSet,
)
from ._implicit.adjoint import (
    AbstractAdjoint as AbstractAdjoint,
    KKTSystem as KKTSystem,
)
from ._implicit.feasible import onto_allowed as onto_allowed, onto_domain as onto_domain
from ._implicit.hypergradient import Evaluation as Evaluation
from ._lower.base import (
    AbstractLowerSolver as AbstractLowerSolver,
    LowerSolution as LowerSolution,
)
from ._methods.asking import (
    AbstractAskingMethod as AbstractAskingMethod,
    Query as Query,
)
from ._methods.base import (
    AbstractMethod as AbstractMethod,
    Draws as Draws,
    Record as Record,
    Scales as Scales,
    at_step as at_step,
    draws as draws,
    falling as falling,
    number as number,
    report as report,
    tree_norm as tree_norm,
    tree_step as tree_step,
)
from ._methods.oracle import Oracle as Oracle, gradient_at as gradient_at
from ._methods.search import Point as Point, select as select, value_at as value_at
from ._problem.perturbation import AbstractPerturbation as AbstractPerturbation
from ._problem.problem import (
    AbstractLocalLower as AbstractLocalLower,
    AbstractProblem as AbstractProblem,
)
from ._problem.samplers import AbstractSampler as AbstractSampler
