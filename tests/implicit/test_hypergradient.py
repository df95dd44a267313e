"""The hypergradient against formulas, differences, and its own error estimates."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bilevax as bx

from .. import zoo


def jacobians_of_pro_diff(problem, x, lower):
    """`eq:grad_l` and `eq:grad_yast1`: the full Jacobians of multipliers and of y."""
    y = lower.y
    active = np.asarray(lower.active)
    A = np.asarray(problem.constraints.A)[active]
    B = np.asarray(problem.constraints.B)[active]
    H = np.asarray(jax.hessian(problem.lower, argnums=1)(x, y))
    mixed = np.asarray(jax.jacfwd(jax.grad(problem.lower, argnums=1), argnums=0)(x, y))
    inverse = np.linalg.inv(H)
    multipliers = -np.linalg.inv(A @ inverse @ A.T) @ (A @ inverse @ mixed - B)
    return multipliers, inverse @ (-mixed - A.T @ multipliers)


@pytest.mark.parametrize("seed", range(3))
def test_the_closed_form_of_the_paper(seed):
    problem = zoo.t2(seed=seed)
    x = jnp.asarray(np.random.default_rng(seed).normal(size=10) * 0.3)
    e = bx.hypergradient(problem, x)
    assert np.sum(e.lower.active) >= 1
    dlam, dy = jacobians_of_pro_diff(problem, x, e.lower)
    f_x, f_y = jax.grad(problem.upper, argnums=(0, 1))(x, e.lower.y)
    np.testing.assert_allclose(e.grad, f_x + dy.T @ f_y, rtol=zoo.EXACT, atol=zoo.EXACT)

    both = eqx.filter_jit(
        jax.jacobian(lambda x: bx.solution_map(problem, x, multipliers=True))
    )(x)
    np.testing.assert_allclose(both[0], dy, atol=zoo.EXACT)
    np.testing.assert_allclose(both[1][e.lower.active], dlam, atol=zoo.EXACT)


@pytest.mark.parametrize("seed", range(3))
def test_the_reference_values_of_the_paper_family(seed):
    # F(0) of the tight family and F(1) of the uniform one, seeds 0 to 2.
    tight = [-1.699865, -1.936898, -2.000811][seed]
    uniform = [50.524133, 46.211496, 52.369800][seed]
    at_zero = bx.hypergradient(zoo.t2(seed=seed), np.zeros(10)).value
    at_one = bx.hypergradient(zoo.t2(seed=seed, tight=False), np.ones(10)).value
    np.testing.assert_allclose(at_zero, tight, atol=5e-7)
    np.testing.assert_allclose(at_one, uniform, atol=5e-7)


def test_central_differences_of_F():
    problem, x = zoo.t2(), np.full(10, -0.5)
    e = bx.hypergradient(problem, x)
    differences = zoo.central_differences(
        lambda x: float(bx.hypergradient(problem, x).value), x
    )
    np.testing.assert_allclose(e.grad, differences, rtol=zoo.DIFFERENCES, atol=1e-7)


@pytest.mark.parametrize(
    ("adjoint", "rtol"),
    [
        (bx.DenseAdjoint(), zoo.IDENTITY),
        (bx.ConjugateGradient(), zoo.EXACT),
        (bx.Neumann(terms=400), zoo.EXACT),
    ],
)
def test_all_back_ends_agree(adjoint, rtol):
    problem, x = zoo.t2(), np.full(10, -0.5)
    expected = bx.hypergradient(problem, x).grad
    out = bx.hypergradient(problem, x, adjoint=adjoint)
    np.testing.assert_allclose(out.grad, expected, rtol=rtol, atol=rtol)


def test_few_neumann_terms_are_biased_and_more_are_less_so():
    H = jnp.diag(jnp.array([1.0, 2.0, 4.0]))
    problem = bx.Problem(
        lambda x, y: jnp.sum(y),
        lambda x, y: 0.5 * y @ H @ y - x @ y,
        y0=np.zeros(3),
    )
    expected = 1 / jnp.diagonal(H)
    errors = []
    for terms in (1, 4, 16):
        adjoint = bx.Neumann(terms=terms, step=0.25)
        grad = bx.hypergradient(problem, np.ones(3), adjoint=adjoint).grad
        errors.append(float(jnp.max(jnp.abs(grad - expected))))
    # The slowest mode contracts by 1 - step * mu = 3/4 a term.
    np.testing.assert_allclose(errors, 0.75 ** np.array([1, 4, 16]), rtol=1e-9)


def test_auxiliary_output_and_pytrees():
    def upper(x, y):
        value = jnp.sum(y["flow"] * x["toll"]) + y["rest"] ** 2
        return value, {"total": jnp.sum(y["flow"])}

    def lower(x, y):
        return (
            0.5 * jnp.sum((y["flow"] - x["toll"]) ** 2)
            + 0.5 * (y["rest"] - x["tax"]) ** 2
        )

    box = bx.Box(
        {"flow": np.zeros(2), "rest": -np.inf}, {"flow": np.ones(2), "rest": np.inf}
    )
    x = {"toll": np.array([0.5, 3.0]), "tax": 2.0}
    e = bx.hypergradient(bx.Problem(upper, lower, box), x)
    np.testing.assert_allclose(e.lower.y["flow"], [0.5, 1], atol=zoo.IDENTITY)
    np.testing.assert_allclose(e.aux["total"], 1.5, atol=zoo.IDENTITY)
    np.testing.assert_allclose(e.grad["toll"], [1.0, 1.0], atol=zoo.IDENTITY)
    np.testing.assert_allclose(e.grad["tax"], 4.0, atol=zoo.IDENTITY)
    # All lower bounds, then all upper bounds; y raveled in JAX order.
    np.testing.assert_array_equal(
        e.lower.active, [False, False, False, False, True, False]
    )

    rows = bx.Polyhedron(A=np.array([[1.0, 1.0, 0.0]]), b=np.ones(1))
    y0 = {"flow": np.zeros(2), "rest": 0.0}
    e = bx.hypergradient(bx.Problem(upper, lower, rows, y0=y0), x)
    np.testing.assert_allclose(jnp.sum(e.lower.y["flow"]), 1, atol=zoo.IDENTITY)


def test_a_tilt_moves_the_kink_and_does_not_recompile():
    problem = zoo.t1()
    traces = []

    @eqx.filter_jit
    def slope(problem, x):
        traces.append(None)
        return bx.hypergradient(problem, x, throw=False).grad

    for q in (0.5, -0.5, 0.25):
        tilted = problem.perturbed(np.array([q]))
        for x in (q - 1e-3, q + 1e-3):
            expected = x / 2 + 0.5 * np.sign(x - q)
            out = slope(tilted, jnp.array([x]))
            np.testing.assert_allclose(out, [expected], atol=zoo.EXACT)
    assert len(traces) == 1
    twice = problem.perturbed(np.array([0.25])).perturbed(np.array([0.25]))
    np.testing.assert_allclose(slope(twice, jnp.array([0.6])), [0.8], atol=zoo.EXACT)
    assert len(traces) == 1


def test_quality_bounds_the_error_of_an_inexact_lower_level():
    problem, x = zoo.t2(), jnp.full(10, -0.5)
    exact = bx.hypergradient(problem, x, quality=True)
    assert exact.quality is not None
    # H = 2 I on every subspace.
    np.testing.assert_allclose(exact.quality.condition, 1, rtol=1e-2)
    assert exact.quality.bias_is_bound
    assert exact.quality.bias < 1e-12

    class Sloppy(bx.ActiveSet):
        """The right active set, `y` and multipliers off by a little."""

        def __call__(self, problem, x, warm=None):
            out = bx.ActiveSet()(problem, x, warm)
            off = 1e-4 * jnp.sin(jnp.arange(10.0))
            return eqx.tree_at(lambda s: s.y, out, out.y + off)

    rough = bx.hypergradient(problem, x, solver=Sloppy(), quality=True)
    assert rough.quality is not None
    error = np.linalg.norm(rough.grad - exact.grad)
    assert 1e-6 < error <= float(rough.quality.bias) * (1 + 1e-9)
    assert rough.quality.bias < 3 * error


def test_quality_says_when_it_is_only_an_estimate():
    problem = bx.Problem(
        lambda x, y: jnp.sum(y**2),
        lambda x, y: jnp.sum(jnp.cosh(y)) - x @ y,
        bx.Polyhedron(A=np.ones((1, 3)), b=np.ones(1)),
    )
    e = bx.hypergradient(problem, np.array([0.1, 0.2, 0.3]), quality=True)
    assert e.quality is not None
    assert not e.quality.bias_is_bound


def test_a_scan_with_warm_starts_equals_cold_calls():
    problem = zoo.t2()
    points = -0.5 + 0.2 * jnp.sin(jnp.arange(30.0)[:, None] + jnp.arange(10.0))

    @eqx.filter_jit
    def scanned(problem, points):
        first = bx.hypergradient(problem, points[0], throw=False)

        def step(lower, x):
            e = bx.hypergradient(problem, x, warm=lower, throw=False)
            return e.lower, (e.value, e.grad)

        return jax.lax.scan(step, first.lower, points)[1]

    values, grads = scanned(problem, points)
    cold = eqx.filter_jit(
        jax.vmap(lambda x: bx.hypergradient(problem, x, throw=False))
    )(points)
    np.testing.assert_allclose(values, cold.value, rtol=zoo.EXACT)
    np.testing.assert_allclose(grads, cold.grad, rtol=zoo.EXACT, atol=zoo.EXACT)


def test_a_cold_start_at_the_answer_still_factors():
    """At rest in `y0` a first pass finds nothing to do, whatever factor it has."""
    rng = np.random.default_rng(0)
    A, B = rng.uniform(size=(4, 10)), rng.uniform(size=(4, 10))
    problem = bx.Problem(
        lambda x, y: jnp.sum((y - 2) ** 2) / 2,
        lambda x, y: jnp.sum((y - x) ** 2) / 2,
        bx.Polyhedron(A_eq=A, B_eq=B, b_eq=np.zeros(4)),
    )
    e = bx.hypergradient(problem, jnp.zeros(10))
    inverse = np.linalg.pinv(A)
    J = np.eye(10) - inverse @ A - inverse @ B
    np.testing.assert_allclose(e.lower.y, np.zeros(10), atol=zoo.IDENTITY)
    np.testing.assert_allclose(e.grad, J.T @ (-2 * np.ones(10)), rtol=zoo.EXACT)
