"""Adversarial training on CIFAR-10: every method under the same schedule.

    python -m benchmarks.adversarial --data cifar10.npz --plan final --out ROWS.jsonl

One row of JSON per finished run: its settings, clean accuracy, accuracy under PGD-50
with restarts and under the ensemble, for the last weights and their average, seconds
per epoch. A row that is there already is not made again, so a killed run goes on with
the next one; processes that share a folder of `--claims` share the work. Plans named
`tune` train on 45 000 images and score the other 5 000 of the training set; all others
train on 50 000 and score the test set once.
"""

import argparse
import dataclasses
import hashlib
import json
import time
from pathlib import Path

import jax
import numpy as np

from bilevax.adversarial.images import Images, load_images, split
from bilevax.adversarial.settings import BILEVEL, Settings
from bilevax.adversarial.training import score, train

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
# At 16/255 a plain step is too weak: all take sign steps of 4/255, see adversarial.md.
LARGE = dict(epsilon=16 / 255, sign_step=4 / 255)
# For long runs: a harder attack, since there is clean accuracy to spare, and an average
# over more steps, since there are more.
HARDER = dict(attack_steps=3, sign_step=3 / 255, average=0.999)
# Clean and robust accuracy that the paper reports, by method, radius and variance of
# the tilt; it names neither epochs nor the attack.
PAPER = {
    ("at", 8): {None: (80.83, 50.63)},
    ("trades", 8): {None: (80.88, 51.34)},
    ("pigd", 8): {None: (79.43, 51.55)},
    ("ssigd", 8): {2e-5: (80.49, 50.79), 6e-5: (81.59, 50.66), 8e-5: (83.33, 49.91)},
    ("ds-blo", 8): {1e-5: (80.86, 50.86), 5e-5: (81.11, 51.79), 1e-4: (81.19, 51.59)},
    ("at", 16): {None: (70.19, 32.31)},
    ("trades", 16): {None: (70.25, 33.39)},
    ("pigd", 16): {None: (70.11, 33.75)},
    ("ssigd", 16): {2e-5: (71.35, 32.73), 6e-5: (73.72, 29.19), 8e-5: (73.14, 29.88)},
    ("ds-blo", 16): {1e-5: (71.49, 32.29), 5e-5: (70.32, 33.99), 1e-4: (70.85, 33.13)},
}


def change(**changes) -> Settings:
    return dataclasses.replace(BASE, **changes)


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


def hard_16() -> list[Settings]:
    """Whether DS-BLO lasts at 16/255 if sign steps reach all of the box, and whether
    the cross term or the random point is what ends it with four."""
    slow = dict(average=0.999, validation=1000, **LARGE)
    return [
        tuned("ds-blo", attack_steps=8, epochs=56, **slow),
        tuned("ds-blo", attack_steps=4, epochs=80, implicit_weight=1000.0, **slow),
        tuned("bilevel-sgd", attack_steps=4, epochs=80, **slow),
    ]


PLANS = {
    "tune": tune,
    "tune-weight": tune_weight,
    "tune-16": tune_16,
    "tune-long": tune_long,
    "final": final,
    "final-16": final_16,
    "seeds": seeds,
    "sweep": sweep,
    "resnet": resnet,
    "equal-seconds": equal_seconds,
    "long": long,
    "long-16": long_16,
    "hard-16": hard_16,
}


def plan(name: str) -> list[Settings]:
    return PLANS[name]()


def held_out_by(name: str) -> int:
    return HELD_OUT if name.startswith("tune") else 0


def claimed(folder: Path | None, identity: str) -> bool:
    """Whether another process has this run; if not, it is ours from now on."""
    if folder is None:
        return False
    folder.mkdir(parents=True, exist_ok=True)
    try:
        (folder / hashlib.sha256(identity.encode()).hexdigest()[:16]).touch(
            exist_ok=False
        )
    except FileExistsError:
        return True
    return False


def identity(settings: Settings, held_out: int) -> str:
    return json.dumps(settings.as_row() | dict(held_out=held_out), sort_keys=True)


def identity_of(row: dict) -> str:
    return identity(Settings(**row["settings"]), row["held_out"])


def scoring(name: str) -> dict[str, dict]:
    """How a plan scores the last weights and their average; the ensemble is dear."""
    if held_out_by(name):
        quick = dict(restarts=1, ensemble=False)
        return dict(raw=quick, average=quick, best=quick)
    return dict(
        raw=dict(ensemble=name in ("final", "final-16", "long")),
        average=dict(ensemble=name != "sweep"),
        best=dict(ensemble=True),
    )


def run(settings: Settings, images: Images, name: str, sharing: int) -> dict:
    """One row of the plan `name`."""
    held_out = held_out_by(name)
    began = time.perf_counter()
    trained = train(images, settings)
    training = time.perf_counter() - began
    models = dict(raw=trained.model, average=trained.average, best=trained.best)
    how = scoring(name)
    scores = {
        which: score(model, images, settings, **how[which])
        for which, model in models.items()
        if model is not None
    }
    seconds = [row["seconds"] for row in trained.rows]
    return dict(
        settings=settings.as_row(),
        held_out=held_out,
        stopped=trained.stopped,
        collapsed=trained.collapsed,
        best_epoch=trained.best_epoch,
        seconds_per_epoch=float(np.median(seconds)),
        first_epoch=seconds[0],
        training_seconds=training,
        scores=scores,
        epochs=trained.rows,
        device=jax.devices()[0].device_kind,
        sharing=sharing,
        jax=jax.__version__,
    )


def brief(row: dict) -> str:
    shown = {k: v for k, v in row["settings"].items() if v != vars(BASE)[k]}
    numbers = ", ".join(
        f"{name} {100 * s['clean']:.2f} / {100 * s['pgd']:.2f}"
        + (f" / {100 * s['ensemble']:.2f}" if "ensemble" in s else "")
        for name, s in row["scores"].items()
    )
    return f"{shown} {row['seconds_per_epoch']:.2f} s/epoch: {numbers}"


def attack(settings: dict) -> str:
    """The training attack in a few signs; a bilevel one ends with a plain step."""
    own = settings["method"] in BILEVEL
    count = settings["attack_steps"] or (1 if own else 10)
    size = settings["sign_step"] or (None if own else settings["epsilon"] / 4)
    plain = f"{255 * settings['attack_step']:.0f}/255"
    if size is None:
        return f"{count} + 1 plain of {plain}"
    signs = f"{count} signs of {255 * size:.0f}/255"
    return f"{signs} + 1 plain of {plain}" if own else signs


def weight(settings: dict) -> str:
    """The Hessian in the implicit gradient."""
    if settings["method"] not in BILEVEL:
        return "–"
    return "tied" if settings["tied"] else f"{settings['implicit_weight']:g}"


def in_paper(settings: dict) -> str:
    """What the paper reports at this radius, or at the variance nearest to this one."""
    radius = round(255 * settings["epsilon"])
    reported = PAPER.get((settings["method"], radius))
    if reported is None:
        return "–"
    if None in reported:
        return "{} / {}".format(*reported[None])
    variance = settings["variance"]
    near = min(reported, key=lambda other: abs(other - variance))
    numbers = "{} / {}".format(*reported[near])
    return numbers if near == variance else f"{numbers} at {near:.0e}"


def spread(rows: list[dict]) -> str:
    """Averaged weights: mean and deviation over seeds, all else being equal."""
    groups: dict[str, list[dict]] = {}
    for row in rows:
        same = dict(row["settings"], seed=None, held_out=row["held_out"])
        groups.setdefault(json.dumps(same, sort_keys=True), []).append(row)
    lines = [
        "| method | eps | epochs | seeds | SA | RA | ensemble |",
        "|---|---|---|---|---:|---:|---:|",
    ]
    for group in groups.values():
        if len(group) < 2:
            continue
        s = group[0]["settings"]
        cells = [s["method"], f"{round(255 * s['epsilon'])}/255", s["epochs"]]
        cells.append(len(group))
        for kind in ("clean", "pgd", "ensemble"):
            found = [row["scores"]["average"].get(kind) for row in group]
            if None in found:
                cells.append("–")
                continue
            percent = 100 * np.array(found)
            cells.append(f"{np.mean(percent):.2f} ± {np.std(percent, ddof=1):.2f}")
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines) if len(lines) > 2 else ""


def ends_of(row: dict) -> list[tuple[dict, str, tuple[str, str]]]:
    """Its lines in the table: how long it ran, and the weights of the two columns."""
    epochs = str(row["settings"]["epochs"])
    if row["collapsed"]:
        epochs = f"{len(row['epochs'])} of {epochs}, collapsed"
    ends = [(row, epochs, ("raw", "average"))]
    if row.get("best_epoch"):
        ends.append((row, f"{row['best_epoch']}, the best", ("", "best")))
    return ends


def table(rows: list[dict]) -> str:
    """Rows as Markdown."""
    head = (
        "method", "model", "eps", "attack", "weight", "variance", "epochs", "step",
        "momentum", "seed",
    )  # fmt: skip
    numbers = [
        f"{name} {kind}"
        for name in ("raw", "average")
        for kind in ("SA", "RA", "ensemble")
    ]
    lines = [
        "| " + " | ".join((*head, *numbers, "paper SA / RA", "s / epoch")) + " |",
        "|---" * len(head) + "|---:" * (len(numbers) + 2) + "|",
    ]
    ends = [end for row in rows for end in ends_of(row)]
    for row, epochs, shown in ends:
        s = row["settings"]
        radius = round(255 * s["epsilon"])
        tilted = s["method"] in ("ds-blo", "tilted-momentum", "ssigd")
        cells = [
            s["method"], s["model"], f"{radius}/255", attack(s), weight(s),
            f"{s['variance']:.0e} {s['reading']}" if tilted else "–", epochs,
            f"{s['rate'] / (1 - s['momentum']):.3g}", s["momentum"], s["seed"],
        ]  # fmt: skip
        for name in shown:
            scores = row["scores"].get(name, {})
            cells += [
                f"{100 * scores[kind]:.2f}" if kind in scores else "–"
                for kind in ("clean", "pgd", "ensemble")
            ]
        cells.append("–" if row["held_out"] else in_paper(s))
        # Of a run that shared the device: comparable to nothing, but what it took.
        shared = "" if row.get("sharing", 1) == 1 else " (shared)"
        cells.append(f"{row['seconds_per_epoch']:.2f}{shared}")
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--table", type=Path, help="print these rows, run nothing")
    parser.add_argument("--data", help="an npz file, or a folder")
    parser.add_argument("--plan", nargs="+", default=[], choices=PLANS)
    parser.add_argument("--methods", nargs="+", choices=TUNED, help="of the plan")
    parser.add_argument(
        "--sharing", type=int, default=1, help="runs on the device at once, for the row"
    )
    parser.add_argument("--out", type=Path, default=Path("results/adversarial.jsonl"))
    parser.add_argument("--claims", type=Path, help="folder of processes that share")
    parser.add_argument("--minutes", type=float, default=1e9, help="then start no more")
    parser.add_argument("--epochs", type=int, help="instead of those of the plan")
    options = parser.parse_args()
    if options.table is not None:
        lines = options.table.read_text().splitlines()
        rows = [json.loads(line) for line in lines]
        print(table(rows), spread(rows), sep="\n\n")
        return
    options.out.parent.mkdir(parents=True, exist_ok=True)
    began = time.perf_counter()
    rows = options.out.read_text().splitlines() if options.out.exists() else []
    done = {identity_of(json.loads(row)) for row in rows}
    whole = load_images("cifar10", options.data)
    for name in options.plan:
        held_out = held_out_by(name)
        images = split(whole, held_out) if held_out else whole
        for settings in plan(name):
            if options.epochs:
                settings = dataclasses.replace(settings, epochs=options.epochs)
            if options.methods and settings.method not in options.methods:
                continue
            late = time.perf_counter() - began > 60 * options.minutes
            this = identity(settings, held_out)
            if late or this in done or claimed(options.claims, this):
                continue
            row = run(settings, images, name, options.sharing)
            with options.out.open("a") as file:
                file.write(json.dumps(row) + "\n")
            print(f"{time.perf_counter() - began:6.0f} s  {brief(row)}", flush=True)


if __name__ == "__main__":
    main()
