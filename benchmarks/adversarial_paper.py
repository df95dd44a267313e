"""The second table of the paper in its layout, its numbers beside ours.

    python -m benchmarks.adversarial --paper benchmarks/adversarial_paper.md

Made from the committed rows alone. A cell is empty until there is a row for it.
"""

import json
from pathlib import Path

import numpy as np

from bilevax.adversarial.training.settings import BILEVEL, Settings

from .adversarial_tables import REPORTED, attack

RESULTS = Path(__file__).parent / "results"
FILES = ("adversarial.jsonl", "adversarial_cifar100.jsonl")
# Columns in the order of the paper: method, and variance of the tilt if it has one.
COLUMNS = (
    ("at", None), ("trades", None), ("pigd", None),
    ("ssigd", 2e-5), ("ssigd", 6e-5), ("ssigd", 8e-5),
    ("ds-blo", 1e-5), ("ds-blo", 5e-5), ("ds-blo", 1e-4),
)  # fmt: skip
TITLES = {
    "at": "AT",
    "trades": "TRADES",
    "pigd": "PIGD†",
    "ssigd": "[S]SIGD†",
    "ds-blo": "DS-BLO†",
}
NAMES = {"cifar10": "CIFAR-10", "cifar100": "CIFAR-100"}
EPOCHS = 20
METRICS = {"SA": "clean", "RA": "pgd", "ensemble": "ensemble"}


def committed_rows() -> list[dict]:
    lines = [
        line for name in FILES for line in (RESULTS / name).read_text().split("\n")
    ]
    return [json.loads(line) for line in lines if line]


def page(rows: list[dict]) -> str:
    """The page: one table for each data set and radius."""
    parts = [_HEAD]
    for dataset in NAMES:
        for radius in (8, 16):
            title = f"## {NAMES[dataset]}, epsilon = {radius}/255"
            parts += [title, block(rows, dataset, radius)]
    return "\n\n".join(parts) + "\n"


def block(rows: list[dict], dataset: str, radius: int) -> str:
    """The table of one data set and radius."""
    here = [row for row in rows if _belongs(row, dataset, radius)]
    heads = [
        TITLES[method] + (f" {variance:.0e}" if variance else "")
        for method, variance in COLUMNS
    ]
    lines = ["| PM | " + " | ".join(heads) + " |", "|---" + "|---:" * len(heads) + "|"]
    for number, metric in enumerate(("SA", "RA")):
        reported = [
            f"{REPORTED[dataset][method, radius][variance][number]:.2f}"
            for method, variance in COLUMNS
        ]
        lines.append(f"| {metric}, paper | " + " | ".join(reported) + " |")
    for model, how in _settings(here, radius):
        found = [_runs(here, column, model, how) for column in COLUMNS]
        for metric, kind in METRICS.items():
            cells = " | ".join(_cell(runs, kind) for runs in found)
            lines.append(f"| {metric}, {model}, {how} | {cells} |")
    return "\n".join(lines)


def _belongs(row: dict, dataset: str, radius: int) -> bool:
    s = row["settings"]
    return (
        row.get("dataset", "cifar10") == dataset
        and round(255 * s["epsilon"]) == radius
        and s["epochs"] == EPOCHS
        and not row["held_out"]
        and s["reading"] == "added"
    )


def _settings(rows: list[dict], radius: int) -> list[tuple[str, str]]:
    """Networks and bilevel attacks; those of the plan `paper` first, rows or none."""
    usual = attack(Settings(epsilon=radius / 255).as_row())
    found = {
        (row["settings"]["model"], attack(row["settings"]))
        for row in rows
        if row["settings"]["method"] in BILEVEL
    }
    return [("resnet18", usual), *sorted(found - {("resnet18", usual)})]


def _runs(rows: list[dict], column, model: str, how: str) -> list[dict]:
    """All seeds of a column. AT and TRADES keep their attack, whatever others have."""
    method, variance = column
    return [
        row
        for row in rows
        if (s := row["settings"])["method"] == method
        and s["model"] == model
        and (variance is None or s["variance"] == variance)
        and (method not in BILEVEL or attack(s) == how)
    ]


def _cell(runs: list[dict], kind: str) -> str:
    """Averaged weights: mean, deviation over seeds, and whether one collapsed."""
    found = [100 * run["scores"]["average"].get(kind, np.nan) for run in runs]
    found = [value for value in found if np.isfinite(value)]
    if not found:
        return ""
    text = f"{np.mean(found):.2f}"
    if len(found) > 1:
        text += f" ± {np.std(found, ddof=1):.2f} ({len(found)})"
    return text + (" c" if any(run["collapsed"] for run in runs) else "")


_HEAD = """\
# The paper's table, and ours

Made by `python -m benchmarks.adversarial --paper benchmarks/adversarial_paper.md` from
the committed rows; nothing here is typed by hand. The paper's numbers are means of five
trials; it names neither epochs nor the attack behind RA. Ours: 20 epochs, averaged
weights, all test images; RA is PGD-50 with 10 restarts, the ensemble that of
[docs/adversarial.md](../docs/adversarial.md). One seed, or mean ± deviation (seeds).
† bilevel methods, the number after [S]SIGD and DS-BLO is the variance of the tilt.
"c": a run collapsed, and the weights are what was left. **An empty cell has not been
run.** The first rows of ours are the setting that the whole table is meant for: the
network of the paper, and the default attack of bilevel methods. The others are earlier
settings, with what there is of them."""
