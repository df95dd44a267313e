"""Rows of `benchmarks.adversarial` as Markdown, beside the numbers of the paper."""

import json

import numpy as np

from bilevax.adversarial.training.settings import BILEVEL, Settings

from .adversarial_plans import BASE

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
# The same for CIFAR-100.
PAPER_100 = {
    ("at", 8): {None: (53.79, 27.39)},
    ("trades", 8): {None: (53.27, 28.49)},
    ("pigd", 8): {None: (53.77, 28.19)},
    ("ssigd", 8): {2e-5: (53.79, 27.98), 6e-5: (53.47, 28.13), 8e-5: (54.34, 27.99)},
    ("ds-blo", 8): {1e-5: (53.84, 28.29), 5e-5: (53.79, 28.83), 1e-4: (53.94, 28.15)},
    ("at", 16): {None: (42.12, 15.33)},
    ("trades", 16): {None: (42.33, 16.68)},
    ("pigd", 16): {None: (41.12, 16.66)},
    ("ssigd", 16): {2e-5: (44.14, 15.63), 6e-5: (46.69, 13.32), 8e-5: (47.05, 13.72)},
    ("ds-blo", 16): {1e-5: (42.32, 15.32), 5e-5: (42.08, 15.46), 1e-4: (42.25, 14.93)},
}
REPORTED = {"cifar10": PAPER, "cifar100": PAPER_100}


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
    count, size, last = Settings(**settings).attack
    plain = None if last is None else f"{255 * last:.0f}/255"
    if size is None:
        return f"{count} + 1 plain of {plain}"
    signs = f"{count} signs of {255 * size:.0f}/255"
    return signs if plain is None else f"{signs} + 1 plain of {plain}"


def weight(settings: dict) -> str:
    """The Hessian in the implicit gradient."""
    if settings["method"] not in BILEVEL:
        return "–"
    return "tied" if settings["tied"] else f"{settings['implicit_weight']:g}"


def in_paper(settings: dict, dataset: str) -> str:
    """What the paper reports at this radius, or at the variance nearest to this one."""
    radius = round(255 * settings["epsilon"])
    reported = REPORTED[dataset].get((settings["method"], radius))
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
        cells.append(
            "–" if row["held_out"] else in_paper(s, row.get("dataset", "cifar10"))
        )
        # Of a run that shared the device: comparable to nothing, but what it took.
        shared = "" if row.get("sharing", 1) == 1 else " (shared)"
        cells.append(f"{row['seconds_per_epoch']:.2f}{shared}")
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)
