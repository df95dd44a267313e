"""Why a single long step of the attack ends in a collapse, in minutes on a CPU.

    python -m benchmarks.collapse [--seeds 1] [--cases NUMBER ...]
    python -m benchmarks.collapse --draw docs/collapse.svg

The first command trains the small network on scikit-learn's digits at a large radius
with one attack after the other and writes a row per epoch: accuracy under the training
attack, under PGD (ten steps, the same training images) and on clean images. Runs are
planned for 80 epochs and end after 20, or where the guard ends them. The second command
draws the rows.
"""

import argparse
import dataclasses
import json
from pathlib import Path

from bilevax.adversarial.data.images import load_images
from bilevax.adversarial.training.settings import Settings
from bilevax.adversarial.training.training import train

ROWS = Path(__file__).parent / "results" / "collapse.jsonl"
BASE = Settings(
    method="bilevel-sgd",
    model="small",
    width=64,
    epsilon=0.3,
    epochs=80,
    batch_size=50,
    rate=0.2,
    padding=0,
    flip=False,
    average=0.9,
)
LONG = 2000 / 255
# Without a first attack the last step, a long one, is all of the attack.
CASES = {
    "one plain step of 2000/255": dict(attack_steps=0, attack_step=LONG),
    "two of them, the former default": dict(attack_steps=1, attack_step=LONG),
    "the default": dict(),
}
SHOWN = ("accuracy", "robust_by_batch", "clean_by_batch", "free", "loss")
IMAGES, LAST = 500, 20


def digits():
    """The first 500 training images."""
    whole = load_images("digits")
    return dataclasses.replace(
        whole, x_train=whole.x_train[:IMAGES], y_train=whole.y_train[:IMAGES]
    )


class _EnoughError(Exception):
    """The epochs that are shown are done."""


def run(case: str, seed: int, out: Path) -> str:
    """Add a row per epoch to the file; how the run ended."""
    settings = dataclasses.replace(BASE, seed=seed, **CASES[case])
    common = dict(case=case, seed=seed, attack=settings.attack._asdict())

    def write(epoch, model, average, row):
        shown = common | dict(epoch=epoch) | {name: row[name] for name in SHOWN}
        with out.open("a") as file:
            file.write(json.dumps(shown) + "\n")
        if epoch == LAST:
            raise _EnoughError

    try:
        return train(digits(), settings, every_epoch=write).stopped
    except _EnoughError:
        return f"stopped after {LAST} epochs"


def draw(rows: list[dict], path: Path) -> None:
    """Accuracy under the training attack and under PGD by epoch, a panel for a case."""
    from matplotlib.figure import Figure

    cases = [case for case in CASES if any(row["case"] == case for row in rows)]
    figure = Figure(figsize=(3.2 * len(cases), 2.8), layout="constrained")
    panels = figure.subplots(1, len(cases), sharey=True, sharex=True, squeeze=False)[0]
    for axes, case in zip(panels, cases, strict=True):
        for seed in sorted({row["seed"] for row in rows}):
            here = [r for r in rows if r["case"] == case and r["seed"] == seed]
            for name, label, colour in (
                ("accuracy", "training attack", "C0"),
                ("robust_by_batch", "PGD", "C3"),
            ):
                axes.plot(
                    [row["epoch"] for row in here],
                    [row[name] for row in here],
                    color=colour,
                    alpha=0.7,
                    label=label if seed == 0 else None,
                )
        axes.set_title(case, fontsize=9)
        axes.set_xlabel("epoch")
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("accuracy")
    panels[0].legend(fontsize=8)
    # Without a date the file is the same whenever it is drawn.
    figure.savefig(path, metadata={"Date": None})


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROWS)
    parser.add_argument("--draw", type=Path, help="draw the rows here, run nothing")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument(
        "--cases", type=int, nargs="+", default=range(len(CASES)),
        help=f"by number: {', '.join(f'{i} {case}' for i, case in enumerate(CASES))}",
    )  # fmt: skip
    options = parser.parse_args()
    if options.draw is not None:
        lines = options.out.read_text().splitlines()
        draw([json.loads(line) for line in lines], options.draw)
        return
    there = options.out.read_text().splitlines() if options.out.exists() else []
    done = {(row["case"], row["seed"]) for row in map(json.loads, there)}
    for seed in range(options.seeds):
        for case in (list(CASES)[number] for number in options.cases):
            if (case, seed) in done:
                continue
            print(f"{case}, seed {seed}: {run(case, seed, options.out)}", flush=True)


if __name__ == "__main__":
    main()
