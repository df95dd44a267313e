"""`bilevax export FOLDER`: a trained network as a file that others can load."""

import argparse

import jax

from ..adversarial.files.export import export
from ..adversarial.training.run_folder import settings_of
from ..adversarial.training.weights import KINDS, image_shape, load_network
from .arguments import count
from .text import print_json

TEXT = "write a trained classifier as safetensors or ONNX"
PRECISION = "float32"


def add_arguments(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("folder", help="what `bilevax train --out` named")
    sub.add_argument(
        "--to", required=True, metavar="FILE",
        help="....safetensors (arrays named as in PyTorch; extra `export`) or ....onnx "
        "(the whole network; extra `onnx`)",
    )  # fmt: skip
    sub.add_argument(
        "--weights", choices=KINDS, default="average",
        help="the running average, the weights of the last step, or the average of the "
        "best epoch (default: average)",
    )  # fmt: skip
    sub.add_argument(
        "--image-size", type=count, nargs=2, metavar=("HEIGHT", "WIDTH"),
        help="of the images, for ONNX (default: those of the training)",
    )  # fmt: skip


def run(options) -> int:
    if settings_of(options.folder).dtype == "float64":
        jax.config.update("jax_enable_x64", True)
    network = load_network(options.folder, options.weights)
    shape = None
    if options.image_size is not None:
        shape = (*options.image_size, len(network.normalise.mean))
    elif options.to.endswith(".onnx"):
        shape = image_shape(options.folder)
    export(network, options.to, image_shape=shape)
    if options.json:
        print_json(dict(file=options.to, weights=options.weights))
    else:
        print(f"{options.to}: {options.weights} weights of {options.folder}")
    return 0
