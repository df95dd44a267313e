"""From rows to gaps, costs, profiles and curves, by hand."""

import numpy as np
import pytest

from bilevax._compare.curves import curves, gaps, references
from bilevax._compare.profiles import cost_to_target, profiles, target_table
from bilevax._compare.tables import (
    summary,
    trouble_table,
)

from ..comparisons import ROWS, handmade


def test_gaps_are_shares_of_the_way_to_the_best_known_value():
    known = references(ROWS)
    assert known == {("p", 0): (1.0, 0.0), ("p", 1): (11.0, 1.0), ("q", 0): (3.0, 1.0)}
    np.testing.assert_allclose(gaps(ROWS[4], known), [1, 0.2, 0.005, 0.1])
    np.testing.assert_allclose(gaps(ROWS[5], known), [1, np.inf, 0.05, 1.1])


def test_costs_to_a_target_are_those_of_the_first_look_there():
    known = references(ROWS)
    cost = lambda i, axis, gap: cost_to_target(ROWS[i], axis, gap, known)
    assert cost(0, "step", 0.1) == 20
    assert cost(1, "solves", 0.1) == 40
    assert cost(1, "seconds", 0.1) == pytest.approx(4.0)
    assert cost(1, "solves", 0.01) == np.inf
    assert cost(2, "step", 0.1) == np.inf
    assert cost(4, "step", 0.01) == 20
    assert cost(5, "solves", 0.1) == 40


def test_performance_profiles_by_hand():
    """Solves to a gap of 0.1: A 20, -, 20; B 40, 80, 40; C -, 40, -."""
    a, b, c = profiles(ROWS, "solves", 0.1)
    assert [a.method, b.method, c.method] == ["A", "B", "C"]
    assert [p.instances for p in (a, b, c)] == [3, 3, 3]
    assert a.ratios.tolist() == [1, 1]
    assert b.ratios.tolist() == [2, 2, 2]
    assert c.ratios.tolist() == [1]
    assert [a.share(f) for f in (1, 1.9, 2, 10)] == pytest.approx([2 / 3] * 4)
    assert [b.share(f) for f in (1, 1.9, 2, 10)] == pytest.approx([0, 0, 1, 1])
    assert [c.share(f) for f in (1, 10)] == pytest.approx([1 / 3] * 2)
    # To 0.01: A 30, -, 20; B -, 80, 40.
    a, b, c = profiles(ROWS, "seconds", 0.01)
    assert a.ratios.tolist() == [1, 1]
    assert b.ratios == pytest.approx([1, 2])
    assert len(c.ratios) == 0


def test_time_to_target_by_hand():
    table = {
        (row["problem"], row["gap"], row["method"]): row
        for row in target_table(ROWS, targets=(0.6, 0.1))
    }
    row = table["p", 0.6, "A"]
    assert (row["runs"], row["reached"]) == (2, 2)
    assert (row["iterations"], row["solves"]) == (10, 10)
    assert row["seconds"] == pytest.approx(1.0)
    # One run of two never came there: the median is infinite.
    row = table["p", 0.1, "A"]
    assert (row["reached"], row["iterations"]) == (1, np.inf)
    row = table["p", 0.1, "B"]
    assert (row["reached"], row["iterations"], row["solves"]) == (2, 15, 60)
    assert ("q", 0.1, "C") not in table


def test_a_curve_of_seconds_ends_with_the_last_look():
    # The slow method sets the grid; the fast one still shows where it ended.
    fast = handmade("p", "fast", 0, [4.0, 2.0, 1.0])
    slow = handmade("p", "slow", 0, [4.0, 3.0, 2.0])
    slow["seconds"] = [10 * s for s in slow["seconds"]]
    found = {curve.method: curve for curve in curves([fast, slow], "seconds", "value")}
    assert found["fast"].at[-1] == pytest.approx(fast["seconds"][-1])
    assert found["fast"].median[-1] == 1.0
    assert found["slow"].median[-1] == 2.0


def test_a_budget_spent_before_the_first_look_is_told():
    row = handmade("p", "A", 0, [4.0, 2.0])
    row["budget"] = row["budget"] | dict(lower_solves=1)
    (told,) = trouble_table([row])
    assert told["what"] == "has no result"
    assert "A on p has no result" in summary([row])


def test_curves_hold_medians_and_quartiles_of_what_is_known_by_then():
    rows = [handmade("p", "A", s, [4.0, 2.0 + s, float(s)]) for s in range(5)]
    (curve,) = curves(rows, "step", "value")
    assert curve.at.tolist() == [0, 10, 20]
    assert curve.median.tolist() == [4, 4, 2]
    assert curve.low.tolist() == [4, 3, 1]
    assert curve.high.tolist() == [4, 5, 3]
    rows.append(handmade("p", "B", 0, [4.0, 1.0], cost=15))
    slow = curves(rows, "solves", "value")[1]
    # B has looks at 0 and 150 solves; A ends at 20.
    assert slow.at.tolist() == [0, 10, 20, 150]
    assert slow.median.tolist() == [4, 4, 4, 1]


def test_runs_that_fail_are_infinitely_bad_in_a_median():
    rows = [handmade("p", "A", s, [4.0, 2.0]) for s in range(2)]
    rows += [handmade("p", "A", s, [], status="failed") for s in (2, 3, 4)]
    (curve,) = curves(rows, "step", "value")
    assert np.all(np.isinf(curve.median))
    assert curve.low.tolist() == [4, 2]


def test_a_start_that_is_best_costs_nothing_worse_than_one():
    rows = [handmade("p", "A", 0, [1.0, 2.0]), handmade("p", "B", 0, [1.0, 1.0])]
    a, b = profiles(rows, "seconds", 0.1)
    assert a.ratios.tolist() == b.ratios.tolist() == [1]
