"""The analysis of DS-BLO as functions: constants, inputs of the method, guarantees.

`measure` gives the constants of the assumptions on a region, `derived` all others,
`algorithm_inputs`, `transfer` and `perturbation_gap` what follows for a user.
Docstrings carry the labels of the paper; slips of the paper are corrected and named.
"""

from .constants import (
    L_F as L_F,
    BaseConstants as BaseConstants,
    C_q as C_q,
    DerivedConstants as DerivedConstants,
    L_lambda as L_lambda,
    L_y as L_y,
    Lbar_A as Lbar_A,
    Lbar_F as Lbar_F,
    Lbar_lambda as Lbar_lambda,
    Lbar_y as Lbar_y,
    Ltilde_F as Ltilde_F,
    Ltilde_y as Ltilde_y,
    delta_q as delta_q,
    delta_v as delta_v,
    derived as derived,
    lambda_lipschitz as lambda_lipschitz,
    sigma_F as sigma_F,
    y_lipschitz as y_lipschitz,
)
from .inputs import (
    AlgorithmInputs as AlgorithmInputs,
    TiltNorm as TiltNorm,
    Transfer as Transfer,
    active_set_radius as active_set_radius,
    algorithm_inputs as algorithm_inputs,
    identification_steps as identification_steps,
    perturbation_gap as perturbation_gap,
    tilt_norm as tilt_norm,
    transfer as transfer,
)
from .measure import measure as measure
