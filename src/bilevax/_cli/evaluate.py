"""`bilevax evaluate FOLDER`: accuracies of a network that `bilevax train` left."""

import argparse
import dataclasses

import jax

from ..adversarial.data.images import load_images
from ..adversarial.training.run_folder import settings_of
from ..adversarial.training.training import score
from ..adversarial.training.weights import KINDS, load_network
from .arguments import ratio
from .text import print_json
from .train import accuracies, add_data, add_scoring

TEXT = "attack a trained classifier"
PRECISION = "float32"


def add_arguments(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("folder", help="what `bilevax train --out` named")
    add_data(sub)
    sub.add_argument(
        "--epsilon", type=ratio, metavar="RADIUS",
        help="radius of the attacks, such as 8/255 (default: that of the training)",
    )  # fmt: skip
    sub.add_argument(
        "--weights", choices=KINDS, default="average",
        help="the running average, the weights of the last step, or the average of the "
        "best epoch, where the run had a --validation (default: average)",
    )  # fmt: skip
    add_scoring(sub)


def run(options) -> int:
    settings = settings_of(options.folder)
    if options.epsilon is not None:
        settings = dataclasses.replace(settings, epsilon=options.epsilon)
    if settings.dtype == "float64":
        jax.config.update("jax_enable_x64", True)
    network = load_network(options.folder, options.weights)
    images = load_images(options.dataset, options.data)
    if images.classes != network.classes:
        raise ValueError(
            f"{options.dataset} has {images.classes} classes, the network in "
            f"{options.folder} knows {network.classes}. Name the data it was trained "
            "on with --dataset and --data."
        )
    scores = score(
        network,
        images,
        settings,
        restarts=options.restarts,
        ensemble=not options.no_ensemble,
        progress=not options.json,
    )
    if options.json:
        print_json(scores | dict(epsilon=settings.epsilon))
    else:
        print(f"epsilon {settings.epsilon:.4g}, {scores['images']} test images")
        print(accuracies(scores))
    return 0
