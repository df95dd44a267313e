"""Failures are values with advice; one bad member never spoils a batch."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bilevax as bx

from .. import zoo


class Family(eqx.Module):
    """A lower level whose trouble is data, so that all cases share one program."""

    curvature: jax.Array
    offset: jax.Array

    def __call__(self, x, y):
        return 0.5 * jnp.sum(self.curvature * y**2) - jnp.sum((x + self.offset) * y)


def length(x, y):
    return jnp.sum(y**2)


def problem(curvature=(1.0, 1.0), offset=0.0, b=(1.0, 1.0, 5.0)):
    rows = bx.Polyhedron(
        A=np.array([[1.0, 0.0], [0.0, 1.0], [-1.0, -1.0]]), b=jnp.asarray(b)
    )
    lower = Family(jnp.asarray(curvature), jnp.asarray(offset))
    return bx.Problem(length, lower, rows)


X = np.array([2.0, 0.5])
TROUBLE = {
    "successful": (problem(), X),
    "infeasible": (problem(b=(1.0, 1.0, -3.0)), X),
    "not_strongly_convex": (problem(curvature=(1.0, -1.0)), X),
    "non_finite": (problem(), np.array([np.nan, 0.5])),
    "kink": (problem(), np.array([1.0, 0.5])),
}
evaluate = eqx.filter_jit(lambda p, x: bx.hypergradient(p, x, throw=False))


@pytest.mark.parametrize("name", TROUBLE)
def test_each_trouble_has_its_status(name):
    e = evaluate(*TROUBLE[name])
    assert bx.status_name(e.status) == name
    lost = name in ("infeasible", "not_strongly_convex", "non_finite")
    assert np.isnan(e.value) == lost
    assert bool(np.all(np.isnan(e.grad))) == lost


@pytest.mark.parametrize("name", ["successful", "kink"])
def test_a_kink_is_an_answer(name):
    e = bx.hypergradient(*TROUBLE[name])
    assert e.success
    assert bool(e.message) == (name == "kink")


@pytest.mark.parametrize(
    "name", [n for n in TROUBLE if n not in ("successful", "kink")]
)
def test_throw_raises_the_advice(name):
    with pytest.raises(bx.BilevelError) as info:
        bx.hypergradient(*TROUBLE[name])
    text = str(info.value)
    assert len(text) > 80
    assert "`" in text
    assert info.value.result.lower is not None


@pytest.mark.parametrize(
    ("curvature", "offset", "expected"),
    [
        ((0.0, 1.0), -2.0, "not_strongly_convex"),
        # Flat along a coordinate that a row holds with force.
        ((0.0, 1.0), 0.0, "successful"),
        ((1.0, 1.0), np.inf, "non_finite"),
        ((np.nan, 1.0), 0.0, "non_finite"),
        ((1e-30, 1e-30), 0.0, "successful"),
    ],
)
def test_singular_and_non_finite_objectives(curvature, offset, expected):
    e = evaluate(problem(curvature=curvature, offset=offset), X)
    assert bx.status_name(e.status) == expected


@pytest.mark.parametrize(
    ("b", "expected"),
    [
        ((np.inf, np.inf, np.inf), "successful"),
        ((-np.inf, 1.0, 5.0), "infeasible"),
        ((np.nan, 1.0, 5.0), "non_finite"),
        ((1.0, 1.0, -2.0), "dependent_rows"),
        ((1.0, 1.0, -2.0 - 1e-6), "infeasible"),
    ],
)
def test_bounds_at_the_edge_of_sense(b, expected):
    # b = (1, 1, -2) leaves the single point (1, 1); it does not move with x, so the
    # dependence is shared and the gradient exists.
    e = evaluate(problem(b=b), X)
    name = bx.status_name(e.status)
    assert name == ("successful" if expected == "dependent_rows" else expected)


def test_a_batch_keeps_one_status_per_member():
    names, cases = list(TROUBLE), list(TROUBLE.values())
    stacked = jax.tree.map(
        lambda *leaves: jnp.stack(leaves) if eqx.is_array(leaves[0]) else leaves[0],
        *[c[0] for c in cases],
    )
    points = jnp.stack([c[1] for c in cases])
    out = eqx.filter_jit(
        eqx.filter_vmap(lambda p, x: bx.hypergradient(p, x, throw=False))
    )(stacked, points)
    for i, name in enumerate(names):
        assert bx.status_name(jax.tree.map(lambda s, i=i: s[i], out.status)) == name
    np.testing.assert_allclose(out.grad[0], evaluate(*cases[0]).grad, atol=zoo.EXACT)
    with pytest.raises(bx.BilevelError, match="1 of 5"):
        raise bx.BilevelError(out.message, out.status)


def test_iteration_limits_are_reported():
    lower = lambda x, y: jnp.sum(jnp.cosh(y - 20 * x))
    rows = bx.Polyhedron(A=np.ones((1, 2)), b=np.ones(1))
    hard = bx.Problem(lambda x, y: jnp.sum(y), lower, rows)
    capped = bx.ActiveSet(max_passes=1, max_safeguard_steps=1)
    e = bx.hypergradient(hard, np.ones(2), solver=capped, throw=False)
    assert bx.status_name(e.status) == "iteration_limit"
    assert bx.hypergradient(hard, np.ones(2)).success


def test_traced_calls_never_raise():
    traced = jax.jit(lambda x: bx.hypergradient(TROUBLE["infeasible"][0], x).value)
    assert np.isnan(traced(X))


def test_inconsistent_and_redundant_equalities():
    def solve(second):
        rows = bx.Polyhedron(A_eq=np.array([[1.0, 1], [2, 2]]), b_eq=jnp.stack(second))
        lower = lambda x, y: 0.5 * jnp.sum((y - x) ** 2)
        p = bx.Problem(lambda x, y: y[0] ** 2, lower, rows)
        return bx.hypergradient(p, np.array([1.0, 0.0]), throw=False)

    fine = solve([1.0, 2.0])
    assert fine.success
    np.testing.assert_allclose(fine.lower.y, [1, 0], atol=zoo.IDENTITY)
    np.testing.assert_allclose(fine.grad, [1, -1], atol=zoo.IDENTITY)
    assert bx.status_name(solve([1.0, 3.0]).status) == "infeasible"


def test_an_empty_triangle_is_found_empty():
    """Rows that all but lose rank, two of them; each set of three rows is empty."""
    cases = [
        (
            [[-0.2592977246259758, -0.6065991794895672],
             [-2.760469529784762, 1.9600039376867153],
             [2.7664262795446035, -1.92455166420242]],
            [-0.3639995593022946, -0.06225559470870442, -0.10747145920471791],
            [0.58557928, 2.75606857],
        ),
        (
            [[-0.22965557886303192, 0.5054574895619885],
             [-0.985994007658882, 0.9232987773161978],
             [0.8779566468055859, -0.8410102866339151]],
            [0.416012551983842, -1.323485475542392, 0.8950252659585157],
            [0.91150264, 2.92160026],
        ),
    ]  # fmt: skip
    for A, b, c in cases:
        problem = bx.Problem(
            lambda x, y: jnp.sum(y**2),
            lambda x, y, c=c: 0.5 * jnp.sum((y - jnp.array(c)) ** 2),
            bx.Polyhedron(A=A, B=-np.ones((3, 1)), b=b),
        )
        e = bx.hypergradient(problem, jnp.zeros(1), throw=False)
        assert bx.status_name(e.status) == "infeasible"
        assert bx.hypergradient(problem, jnp.ones(1)).success
