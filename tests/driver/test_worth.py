"""A result says what it is worth: lines that hold for problems with known answers."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bilevax as bx
from bilevax._driver.requests import alone
from bilevax._driver.second_look import second_look
from bilevax._executors.description import described, rebuilt
from bilevax._problem.coordinates import coordinate_index, coordinate_names

BOX = bx.Box(jnp.zeros(1), jnp.full(1, 4.0))


def still(x, y):
    return 0.5 * jnp.sum(y**2)


def of_x(F, domain: Any = BOX) -> bx.Problem:
    """A problem whose F is a function of x alone."""
    return bx.Problem(
        lambda x, y: F(x) + 0 * jnp.sum(y), still, y0=jnp.zeros(1), domain=domain
    )


def buyer(x, y):
    """Buys 1 - x where that is positive."""
    return 0.5 * jnp.sum((y - (1 - x[:1])) ** 2)


def shop(most: float = 4.0) -> bx.Problem:
    """Revenue x (1 - x) below a price of 1, nothing above: F* = -1/4 at x = 1/2."""
    return bx.Problem(
        lambda x, y: -x[0] * y[0],
        buyer,
        bx.Box(jnp.zeros(1), jnp.full(1, 10.0)),
        domain=bx.Box(jnp.zeros(1), jnp.full(1, most)),
    )


SHOP = shop()
# Goes where gradients lead, and stays where there are none.
PLAIN = bx.ProximalSubgradient()


@pytest.mark.parametrize(("x0", "flat"), [(1.5, 0.25), (3.7, 0.625)])
def test_around_a_flat_point_the_second_look_finds_the_lower_ones(x0, flat):
    x = jnp.array([x0])
    e = bx.hypergradient(SHOP, x)
    look, near, there = alone(second_look(SHOP, x, e, 4.0, 1.0, jax.random.key(0)))
    assert look.open
    assert there.value < -0.2
    # Along the line of x everything up to there is flat.
    assert 0 <= near[0] < 1
    np.testing.assert_allclose(look.measure, 0, atol=1e-12)
    assert abs(float(near[0]) - x0) >= flat * 4


def test_where_all_is_flat_the_second_look_says_how_far():
    problem = of_x(lambda x: 0.0 * x[0])
    x = jnp.array([2.0])
    e = bx.hypergradient(problem, x)
    look, near, _ = alone(second_look(problem, x, e, 4.0, 1.0, jax.random.key(0)))
    assert not look.open
    assert near is x
    np.testing.assert_allclose(look.flat, [4.0])


def test_two_flat_directions_at_once_are_left():
    buyers = lambda x, y: 0.5 * jnp.sum((y - (1 - x)) ** 2)
    both = bx.Problem(
        lambda x, y: -jnp.sum(x * y),
        buyers,
        bx.Box(jnp.zeros(2), jnp.full(2, 10.0)),
        domain=bx.Box(jnp.zeros(2), jnp.full(2, 3.0)),
    )
    x0 = jnp.array([2.5, 1.7])
    s = bx.solve(both, PLAIN, x0, key=1, num_starts=1, num_steps=5)
    assert abs(s.stochastic[1]) < 1e-12
    np.testing.assert_allclose(s.x, [0.5, 0.5], atol=1e-6)


def test_a_coordinate_that_does_nothing_is_told_by_its_name():
    domain = bx.Box(
        {"cap": jnp.zeros(2), "price": jnp.zeros(())},
        {"cap": jnp.ones(2), "price": jnp.full((), 4.0)},
    )
    F = lambda x: (x["price"] - 1) ** 2 + (x["cap"][0] - 0.5) ** 2
    s = bx.solve(of_x(F, domain), key=0, num_steps=5)
    assert s.converged
    text = str(s)
    assert "does not change along cap[1]" in text
    assert "price" not in text.split("flat")[1].split("\n")[0]


def test_a_bound_that_holds_is_told():
    s = bx.solve(of_x(lambda x: (x[0] - 7) ** 2), key=0, num_steps=5)
    assert s.bounds == {"x[0]": "at its upper bound 4"}
    assert s.converged
    assert "x[0] at its upper bound 4" in str(s)
    rows = bx.Polyhedron(
        A=jnp.array([[1.0, 1.0], [-1.0, 0.0]]), b=jnp.array([1.0, 5.0])
    )
    F = lambda x: jnp.sum((x - 2) ** 2)
    s = bx.solve(of_x(F, rows), x0=jnp.zeros(2), key=0, num_steps=5)
    assert list(s.bounds) == ["row 0 of `domain`"]
    assert s.converged


def test_the_spread_of_the_starts_counts_the_ends():
    wells = of_x(
        lambda x: (x[0] ** 2 - 1) ** 2 + 0.3 * x[0],
        bx.Box(jnp.full(1, -2.0), jnp.full(1, 2.0)),
    )
    starts = [jnp.array([x]) for x in (1.1, -1.2, 0.9)]
    s = bx.solve(wells, x0=jnp.array([1.5]), starts=starts, key=0, num_steps=5)
    low, high = (np.min(F) for F in _wells())
    assert f"1 of 4 starts ends at {low:.6g}, 3 at {high:.6g}" in str(s)
    assert "num_starts=16" in str(s)


def _wells():
    """F on a fine grid of each well."""
    for side in (-1.0, 1.0):
        x = side + np.linspace(-0.2, 0.2, 400001)
        yield (x**2 - 1) ** 2 + 0.3 * x


def test_success_is_about_the_evaluation_and_converged_about_the_run():
    F = lambda x: jnp.sum((x - 3) ** 2)
    short = bx.solve(
        of_x(F), x0=jnp.zeros(1), key=0, num_steps=2, polish=False, num_starts=1
    )
    assert short.success
    assert not short.converged
    assert "polish=True" in str(short)
    whole = bx.solve(of_x(F), x0=jnp.zeros(1), key=0, num_steps=5)
    assert whole.success
    assert whole.converged


def test_a_run_on_a_kink_is_stationary_though_no_gradient_vanishes():
    s = bx.solve(of_x(lambda x: jnp.abs(x[0] - 1) + 0.5 * x[0]), key=0, num_steps=5)
    np.testing.assert_allclose(s.x, [1.0], atol=1e-8)
    assert s.around is not None
    assert s.around.measure < 1e-12
    assert s.converged


def test_where_f_falls_for_ever_nothing_has_converged():
    s = bx.solve(of_x(lambda x: x[0], None), x0=jnp.zeros(1), key=0, throw=False)
    assert s.status_name == "unbounded"
    assert not s.converged
    assert "restrict x" in str(s)


def test_a_solution_has_all_that_is_known_of_its_lower_level():
    problem = shop(0.4)
    s = bx.solve(problem, key=0, num_steps=5)
    e = bx.hypergradient(problem, s.x)
    np.testing.assert_allclose(s.multipliers, e.lower.multipliers, atol=1e-12)
    assert s.lower is not None
    np.testing.assert_array_equal(s.lower.active, e.lower.active)
    np.testing.assert_array_equal(s.prices, s.multipliers)


class Wanted(eqx.Module):
    """A follower who wants `d - x`, and a leader who wants 0.3."""

    d: Any

    def problem(self) -> bx.Problem:
        g = lambda x, y: 0.5 * jnp.sum((y - (self.d - x)) ** 2)
        f = lambda x, y: jnp.sum((y - 0.3) ** 2)
        return bx.Problem(f, g, bx.Box(jnp.zeros(1), jnp.ones(1)), domain=BOX)


def test_of_followers_and_samples_there_is_a_report_too():
    each = bx.Followers(lambda d: Wanted(d).problem(), jnp.array([0.8, 0.9, 1.0]))
    s = bx.solve(each, key=0, num_steps=5, num_starts=1)
    assert s.multipliers.shape == (3, 2)
    assert s.converged
    assert str(s).startswith("F ")
    draws = bx.StochasticProblem.from_data(
        jnp.array([0.8, 0.9, 1.0]), 2, lambda rows: Wanted(jnp.mean(rows)).problem()
    )
    s = bx.solve(draws, x0=jnp.zeros(1), key=0, num_steps=5)
    assert "ended" in str(s)


def test_a_solution_that_travels_is_the_same():
    s = bx.solve(SHOP, key=0, num_steps=5)
    (again,) = rebuilt(*described([s]))
    assert str(again) == str(s)
    assert again.converged == s.converged


def test_a_run_that_continues_says_the_same(tmp_path):
    options: dict[str, Any] = dict(x0=jnp.array([3.5]), key=0, num_steps=5)
    path = tmp_path / "run.npz"
    first = bx.solve(SHOP, checkpoint=path, **options)
    again = bx.solve(SHOP, checkpoint=path, **options)
    assert str(again) == str(first)


def test_names_of_coordinates_are_in_the_order_of_the_flat_vector():
    x = {"b": jnp.array([1.0, 2.0]), "a": {"c": jnp.array(0.0)}}
    assert coordinate_names(x) == ["a.c", "b[0]", "b[1]"]
    assert coordinate_names(jnp.zeros((1, 2))) == ["x[0, 0]", "x[0, 1]"]
    assert coordinate_names([jnp.zeros(1), jnp.zeros(())]) == ["x[0][0]", "x[1]"]
    names = coordinate_names(x)
    assert coordinate_index(names, "b[1]", "along") == 2
    assert coordinate_index(names, -1, "along") == 2
