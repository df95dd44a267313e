"""Everything that decides a training run, as one record that goes into its rows."""

from dataclasses import asdict, dataclass
from typing import NamedTuple

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
    ("epochs", "batch_size", "width", "implicit_every"): (
        lambda value: value >= 1,
        "at least 1",
    ),
    ("attack_steps", "padding", "validation"): (
        lambda value: value >= 0,
        "not negative",
    ),
    ("seed",): (lambda value: 0 <= value < 2**31, "between 0 and 2^31 - 1"),
}


class TrainingAttack(NamedTuple):
    """The attack while training: `steps` sign steps of `sign_step`, or plain ones.

    `attack_step` is the length of plain steps. Bilevel methods take one more of them at
    the end, which is their lower level; others take none, and have None.
    """

    steps: int
    sign_step: float | None
    attack_step: float | None


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
    - `attack_steps`, `sign_step`, `attack_step`: of the training attack. By default
      bilevel methods take four sign steps of half of epsilon and then, as their lower
      level, one plain step of 12.5 epsilon. An `attack_step` without a `sign_step`
      makes all steps plain, one before the last unless `attack_steps` says otherwise.
      AT and TRADES take sign steps alone: 10, of a quarter of epsilon. See `attack`.
    - `implicit_weight`: the Hessian in the implicit gradient; `tied` takes the inverse
      of the length of the last step instead.
    - `implicit_every`: N computes the implicit term at one step in N, drawn at random,
      and N times as large: a gradient with the same mean for less time.
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
    implicit_every: int = 1
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
    def attack(self) -> TrainingAttack:
        """What the three settings of the attack come to.

        The default of bilevel methods has two reasons. Four steps of half a radius
        reach all of the box, which is two radii wide, from any start. The plain step
        after them should decide which pixels are free and not where the attack goes:
        one that is long against the box is one more single-step attack, of up to two
        radii, which a network learns to mislead. All grows with the radius, so that
        the attack at another radius is the same one at another scale.
        """
        steps, size, last = self.attack_steps, self.sign_step, self.attack_step
        # In a box of a single point nothing moves, but steps need a length.
        radius = self.epsilon or 1.0
        if self.method in BILEVEL:
            if size is None and last is not None:
                return TrainingAttack(1 if steps is None else steps, None, last)
            size = radius / 2 if size is None else size
            last = 12.5 * radius if last is None else last
            return TrainingAttack(4 if steps is None else steps, size, last)
        if self.method == "clean":
            return TrainingAttack(0, None, None)
        if self.method == "fast-at":
            return TrainingAttack(1, 1.25 * radius, None)
        size = radius / 4 if size is None else size
        return TrainingAttack(10 if steps is None else steps, size, None)

    @property
    def tilt_deviation(self) -> float:
        """Of `q`, whatever the reading; only bilevel methods have a lower level."""
        sigma, step = self.variance**0.5, self.attack.attack_step
        return sigma if self.reading == "tilt" or step is None else sigma / step

    def as_row(self) -> dict:
        """All settings, those of the attack as they are used."""
        attack = self.attack
        return asdict(self) | dict(
            attack_steps=attack.steps,
            sign_step=attack.sign_step,
            attack_step=attack.attack_step,
        )
