"""The constants that belong to rows, against every active set."""

import itertools
import math

import jax.numpy as jnp
import numpy as np
import pytest

import bilevax as bx
from bilevax import theory

from .. import zoo
from ..theory_tools import box


def total(x, y):
    return jnp.sum(y)


def measured_rows(constraints, n):
    problem = bx.Problem(total, zoo.Clipped(), constraints)
    return theory.measure(problem, box((-1, 1)), box(*[(-1, 1)] * n))


def all_active_sets(A, equality):
    """Extremes over every independent set, by the definition."""
    fixed = [i for i in range(len(A)) if equality[i]]
    free = [i for i in range(len(A)) if not equality[i]]
    extremes = []
    for size in range(len(free) + 1):
        for chosen in itertools.combinations(free, size):
            rows = A[[*fixed, *chosen]]
            if len(rows) and np.linalg.matrix_rank(rows) == len(rows):
                values = np.linalg.svd(rows, compute_uv=False)
                extremes.append((values.min() ** 2, values.max()))
    smallest, largest = zip(*extremes, strict=True)
    return min(smallest), max(largest)


@pytest.mark.parametrize("equalities", [0, 1])
def test_active_sets_are_enumerated(equalities):
    rng = np.random.default_rng(equalities)
    A = rng.normal(size=(6, 3))
    A[3], A[4] = 2 * A[0], A[1] - A[2]
    A_eq = rng.normal(size=(equalities, 3))
    rows = bx.Polyhedron(
        A=A,
        b=np.ones(6),
        A_eq=A_eq if equalities else None,
        b_eq=np.ones(1) if equalities else None,
    )
    base = measured_rows(rows, 3)
    flags = np.arange(6 + equalities) >= 6
    smallest, largest = all_active_sets(np.concatenate([A, A_eq]), flags)
    assert base.lambda_min == pytest.approx(smallest, rel=zoo.EXACT)
    assert base.L_A == pytest.approx(largest, rel=zoo.EXACT)
    assert base.label("lambda_min") == base.label("L_A") == "exact"


def test_boxes_and_simplices_agree_with_their_rows():
    for constraints, flags in (
        (bx.Box(-np.ones(3), np.ones(3)), np.zeros(6, bool)),
        (bx.Simplex(3), np.arange(4) == 3),
    ):
        base = measured_rows(constraints, 3)
        A = np.asarray(constraints.matrix(3, float))
        smallest, largest = all_active_sets(A, flags)
        assert base.lambda_min == pytest.approx(smallest, rel=zoo.EXACT)
        assert base.L_A == pytest.approx(largest, rel=zoo.EXACT)


def test_rows_that_are_never_active_do_not_count():
    A = np.array([[1.0, 0, 0], [1.0, 1e-6, 0]])
    base = measured_rows(bx.Polyhedron(A=A, b=np.array([1.0, np.inf])), 3)
    assert (base.L_A, base.lambda_min) == (1, 1)
    free = measured_rows(bx.Box(-np.inf * np.ones(3), np.inf), 3)
    assert (free.L_A, free.lambda_min) == (0, math.inf)
    assert theory.derived(free).Lbar_lambda == 0
    assert any(text.startswith("ass:sets") for text in free.broken)


def test_too_many_active_sets_are_sampled_and_labelled():
    # The rows of a box in 12 dimensions have C(24, 12) candidates, all of norm one.
    eye = np.eye(12)
    rows = bx.Polyhedron(A=np.concatenate([eye, -eye]), b=np.ones(24))
    base = measured_rows(rows, 12)
    assert base.label("lambda_min") == "estimate"
    assert base.label("L_A") == "bound"
    assert base.lambda_min == pytest.approx(1)
    assert base.L_A == pytest.approx(math.sqrt(2))


def test_a_repeated_row_breaks_an_assumption():
    base = theory.measure(zoo.clipped(2), box((-1, 1)), box((-1, 0)))
    assert any(text.startswith("ass:rank") for text in base.broken)
    assert base.lambda_min == 1


def test_the_largest_gradient_in_many_dimensions_is_a_bound():
    n = 10
    problem = zoo.t2(n)
    region = box(*[(-1, 1)] * n)
    base = theory.measure(problem, region, region)
    assert base.label("Lbar_f") == "bound"
    rng = np.random.default_rng(0)
    xs, ys = np.sign(rng.normal(size=(2, 500, n)))
    Q = np.asarray(problem.upper.Q)
    f_x, f_y = 2 * xs + 0.1 * ys @ Q.T + 1, 2 * ys + 0.1 * xs @ Q + 1
    norms = np.linalg.norm(np.hstack([f_x, f_y]), axis=1)
    assert norms.max() <= base.Lbar_f
    # Five rows in ten dimensions cannot bound the set: the paper's own example.
    assert any(text.startswith("ass:sets") for text in base.broken)


def test_dependent_equalities_are_refused():
    rows = bx.Polyhedron(A_eq=np.ones((2, 3)), b_eq=np.ones(2))
    with pytest.raises(ValueError, match="`A_eq` must have independent rows"):
        measured_rows(rows, 3)
