"""Upper constraints that involve `y`: solved, reported, and told where they fail."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bilevax as bx

from .. import zoo
from ..executors.tools import Here

SQUARE = bx.Box(-2 * np.ones(2), 2 * np.ones(2))


def follows(x, y):
    """The follower answers `y = x`, within its bounds."""
    return 0.5 * jnp.sum((y - x) ** 2)


def towards(x, y):
    return jnp.sum((y - jnp.array([2.0, 1.0])) ** 2)


def disc(x, y):
    return jnp.sum(y**2) - 1


def coupled(c=None, upper=towards, constraints=None, size=2, domain=None, **more):
    y0 = jnp.zeros(size) if constraints is None else None
    return bx.Problem(
        upper, follows, constraints, y0=y0, domain=domain, upper_constraints=c, **more
    )


def solved(problem, x0, **options):
    return bx.solve(problem, x0=np.asarray(x0, float), key=0, **options)


def test_a_nonlinear_constraint_gives_the_projection_and_its_multiplier():
    found = solved(coupled(disc), [0.3, -0.2])
    root = np.sqrt(5)
    np.testing.assert_allclose(found.x, np.array([2, 1]) / root, rtol=zoo.REFERENCE)
    np.testing.assert_allclose(found.value, (root - 1) ** 2, rtol=zoo.EXACT)
    np.testing.assert_allclose(found.upper_multipliers, root - 1, rtol=zoo.REFERENCE)
    assert found.violation <= zoo.EXACT
    assert found.success
    assert found.feasible


def test_the_multipliers_are_the_derivative_of_the_optimum():
    def rise(t):
        c = jax.tree_util.Partial(lambda t, x, y: jnp.sum(y**2) - 1 - t, jnp.asarray(t))
        return solved(coupled(c), [0.3, -0.2]).value

    found = solved(coupled(disc), [0.3, -0.2])
    slope = (rise(1e-4) - rise(-1e-4)) / 2e-4
    np.testing.assert_allclose(-slope, found.upper_multipliers, rtol=zoo.DIFFERENCES)


def test_several_active_constraints_meet_in_a_vertex():
    """`x1 + 2 x2 <= 4` and `3 x1 + x2 <= 6` meet in (1.6, 1.2)."""
    rows = lambda x, y: {"a": y[0] + 2 * x[1] - 4, "b": jnp.array([[3, 1]]) @ y - 6}
    found = solved(coupled(rows, lambda x, y: -jnp.sum(y)), [0.0, 0.0])
    np.testing.assert_allclose(found.x, [1.6, 1.2], rtol=zoo.EXACT)
    np.testing.assert_allclose(found.value, -2.8, rtol=zoo.EXACT)
    # -(1, 1) + 0.4 (1, 2) + 0.2 (3, 1) = 0
    multipliers = found.upper_multipliers
    np.testing.assert_allclose(multipliers["a"], 0.4, rtol=zoo.REFERENCE)
    np.testing.assert_allclose(multipliers["b"], [0.2], rtol=zoo.REFERENCE)
    assert found.upper is not None
    assert found.upper.residual <= zoo.REFERENCE


def test_a_constraint_that_is_met_changes_nothing():
    far = lambda x, y: y - 10
    found = solved(coupled(far), [0.0, 0.0])
    np.testing.assert_allclose(found.x, [2, 1], atol=zoo.REFERENCE)
    np.testing.assert_array_equal(found.upper_multipliers, np.zeros(2))


def test_a_constraint_may_touch_at_a_kink_of_the_answer():
    """`y = max(x, 0) <= 0`, so `x <= 0`: the slope of C is 0 or 1 at the solution."""
    positive = bx.Box(np.zeros(1), np.full(1, 5.0))
    found = solved(
        coupled(lambda x, y: y, lambda x, y: jnp.sum((x - 1) ** 2), positive), [-1.0]
    )
    np.testing.assert_allclose(found.x, [0], atol=zoo.EXACT)
    np.testing.assert_allclose(found.value, 1, rtol=zoo.EXACT)
    np.testing.assert_allclose(found.upper_multipliers, [2], rtol=1e-5)  # of a ball
    assert found.violation <= zoo.EXACT


def test_a_domain_and_constraints_hold_together():
    """Least `|x - (2, 1)|^2` with `x1 + x2 <= 1` and `x2 >= 0.25`: (0.75, 0.25)."""
    domain = bx.Box(np.array([-2.0, 0.25]), np.array([2.0, 2.0]))
    found = solved(coupled(lambda x, y: jnp.sum(y) - 1, domain=domain), [0.0, 1.0])
    np.testing.assert_allclose(found.x, [0.75, 0.25], atol=zoo.EXACT)
    rows = bx.Polyhedron(A=np.array([[0.0, -1.0]]), b=np.array([-0.25]))
    found = solved(coupled(lambda x, y: jnp.sum(y) - 1, domain=rows), [0.0, 1.0])
    np.testing.assert_allclose(found.x, [0.75, 0.25], atol=zoo.EXACT)


def test_equalities_are_met_with_a_signed_multiplier():
    """On `y1 = y2` the nearest point to (2, 1) is (1.5, 1.5)."""
    equal = lambda x, y: y[0] - y[1]
    found = solved(coupled(upper_equalities=equal), [1.0, -1.0])
    np.testing.assert_allclose(found.x, [1.5, 1.5], rtol=zoo.EXACT)
    assert found.violation <= zoo.EXACT
    # 2 (x - (2, 1)) + nu (1, -1) = 0
    assert found.upper is not None
    nu = found.upper.equality_multipliers
    np.testing.assert_allclose(nu, 1, rtol=zoo.REFERENCE)


def test_two_opposite_inequalities_are_an_equality():
    both = lambda x, y: jnp.stack([y[0] - y[1], y[1] - y[0]])
    found = solved(coupled(both), [1.0, -1.0])
    np.testing.assert_allclose(found.x, [1.5, 1.5], rtol=zoo.REFERENCE)
    mu = found.upper_multipliers
    np.testing.assert_allclose(mu[0] - mu[1], 1, rtol=zoo.REFERENCE)


def test_a_price_may_be_capped():
    """Two plants with costs `a_i y_i^2 / 2` share the demand `x` at the price
    `x / (1/a_1 + 1/a_2)`; demand grows until the price is at its cap."""
    slopes, cap = np.array([1.0, 4.0]), 3.0
    market = bx.Intersection(
        balance=bx.Polyhedron(
            A_eq=np.ones((1, 2)), B_eq=-np.ones((1, 1)), b_eq=np.zeros(1)
        ),
        bounds=bx.Box(np.zeros(2), np.full(2, 50.0)),
    )
    problem = bx.Problem(
        lambda x, y, prices: -x[0] + 0 * jnp.sum(y),
        lambda x, y: 0.5 * jnp.sum(slopes * y**2),
        market,
        prices=True,
        domain=bx.Box(np.zeros(1), np.full(1, 40.0)),
        upper_constraints=lambda x, y, prices: -prices["balance"] - cap,
    )
    found = solved(problem, [1.0])
    width = np.sum(1 / slopes)
    np.testing.assert_allclose(found.x, cap * width, rtol=zoo.EXACT)
    np.testing.assert_allclose(found.upper_multipliers, width, rtol=zoo.REFERENCE)
    slope = bx.constraint_gradients(problem, found.x).jacobian
    np.testing.assert_allclose(slope, 1 / width, rtol=zoo.EXACT)


def test_a_penalty_too_weak_for_an_unbounded_objective_is_made_heavier():
    """`-x` falls without bound; `c = exp(y) - 1 <= 0` stops it at zero."""
    problem = coupled(lambda x, y: 1e-3 * y, lambda x, y: -jnp.sum(x), size=1)
    found = solved(problem, [-1.0])
    np.testing.assert_allclose(found.x, [0], atol=zoo.EXACT)
    np.testing.assert_allclose(found.upper_multipliers, [1000], rtol=zoo.REFERENCE)


@pytest.mark.parametrize("unit", [1e-6, 1e6])
def test_units_of_constraints_do_not_matter(unit):
    found = solved(coupled(lambda x, y: unit * disc(x, y)), [0.3, -0.2])
    root = np.sqrt(5)
    np.testing.assert_allclose(found.value, (root - 1) ** 2, rtol=zoo.EXACT)
    np.testing.assert_allclose(
        unit * found.upper_multipliers, root - 1, rtol=zoo.REFERENCE
    )


def test_what_cannot_be_satisfied_is_said_and_named():
    never = lambda x, y: {"a": y[0] - 5, "limit": jnp.stack([y[1] - 9, 1 + y[0] ** 2])}
    found = solved(coupled(never), [0.5, 0.5], throw=False)
    assert found.status_name == "upper_infeasible"
    assert not found.success
    assert not found.feasible
    np.testing.assert_allclose(found.violation, 1, rtol=zoo.DIFFERENCES)
    assert "`limit[1]` of `upper_constraints` is 1." in found.message
    assert "signs" in found.message
    assert all(np.isnan(m).all() for m in jax.tree.leaves(found.upper_multipliers))
    with pytest.raises(bx.BilevelError, match="upper constraints"):
        solved(coupled(never), [0.5, 0.5])


def test_of_several_starts_one_that_satisfies_the_constraints_counts():
    """`c = 1 - y^2` has a hill of violation between x = -1 and x = 1."""
    problem = coupled(
        lambda x, y: 1 - y**2 + 5 * jnp.exp(-((y - 3) ** 2)),
        lambda x, y: jnp.sum((x - 0.5) ** 2),
        size=1,
    )
    found = solved(problem, [0.0], starts=[[2.0], [-3.0]], throw=False)
    assert found.feasible
    assert len(found.starts) == 3
    assert found.value == min(s.value for s in found.starts if s.feasible)


def test_gradients_of_constraints_are_those_of_differences():
    bend = lambda x, y: {"a": jnp.sin(y) * x[0], "b": y[0] * y[1]}
    equal = lambda x, y: jnp.stack([x @ y])
    problem = coupled(bend, constraints=SQUARE, upper_equalities=equal)
    x = np.array([0.7, -0.4])
    found = bx.constraint_gradients(problem, x)
    at = lambda x: bx.constraint_gradients(problem, x)
    step = 1e-6
    slope = lambda a, b: (a - b) / (2 * step)
    for i, e in enumerate(np.eye(2)):
        ahead, behind = at(x + step * e), at(x - step * e)
        for name in ("a", "b"):
            numbers = slope(ahead.constraints[name], behind.constraints[name])
            np.testing.assert_allclose(
                found.jacobian[name][..., i], numbers, atol=zoo.DIFFERENCES
            )
        numbers = slope(ahead.equalities, behind.equalities)
        np.testing.assert_allclose(
            found.equality_jacobian[..., i], numbers, atol=zoo.DIFFERENCES
        )
    alone = bx.hypergradient(problem, x)
    np.testing.assert_allclose(found.value, alone.value, rtol=zoo.IDENTITY)
    np.testing.assert_allclose(found.grad, alone.grad, rtol=zoo.EXACT)


def test_constraint_gradients_are_the_same_in_programs_and_batches():
    problem = coupled(disc)
    points = np.array([[0.7, -0.4], [0.1, 2.0]])
    jacobian = lambda x: bx.constraint_gradients(problem, x, throw=False).jacobian
    batch = jax.jit(jax.vmap(jacobian))(points)
    for row, point in zip(batch, points, strict=True):
        np.testing.assert_allclose(row, jacobian(point), rtol=zoo.EXACT)
        np.testing.assert_allclose(row, 2 * point, rtol=zoo.EXACT)


def test_x_and_constraints_may_be_trees():
    """Least `(a - 3)^2 + b^2` with `a^2 <= 4`."""
    lower = lambda x, y: (y["u"] - x["a"]) ** 2 + jnp.sum((y["v"] - x["b"]) ** 2)
    problem = bx.Problem(
        lambda x, y: (y["u"] - 3) ** 2 + jnp.sum(x["b"] ** 2),
        lower,
        y0={"u": jnp.zeros(()), "v": jnp.zeros(3)},
        upper_constraints=lambda x, y: {"cap": y["u"] ** 2 - 4},
    )
    x0 = {"a": np.array(0.5), "b": np.ones(3)}
    found = bx.solve(problem, x0=x0, key=0)
    np.testing.assert_allclose(found.x["a"], 2, rtol=zoo.EXACT)
    np.testing.assert_allclose(found.x["b"], np.zeros(3), atol=1e-6)  # F is flat there
    np.testing.assert_allclose(found.upper_multipliers["cap"], 0.5, rtol=zoo.REFERENCE)
    slopes = bx.constraint_gradients(problem, x0).jacobian["cap"]
    np.testing.assert_allclose(slopes["a"], 1, rtol=zoo.EXACT)
    np.testing.assert_array_equal(slopes["b"], np.zeros(3))


def test_many_instances_are_solved_as_each_alone():
    bend = lambda radius, x, y: jnp.sum(y**2) - radius**2
    partial = jax.tree_util.Partial
    problems = [coupled(partial(bend, jnp.asarray(r))) for r in (0.5, 1.0, 3.0)]
    found = bx.solve_many(problems, jnp.array([[0.3, -0.2]] * 3), 0)
    distance = np.maximum(np.sqrt(5) - np.array([0.5, 1.0, 3.0]), 0)
    values = [one.value for one in found]
    np.testing.assert_allclose(values, distance**2, rtol=zoo.EXACT, atol=zoo.IDENTITY)
    assert all(one.feasible for one in found)


def test_sampled_constraints_hold_for_all_rows_at_the_end():
    """The mean of `a` is one, and `mean(a) |y|^2 <= 1` is the disc."""
    data = np.array([0.5, 1.5, 0.75, 1.25])

    def instance(batch):
        c = jax.tree_util.Partial(lambda a, x, y: a * jnp.sum(y**2) - 1, batch.mean())
        return coupled(c)

    problem = bx.StochasticProblem.from_data(data, 2, instance)
    found = solved(problem, [0.3, -0.2], polish=True)
    np.testing.assert_allclose(found.value, (np.sqrt(5) - 1) ** 2, rtol=zoo.REFERENCE)
    found = solved(problem, [0.3, -0.2], throw=False)
    assert found.feasible


def test_the_certificate_of_a_solution_is_small_and_elsewhere_it_is_not():
    problem = coupled(disc)
    found = solved(problem, [0.3, -0.2], certify=1e-4)
    assert found.certificate is not None
    assert found.certificate.measure < 1e-3
    elsewhere = bx.certify(problem, np.array([1.0, 0.0]), 1e-4, key=0)
    # Along the circle F still falls: its slope there is 2.
    np.testing.assert_allclose(elsewhere.measure, 2, rtol=1e-3)


def test_the_penalised_problem_is_exact_above_the_multiplier():
    root = np.sqrt(5)
    found = solved(bx.penalised(coupled(disc), 2 * (root - 1)), [0.3, -0.2])
    np.testing.assert_allclose(found.value, (root - 1) ** 2, rtol=zoo.REFERENCE)
    light = solved(bx.penalised(coupled(disc), 0.5 * (root - 1)), [0.3, -0.2])
    assert np.sum(light.x**2) > 1.1


def test_executors_find_what_this_process_finds():
    problem = coupled(disc)
    here = solved(problem, [0.3, -0.2])
    there = solved(problem, [0.3, -0.2], executor=Here())
    np.testing.assert_array_equal(here.x, there.x)
    np.testing.assert_array_equal(here.upper_multipliers, there.upper_multipliers)


def test_a_solution_on_disk_keeps_its_constraints(tmp_path):
    found = solved(coupled(disc), [0.3, -0.2])
    found.save(tmp_path / "disc.npz")
    again = bx.Solution.load(tmp_path / "disc.npz")
    np.testing.assert_array_equal(again.upper_multipliers, found.upper_multipliers)
    assert again.feasible
    assert again.upper is not None
    assert again.upper.residual == getattr(found.upper, "residual", None)
    assert "upper_constraints (1.236)" in " ".join(str(again).split())


def test_a_checkpoint_ends_where_the_run_ends(tmp_path):
    path = tmp_path / "run.npz"
    first = solved(coupled(disc), [0.3, -0.2], checkpoint=path)
    again = solved(coupled(disc), [0.3, -0.2], checkpoint=path)
    np.testing.assert_array_equal(first.x, again.x)
    np.testing.assert_array_equal(first.history.value, again.history.value)


def test_ranges_that_are_decades_apart_do_not_matter():
    """Least `(log10 x1 - 2)^2 + x2^2` with `log10 x1 <= 1` has `x1 = 10`."""
    decades = lambda x, y: 0.5 * (y[0] - jnp.log10(x[0])) ** 2 + 0.5 * y[1] ** 2
    problem = bx.Problem(
        lambda x, y: (y[0] - 2) ** 2 + x[1] ** 2,
        decades,
        y0=jnp.zeros(2),
        domain=bx.Box(np.array([1e-2, -1.0]), np.array([1e4, 1.0])),
        upper_constraints=lambda x, y: y[0] - 1,
    )
    found = solved(problem, [1.0, 0.5])
    np.testing.assert_allclose(found.x[0], 10, rtol=zoo.REFERENCE)
    np.testing.assert_allclose(found.upper_multipliers, 2, rtol=zoo.REFERENCE)


def test_the_best_value_changes_with_data_of_the_constraint_by_its_multiplier():
    c = jax.tree_util.Partial(lambda t, x, y: jnp.sum(y**2) - 1 - t, jnp.asarray(0.0))
    problem = coupled(c)
    found = solved(problem, [0.3, -0.2])
    slope = bx.sensitivity(problem, found.x).data.upper_constraints.args[0]
    np.testing.assert_allclose(-slope, found.upper_multipliers, rtol=1e-3)


def test_any_method_may_run_on_it():
    method = bx.SSIGD()
    found = bx.solve(coupled(disc), method, np.array([0.3, -0.2]), key=0)
    np.testing.assert_allclose(found.value, (np.sqrt(5) - 1) ** 2, rtol=zoo.REFERENCE)


def test_without_a_polish_newton_steps_still_meet_the_constraints():
    found = solved(coupled(disc), [0.3, -0.2], polish=False, throw=False)
    assert found.feasible
    assert found.value >= (np.sqrt(5) - 1) ** 2 - zoo.REFERENCE


def test_explain_says_whether_they_hold():
    inside = bx.explain(coupled(disc), np.zeros(2))
    outside = bx.explain(coupled(disc), np.array([2.0, 0.0]))
    told = lambda e: next(f for f in e.findings if "upper" in f.assumption)
    assert told(inside).holds
    assert not told(outside).holds
    np.testing.assert_allclose(told(outside).number, 3, rtol=zoo.EXACT)


f = towards
ONE = np.zeros(2)


@pytest.mark.parametrize(
    ("attempt", "words"),
    [
        (lambda: coupled(np.ones(2)), ("`upper_constraints`", "function", "ndarray")),
        (lambda: coupled(upper_equalities=3), ("`upper_equalities`", "h(x, y)", "int")),
        (lambda: solved(coupled(lambda x: x), ONE), ("`upper_constraints(x, y)`",)),
        (
            lambda: solved(coupled(lambda x, y, prices: y - prices), ONE),
            ("`upper_constraints(x, y)`", "prices=True"),
        ),
        (lambda: solved(coupled(lambda x, y: None), ONE), ("None", "`return`")),
        (lambda: solved(coupled(lambda x, y: y <= x), ONE), ("comparison", "a - b")),
        (lambda: solved(coupled(lambda x, y: ()), ONE), ("at least one number",)),
        (lambda: solved(coupled(lambda x, y: "no"), ONE), ("array", "str")),
        (lambda: solved(coupled(lambda x, y: 1j * y), ONE), ("real", "complex128")),
        (
            lambda: solved(coupled(lambda x, y: y[0] + jnp.ones(3) @ x), ONE),
            ("`upper_constraints(x, y)`", "(2,)"),
        ),
        (lambda: solved(coupled(disc), ONE, looks=False), ("`looks=False`", "penalis")),
        (
            lambda: solved(coupled(disc), ONE, output="random"),
            ("`output='random'`", "penalised"),
        ),
        (lambda: bx.tune(coupled(disc), None, ONE, key=0), ("`bx.penalised(",)),
        (lambda: bx.penalised(coupled(disc), -1.0), ("`weight`", "negative")),
        (lambda: bx.penalised(coupled(None), 1.0), ("no upper constraints",)),
        (lambda: bx.constraint_gradients(coupled(), ONE), ("`hypergradient`",)),
        (
            lambda: bx.Followers(lambda d: coupled(disc), np.zeros(2)),
            ("Followers", "`upper_constraints`", "`upper(x, ys, data)`"),
        ),
    ],
)
def test_mistakes_are_told_by_cause_and_remedy(attempt, words):
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        attempt()
    for word in words:
        assert word in str(caught.value)


def test_a_constraint_that_is_no_number_is_named():
    broken = lambda x, y: {"fine": y[0] - 5, "log": jnp.log(y - 10)}
    found = solved(coupled(broken), ONE, throw=False)
    assert found.status_name == "non_finite"
    assert "`log[0]` of `upper_constraints` is nan" in found.message
    assert not found.success


def test_comparisons_refuse_it_in_a_sentence():
    comparison = bx.compare(
        {"disc": (coupled(disc), ONE)}, [bx.DSBLO()], seeds=1, budget=bx.Budget(steps=5)
    )
    assert all(row["status"] == "refused" for row in comparison.rows)
    assert "penalised" in comparison.rows[0]["message"]
