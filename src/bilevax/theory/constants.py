"""The constants of the analysis: plain arithmetic on the constants of the assumptions.

Names follow the paper: `Lbar_` bounds a size, `L_` a change under an error of `y`,
`Ltilde_` a local Lipschitz constant in `x`. A problem without rows has `L_A = 0` and
`lambda_min = inf`, for which all multiplier constants vanish.
"""

import math

import equinox as eqx

from .._constraints import Box


class BaseConstants(eqx.Module):
    """The constants of the assumptions, valid on a region of `x` and `y`.

    - `mu_g`: smallest curvature of `g` in `y` (`ass:str_cvx_h`).
    - `L_g`: Lipschitz constant of `grad_y g` in `(x, y)` (`ass:g_lip_grad`).
    - `Lbar_gyy`: largest curvature of `g` in `y`; the part of `L_g` in `y` alone.
    - `Lbar_gxy`: largest norm of the mixed derivative of `g` (`ass:Hes_bound_gxy`).
    - `L_gyy`, `L_gxy`: Lipschitz constants, in `(x, y)`, of the Hessian in `y` and of
      the mixed derivative (`ass:Hes_gyy`, `ass:Hes_lip_gxy`).
    - `Lbar_f`, `L_f`: bound and Lipschitz constant of the gradient of `f`
      (`ass:grad_f_bound`, `ass:grad_f_lip`).
    - `L_A`, `L_B`: largest norms of the active rows of `A`, and of `B`.
    - `lambda_min`: smallest eigenvalue of `A A^T` over active rows.
    - `sigma_f`: standard deviation of the sampled gradient of `f` (`ass:SG`).

    `region_x` and `region_y` state the region, where it is known.
    `bounds` and `estimates` name the entries that are rigorous but not tight, and those
    that are sampled and guarantee nothing; all others are exact, or taken as given.
    `broken` says, label first, which assumptions were found not to hold.
    """

    mu_g: float
    L_g: float
    Lbar_gyy: float
    Lbar_gxy: float
    L_gyy: float
    L_gxy: float
    Lbar_f: float
    L_f: float
    L_A: float
    L_B: float
    lambda_min: float
    sigma_f: float = 0.0
    region_x: Box | None = None
    region_y: Box | None = None
    bounds: frozenset[str] = eqx.field(static=True, default=frozenset())
    estimates: frozenset[str] = eqx.field(static=True, default=frozenset())
    broken: tuple[str, ...] = eqx.field(static=True, default=())

    def __check_init__(self):
        for name in CONSTANT_NAMES:
            if name in ("mu_g", "lambda_min"):
                check_positive(name, getattr(self, name), finite=name == "mu_g")
            else:
                check_non_negative(name, getattr(self, name))

    def label(self, name: str) -> str:
        """ "exact", "bound" or "estimate", for the constant called `name`."""
        if name not in CONSTANT_NAMES:
            raise ValueError(
                f"`name` must be one of {', '.join(CONSTANT_NAMES)}; got {name!r}."
            )
        if name in self.estimates:
            return "estimate"
        return "bound" if name in self.bounds else "exact"


CONSTANT_NAMES = (
    "mu_g",
    "L_g",
    "Lbar_gyy",
    "Lbar_gxy",
    "L_gyy",
    "L_gxy",
    "Lbar_f",
    "L_f",
    "L_A",
    "L_B",
    "lambda_min",
    "sigma_f",
)


def Lbar_A(*, Lbar_gyy: float, lambda_min: float) -> float:
    """Bound on `(A H^-1 A^T)^-1`, with `A` the active rows (`lem:prelim1`).

    `Lbar_gyy / lambda_min(A A^T)`; the paper prints an undefined numerator.
    """
    check_non_negative("Lbar_gyy", Lbar_gyy)
    check_positive("lambda_min", lambda_min, finite=False)
    return Lbar_gyy / lambda_min


def Lbar_lambda(
    *, mu_g: float, Lbar_gxy: float, L_A: float, L_B: float, Lbar_A: float
) -> float:
    """Bound on the Jacobian of the multipliers (`lem:lambda_y_bound`).

    `Lbar_A (L_A Lbar_gxy / mu_g + L_B)`: the statement forgets `L_B`, its proof not.
    """
    check_positive("mu_g", mu_g)
    return Lbar_A * (L_A * Lbar_gxy / mu_g + L_B)


def Lbar_y(*, mu_g: float, Lbar_gxy: float, L_A: float, Lbar_lambda: float) -> float:
    """Bound on the Jacobian of `y*` (`lem:lambda_y_bound`).

    `(Lbar_gxy + L_A Lbar_lambda) / mu_g`.
    """
    check_positive("mu_g", mu_g)
    return (Lbar_gxy + L_A * Lbar_lambda) / mu_g


def L_lambda(
    *,
    mu_g: float,
    Lbar_gxy: float,
    L_gyy: float,
    L_gxy: float,
    L_A: float,
    L_B: float,
    Lbar_A: float,
) -> float:
    """Change of the multiplier Jacobian per unit of error in `y` (`lem:lambda_err`).

    `(Lbar_A L_A / mu_g)^2 L_gyy (L_A Lbar_gxy / mu_g + L_B)
    + Lbar_A L_A (L_gxy / mu_g + L_gyy Lbar_gxy / mu_g^2)`, as the proof ends.
    """
    check_positive("mu_g", mu_g)
    inner = (Lbar_A * L_A / mu_g) ** 2 * L_gyy * (L_A * Lbar_gxy / mu_g + L_B)
    return inner + Lbar_A * L_A * (L_gxy / mu_g + L_gyy * Lbar_gxy / mu_g**2)


def L_y(
    *,
    mu_g: float,
    Lbar_gxy: float,
    L_gyy: float,
    L_gxy: float,
    L_A: float,
    Lbar_lambda: float,
    L_lambda: float,
) -> float:
    """Change of the Jacobian of `y*` per unit of error in `y` (`lem:y_err`).

    `L_gyy (Lbar_gxy + L_A Lbar_lambda) / mu_g^2 + (L_gxy + L_A L_lambda) / mu_g`.
    """
    check_positive("mu_g", mu_g)
    moved = L_gyy * (Lbar_gxy + L_A * Lbar_lambda) / mu_g**2
    return moved + (L_gxy + L_A * L_lambda) / mu_g


def L_F(*, L_f: float, Lbar_f: float, Lbar_y: float, L_y: float) -> float:
    """Bias of the implicit gradient per unit of error in `y` (`lem:F`).

    `L_f + Lbar_f L_y + L_f Lbar_y`, on the right active set.
    """
    return L_f * (1 + Lbar_y) + Lbar_f * L_y


def Lbar_F(*, Lbar_f: float, Lbar_y: float) -> float:
    """Bound on the implicit gradient: `(1 + Lbar_y) Lbar_f` (`lem:F`)."""
    return (1 + Lbar_y) * Lbar_f


def sigma_F(*, sigma_f: float, Lbar_y: float) -> float:
    """Deviation of the implicit gradient from sampling `f` (`lem: SG_IG`).

    `sqrt(2 sigma_f^2 + 2 Lbar_y^2 sigma_f^2)`; the paper forgets the square.
    """
    return math.sqrt(2) * sigma_f * math.hypot(1, Lbar_y)


def delta_q(*, Lbar_F: float) -> float:
    """Deviation of the implicit gradient from the tilt: `2 Lbar_F` (`lem:F_Variance`).

    The paper calls this, too, `delta_v`.
    """
    return 2 * Lbar_F


def delta_v(*, Lbar_F: float, sigma_F: float = 0.0) -> float:
    """Total deviation of the sampled implicit gradient (`lem: SG_IG`).

    `sqrt(delta_q^2 + sigma_F^2)`: tilt and sample are drawn independently.
    """
    return math.hypot(delta_q(Lbar_F=Lbar_F), sigma_F)


def C_q(*, mu_g: float, L_F: float) -> float:
    """Change of the implicit gradient per unit of tilt (`prop:equivalence`).

    `L_F / mu_g`: a tilt moves `y*` by at most `|q| / mu_g`, on one active set. The
    printed constant lacks a factor `1 / mu_g` in its second bracket.
    """
    check_positive("mu_g", mu_g)
    return L_F / mu_g


def Ltilde_y(*, Lbar_y: float, L_y: float) -> float:
    """Local Lipschitz constant of the Jacobian of `y*` (`eq:lip_y_const`).

    The brackets of the paper add up to `L_y (1 + Lbar_y)`: moving `x` by one unit moves
    `(x, y*)` by at most `1 + Lbar_y`, and `L_gyy`, `L_gxy` are joint in `(x, y)`.
    """
    return L_y * (1 + Lbar_y)


def Ltilde_F(*, L_f: float, Lbar_f: float, Lbar_y: float, Ltilde_y: float) -> float:
    """Local Lipschitz constant of the implicit gradient (`eq:lip_F_const`).

    `L_f (1 + Lbar_y) + Lbar_f Ltilde_y + Lbar_y L_f (1 + Lbar_y)`, without the stray
    distance that the paper leaves in the first term.
    """
    return L_f * (1 + Lbar_y) ** 2 + Lbar_f * Ltilde_y


def y_lipschitz(*, mu_g: float, Lbar_gxy: float) -> float:
    """Lipschitz constant of `y*` where the set does not move: `Lbar_gxy / mu_g`.

    `lem: y_Lip`, corrected; with coupling use `Lbar_y`.
    """
    check_positive("mu_g", mu_g)
    return Lbar_gxy / mu_g


def lambda_lipschitz(
    *, mu_g: float, L_g: float, Lbar_gxy: float, sigma_min: float
) -> float:
    """Lipschitz constant of the multipliers where the set does not move (`lem: y_Lip`).

    `L_g / sigma_min (1 + Lbar_gxy / mu_g)`, with `sigma_min` the smallest singular
    value of all of `A`, which must have independent rows.
    """
    check_positive("sigma_min", sigma_min)
    moved = 1 + y_lipschitz(mu_g=mu_g, Lbar_gxy=Lbar_gxy)
    return L_g / sigma_min * moved


class DerivedConstants(eqx.Module):
    """Every constant of the analysis; each field is the function of the same name.

    `label` is "estimate" where any constant that it rests on is, else "bound".
    """

    Lbar_A: float
    Lbar_lambda: float
    Lbar_y: float
    L_lambda: float
    L_y: float
    L_F: float
    Lbar_F: float
    sigma_F: float
    delta_q: float
    delta_v: float
    C_q: float
    Ltilde_y: float
    Ltilde_F: float
    label: str = eqx.field(static=True, default="bound")


def derived(base: BaseConstants) -> DerivedConstants:
    """The constants of the analysis that follow from those of the assumptions."""
    b = base
    a_inv = Lbar_A(Lbar_gyy=b.Lbar_gyy, lambda_min=b.lambda_min)
    lam = Lbar_lambda(
        mu_g=b.mu_g, Lbar_gxy=b.Lbar_gxy, L_A=b.L_A, L_B=b.L_B, Lbar_A=a_inv
    )
    y = Lbar_y(mu_g=b.mu_g, Lbar_gxy=b.Lbar_gxy, L_A=b.L_A, Lbar_lambda=lam)
    smooth = dict(
        mu_g=b.mu_g, Lbar_gxy=b.Lbar_gxy, L_gyy=b.L_gyy, L_gxy=b.L_gxy, L_A=b.L_A
    )
    lam_change = L_lambda(**smooth, L_B=b.L_B, Lbar_A=a_inv)
    y_change = L_y(**smooth, Lbar_lambda=lam, L_lambda=lam_change)
    bias = L_F(L_f=b.L_f, Lbar_f=b.Lbar_f, Lbar_y=y, L_y=y_change)
    size = Lbar_F(Lbar_f=b.Lbar_f, Lbar_y=y)
    noise = sigma_F(sigma_f=b.sigma_f, Lbar_y=y)
    y_local = Ltilde_y(Lbar_y=y, L_y=y_change)
    return DerivedConstants(
        Lbar_A=a_inv,
        Lbar_lambda=lam,
        Lbar_y=y,
        L_lambda=lam_change,
        L_y=y_change,
        L_F=bias,
        Lbar_F=size,
        sigma_F=noise,
        delta_q=delta_q(Lbar_F=size),
        delta_v=delta_v(Lbar_F=size, sigma_F=noise),
        C_q=C_q(mu_g=b.mu_g, L_F=bias),
        Ltilde_y=y_local,
        Ltilde_F=Ltilde_F(L_f=b.L_f, Lbar_f=b.Lbar_f, Lbar_y=y, Ltilde_y=y_local),
        label="estimate" if b.estimates else "bound",
    )


def check_positive(name: str, value: float, *, finite: bool = True) -> None:
    """Raise a `ValueError` unless `value > 0`; NaN never passes."""
    if not value > 0 or (finite and math.isinf(value)):
        kind = "positive and finite" if finite else "positive"
        raise ValueError(f"`{name}` must be {kind}; got {value}.")


def check_non_negative(name: str, value: float) -> None:
    """Raise a `ValueError` unless `0 <= value < inf`."""
    if not 0 <= value < math.inf:
        raise ValueError(f"`{name}` must be non-negative and finite; got {value}.")
