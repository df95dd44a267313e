"""Published methods, for `solve` and `compare`, all of one kind: `bx.methods.PIGD()`.

`DSBLO` is the method of this library; the others are those it is compared with.
"""

from ._methods.aipod import AiPOD as AiPOD
from ._methods.blocc import BLOCC as BLOCC
from ._methods.ds_blo import DSBLO as DSBLO
from ._methods.dsigd import DSIGD as DSIGD
from ._methods.e_aipod import EAiPOD as EAiPOD
from ._methods.gam import GAM as GAM
from ._methods.gradient_descent import GradientDescent as GradientDescent
from ._methods.igba import IGBA as IGBA
from ._methods.ingd import INGD as INGD
from ._methods.lv_hba import LVHBA as LVHBA
from ._methods.perturbed_ingd import PerturbedINGD as PerturbedINGD
from ._methods.perturbed_stochastic_ingd import (
    PerturbedStochasticINGD as PerturbedStochasticINGD,
)
from ._methods.pigd import PIGD as PIGD
from ._methods.proximal_subgradient import ProximalSubgradient as ProximalSubgradient
from ._methods.ssigd import SSIGD as SSIGD
from ._methods.stochastic_ingd import StochasticINGD as StochasticINGD
from ._methods.zero_order import ZeroOrder as ZeroOrder
