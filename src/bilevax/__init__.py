"""Constrained bilevel optimisation in JAX."""

from . import extend as extend, methods as methods, theory as theory
from ._compare.ablations import ablations as ablations
from ._compare.budget import Budget as Budget
from ._compare.cases import Case as Case
from ._compare.grid import StepGrid as StepGrid
from ._compare.runs import Comparison as Comparison, compare as compare
from ._constraints import (
    Box as Box,
    Intersection as Intersection,
    Polyhedron as Polyhedron,
    Simplex as Simplex,
)
from ._cvxpy import from_cvxpy as from_cvxpy
from ._driver.history import History as History
from ._driver.run import Stop as Stop
from ._driver.solution import Solution as Solution
from ._driver.solve import solve as solve, solve_many as solve_many
from ._driver.tune import Tuning as Tuning, tune as tune
from ._driver.upper_report import UpperReport as UpperReport
from ._files.checkpoint import CheckpointError as CheckpointError
from ._implicit.adjoint import (
    ConjugateGradient as ConjugateGradient,
    Danskin as Danskin,
    DenseAdjoint as DenseAdjoint,
    Neumann as Neumann,
    ScaledIdentity as ScaledIdentity,
)
from ._implicit.evaluation import (
    Evaluation as Evaluation,
    FollowersEvaluation as FollowersEvaluation,
)
from ._implicit.hypergradient import hypergradient as hypergradient
from ._implicit.quality import Quality as Quality
from ._implicit.solution_map import solution_map as solution_map
from ._implicit.upper_constraints import (
    UpperConstraints as UpperConstraints,
    constraint_gradients as constraint_gradients,
)
from ._judge.certificate import (
    Certificate as Certificate,
    certify as certify,
    moreau as moreau,
)
from ._judge.check import Check as Check, check as check
from ._judge.explain import Explanation as Explanation, explain as explain
from ._judge.objective import scipy_objective as scipy_objective
from ._judge.profile import Profile as Profile, profile as profile
from ._judge.sensitivity import (
    Sensitivity as Sensitivity,
    sensitivity as sensitivity,
)
from ._lower.active_set import ActiveSet as ActiveSet
from ._lower.base import LowerSolution as LowerSolution
from ._lower.closed_form import ClosedForm as ClosedForm
from ._lower.interior_point import InteriorPoint as InteriorPoint
from ._lower.projected import ProjectedGradient as ProjectedGradient
from ._lower.sparse.solver import SparseActiveSet as SparseActiveSet
from ._methods.aipod import AiPOD as AiPOD
from ._methods.blocc import BLOCC as BLOCC
from ._methods.ds_blo import DSBLO as DSBLO
from ._methods.dsigd import DSIGD as DSIGD
from ._methods.e_aipod import EAiPOD as EAiPOD
from ._methods.equality_oracle import equality_gradient as equality_gradient
from ._methods.gam import GAM as GAM
from ._methods.gradient_descent import GradientDescent as GradientDescent
from ._methods.igba import IGBA as IGBA
from ._methods.ingd import INGD as INGD
from ._methods.lv_hba import LVHBA as LVHBA
from ._methods.optax_step import (
    scale_by_normalised_momentum as scale_by_normalised_momentum,
)
from ._methods.penalty_oracle import (
    FirstOrderEvaluation as FirstOrderEvaluation,
    penalty_gradient as penalty_gradient,
)
from ._methods.perturbed_ingd import PerturbedINGD as PerturbedINGD
from ._methods.perturbed_stochastic_ingd import (
    PerturbedStochasticINGD as PerturbedStochasticINGD,
)
from ._methods.pigd import PIGD as PIGD
from ._methods.proximal_subgradient import ProximalSubgradient as ProximalSubgradient
from ._methods.ssigd import SSIGD as SSIGD
from ._methods.stochastic_ingd import StochasticINGD as StochasticINGD
from ._methods.zero_order import ZeroOrder as ZeroOrder
from ._problem.followers import Followers as Followers
from ._problem.host import HostFollowers as HostFollowers
from ._problem.penalised import penalised as penalised
from ._problem.perturbation import (
    Gaussian as Gaussian,
    TruncatedGaussian as TruncatedGaussian,
    UniformBall as UniformBall,
)
from ._problem.problem import (
    AbstractLocalLower as AbstractLocalLower,
    Problem as Problem,
)
from ._problem.stochastic import StochasticProblem as StochasticProblem
from ._status import (
    BilevelError as BilevelError,
    Status as Status,
    status_name as status_name,
)

__version__ = "0.1.0"
