"""Everything that decides a training run, as one record that goes into its rows."""

from dataclasses import asdict, dataclass
from fractions import Fraction

# The methods whose gradient passes through the attack.
BILEVEL = ("ds-blo", "tilted-momentum", "ssigd", "pigd", "bilevel-sgd")
METHODS = (*BILEVEL, "at", "trades", "fast-at", "clean")
READINGS = ("added", "tilt")


@dataclass(frozen=True)
class Settings:
    """A run of `train`.

    - `method`: one of `METHODS`. "tilted-momentum" is DS-BLO with gradients at the
      iterate itself, which is not the method of the paper; "bilevel-sgd" is the bilevel
      gradient with plain momentum (the recipe of Fast-BAT); "clean" trains without an
      attack.
    - `epsilon`: radius of the attack, in units of the pixel range [0, 1].
    - `rate`, `schedule`: peak of the learning rate of SGD, and how it moves. DS-BLO
      averages gradients instead of adding them up, so its `1 / gamma2` is the rate
      over `1 - momentum`.
    - `gamma1`: of DS-BLO.
    - `attack_step`: length of a plain step of the bilevel attack; by default 5000/255,
      and 2000/255 for epsilon above 8/255.
    - `attack_steps`: of the first attack of bilevel methods (1), or of AT and TRADES
      (10). `sign_step`: makes the first attack one of sign steps of that length.
    - `implicit_weight`: the Hessian in the implicit gradient; `tied` takes the inverse
      of the attack step instead.
    - `variance`: of the tilt. `reading`: "added" states it in units of the perturbation
      it causes; "tilt" states it for `q` itself.
    - `radius`: length of the random shift of the weights in PIGD, as a share of the
      norm of the weights at the start.
    - `average`: decay of the average of the weights.
    """

    method: str = "ds-blo"
    model: str = "preact-resnet18"
    epsilon: float = 8 / 255
    epochs: int = 40
    batch_size: int = 256
    rate: float = 0.3
    schedule: str = "triangular"
    peak_at: float = 0.4
    momentum: float = 0.9
    weight_decay: float = 5e-4
    label_smoothing: float = 0.0
    gamma1: float = 0.01
    attack_step: float | None = None
    attack_steps: int | None = None
    sign_step: float | None = None
    implicit_weight: float = 10.0
    tied: bool = False
    variance: float = 5e-5
    reading: str = "added"
    radius: float = 1e-4
    trades_beta: float = 6.0
    average: float = 0.995
    padding: int = 4
    flip: bool = True
    dtype: str = "float32"
    activation: str = "relu"
    width: int | None = None
    seed: int = 0

    def __post_init__(self):
        for name, allowed in (("method", METHODS), ("reading", READINGS)):
            if getattr(self, name) not in allowed:
                raise ValueError(
                    f"`{name}` is one of {', '.join(allowed)}; got "
                    f"{getattr(self, name)!r}."
                )
        if not 0 <= self.epsilon <= 1:
            raise ValueError(
                "`epsilon` is in units of the pixel range [0, 1], such as 8/255; got "
                f"{self.epsilon}."
            )
        for name in ("rate", "implicit_weight", "attack_step", "sign_step"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise ValueError(f"`{name}` is a positive number; got {value}.")
        if not 0 <= self.momentum < 1:
            raise ValueError(f"`momentum` is in [0, 1); got {self.momentum}.")
        if not 0 <= self.variance < float("inf"):
            raise ValueError(f"`variance` is not negative; got {self.variance}.")
        for name in ("epochs", "batch_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"`{name}` is at least 1; got {getattr(self, name)}.")

    @property
    def step_of_attack(self) -> float:
        """`attack_step` or its default."""
        if self.attack_step is not None:
            return self.attack_step
        return (5000 if self.epsilon <= 8 / 255 + 1e-9 else 2000) / 255

    @property
    def tilt_deviation(self) -> float:
        """Of `q`, whatever the reading."""
        sigma = self.variance**0.5
        return sigma / self.step_of_attack if self.reading == "added" else sigma

    def as_row(self) -> dict:
        """All settings, with the attack step and its default resolved."""
        return asdict(self) | dict(attack_step=self.step_of_attack)


def fraction(text: str) -> float:
    """A number such as `0.03` or `8/255`."""
    try:
        return float(Fraction(text))
    except ZeroDivisionError:
        raise ValueError(f"{text} divides by zero.") from None
