"""Everything that decides a training run, as one record that goes into its rows."""

from dataclasses import asdict, dataclass

from ..attacks.boxes import check_radius
from .schedules import SCHEDULES

# The methods whose gradient passes through the attack.
BILEVEL = ("ds-blo", "tilted-momentum", "ssigd", "pigd", "bilevel-sgd")
METHODS = (*BILEVEL, "at", "trades", "fast-at", "clean")
READINGS = ("added", "tilt")
_CHOICES = dict(method=METHODS, schedule=SCHEDULES, reading=READINGS)
# What the numbers may be. Comparisons with NaN are false.
_RANGES = {
    ("rate", "implicit_weight", "attack_step", "sign_step"): (
        lambda value: 0 < value < float("inf"),
        "a positive number",
    ),
    ("variance", "weight_decay", "gamma1", "radius", "trades_beta"): (
        lambda value: 0 <= value < float("inf"),
        "a number that is not negative",
    ),
    ("momentum", "label_smoothing", "average"): (
        lambda value: 0 <= value < 1,
        "in [0, 1)",
    ),
    ("peak_at",): (lambda value: 0 < value <= 1, "in (0, 1]"),
    ("epochs", "batch_size", "width"): (lambda value: value >= 1, "at least 1"),
    ("attack_steps", "padding", "validation"): (
        lambda value: value >= 0,
        "not negative",
    ),
    ("seed",): (lambda value: 0 <= value < 2**31, "between 0 and 2^31 - 1"),
}


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
      (10). `sign_step`: makes the first attack one of sign steps of that length; AT and
      TRADES always take them, by default of a quarter of epsilon (2/255 at 8/255).
    - `implicit_weight`: the Hessian in the implicit gradient; `tied` takes the inverse
      of the attack step instead.
    - `variance`: of the tilt. `reading`: "added" states it in units of the perturbation
      it causes; "tilt" states it for `q` itself.
    - `radius`: length of the random shift of the weights in PIGD, as a share of the
      norm of the weights at the start.
    - `average`: decay of the average of the weights.
    - `validation`: how many training images, the last ones, are not trained on; after
      each epoch the average is attacked there, and that of the best epoch is kept.
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
    validation: int = 0
    padding: int = 4
    flip: bool = True
    dtype: str = "float32"
    activation: str = "relu"
    width: int | None = None
    seed: int = 0

    def __post_init__(self):
        for name, allowed in _CHOICES.items():
            if getattr(self, name) not in allowed:
                raise ValueError(
                    f"`{name}` is one of {', '.join(allowed)}; got "
                    f"{getattr(self, name)!r}."
                )
        check_radius(self.epsilon)
        for names, (holds, text) in _RANGES.items():
            for name in names:
                value = getattr(self, name)
                if value is not None and not holds(value):
                    raise ValueError(f"`{name}` is {text}; got {value}.")

    @property
    def step_of_attack(self) -> float:
        """`attack_step` or its default."""
        if self.attack_step is not None:
            return self.attack_step
        return (5000 if self.epsilon <= 8 / 255 + 1e-9 else 2000) / 255

    @property
    def sign_step_of_attack(self) -> float:
        """`sign_step` or the default of AT and TRADES, which reaches all of the box."""
        return self.epsilon / 4 if self.sign_step is None else self.sign_step

    @property
    def tilt_deviation(self) -> float:
        """Of `q`, whatever the reading."""
        sigma = self.variance**0.5
        return sigma / self.step_of_attack if self.reading == "added" else sigma

    def as_row(self) -> dict:
        """All settings, with the attack step and its default resolved."""
        return asdict(self) | dict(attack_step=self.step_of_attack)
