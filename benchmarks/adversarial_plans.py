"""What `benchmarks.adversarial` runs: settings by name, and how they were chosen."""

import dataclasses

from bilevax.adversarial.training.settings import BILEVEL, Settings

BASE = Settings(dtype="bfloat16", epochs=20)
HELD_OUT = 5000
# Chosen on held-out images, see adversarial.md.
TUNED = {
    "ds-blo": dict(rate=0.4, momentum=0.8),
    "tilted-momentum": dict(rate=0.3),
    "ssigd": dict(rate=0.3),
    "pigd": dict(rate=0.3),
    "bilevel-sgd": dict(rate=0.3),
    "at": dict(rate=0.2),
    "trades": dict(rate=0.2),
}
# At 16/255 a plain step is too weak: sign steps of 4/255 before it (adversarial.md).
LARGE = dict(epsilon=16 / 255, sign_step=4 / 255)
# The variances of the paper's table.
VARIANCES = {"ssigd": (2e-5, 8e-5, 6e-5), "ds-blo": (5e-5, 1e-4, 1e-5)}
# For long runs: a harder attack, since there is clean accuracy to spare, and an average
# over more steps, since there are more.
HARDER = dict(attack_steps=3, sign_step=3 / 255, average=0.999)


def gentle(radius: float) -> dict:
    """The default attack of bilevel methods, by numbers: rows outlive defaults."""
    return dict(
        epsilon=radius, attack_steps=4, sign_step=radius / 2, attack_step=12.5 * radius
    )


def change(**changes) -> Settings:
    """Settings of the earlier plans, whose bilevel methods end with a long plain step:
    5000/255, or 2000/255 above 8/255."""
    settings = dataclasses.replace(BASE, **changes)
    if settings.method not in BILEVEL or settings.attack_step is not None:
        return settings
    length = (5000 if settings.epsilon <= 8 / 255 + 1e-9 else 2000) / 255
    return dataclasses.replace(settings, attack_step=length)


def tuned(method: str, **changes) -> Settings:
    return change(**(dict(method=method) | TUNED[method] | changes))


def tune() -> list[Settings]:
    """Steps and momentum of DS-BLO, steps of its rivals; on held-out images."""
    pairs = (
        (0.3, 0.9), (0.2, 0.9), (0.5, 0.9), (0.3, 0.8), (0.3, 0.95), (0.2, 0.5),
        (0.2, 0.8), (0.1, 0.5), (1.0, 0.5), (0.4, 0.8),
    )  # fmt: skip
    runs = [change(rate=rate, momentum=momentum) for rate, momentum in pairs]
    runs += [change(method="tilted-momentum")]
    runs += [change(method="at", rate=0.2)]
    runs += [change(method="bilevel-sgd", rate=rate) for rate in (0.2, 0.3)]
    runs += [change(method="tilted-momentum", rate=0.2)]
    runs += [change(method="trades", rate=rate) for rate in (0.2, 0.3)]
    return [*runs, change(method="at", rate=0.3)]


def tune_weight() -> list[Settings]:
    """The implicit weight between 1 and its tied value, watched for a collapse."""
    runs = [tuned("ds-blo", implicit_weight=weight) for weight in (1.0, 0.3, 0.1)]
    return [*runs, tuned("ds-blo", tied=True)]


def tune_16() -> list[Settings]:
    """How hard the lower level must be solved at 16/255."""
    large = dict(epsilon=16 / 255)
    signs = [
        tuned("ds-blo", attack_steps=steps, sign_step=size / 255, **large)
        for steps, size in ((4, 4), (2, 8))
    ]
    longer = tuned("ds-blo", attack_step=5000 / 255, **large)
    return [*signs, longer, tuned("ds-blo", **large)]


def tune_long() -> list[Settings]:
    """What a longer run gains from: a harder attack, slower averages, soft labels."""
    harder = dict(attack_steps=3, sign_step=3 / 255)
    return [
        tuned("ds-blo", epochs=40, **harder),
        tuned("ds-blo", epochs=40, **HARDER),
        tuned("ds-blo", epochs=40, label_smoothing=0.2, **harder),
    ]


def tune_gentle() -> list[Settings]:
    """Whether what keeps 16/255 sound does so at 8/255, where one plain step makes two
    methods collapse on CIFAR-100."""
    how = gentle(8 / 255)
    return [
        tuned(method, model="resnet18", **how) for method in ("ds-blo", "ssigd", "pigd")
    ]


def final() -> list[Settings]:
    """Every method once."""
    return [tuned(method) for method in TUNED]


def final_16() -> list[Settings]:
    """Every method once at 16/255."""
    steps = {method: 10 if method in ("at", "trades") else 4 for method in TUNED}
    return [tuned(m, attack_steps=count, **LARGE) for m, count in steps.items()]


def seeds() -> list[Settings]:
    """Two more seeds of AT and DS-BLO."""
    return [tuned(m, seed=seed) for seed in (1, 2) for m in ("at", "ds-blo")]


def sweep() -> list[Settings]:
    """Two more variances of the tilt, the least and the largest of the paper."""
    ends = {"ds-blo": (1e-5, 1e-4), "ssigd": (2e-5, 8e-5)}
    return [
        tuned(method, variance=variance)
        for method, variances in ends.items()
        for variance in variances
    ]


def resnet() -> list[Settings]:
    """The network of the paper."""
    return [tuned(method, model="resnet18") for method in ("at", "ds-blo")]


def paper(radius: float = 8 / 255, attack: dict | None = None) -> list[Settings]:
    """The nine columns of the paper on its network, the slowest first, then two more
    seeds of AT and DS-BLO; bilevel methods with the default attack or another."""
    plain = dict(model="resnet18", epsilon=radius)
    bilevel = plain | (gentle(radius) if attack is None else attack)
    tilted = [
        tuned(method, variance=variance, **bilevel)
        for pair in zip(*VARIANCES.values(), strict=True)
        for method, variance in zip(VARIANCES, pair, strict=True)
    ]
    columns = [tuned(method, **plain) for method in ("trades", "at")]
    columns += [tilted[1], tilted[0], tuned("pigd", **bilevel), *tilted[2:]]
    more = [
        tuned(method, seed=seed, **settings)
        for seed in (1, 2)
        for method, settings in (("at", plain), ("ds-blo", bilevel))
    ]
    return [*columns, *more]


def paper_16() -> list[Settings]:
    """The same at 16/255."""
    return paper(16 / 255)


def paper_plain() -> list[Settings]:
    """The table at 8/255 with plain steps, as the first rows of CIFAR-100 had it."""
    return paper(attack=dict(attack_steps=1, attack_step=5000 / 255))


def equal(radius: float) -> list[Settings]:
    """DS-BLO, three seeds, for as many seconds as the 20 epochs of AT in `paper`."""
    wanted = seconds_of_training(tuned("at", model="resnet18", epsilon=radius))
    how = dict(model="resnet18", **gentle(radius))
    one = seconds_of_training(tuned("ds-blo", epochs=1, **how))
    epochs = int(wanted / one)
    return [tuned("ds-blo", epochs=epochs, seed=seed, **how) for seed in range(3)]


def equal_8() -> list[Settings]:
    """Equal seconds at 8/255."""
    return equal(8 / 255)


def equal_16() -> list[Settings]:
    """Equal seconds at 16/255."""
    return equal(16 / 255)


def lasting(radius: float, epochs: int = 100) -> list[Settings]:
    """DS-BLO with the default attack for 100 epochs, then AT for as many seconds; three
    seeds, the first of both at the front."""
    slow = dict(epsilon=radius, average=0.999, validation=1000)
    bilevel = slow | gentle(radius)
    whole = seconds_of_training(tuned("ds-blo", epochs=epochs, **bilevel))
    once = seconds_of_training(tuned("at", epochs=1, **slow))
    return [
        settings
        for seed in range(3)
        for settings in (
            tuned("ds-blo", epochs=epochs, seed=seed, **bilevel),
            tuned("at", epochs=int(whole / once), seed=seed, **slow),
        )
    ]


def lasting_8() -> list[Settings]:
    """Long runs at 8/255."""
    return lasting(8 / 255)


def lasting_16() -> list[Settings]:
    """Long runs at 16/255."""
    return lasting(16 / 255)


def collapse_16() -> list[Settings]:
    """The schedule of `lasting-16` with other attacks: that of the last step alone, and
    the earlier setting."""
    how = gentle(16 / 255) | dict(epochs=100, average=0.999, validation=1000)
    long = dict(attack_step=2000 / 255)
    return [
        tuned("ds-blo", **(how | long)),
        tuned("ds-blo", **(how | long | dict(sign_step=4 / 255))),
    ]


def tune_every() -> list[Settings]:
    """What an implicit term at one step in N costs; on held-out images."""
    return [
        tuned("ds-blo", model="resnet18", implicit_every=every, **gentle(radius))
        for radius in (8 / 255, 16 / 255)
        for every in (1, 2, 4)
    ]


def equal_seconds() -> list[Settings]:
    """DS-BLO for as many seconds as 20 epochs of AT."""
    return [tuned("ds-blo", epochs=36), tuned("tilted-momentum", epochs=36)]


def long() -> list[Settings]:
    """DS-BLO for longer, and against a harder attack for much longer."""
    return [change(rate=0.2, epochs=40), tuned("ds-blo", epochs=80, **HARDER)]


def long_16() -> list[Settings]:
    """As many seconds as 80 epochs of DS-BLO with four sign steps at 16/255: that run,
    AT, DS-BLO with plain steps alone; and AT for as long as the run of 80 epochs at
    8/255. Epochs follow from the passes of a step, as `adversarial.md` counts them."""
    slow = dict(average=0.999)
    plain = dict(epsilon=16 / 255, attack_step=5000 / 255)
    return [
        tuned("ds-blo", attack_steps=4, epochs=80, **LARGE, **slow),
        tuned("at", attack_steps=10, epochs=64, **LARGE, **slow),
        tuned("ds-blo", epochs=116, **plain, **slow),
        tuned("at", epochs=58, **slow),
    ]


PLANS = {
    "tune": tune,
    "tune-weight": tune_weight,
    "tune-16": tune_16,
    "tune-long": tune_long,
    "tune-gentle": tune_gentle,
    "final": final,
    "final-16": final_16,
    "seeds": seeds,
    "sweep": sweep,
    "resnet": resnet,
    "paper-8": paper,
    "paper-16": paper_16,
    "equal-seconds": equal_seconds,
    "long": long,
    "long-16": long_16,
    "paper-plain": paper_plain,
    "equal-8": equal_8,
    "equal-16": equal_16,
    "lasting-8": lasting_8,
    "lasting-16": lasting_16,
    "collapse-16": collapse_16,
    "tune-every": tune_every,
}


def plan(name: str) -> list[Settings]:
    return PLANS[name]()


def held_out_by(name: str) -> int:
    return HELD_OUT if name.startswith("tune") else 0


def scoring(name: str) -> dict[str, dict]:
    """How a plan scores the last weights and their average; the ensemble is dear."""
    if held_out_by(name):
        quick = dict(restarts=1, ensemble=False)
        return dict(raw=quick, average=quick, best=quick)
    if name.startswith(("paper", "equal-8", "equal-16")):
        return dict(raw=dict(restarts=1, ensemble=False), average=dict(ensemble=True))
    return dict(
        raw=dict(ensemble=name in ("final", "final-16", "long")),
        average=dict(ensemble=name != "sweep"),
        best=dict(ensemble=True),
    )


# Milliseconds of passes at batch 256 on one H200, measured by `adversarial_speed`:
# gradient in the image, gradient in weights and image, mixed derivative, all the rest.
_IMAGE, _BOTH, _MIXED, _REST = 2.67, 3.61, 7.20, 1.0
# Seconds to compile a run, and to score averaged weights with and without the ensemble.
_COMPILING, _PGD, _ENSEMBLE = 30, 20, 40


def seconds_of_training(settings: Settings, images: int = 50_000) -> float:
    """What a run takes alone on that device, by its passes; for planning."""
    steps, bilevel = settings.attack.steps, settings.method in BILEVEL
    mixed = _MIXED / settings.implicit_every if bilevel else 0
    one = (steps + bilevel) * _IMAGE + _BOTH + mixed + _REST
    return settings.epochs * (images // settings.batch_size) * one / 1000


def seconds_of(name: str, settings: Settings) -> float:
    """The same with compilation and scores."""
    scores = sum(
        _PGD * how.get("restarts", 10) / 10 + _ENSEMBLE * how.get("ensemble", True)
        for which, how in scoring(name).items()
        if which != "best" or settings.validation
    )
    return seconds_of_training(settings) + _COMPILING + scores


def estimate(name: str) -> str:
    """The runs of a plan and about how many seconds each takes alone on an H200."""
    lines = ["| run | method | model | eps | variance | epochs | seed | seconds |"]
    lines.append("|---:|---|---|---|---|---:|---:|---:|")
    total = 0.0
    for number, s in enumerate(plan(name), 1):
        seconds = seconds_of(name, s)
        total += seconds
        tilt = f"{s.variance:.0e}" if s.method in ("ds-blo", "ssigd") else "–"
        radius = f"{round(255 * s.epsilon)}/255"
        cells = (number, s.method, s.model, radius, tilt, s.epochs, s.seed)
        lines.append("| " + " | ".join(map(str, cells)) + f" | {seconds:.0f} |")
    return "\n".join([*lines, "", f"{name}: about {total / 60:.0f} minutes."])
