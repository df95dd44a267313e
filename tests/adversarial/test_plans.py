"""What the benchmark of adversarial training runs, and what it has run."""

import json

import numpy as np
import pytest

from benchmarks.adversarial import identity, identity_of
from benchmarks.adversarial_paper import COLUMNS, RESULTS, block, committed_rows, page
from benchmarks.adversarial_plans import (
    PLANS,
    estimate,
    held_out_by,
    plan,
    scoring,
    seconds_of_training,
)
from benchmarks.adversarial_tables import REPORTED

ROWS = sorted(path.name for path in RESULTS.glob("adversarial*.jsonl"))


@pytest.mark.parametrize("name", ROWS)
def test_every_committed_row_is_a_run_of_a_plan(name):
    lines = (RESULTS / name).read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    planned = {
        identity(settings, held_out_by(each), dataset)
        for each in PLANS
        for settings in plan(each)
        for dataset in ("cifar10", "cifar100")
    }
    assert rows
    for row in rows:
        assert identity_of(row) in planned, row["settings"]


@pytest.mark.parametrize("name", PLANS)
def test_a_plan_names_each_run_once_and_says_how_to_score_it(name):
    runs = [identity(settings, 0, "cifar10") for settings in plan(name)]
    assert len(set(runs)) == len(runs)
    assert {"raw", "average"} <= set(scoring(name))
    assert estimate(name).count("\n") == len(runs) + 3


@pytest.mark.parametrize("name", ["paper-8", "paper-16"])
def test_the_plan_of_the_table_fills_every_column_of_it(name):
    runs = [(s.method, s.variance) for s in plan(name)]
    for method, variance in COLUMNS:
        assert any(m == method and variance in (None, v) for m, v in runs)
    # Three seeds of AT and of DS-BLO at the variance that the paper finds best.
    assert runs.count(("ds-blo", 5e-5)) == 3
    assert sum(method == "at" for method, _ in runs) == 3


@pytest.mark.parametrize("name", ["equal-8", "equal-16"])
def test_plans_of_equal_seconds_end_before_the_run_that_they_are_compared_with(name):
    rival = next(s for s in plan(f"paper-{name[6:]}") if s.method == "at")
    limit = seconds_of_training(rival)
    for settings in plan(name):
        assert settings.model == rival.model
        taken = seconds_of_training(settings)
        assert limit - taken / settings.epochs < taken <= limit


def test_the_page_of_the_table_is_made_of_the_committed_rows():
    text = (RESULTS.parent / "adversarial_paper.md").read_text()
    assert text == page(committed_rows())


def test_cells_of_the_table_are_means_of_their_runs_and_empty_without_any():
    run = dict(method="ds-blo", model="resnet18", epsilon=16 / 255, epochs=20)
    made = [
        dict(
            dataset="cifar100",
            held_out=0,
            collapsed=False,
            settings=plan("paper-16")[0].as_row() | run | dict(
                attack_steps=4, sign_step=8 / 255, attack_step=200 / 255,
                variance=1e-4, seed=seed,
            ),
            scores=dict(average=dict(clean=clean, pgd=0.15)),
        )
        for seed, clean in enumerate((0.40, 0.44))
    ]  # fmt: skip
    lines = block(made, "cifar100", 16).splitlines()
    cells = [[cell.strip() for cell in line.split("|")[2:-1]] for line in lines]
    place = COLUMNS.index(("ds-blo", 1e-4))
    assert float(cells[2][place]) == REPORTED["cifar100"]["ds-blo", 16][1e-4][0]
    deviation = np.std([40, 44], ddof=1)
    assert cells[4][place] == f"42.00 ± {deviation:.2f} (2)"
    assert cells[5][place] == "15.00 ± 0.00 (2)"
    assert [cell for cell in cells[4] if cell] == [cells[4][place]]
    assert not any(cells[6])
