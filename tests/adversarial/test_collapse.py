"""The figure of the collapse is made of committed rows."""

import json

from benchmarks.collapse import CASES, ROWS, draw
from bilevax.adversarial.training.watch import collapsed


def test_the_rows_of_the_figure_say_what_the_page_says(tmp_path):
    rows = [json.loads(line) for line in ROWS.read_text().splitlines()]
    assert {row["case"] for row in rows} == set(CASES)
    ends = {case: [row for row in rows if row["case"] == case][-1] for case in CASES}
    one, _, default = (ends[case] for case in CASES)
    # The long step is withstood and PGD is not; the default tells of both alike.
    assert collapsed(one)
    assert not any(collapsed(row) for row in rows if row["case"] == default["case"])
    assert abs(default["accuracy"] - default["robust_by_batch"]) < 0.1
    draw(rows, tmp_path / "collapse.svg")
    assert "<svg" in (tmp_path / "collapse.svg").read_text()
