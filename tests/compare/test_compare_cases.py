"""What can be compared: cases, methods, ablations, the catalogue."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bilevax as bx
from bilevax._compare import runs
from bilevax._methods.catalogue import CATALOGUE, as_markdown

from ..comparisons import KINK, Descent, Walk

REPOSITORY = Path(__file__).parent.parent.parent


def test_problems_and_methods_can_be_given_in_several_ways():
    box = bx.Problem(
        KINK.upper, KINK.lower, KINK.constraints,
        domain=bx.Box(np.array([1.0]), np.array([2.0])),
    )  # fmt: skip
    names = runs.as_cases({"a": (KINK, np.ones(1)), "b": box})
    assert [case.name for case in names] == ["a", "b"]
    drawn = [float(names[1].instance(seed).x0[0]) for seed in range(3)]
    assert len(set(drawn)) == 3
    assert all(1 <= x <= 2 for x in drawn)
    assert list(runs.as_methods([Walk(), Descent()])) == ["Walk", "Descent"]
    one: Any = Walk()
    assert list(runs.as_methods(one)) == ["Walk"]
    with pytest.raises(ValueError, match="must be a Budget"):
        bx.compare({"a": (KINK, np.ones(1))}, [Walk()], budget=5)  # pyright: ignore
    assert runs.as_seeds(3) == [0, 1, 2]
    with pytest.raises(ValueError, match="needs a start"):
        runs.as_cases({"a": KINK})[0].instance(0)
    with pytest.raises(ValueError, match="Walk came twice"):
        runs.as_methods([Walk(), Walk()])
    with pytest.raises(ValueError, match="got Walk"):
        runs.as_methods({"a": Walk})  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="`steps` must be a positive integer"):
        bx.Budget(0)


def test_ablations_switch_off_one_part_each():
    method = bx.DSBLO(first_step=0.02, perturbation=bx.UniformBall(1e-3))
    found = bx.ablations(method)
    assert found["DS-BLO"] is method
    no_q = found["no q"]
    assert no_q.perturbation is None
    assert float(no_q.first_tilt) == 0
    assert not found["one fixed q"].fresh_tilt
    assert not found["no segment"].segment
    assert float(found["no momentum"].beta) == 0
    for other in found.values():
        assert float(other.first_step) == 0.02


def test_the_page_of_methods_is_made_from_the_catalogue():
    """Regenerate with `python -m bilevax._methods.catalogue > docs/methods.md`."""
    assert (REPOSITORY / "docs" / "methods.md").read_text() == as_markdown()


def test_every_method_of_the_catalogue_can_be_compared():
    assert len(CATALOGUE) == 16
    for entry in CATALOGUE.values():
        method: Any = entry.kind()
        assert float(method.first_step) > 0
        assert getattr(bx, entry.kind.__name__) is entry.kind
        assert (REPOSITORY / "tests" / "methods" / entry.tests).exists()
