"""All methods by their name on the command line, with the facts of the comparison.

`python -m bilevax._methods.catalogue` prints docs/methods.md.
"""

from dataclasses import dataclass

from .aipod import AiPOD
from .base import AbstractMethod
from .blocc import BLOCC
from .ds_blo import DSBLO
from .dsigd import DSIGD
from .e_aipod import EAiPOD
from .gam import GAM
from .igba import IGBA
from .ingd import INGD
from .lv_hba import LVHBA
from .perturbed_ingd import PerturbedINGD
from .perturbed_stochastic_ingd import PerturbedStochasticINGD
from .pigd import PIGD
from .proximal_subgradient import ProximalSubgradient
from .ssigd import SSIGD
from .stochastic_ingd import StochasticINGD
from .zero_order import ZeroOrder

_KHANDURI = "Khanduri et al., ICML 2023"
_KORNOWSKI = "Kornowski et al., NeurIPS 2024"
_XIAO = "Xiao et al., AISTATS 2023"
_INGD = "Zhang et al., ICML 2020"
_PERTURBED = "Davis et al., NeurIPS 2022; Tian, Zhou and So, ICML 2022"


@dataclass(frozen=True)
class Entry:
    """One method.

    - `name`, `kind`, `tests`: as printed, its class, and the file that tests it.
    - `rows`: the constraints of the lower level it was published for; LE are linear
      equalities, LI linear inequalities, GC general convex ones, and "single level"
      has none, the method seeing only gradients of `F`.
    - `setting`, `approach`, `measure`, `rate`: as in the two tables of the DS-BLO paper
      (`tab: Comparison_Bilevel`, `tab:table1`).
    """

    name: str
    kind: type[AbstractMethod]
    tests: str
    paper: str
    rows: str
    setting: str
    approach: str
    measure: str
    rate: str
    note: str = ""


_DET, _STO = "deterministic", "stochastic"
_IG, _PENALTY, _DIRECT = "implicit gradient", "penalty", "gradients of F"
_G, _S, _KKT, _MOREAU = "Goldstein", "stationarity", "KKT", "Moreau envelope"
_WEAK = "If F is weakly convex. The second table gives stationarity as the measure."

CATALOGUE: dict[str, Entry] = {
    "ds-blo": Entry(
        "DS-BLO", DSBLO, "test_ds_blo.py", "the DS-BLO paper", "LI", _STO,
        _IG, _G, "Õ(ε⁻⁴ δ⁻¹)",
        "For the problem with a tilted lower level; for the original one under a "
        "further assumption, with a slightly larger radius.",
    ),
    "ssigd": Entry(
        "[S]SIGD", SSIGD, "test_sigd.py", _KHANDURI, "LI", _STO, _IG,
        _MOREAU, "O(ε⁻⁴)", _WEAK,
    ),
    "dsigd": Entry(
        "[D]SIGD", DSIGD, "test_sigd.py", _KHANDURI, "LI", _DET, _IG, _S,
        "asymptotic",
    ),
    "pigd": Entry(
        "PIGD", PIGD, "test_pigd.py", _KORNOWSKI, "LI", _DET, _IG, _G,
        "O(ε⁻⁴ δ⁻¹)", "Needs exact multipliers of the lower level.",
    ),
    "zero-order": Entry(
        "Algorithm 3", ZeroOrder, "test_pigd.py", _KORNOWSKI,
        "LI", _DET, _IG, _G, "O(d ε⁻³ δ⁻¹)", "Sees values of F only.",
    ),
    "aipod": Entry(
        "AiPOD", AiPOD, "test_aipod.py", _XIAO, "LE", _STO, _IG, _S,
        "O(ε⁻⁴)",
    ),
    "e-aipod": Entry(
        "E-AiPOD", EAiPOD, "test_aipod.py", _XIAO, "LE", _STO, _IG, _S,
        "-", "A variant with fewer projections; not in the tables of the DS-BLO paper.",
    ),
    "igba": Entry(
        "IGBA", IGBA, "test_igba.py", "Tsaknakis et al., ICASSP 2023",
        "GC + LE", _DET, _IG, _S, "O(ε⁻²)",
        "For the problem with a logarithmic barrier in place of the inequalities.",
    ),
    "lv-hba": Entry(
        "LV-HBA", LVHBA, "test_lv_hba.py", "Yao et al., ICLR 2024", "GC",
        _DET, _PENALTY, _KKT, "O(ε⁻²)",
    ),
    "blocc": Entry(
        "BLOCC", BLOCC, "test_blocc.py", "Jiang et al., NeurIPS 2024", "GC",
        _DET, _PENALTY, _KKT, "O(ε⁻⁵)",
    ),
    "gam": Entry(
        "GAM", GAM, "test_gam.py", "Xu and Zhu, AAAI 2023", "GC", _DET, _IG,
        _S, "asymptotic",
    ),
    "ingd": Entry(
        "INGD", INGD, "test_ingd.py", _INGD, "single level", _DET, _DIRECT,
        _G, "Õ(ε⁻³ δ⁻¹)",
    ),
    "stochastic-ingd": Entry(
        "Stochastic INGD", StochasticINGD, "test_ingd.py", _INGD,
        "single level", _STO, _DIRECT, _G, "Õ(ε⁻⁴ δ⁻¹)",
    ),
    "perturbed-ingd": Entry(
        "Perturbed INGD", PerturbedINGD, "test_ingd.py", _PERTURBED,
        "single level", _DET, _DIRECT, _G, "Õ(ε⁻³ δ⁻¹)",
    ),
    "perturbed-stochastic-ingd": Entry(
        "Perturbed Stochastic INGD", PerturbedStochasticINGD,
        "test_ingd.py", _PERTURBED, "single level", _STO,
        _DIRECT, _G, "Õ(ε⁻⁴ δ⁻¹)",
    ),
    "proximal-subgradient": Entry(
        "Proximal stochastic subgradient", ProximalSubgradient,
        "test_sigd.py",
        "Davis and Drusvyatskiy, SIAM J. Optim. 2019", "single level", _STO, _DIRECT,
        _MOREAU, "O(ε⁻⁴)", "If F is weakly convex, plus a term with a simple prox.",
    ),
}  # fmt: skip

_HEAD = """# Methods

All of them minimise `F(x) = f(x, y*(x))` through `bx.solve(problem, method, x0, key=k)`
and need no argument. They share the lower-level solver, the random draws and the
counters, so that `bx.compare` and `bilevax compare` can set them side by side. A method
that cannot handle a problem says so in a sentence.

Constraint class, setting, measure and rate are those of the two tables of the DS-BLO
paper. LE: linear equalities; LI: linear inequalities; GC: general convex constraints;
single level: methods for a plain Lipschitz function, here fed with gradients of `F`.
Rates count gradient calls to reach the measure at `ε`, for Goldstein's with radius `δ`;
Õ leaves out logarithms; `d` is the number of entries of `x`.
"""


def as_markdown() -> str:
    """The page docs/methods.md."""
    names = (
        "method", "class", "command line", "constraints", "setting", "approach",
        "measure", "rate", "paper", "tests",
    )  # fmt: skip
    notes, lines = [], [names, ["---"] * len(names)]
    for command, entry in CATALOGUE.items():
        mark = ""
        if entry.note:
            notes.append(entry.note)
            mark = f" ({len(notes)})"
        lines.append(
            (
                entry.name, f"`{entry.kind.__name__}`", f"`{command}`", entry.rows,
                entry.setting, entry.approach, entry.measure, entry.rate + mark,
                entry.paper, f"[{entry.tests}](../tests/methods/{entry.tests})",
            )
        )  # fmt: skip
    table = "\n".join("| " + " | ".join(cells) + " |" for cells in lines)
    listed = "\n".join(f"{i}. {note}" for i, note in enumerate(notes, 1))
    return f"{_HEAD}\n{table}\n\n{listed}\n"


if __name__ == "__main__":
    print(as_markdown(), end="")
