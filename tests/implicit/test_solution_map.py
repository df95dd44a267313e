"""The follower as a layer, under every transformation."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

import bilevax as bx

from .. import zoo
from ..quadratics import random_quadratic

DATA = {
    name: jnp.asarray(part)
    for name, part in random_quadratic(
        np.random.default_rng(2), 4, 5, 3, "plain", 10.0
    ).items()
}


@eqx.filter_jit
def follower(data):
    return bx.solution_map(zoo.quadratic_problem(data), data["x"], multipliers=True)


def replaced(**changes):
    return {**DATA, **changes}


def test_value_and_multipliers_are_those_of_the_solver():
    lower = bx.hypergradient(zoo.quadratic_problem(DATA), DATA["x"]).lower
    y, multipliers = follower(DATA)
    assert np.any(lower.active)
    np.testing.assert_allclose(y, lower.y, rtol=zoo.IDENTITY)
    np.testing.assert_allclose(multipliers, lower.multipliers, atol=zoo.IDENTITY)


def test_forward_reverse_and_differences_in_every_input():
    # x, b, A, B, and the data inside `lower` are all differentiable.
    for name in ("x", "b", "A", "B", "c"):
        function = lambda part, name=name: jnp.concatenate(
            follower(replaced(**{name: part}))
        )
        direction = jnp.asarray(np.random.default_rng(1).normal(size=DATA[name].shape))
        _, forward = jax.jvp(function, (DATA[name],), (direction,))
        step = 1e-6
        ahead, behind = (function(DATA[name] + s * direction) for s in (step, -step))
        np.testing.assert_allclose(
            forward, (ahead - behind) / (2 * step), rtol=1e-5, atol=1e-6
        )
        cotangent = jnp.asarray(np.random.default_rng(3).normal(size=forward.shape))
        (reverse,) = jax.vjp(function, DATA[name])[1](cotangent)
        np.testing.assert_allclose(
            jnp.sum(reverse * direction), forward @ cotangent, rtol=zoo.EXACT
        )


def test_hypergradient_is_the_gradient_through_the_layer():
    problem = zoo.quadratic_problem(DATA)
    through = jax.grad(lambda x: problem.upper(x, follower(replaced(x=x))[0]))
    expected = bx.hypergradient(problem, DATA["x"]).grad
    np.testing.assert_allclose(through(DATA["x"]), expected, rtol=zoo.EXACT)


def test_second_derivatives_of_a_curved_follower_in_every_nesting():
    rows = bx.Polyhedron(A=np.ones((1, 2)), B=np.ones((1, 2)), b=np.ones(1))

    def lower(x, y):
        return jnp.sum(jnp.cosh(y) + jnp.logaddexp(0.0, x * y)) - 3 * x @ y

    problem = bx.Problem(lambda x, y: jnp.sum(y), lower, rows)

    def follower(x):
        return jnp.concatenate(bx.solution_map(problem, x, multipliers=True))

    modes = (jax.jacfwd, jax.jacrev)

    @jax.jit
    @jax.vmap
    def nestings(x):
        return [outer(inner(follower))(x) for outer in modes for inner in modes]

    x = jnp.array([0.8, 0.5])
    jacobian = jax.jit(jax.jacfwd(follower))
    differences = np.stack(
        [(jacobian(x + 1e-5 * d) - jacobian(x - 1e-5 * d)) / 2e-5 for d in np.eye(2)],
        axis=-1,
    )
    assert np.abs(differences).max() > 0.1
    for second in nestings(jnp.stack([0.9 * x, x])):
        np.testing.assert_allclose(second[1], differences, atol=zoo.DIFFERENCES)


def test_vmap_of_grad_equals_a_loop():
    points = DATA["x"] + 0.1 * jnp.asarray(np.random.default_rng(6).normal(size=(5, 3)))
    slope = jax.grad(lambda x: jnp.sum(follower(replaced(x=x))[0]))
    batch = jax.jit(jax.vmap(slope))(points)
    loop = jnp.stack([slope(x) for x in points])
    np.testing.assert_allclose(batch, loop, rtol=zoo.EXACT, atol=zoo.EXACT)


def test_a_failed_member_is_nan_and_does_not_touch_shared_parameters():
    def total(scale, shifts):
        def one(shift):
            rows = bx.Polyhedron(
                A=np.array([[1.0], [-1.0]]), b=jnp.stack([shift, -1.0])
            )
            lower = lambda x, y: 0.5 * jnp.sum((y - scale * x) ** 2)
            problem = bx.Problem(lambda x, y: jnp.sum(y), lower, rows)
            return bx.solution_map(problem, jnp.array([1.5]))[0]

        return jax.vmap(one)(shifts)

    shifts = jnp.array([9.0, 0.0, 8.0])
    out = total(2.0, shifts)
    np.testing.assert_allclose(out, [3, np.nan, 3], atol=zoo.IDENTITY)
    grad = jax.grad(lambda s: jnp.nansum(total(s, shifts)))(2.0)
    np.testing.assert_allclose(grad, 3.0, atol=zoo.IDENTITY)
    # Two members are (1.5 s)^2; reverse over reverse meets the third one's NaN twice.
    square = lambda s: jnp.nansum(total(s, shifts) ** 2)
    curve = jax.jit(jax.grad(jax.grad(square)))(2.0)
    np.testing.assert_allclose(curve, 9.0, atol=zoo.EXACT)


def test_the_tangent_of_a_million_boxes_needs_products_only():
    n = 3000
    problem = bx.Problem(
        lambda x, y: jnp.sum(y),
        lambda x, y: 0.5 * jnp.sum(y**2) - x * jnp.sum(jnp.cos(jnp.arange(n)) * y),
        bx.Box(jnp.full(n, -0.5), jnp.full(n, 0.5)),
    )
    y, tangent = jax.jvp(lambda x: bx.solution_map(problem, x), (0.7,), (1.0,))
    wave = np.cos(np.arange(n))
    expected = np.where(np.abs(0.7 * wave) < 0.5, wave, 0)
    np.testing.assert_allclose(tangent, expected, atol=zoo.EXACT)
    np.testing.assert_allclose(y, np.clip(0.7 * wave, -0.5, 0.5), atol=zoo.EXACT)
