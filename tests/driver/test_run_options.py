"""What a run can be asked for: optimisers, schedules, averages, epochs, no looks."""

from typing import Any

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
import pytest

import bilevax as bx

KEY = jr.key(0)
CENTRE = jnp.array([0.3, -0.7])


def upper(x, y):
    value = jnp.sum((y - CENTRE) ** 2) + 0.1 * jnp.sum(x**2)
    return value, {"largest": jnp.max(y), "all": y}


def lower(x, y):
    return 0.5 * jnp.sum((y - x) ** 2)


def problem(**options):
    return bx.Problem(upper, lower, bx.Box(-jnp.ones(2), jnp.ones(2)), **options)


# Inside the box `y = x`, so `F` is quadratic with this minimiser.
BEST = CENTRE / 1.1


def test_any_optimiser_of_optax_minimises_F():
    for optimiser in (optax.sgd(0.2, momentum=0.5), optax.adam(0.05)):
        s = bx.solve(
            problem(), bx.GradientDescent(optimiser), jnp.ones(2) / 2,
            key=KEY, num_steps=300, polish=False,
        )  # fmt: skip
        np.testing.assert_allclose(s.x, BEST, atol=1e-4)


def test_an_optimiser_can_step_for_ssigd_and_pigd():
    step = optax.sgd(0.3)
    methods = (bx.SSIGD(optimiser=step), bx.PIGD(optimiser=step, oracle="implicit"))
    for method in methods:
        s = bx.solve(problem(), method, jnp.zeros(2), key=KEY, polish=False)
        np.testing.assert_allclose(s.x, BEST, atol=1e-2)
    with pytest.raises(ValueError, match="does not go with"):
        bx.PIGD(loop="clipped", optimiser=optax.sgd(0.3))


def test_pigd_with_the_implicit_oracle_takes_exact_gradients():
    method = bx.PIGD(step_size=0.1, radius=0.0, oracle="implicit")
    plain = bx.GradientDescent(optax.sgd(0.1))
    runs = [
        bx.solve(problem(), m, jnp.zeros(2), key=KEY, num_steps=5, polish=False).x
        for m in (method, plain)
    ]
    np.testing.assert_allclose(*runs, rtol=1e-14)


def test_a_constant_schedule_is_a_constant():
    law = bx.Gaussian(1e-3)
    runs = [
        bx.solve(
            problem(), bx.DSBLO(1.0, gamma2, perturbation=law), jnp.zeros(2),
            key=KEY, num_steps=20, polish=False,
        ).x
        for gamma2 in (5.0, lambda step: 5.0 + 0 * step)
    ]  # fmt: skip
    np.testing.assert_array_equal(*runs)
    steps = bx.SSIGD(step_size=lambda t: 0.3 / (1 + t), perturbation=law)
    s = bx.solve(problem(), steps, jnp.zeros(2), key=KEY, num_steps=3, polish=False)
    rate = s.history["move"] / s.history["gradient_norm"]
    np.testing.assert_allclose(rate, [0.3, 0.15, 0.1], rtol=1e-12)


def test_the_average_is_that_of_the_iterates():
    seen, averages = [], []

    def callback(step, x, value, history, average):
        seen.append(np.asarray(x))
        averages.append(np.asarray(average))

    x0 = jnp.zeros(2)
    method = bx.GradientDescent(optax.sgd(0.2))
    s = bx.solve(
        problem(), method, x0, key=KEY, num_steps=6, chunk=1, average=0.4,
        callback=callback, polish=False,
    )  # fmt: skip
    mean = np.asarray(x0)
    for t, x in enumerate(seen):
        decay = min(0.4, (1 + t) / (10 + t))
        mean = decay * mean + (1 - decay) * x
        np.testing.assert_allclose(averages[t], mean, rtol=1e-12)
    np.testing.assert_array_equal(s.average, averages[-1])
    with pytest.raises(ValueError, match="a decay in"):
        bx.solve(problem(), method, x0, key=KEY, average=1.0)


def test_scalars_of_the_auxiliary_output_are_kept():
    s = bx.solve(
        problem(), bx.GradientDescent(optax.sgd(0.2)), jnp.zeros(2),
        key=KEY, num_steps=4, polish=False,
    )  # fmt: skip
    assert s.history["largest"].shape == (4,)
    assert "all" not in s.history.steps


def test_without_looks_F_is_never_evaluated_on_the_side():
    method = bx.GradientDescent(optax.sgd(0.2))
    options: Any = dict(key=KEY, num_steps=30, chunk=10)
    wrong: Any
    blind = bx.solve(problem(), method, jnp.zeros(2), looks=False, **options)
    usual = bx.solve(problem(), method, jnp.zeros(2), polish=False, **options)
    np.testing.assert_array_equal(blind.x, usual.x)
    assert blind.y is None
    assert blind.value == blind.history["value"][-1]
    assert np.isnan(blind.history.value[0])
    for wrong in (dict(polish=True), dict(certify=0.1)):
        with pytest.raises(ValueError, match="never evaluates F"):
            bx.solve(problem(), method, jnp.zeros(2), looks=False, **options, **wrong)


def test_without_looks_a_failure_still_surfaces():
    broken = bx.Problem(
        lambda x, y: jnp.sum(y) / jnp.sum(x), lower, bx.Box(-jnp.ones(2), jnp.ones(2))
    )
    method = bx.GradientDescent(optax.sgd(1.0))
    s = bx.solve(
        broken, method, jnp.zeros(2), key=KEY, num_steps=3, looks=False, throw=False
    )
    assert not s.success
    assert s.status_name == "non_finite"


def test_a_finished_run_without_looks_is_found_again(tmp_path):
    # Steps that overshoot, so that the last iterate is not the best one seen.
    method, path = bx.GradientDescent(optax.sgd(0.95)), tmp_path / "run.npz"
    options: Any = dict(
        key=KEY, num_steps=10, chunk=5, looks=False, checkpoint=path, average=0.5
    )
    first, again = (
        bx.solve(problem(), method, jnp.full(2, 0.5), **options) for _ in range(2)
    )
    np.testing.assert_array_equal(first.x, again.x)
    assert first.value == again.value
    for change in (dict(average=0.6), dict(looks=True)):
        with pytest.raises(bx.CheckpointError, match="another run"):
            bx.solve(problem(), method, jnp.full(2, 0.5), **(options | change))
    other = bx.GradientDescent(optax.sgd(0.5))
    with pytest.raises(bx.CheckpointError, match="another run"):
        bx.solve(problem(), other, jnp.full(2, 0.5), **options)


def test_what_is_no_optimiser_is_a_mistake():
    wrong: Any
    for wrong in (0.1, "sgd"):
        for kind in (bx.GradientDescent, bx.SSIGD, bx.PIGD):
            with pytest.raises(ValueError, match="optax optimiser"):
                kind(optimiser=wrong)


def test_curvatures_are_positive():
    for kind in (bx.ClosedForm, bx.ScaledIdentity):
        for wrong in (-1.0, 0.0, float("nan"), float("inf")):
            with pytest.raises(ValueError, match="positive number"):
                kind(wrong)


def test_epochs_show_every_row_once():
    data = jnp.arange(7.0)
    instance = lambda rows: problem().perturbed(jnp.zeros(2).at[0].set(rows.sum()))
    sampled = bx.StochasticProblem.from_data(data, 2, instance, epochs=True)
    for epoch in range(3):
        steps = jnp.arange(3) + 3 * epoch
        rows = jax.vmap(lambda t: sampled.sample(KEY, t))(steps).ravel()
        assert len(set(rows.tolist())) == 6
    # Without a number of the step, rows come with replacement.
    assert sampled.sample(KEY).shape == (2,)
    big = bx.StochasticProblem.from_data(data, 8, instance, epochs=True)
    with pytest.raises(ValueError, match="must not exceed"):
        big.draw(KEY, jnp.asarray(0))


def test_parts_of_x_can_be_set_instead_of_optimised():
    def instance(shift):
        def loss(x, y):
            value = jnp.sum((y - CENTRE) ** 2) + 0 * x["seen"]
            return value, {"shift": shift}

        inner = lambda x, y: 0.5 * jnp.sum((y - x["w"]) ** 2)
        return bx.Problem(loss, inner, bx.Box(-jnp.ones(2), jnp.ones(2)))

    absorb = lambda x, aux: x | {"seen": 0.5 * x["seen"] + 0.5 * aux["shift"]}
    sampled = bx.StochasticProblem(
        lambda key: jnp.asarray(3.0), instance, absorb=absorb
    )
    x0 = {"w": jnp.zeros(2), "seen": jnp.zeros(())}
    s = bx.solve(sampled, bx.GradientDescent(optax.sgd(0.2)), x0, key=KEY, num_steps=40)
    np.testing.assert_allclose(s.x["w"], CENTRE, atol=1e-6)
    np.testing.assert_allclose(s.x["seen"], 3.0, rtol=1e-10)


def test_a_lower_level_can_be_built_around_each_x():
    class Rounded(bx.AbstractLocalLower):
        """Pulled to `x` and to a point that is rounded, hence locally constant."""

        def at(self, x):
            anchor = jnp.round(x)
            return lambda x, y: jnp.sum((y - x) ** 2) + jnp.sum((y - anchor) ** 2)

    local = bx.Problem(upper, Rounded(), bx.Box(-jnp.ones(2), jnp.ones(2)))
    x = jnp.array([0.7, -0.2])
    e = bx.hypergradient(local, x)
    np.testing.assert_allclose(e.lower.y, (x + jnp.round(x)) / 2, atol=1e-12)
    slope = (e.lower.y - CENTRE) + 0.2 * x
    np.testing.assert_allclose(e.grad, slope, atol=1e-12)
    turned = jax.jacobian(lambda x: bx.solution_map(local, x))(x)
    np.testing.assert_allclose(turned, jnp.eye(2) / 2, atol=1e-12)
    q = jnp.array([0.1, 0.2])
    tilted = bx.hypergradient(local.perturbed(q).perturbed(q), x)
    np.testing.assert_allclose(tilted.lower.y, e.lower.y - q / 2, atol=1e-12)


def test_a_problem_names_its_solver_and_its_adjoint():
    named = problem(solver=bx.ClosedForm(1.0), adjoint=bx.ScaledIdentity(1.0))
    for x in (jnp.array([0.2, 0.4]), jnp.array([2.0, -0.3]), jnp.array([-3.0, 3.0])):
        a, b = bx.hypergradient(named, x), bx.hypergradient(problem(), x)
        np.testing.assert_allclose(a.grad, b.grad, atol=1e-12)
        np.testing.assert_allclose(a.lower.y, b.lower.y, atol=1e-12)
        np.testing.assert_array_equal(a.lower.active, b.lower.active)
        np.testing.assert_allclose(a.margin, b.margin, atol=1e-12)
    held = bx.hypergradient(named, jnp.array([0.2, 0.4]), adjoint=bx.Danskin())
    np.testing.assert_allclose(held.grad, 0.2 * jnp.array([0.2, 0.4]), atol=1e-14)
    with pytest.raises(ValueError, match="projects onto a Box"):
        bx.hypergradient(
            bx.Problem(upper, lower, bx.Simplex((2,), 1.0)),
            jnp.zeros(2),
            solver=bx.ClosedForm(1.0),
        )
