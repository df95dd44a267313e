"""A page beside the weights: what the network is, and what is not known of it."""

import platform
from collections.abc import Mapping
from pathlib import Path

import jax

import bilevax

from ..data.images import Images
from ..networks.network import AbstractNetwork, num_weights
from .run_folder import strict_json
from .settings import Settings

NAME = "model_card.md"
_KINDS = dict(
    raw="weights of the last step",
    averaged="running average of the weights",
    best="average of the best epoch",
)
# Whatever was measured here, these were not.
_NEVER = (
    "Attacks in other norms (l2, l1, l0), patches, rotations, colours, and attacks "
    "without gradients.",
    "AutoAttack: the ensemble here has no black-box part, so it is an upper bound.",
    "Images from elsewhere, and natural corruptions.",
    "Whether confidences mean what they say, and accuracies by group.",
    "Other seeds: this is one run.",
)


def write_card(
    folder: str | Path,
    network: AbstractNetwork,
    images: Images,
    settings: Settings,
    stopped: str,
    scores: Mapping[str, dict] | None = None,
    scored_on: str = "test images",
) -> None:
    """Write the card of a run; `scores` are those of `score`, by kind of weights."""
    if jax.process_index() != 0:
        return
    text = card(network, images, settings, stopped, scores or {}, scored_on)
    (Path(folder) / NAME).write_text(text)


def card(
    network: AbstractNetwork,
    images: Images,
    settings: Settings,
    stopped: str,
    scores: Mapping[str, dict],
    scored_on: str = "test images",
) -> str:
    """The card as Markdown."""
    radius = f"{settings.epsilon:.4g} ({255 * settings.epsilon:.3g}/255)"
    title = f"{type(network).__name__} trained by {settings.method} on {images.name}"
    purpose = "trained without attacks."
    if settings.method != "clean":
        purpose = f"trained to withstand changes of every pixel by at most {radius}."
    sections = {
        "Data": _data(images, settings),
        "Training": _training(settings, stopped),
        "Accuracy": _accuracies(scores, scored_on, radius),
        "Not tested": [f"- {line}" for line in _untested(scores)],
        "Licence": ["To be filled in by whoever passes the weights on."],
    }
    lines = [
        f"# {title}",
        "",
        f"A classifier of {images.classes} classes with {num_weights(network):,} "
        f"weights, {purpose} It takes pixels in [0, 1]; normalisation is a part of it.",
    ]
    for name, content in sections.items():
        lines += ["", f"## {name}", "", *content]
    return "\n".join([*lines, ""])


def _data(images: Images, settings: Settings) -> list[str]:
    count, height, width, channels = images.x_train.shape
    kept = f", {settings.validation:,} of them kept back to choose the epoch"
    return [
        f"- {images.name}: {count:,} training images of {height} x {width} x "
        f"{channels}{kept if settings.validation else ''}",
        f"- mean {_numbers(images.mean)}, deviation {_numbers(images.std)} by channel",
        "- where the images come from, and who may use them: to be filled in",
    ]


def _training(settings: Settings, stopped: str) -> list[str]:
    devices = jax.devices()
    return [
        f"- ended: {stopped}",
        f"- bilevax {bilevax.__version__}, JAX {jax.__version__}, Python "
        f"{platform.python_version()}, {len(devices)} x {devices[0].device_kind}",
        "- settings:",
        "",
        "```json",
        strict_json(settings.as_row(), indent=1),
        "```",
    ]


def _accuracies(scores: Mapping[str, dict], scored_on: str, radius: str) -> list[str]:
    if not scores:
        return ["Not measured on images that were not trained on."]
    lines = [
        f"On {next(iter(scores.values()))['images']:,} {scored_on}, attacked within "
        f"{radius}:",
        "",
        "| weights | clean | PGD-50 | ensemble |",
        "|---|---:|---:|---:|",
    ]
    for kind, found in scores.items():
        cells = [
            f"{found[name]:.2%}" if name in found else "–"
            for name in ("clean", "pgd", "ensemble")
        ]
        lines.append(f"| {_KINDS[kind]} | {' | '.join(cells)} |")
    return lines


def _untested(scores: Mapping[str, dict]) -> list[str]:
    lines: list[str] = [*_NEVER]
    if not scores:
        return ["Any attack on images that were not trained on.", *lines]
    if not any("ensemble" in found for found in scores.values()):
        lines.insert(0, "Any attack but PGD, which alone is easily misled.")
    return lines


def _numbers(values) -> str:
    return ", ".join(f"{value:.4g}" for value in values)
