"""Why a single long step of the attack ends in a collapse, in minutes on a CPU.

    python -m benchmarks.collapse [--out benchmarks/results/collapse.jsonl]
    python -m benchmarks.collapse --draw docs/collapse.svg

The first command trains the small network on scikit-learn's digits at a large radius
with one attack after the other and writes a row per epoch: accuracy under the training
attack, under PGD (ten steps, the same training images) and on clean images. The second
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
    model="small",
    width=64,
    epsilon=0.3,
    epochs=30,
    batch_size=50,
    rate=0.2,
    momentum=0.8,
    padding=0,
    flip=False,
    average=0.9,
)
LONG = 2000 / 255
# Without a first attack the last step, a long one, is all of the attack.
CASES = {
    "one plain step of 2000/255": dict(attack_steps=0, attack_step=LONG),
    "four sign steps, then 2000/255": dict(
        attack_steps=4, sign_step=BASE.epsilon / 2, attack_step=LONG
    ),
    "the default": dict(),
}
SHOWN = ("accuracy", "robust_by_batch", "clean_by_batch", "free", "loss", "seconds")
IMAGES = 500


def digits():
    """The first 500 training images."""
    whole = load_images("digits")
    return dataclasses.replace(
        whole, x_train=whole.x_train[:IMAGES], y_train=whole.y_train[:IMAGES]
    )


def run(case: str, seed: int) -> list[dict]:
    """A row per epoch; the last one says how the run ended."""
    settings = dataclasses.replace(BASE, seed=seed, **CASES[case])
    trained = train(digits(), settings)
    common = dict(case=case, seed=seed, settings=settings.as_row())
    return [
        common
        | dict(epoch=row["epoch"], stopped=trained.stopped)
        | {name: row[name] for name in SHOWN}
        for row in trained.rows
    ]


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
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    if options.draw is not None:
        lines = options.out.read_text().splitlines()
        draw([json.loads(line) for line in lines], options.draw)
        return
    there = options.out.read_text().splitlines() if options.out.exists() else []
    done = {(row["case"], row["seed"]) for row in map(json.loads, there)}
    for seed in range(options.seeds):
        for case in CASES:
            if (case, seed) in done:
                continue
            rows = run(case, seed)
            with options.out.open("a") as file:
                file.writelines(json.dumps(row) + "\n" for row in rows)
            last = rows[-1]
            print(
                f"{case}, seed {seed}: {last['epoch']} epochs, training attack "
                f"{last['accuracy']:.1%}, PGD {last['robust_by_batch']:.1%}; "
                f"{last['stopped']}",
                flush=True,
            )


if __name__ == "__main__":
    main()
