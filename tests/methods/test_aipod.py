"""AiPOD and E-AiPOD: the closed form, the gradient, projections and refusals."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

import bilevax as bx
from bilevax._driver.run import start
from bilevax._methods.aipod import Estimator
from bilevax._methods.base import Scales

from .. import zoo
from ..affine import Affine, states

STEPS = 500
keep = lambda state: (state.x, state.projections)


def setting(probability, lower_steps):
    return bx.EAiPOD(
        step_size=0.02,
        lower_step=0.1,
        lower_steps=lower_steps,
        probability=probability,
    )


@functools.cache
def affine():
    return Affine()


@pytest.mark.parametrize(
    ("probability", "lower_steps", "projections"),
    [(1.0, 5, 2500), (0.3, 5, 740), (0.1, 20, 1000)],
)
def test_skipped_projections_reach_the_closed_form(
    probability, lower_steps, projections
):
    method = setting(probability, lower_steps)
    (x, count), record = states(affine().problem, method, np.zeros(10), STEPS, 3, keep)
    assert np.all(affine().error(x[:, -1]) < 1e-5)
    np.testing.assert_allclose(count[:, -1], projections, rtol=0.08)
    assert int(np.sum(record.lower_solves)) == 0
    assert int(np.sum(record.samples)) == 0
    assert np.all(np.asarray(record.linear_solves) == 1)
    # The Hessian in ten products, and two more in the gradient.
    assert np.all(np.asarray(record.hessian_products) == 12)
    assert np.all(np.asarray(record.status) == 0)


def test_aipod_is_e_aipod_that_always_projects():
    plain = bx.AiPOD(step_size=0.02, lower_step=0.1)
    (x, count), _ = states(affine().problem, plain, np.zeros(10), STEPS, 1, keep)
    (z, _), _ = states(affine().problem, setting(1.0, 5), np.zeros(10), STEPS, 3, keep)
    assert affine().error(x[0, -1]) < 1e-5
    assert int(count[0, -1]) == 5 * STEPS
    np.testing.assert_allclose(x[0], z[0], rtol=zoo.EXACT, atol=zoo.EXACT)


def test_noise_leaves_a_small_error():
    noisy, x0 = affine().noisy(0.1), np.zeros(10)
    for method in (setting(0.3, 5), bx.AiPOD(step_size=0.02, lower_step=0.1)):
        (x, _), record = states(noisy, method, x0, STEPS, 10, keep)
        # The listed errors are 0.015 to 0.020, within half of them.
        assert 0.0075 < affine().error(x[:, -1]).mean() < 0.03
        assert np.all(np.asarray(record.samples) == 7)


def test_no_argument_is_needed():
    for method in (bx.AiPOD(), bx.EAiPOD()):
        s = bx.solve(
            affine().problem, method, np.zeros(10), key=jr.key(0), polish=False
        )
        assert affine().error(s.x) < 1e-4
        assert s.history["lower_solves"].sum() == 0


class Curved(eqx.Module):
    """A quadratic `g` with a full Hessian and a full cross term."""

    G: jax.Array
    C: jax.Array

    def __call__(self, x, y):
        return 0.5 * y @ self.G @ y + y @ (self.C @ x)


class Cubic(eqx.Module):
    """An `f` that is not quadratic, so that its gradients in `y` vary."""

    R: jax.Array

    def __call__(self, x, y):
        return jnp.sum(jnp.sin(x)) + x @ self.R @ y + 0.5 * jnp.sum(y**2) + jnp.sum(y)


def coupled(seed=0, m=6, n=8, rows=3):
    rng = np.random.default_rng(seed)
    root = rng.normal(size=(n, n))
    G, C, R = (
        root @ root.T + np.eye(n),
        rng.normal(size=(n, m)),
        rng.normal(size=(m, n)),
    )
    A, B, b = rng.normal(size=(rows, n)), rng.normal(size=(rows, m)), rng.normal(size=3)
    problem = bx.Problem(
        Cubic(jnp.asarray(R)),
        Curved(jnp.asarray(G), jnp.asarray(C)),
        bx.Polyhedron(A_eq=A, B_eq=B, b_eq=b),
    )
    kkt = np.block([[G, A.T], [A, np.zeros((rows, rows))]])
    follower = lambda x: np.linalg.solve(kkt, np.concatenate([-C @ x, b - B @ x]))[:n]
    return problem, follower, rng.normal(size=m)


@functools.cache
def estimators():
    """The gradient at the exact follower, with the solve and with the series."""
    problem, follower, x = coupled()
    e = bx.hypergradient(problem, x)
    scales = Scales(*(jnp.asarray(1.0) for _ in range(3)))
    state = start(problem, bx.AiPOD(), jnp.asarray(x), e, scales, jr.key(0))
    return problem, follower, x, e, state


def test_the_gradient_is_the_derivative_with_coupled_rows():
    problem, follower, x, e, state = estimators()
    v = Estimator.at(bx.AiPOD(), problem, state, state.x, e.lower.y, jr.key(0))
    value, grad = v(state.x)
    np.testing.assert_allclose(grad, e.grad, rtol=1e-9)
    np.testing.assert_allclose(value, e.value, rtol=1e-12)
    F = lambda x: float(problem.upper(jnp.asarray(x), jnp.asarray(follower(x))))
    # Two step lengths, extrapolated: differences good to 1e-10 and better.
    one, two = (zoo.central_differences(F, x, step) for step in (1e-3, 2e-3))
    central = (4 * one - two) / 3
    gap = np.linalg.norm(grad - central) / np.linalg.norm(central)
    assert gap < 1e-9
    # Without the pull of `f` through the rows the gradient is another one.
    f_y = np.asarray(jax.grad(problem.upper, argnums=1)(state.x, e.lower.y))
    rows = problem.constraints
    assert isinstance(rows, bx.Polyhedron)
    A, B = np.asarray(rows.A_eq), np.asarray(rows.B_eq)
    missing = B.T @ (np.linalg.pinv(A).T @ f_y)
    assert np.linalg.norm(missing) > 0.1 * np.linalg.norm(central)


def test_the_series_is_right_on_average():
    problem, _, _, e, state = estimators()
    method = bx.AiPOD(neumann=400)

    @jax.jit
    def draw(key):
        v = Estimator.at(method, problem, state, state.x, e.lower.y, key)
        return v(state.x)[1]

    draws = np.asarray(jax.vmap(draw)(jr.split(jr.key(1), 4000)))
    spread = draws.std(axis=0) / np.sqrt(len(draws))
    assert np.all(np.abs(draws.mean(axis=0) - np.asarray(e.grad)) < 4.5 * spread)


def test_a_step_that_leads_nowhere_is_taken_back():
    method = bx.AiPOD(lower_step=1e200, step_size=0.02)
    (x, _), record = states(affine().problem, method, np.zeros(10), 4, 1, keep)
    # The first `y` is right and stays; once `x` has moved, every step overflows.
    assert np.all(np.isfinite(x))
    assert np.all(np.asarray(x)[0, 1:] == np.asarray(x)[0, 0])
    assert np.all(np.asarray(record.status)[0, 1:] == bx.Status.non_finite._value)


def test_inequality_rows_are_refused():
    box = bx.Problem(
        lambda x, y: jnp.sum(y), zoo.Clipped(), bx.Box(np.zeros(1), np.ones(1))
    )
    for method in (bx.AiPOD(), bx.EAiPOD()):
        name = type(method).__name__
        with pytest.raises(ValueError, match=f"{name} needs .* 5 inequality rows"):
            bx.solve(zoo.t2(), method, np.ones(10), key=jr.key(0))
        assert "2 inequality rows" in str(method.refusal(box))
        noisy = bx.StochasticProblem(lambda key: key, lambda key: zoo.t1())
        assert "1 inequality row." in str(method.refusal(noisy))
        assert method.refusal(affine().noisy(0.1)) is None
    with pytest.raises(ValueError, match="lower_steps"):
        bx.AiPOD(lower_steps=0)
    with pytest.raises(ValueError, match="upper_steps"):
        bx.EAiPOD(upper_steps=0)
