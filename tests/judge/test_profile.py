"""F along lines and over grids, where it is known in closed form."""

import jax.numpy as jnp
import numpy as np
import pytest

import bilevax as bx

from .test_check import ROADS, TOLLS, revenue, travel

BOXED = bx.Problem(
    revenue, travel, ROADS, domain=bx.Box(jnp.zeros(2), jnp.full(2, 5.0))
)


def test_along_the_first_toll_f_is_that_of_the_closed_form():
    # Roads are full up to x0 = 3 (y0 = (2 - x0 + x1) / 2), then y0 = 4 - x0.
    found = bx.profile(BOXED, jnp.array([2.0, 3.0]), "x[0]", points=51)
    t = found.at[0]
    full = -(t * (5 - t) + 3 * (t - 1)) / 2
    free = -(t * np.maximum(4 - t, 0) + 3)
    full = np.where(t <= 1, -2 * t, full)
    np.testing.assert_allclose(found.values, np.where(t <= 3, full, free), atol=1e-9)
    assert t[0] == 0
    assert t[-1] == 5
    where, value = found.lowest
    assert where == (3.0,)
    np.testing.assert_allclose(value, -6.0, atol=1e-9)
    # Full and one road only, full, not full, not full and one road empty.
    assert "active sets: 4" in str(found)


def test_the_price_of_the_road_falls_to_zero_where_it_is_no_longer_full():
    found = bx.profile(BOXED, jnp.array([2.0, 3.0]), 0, span=(2.0, 3.5), points=7)
    price = np.maximum((3 - found.at[0]) / 2, 0)
    np.testing.assert_allclose(found.multipliers[:, 0], price, atol=1e-9)
    np.testing.assert_array_equal(found.active[:, 0], found.at[0] < 3)


def test_over_two_tolls_the_lowest_point_is_three_three():
    found = bx.profile(
        BOXED, jnp.ones(2), ("x[0]", 1), span=((2.0, 4.0), (2.0, 4.0)), points=5
    )
    assert found.values.shape == (5, 5)
    assert found.lowest[0] == (3.0, 3.0)


def test_along_a_direction_steps_are_those_of_the_direction():
    x = jnp.array([2.5, 3.0])
    found = bx.profile(TOLLS, x, jnp.array([1.0, -1.0]), points=3)
    ahead = bx.hypergradient(TOLLS, jnp.array([3.5, 2.0])).value
    np.testing.assert_allclose(found.values[2], ahead, atol=1e-12)
    np.testing.assert_allclose(found.values[1], bx.hypergradient(TOLLS, x).value)


def test_where_f_has_no_value_there_is_none_and_the_status_says_why():
    edge = bx.Problem(
        lambda x, y: x[0] + y[0],
        lambda x, y: 0.5 * jnp.sum(y**2),
        bx.Polyhedron(A=[[1.0], [-1.0]], B=[[-1.0], [0.0]], b=[-1.0, 0.0]),
    )
    found = bx.profile(edge, jnp.array([2.0]), span=(0.0, 2.0), points=5)
    np.testing.assert_array_equal(np.isnan(found.values), found.at[0] < 1)
    assert found.statuses[0] == "infeasible"
    assert "no value at 2 points (infeasible)" in str(found)


@pytest.mark.parametrize("along", [0, (0, 1)])
def test_pictures_are_drawn_into_files_and_axes(tmp_path, along):
    figure = pytest.importorskip("matplotlib.figure")
    found = bx.profile(BOXED, jnp.array([2.0, 3.0]), along, points=9)
    out = tmp_path / "new" / "picture.svg"
    found.plot(out)
    assert "<svg" in out.read_text()
    axes = figure.Figure().subplots()
    found.plot(axes)
    assert axes.get_xlabel() == "x[0]"
