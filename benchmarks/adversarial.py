"""Adversarial training on CIFAR: every method under the same schedule.

    python -m benchmarks.adversarial --data cifar10.npz --plan final --out ROWS.jsonl
    python -m benchmarks.adversarial --paper benchmarks/adversarial_paper.md

One row of JSON per finished run: its settings, clean accuracy, accuracy under PGD-50
with restarts and under the ensemble, for the last weights and their average, seconds
per epoch. A row that is there already is not made again, so a killed run goes on with
the next one, and with `--checkpoints FOLDER` in the middle of that run; processes that
share a folder of `--claims` share the work. `--estimate` prints the runs of a plan with
about how many seconds each takes. Plans named
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

from bilevax.adversarial.data.cifar_files import CIFARS
from bilevax.adversarial.data.images import Images, load_images, split
from bilevax.adversarial.training.settings import Settings
from bilevax.adversarial.training.training import score, train

from .adversarial_paper import committed_rows, page
from .adversarial_plans import PLANS, TUNED, estimate, held_out_by, plan, scoring
from .adversarial_tables import brief, spread, table


def short(identity: str) -> str:
    """A name for files."""
    return hashlib.sha256(identity.encode()).hexdigest()[:16]


def claimed(folder: Path | None, identity: str) -> bool:
    """Whether another process has this run; if not, it is ours from now on."""
    if folder is None:
        return False
    folder.mkdir(parents=True, exist_ok=True)
    try:
        (folder / short(identity)).touch(exist_ok=False)
    except FileExistsError:
        return True
    return False


def identity(settings: Settings, held_out: int, dataset: str) -> str:
    whole = settings.as_row() | dict(held_out=held_out, dataset=dataset)
    return json.dumps(whole, sort_keys=True)


def identity_of(row: dict) -> str:
    # Older rows are of CIFAR-10 and do not say so.
    dataset = row.get("dataset", "cifar10")
    return identity(Settings(**row["settings"]), row["held_out"], dataset)


def run(
    settings: Settings,
    images: Images,
    name: str,
    sharing: int,
    folder: Path | None = None,
) -> dict:
    """One row of the plan `name`; with a `folder` an interrupted run goes on in it."""
    held_out = held_out_by(name)
    began = time.perf_counter()
    trained = train(images, settings, folder=folder)
    training = time.perf_counter() - began
    models = dict(raw=trained.model, average=trained.average, best=trained.best)
    how = scoring(name)
    scores = {
        which: score(model, images, settings, **how[which])
        for which, model in models.items()
        if model is not None and which in how
    }
    seconds = [row["seconds"] for row in trained.rows]
    return dict(
        dataset=images.name,
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


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--table", type=Path, help="print these rows, run nothing")
    parser.add_argument(
        "--paper",
        type=Path,
        help="write the table of the paper to this file, run nothing",
    )
    parser.add_argument("--dataset", default="cifar10", choices=CIFARS)
    parser.add_argument("--data", help="an npz file, or a folder")
    parser.add_argument("--plan", nargs="+", default=[], choices=PLANS)
    parser.add_argument("--methods", nargs="+", choices=TUNED, help="of the plan")
    parser.add_argument(
        "--sharing", type=int, default=1, help="runs on the device at once, for the row"
    )
    parser.add_argument("--out", type=Path, default=Path("results/adversarial.jsonl"))
    parser.add_argument("--claims", type=Path, help="folder of processes that share")
    parser.add_argument(
        "--checkpoints", type=Path, help="folder in which interrupted runs go on"
    )
    parser.add_argument(
        "--estimate", action="store_true", help="print the runs of the plans, run none"
    )
    parser.add_argument("--minutes", type=float, default=1e9, help="then start no more")
    parser.add_argument("--epochs", type=int, help="instead of those of the plan")
    options = parser.parse_args()
    if options.table is not None:
        lines = options.table.read_text().splitlines()
        rows = [json.loads(line) for line in lines]
        print(table(rows), spread(rows), sep="\n\n")
        return
    if options.paper is not None:
        options.paper.write_text(page(committed_rows()))
        return
    if options.estimate:
        print("\n\n".join(map(estimate, options.plan)))
        return
    options.out.parent.mkdir(parents=True, exist_ok=True)
    began = time.perf_counter()
    rows = options.out.read_text().splitlines() if options.out.exists() else []
    done = {identity_of(json.loads(row)) for row in rows}
    whole = load_images(options.dataset, options.data)
    for name in options.plan:
        held_out = held_out_by(name)
        images = split(whole, held_out) if held_out else whole
        for settings in plan(name):
            if options.epochs:
                settings = dataclasses.replace(settings, epochs=options.epochs)
            if options.methods and settings.method not in options.methods:
                continue
            late = time.perf_counter() - began > 60 * options.minutes
            this = identity(settings, held_out, options.dataset)
            if late or this in done or claimed(options.claims, this):
                continue
            place = options.checkpoints and options.checkpoints / short(this)
            row = run(settings, images, name, options.sharing, place)
            with options.out.open("a") as file:
                file.write(json.dumps(row) + "\n")
            print(f"{time.perf_counter() - began:6.0f} s  {brief(row)}", flush=True)


if __name__ == "__main__":
    main()
