"""`bilevax train`: classifiers that withstand attacks, by bilevel and usual methods."""

import argparse
import dataclasses
import json
import statistics
from pathlib import Path

import jax

# What trains is imported when it is wanted: other commands need not wait for it.
from ..adversarial.models import MODELS
from ..adversarial.schedules import SCHEDULES
from ..adversarial.settings import METHODS, READINGS, Settings, fraction

TEXT = "train a classifier against attacks on its images"
PRECISION = "float32"
# What settings mean, where their name does not say.
_TEXTS = dict(
    method="how the weights move",
    model="the network",
    epsilon="radius of the attack, such as 8/255",
    rate="peak of the learning rate",
    gamma1="of DS-BLO: 1 / step is gamma1 |m| + gamma2",
    attack_step="plain step of the bilevel attack (default: 5000/255; 2000/255 for "
    "epsilon above 8/255)",
    attack_steps="steps of the first attack (default: 1; 10 for at and trades)",
    sign_step="length of sign steps of the attack (default: 2/255 for at and trades, "
    "plain steps for bilevel methods)",
    implicit_weight="Hessian in the implicit gradient",
    tied="take the inverse of the attack step for it; the run is watched and may "
    "collapse",
    variance="of the tilt",
    reading="whether the variance is that of the perturbation which the tilt causes, "
    "or of the tilt itself",
    radius="of the shift of PIGD, as a share of the norm of the weights",
    average="decay of the average of the weights",
    dtype="in which convolutions compute",
)
_CHOICES = dict(
    method=METHODS,
    model=tuple(MODELS),
    schedule=SCHEDULES,
    reading=READINGS,
    dtype=("float32", "bfloat16", "float64"),
)
_FRACTIONS = ("epsilon", "attack_step", "sign_step")


def add_arguments(sub: argparse.ArgumentParser) -> None:
    sub.add_argument(
        "--dataset", default="cifar10",
        help="cifar10, cifar100, digits, or npz for a file of your own "
        "(default: cifar10)",
    )  # fmt: skip
    sub.add_argument(
        "--data", metavar="PATH", help="folder of the binary batches, or an npz file"
    )
    for setting in dataclasses.fields(Settings):
        _add_setting(sub, setting)
    sub.add_argument(
        "--held-out", type=int, default=0, metavar="N",
        help="score on the last N training images, which are then not trained on, "
        "instead of the test images (default: 0)",
    )  # fmt: skip
    sub.add_argument("--restarts", type=int, default=10, help="of PGD-50 (default: 10)")
    sub.add_argument(
        "--no-ensemble", action="store_true", help="score with PGD-50 alone"
    )
    sub.add_argument(
        "--out", default="results/train", metavar="FOLDER",
        help="gets rows, curves and a checkpoint per epoch; the same command goes on "
        "where it was interrupted (default: results/train)",
    )  # fmt: skip
    group = sub.add_argument_group("several processes")
    group.add_argument("--coordinator", metavar="HOST:PORT", help="of the first one")
    group.add_argument("--processes", type=int, help="how many there are")
    group.add_argument("--process", type=int, help="which one this is, from 0")


def _add_setting(sub, setting: dataclasses.Field) -> None:
    name, default = setting.name, setting.default
    flag = "--" + name.replace("_", "-")
    text = _TEXTS.get(name, name.replace("_", " "))
    if isinstance(default, bool):
        kind = argparse.BooleanOptionalAction
        sub.add_argument(flag, action=kind, default=default, help=text)
        return
    if name in _FRACTIONS:
        kind = fraction
    elif default is None:
        kind = int
    else:
        kind = type(default)
    if default is not None:
        shown = "8/255" if name == "epsilon" else default
        text = f"{text} (default: {shown})"
    sub.add_argument(
        flag, type=kind, default=default, choices=_CHOICES.get(name), help=text
    )


def kept(options) -> str:
    """What an interrupted training leaves behind."""
    path = Path(options.out) / "checkpoint.npz"
    if path.exists():
        return f"The run so far is in {path}; the same command goes on from there."
    return "Nothing was saved yet: the first epoch had not ended."


def run(options) -> int:
    from ..adversarial.devices import connect
    from ..adversarial.images import load_images, split
    from ..adversarial.training import score, train

    connect(options.coordinator, options.processes, options.process)
    settings = Settings(
        **{f.name: getattr(options, f.name) for f in dataclasses.fields(Settings)}
    )
    images = load_images(options.dataset, options.data)
    if options.held_out:
        images = split(images, options.held_out)
    progress = not options.json and jax.process_index() == 0
    trained = train(images, settings, folder=options.out, progress=progress)
    result = dict(
        dataset=options.dataset, held_out=options.held_out, **settings.as_row()
    )
    result |= dict(
        stopped=trained.stopped,
        seconds_per_epoch=statistics.median(row["seconds"] for row in trained.rows),
    )
    for name, model in (("raw", trained.model), ("averaged", trained.average)):
        result[name] = score(
            model,
            images,
            settings,
            restarts=options.restarts,
            ensemble=not options.no_ensemble,
            progress=progress,
        )
    return show(options, trained, result)


def show(options, trained, result: dict) -> int:
    """Write the result beside the curves and print it."""
    from ..adversarial.curves import draw

    if jax.process_index() == 0:
        folder = Path(options.out)
        (folder / "result.json").write_text(json.dumps(result, indent=1) + "\n")
        figure = draw(trained.rows, folder / "curves.svg")
        if options.json:
            print(json.dumps(result))
        else:
            print(f"ended: {trained.stopped}")
            for name in ("raw", "averaged"):
                print(f"{name:>8}: {accuracies(result[name])}")
            print(f"rows and curves: {folder}" + ("" if figure else " (no figure)"))
    return 1 if trained.collapsed else 0


def accuracies(scores: dict) -> str:
    shown = f"clean {scores['clean']:.2%}, PGD-50 {scores['pgd']:.2%}"
    if "ensemble" in scores:
        shown += f", ensemble {scores['ensemble']:.2%}"
    return shown
