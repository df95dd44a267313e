"""`bilevax train`: classifiers that withstand attacks, by bilevel and usual methods."""

import argparse
import dataclasses
import statistics
from pathlib import Path

import jax

from ..adversarial.data.images import DATASETS, load_images, split
from ..adversarial.networks.layers import ACTIVATIONS
from ..adversarial.networks.models import MODELS
from ..adversarial.training.curves import draw
from ..adversarial.training.devices import connect
from ..adversarial.training.model_card import write_card
from ..adversarial.training.run_folder import RunFolder, strict_json
from ..adversarial.training.schedules import SCHEDULES
from ..adversarial.training.settings import METHODS, READINGS, Settings
from ..adversarial.training.training import score, train
from ..adversarial.training.weights import load_network
from .arguments import count, ratio
from .text import print_json

TEXT = "train a classifier against attacks on its images"
PRECISION = "float32"
_TEXTS = dict(
    method="how the weights move; all but at, trades, fast-at and clean are bilevel",
    model="the network",
    epsilon="radius of the attack in units of the pixel range, such as 8/255",
    epochs="passes over the training images",
    batch_size="images per step, over all devices",
    rate="peak of the learning rate",
    schedule="how the learning rate moves",
    peak_at="share of the run after which the triangular rate is at its peak",
    momentum="of SGD, or the beta of DS-BLO",
    weight_decay="weight of |theta|^2 / 2 in the loss",
    label_smoothing="share of each label that is spread over all classes",
    gamma1="of DS-BLO: 1 / step is gamma1 |m| + gamma2",
    attack_step="length of the last step of bilevel methods, a plain one (default: "
    "12.5 epsilon); without --sign-step all their steps are plain ones of that length",
    attack_steps="steps of the training attack (default: 10 for at and trades; 4 for "
    "bilevel methods, 1 with plain steps, and the last one at the end)",
    sign_step="length of sign steps of the training attack (default: epsilon/4 for at "
    "and trades, epsilon/2 for bilevel methods)",
    implicit_weight="Hessian in the implicit gradient of bilevel methods",
    tied="take the inverse of the attack step for the implicit weight; the run is "
    "watched and may collapse",
    implicit_every="compute the implicit term at one step in N, drawn at random, and N "
    "times as large: the same mean for less time",
    variance="variance of the tilt of ds-blo, tilted-momentum and ssigd",
    reading="whether the variance is that of the perturbation which the tilt causes, "
    "or of the tilt itself",
    radius="length of the shift of pigd, as a share of the norm of the weights",
    trades_beta="weight of the divergence in trades",
    average="decay of the average of the weights",
    validation="keep the last N training images back, attack the averaged weights on "
    "them after each epoch and keep those of the best epoch as well",
    padding="random crops shift images by up to this many pixels",
    flip="mirror images at random (default: yes)",
    dtype="precision of convolutions; bfloat16 is for accelerators, weights stay "
    "float32",
    activation="relu, or a smooth one",
    width="channels of the first layer (default: 64; 16 for small)",
    seed="of weights, batches, tilts and attacks",
)
_CHOICES = dict(
    method=METHODS,
    model=tuple(MODELS),
    schedule=SCHEDULES,
    reading=READINGS,
    dtype=("float32", "bfloat16", "float64"),
    activation=tuple(ACTIVATIONS),
)
_FRACTIONS = ("epsilon", "attack_step", "sign_step")


def add_data(sub: argparse.ArgumentParser) -> None:
    sub.add_argument(
        "--dataset", default="cifar10", choices=DATASETS,
        help="npz is a file of your own (default: cifar10)",
    )  # fmt: skip
    sub.add_argument(
        "--data", metavar="PATH", help="folder of the binary batches, or an npz file"
    )


def add_scoring(sub: argparse.ArgumentParser) -> None:
    sub.add_argument(
        "--restarts", type=count, default=10, metavar="N",
        help="random starts of PGD-50, by which robust accuracy is measured "
        "(default: 10)",
    )  # fmt: skip
    sub.add_argument(
        "--no-ensemble", action="store_true",
        help="leave out the ensemble of stronger attacks, which takes longest",
    )  # fmt: skip


def add_arguments(sub: argparse.ArgumentParser) -> None:
    add_data(sub)
    for setting in dataclasses.fields(Settings):
        _add_setting(sub, setting)
    sub.add_argument(
        "--held-out", type=int, default=0, metavar="N",
        help="score on the last N training images, which are then not trained on, "
        "instead of the test images (default: 0)",
    )  # fmt: skip
    add_scoring(sub)
    sub.add_argument(
        "--start-from", metavar="FOLDER",
        help="train the averaged weights of that finished run further",
    )  # fmt: skip
    sub.add_argument(
        "--out", default="results/train", metavar="FOLDER",
        help="gets rows, curves, weights, a model card and a checkpoint per epoch; the "
        "same command goes on where it was interrupted (default: results/train)",
    )  # fmt: skip
    sub.add_argument(
        "--afresh", action="store_true", help="discard a run that is there already"
    )
    group = sub.add_argument_group("several processes")
    group.add_argument(
        "--coordinator", metavar="HOST:PORT", help="address of the first process"
    )
    group.add_argument("--processes", type=int, help="how many there are")
    group.add_argument("--process", type=int, help="which one this is, from 0")


def _add_setting(sub, setting: dataclasses.Field) -> None:
    name, default = setting.name, setting.default
    flag = "--" + name.replace("_", "-")
    text = _TEXTS[name]
    if isinstance(default, bool):
        kind = argparse.BooleanOptionalAction
        sub.add_argument(flag, action=kind, default=default, help=text)
        return
    if name in _FRACTIONS:
        kind = ratio
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
    path = RunFolder(Path(options.out)).checkpoint
    if path.exists():
        return f"The run so far is in {path}; the same command goes on from there."
    return "Nothing was saved yet: the first epoch had not ended."


def run(options) -> int:
    connect(options.coordinator, options.processes, options.process)
    settings = Settings(
        **{f.name: getattr(options, f.name) for f in dataclasses.fields(Settings)}
    )
    images = load_images(options.dataset, options.data)
    if options.held_out:
        images = split(images, options.held_out)
    progress = not options.json and jax.process_index() == 0
    start = None if options.start_from is None else load_network(options.start_from)
    trained = train(
        images,
        settings,
        folder=options.out,
        progress=progress,
        network=start,
        resume=not options.afresh,
    )
    result = dict(
        dataset=options.dataset, held_out=options.held_out, **settings.as_row()
    )
    result |= dict(
        stopped=trained.stopped,
        best_epoch=trained.best_epoch,
        seconds_per_epoch=statistics.median(row["seconds"] for row in trained.rows),
    )
    networks = dict(raw=trained.model, averaged=trained.average, best=trained.best)
    for name, model in networks.items():
        if model is None:
            continue
        result[name] = score(
            model,
            images,
            settings,
            restarts=options.restarts,
            ensemble=not options.no_ensemble,
            progress=progress,
        )
    scored_on = "held-out training images" if options.held_out else "test images"
    scores = {name: result[name] for name in networks if name in result}
    write_card(
        options.out, trained.model, images, settings, trained.stopped, scores, scored_on
    )
    return show(options, trained, result)


def show(options, trained, result: dict) -> int:
    """Write the result beside the curves and print it."""
    if jax.process_index() == 0:
        folder = Path(options.out)
        (folder / "result.json").write_text(strict_json(result, indent=1) + "\n")
        figure = draw(trained.rows, folder / "curves.svg")
        if options.json:
            print_json(result)
        else:
            print(f"ended: {trained.stopped}")
            for name in ("raw", "averaged", "best"):
                if name in result:
                    print(f"{name:>8}: {accuracies(result[name])}")
            missing = "" if figure else " (no figure)"
            print(f"rows, curves, weights and model card: {folder}{missing}")
    return 1 if trained.failed else 0


def accuracies(scores: dict) -> str:
    shown = f"clean {scores['clean']:.2%}, PGD-50 {scores['pgd']:.2%}"
    if "ensemble" in scores:
        shown += f", ensemble {scores['ensemble']:.2%}"
    return shown
