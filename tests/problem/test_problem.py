"""Problems, samples and tilts."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

import bilevax as bx

from .. import zoo

KEY = jr.key(0)
ROWS = bx.Polyhedron(A=np.ones((1, 2)), b=np.ones(1))


def test_a_sample_may_change_the_upper_level_only():
    def instance(noise):
        upper = lambda x, y: jnp.sum(y) + noise * x[0]
        return bx.Problem(upper, lambda x, y: 0.5 * jnp.sum((y - x) ** 2), ROWS)

    sampled = bx.StochasticProblem(lambda key: jr.normal(key), instance)
    drawn = eqx.filter_jit(
        lambda key: bx.hypergradient(sampled.draw(key), jnp.zeros(2), throw=False)
    )
    one, two = drawn(jr.key(1)), drawn(jr.key(2))
    np.testing.assert_allclose(one.lower.y, two.lower.y, atol=zoo.IDENTITY)
    np.testing.assert_allclose(one.grad[0] - 1, jr.normal(jr.key(1)), rtol=zoo.EXACT)
    assert one.grad[0] != two.grad[0]


def test_a_minibatch_may_bring_its_own_boxes():
    data = {"image": jnp.asarray(np.random.default_rng(0).uniform(size=(20, 3)))}

    def instance(batch):
        image = batch["image"]
        box = bx.Box(jnp.maximum(-image, -0.1), jnp.minimum(1 - image, 0.1))
        lower = lambda x, y: 0.5 * jnp.sum(y**2) - jnp.sum(x * y * image)
        return bx.Problem(lambda x, y: jnp.mean((image + y) ** 2), lower, box)

    sampled = bx.StochasticProblem.from_data(data, 4, instance)
    batch = sampled.sample(KEY)
    assert batch["image"].shape == (4, 3)
    e = bx.hypergradient(sampled.draw(KEY), 0.3)
    expected = jnp.clip(
        0.3 * batch["image"],
        jnp.maximum(-batch["image"], -0.1),
        jnp.minimum(1 - batch["image"], 0.1),
    )
    np.testing.assert_allclose(e.lower.y, expected, atol=zoo.EXACT)


def test_a_deterministic_problem_draws_itself():
    problem = zoo.t1()
    assert problem.draw(KEY) is problem


@pytest.mark.parametrize(
    "law", [bx.Gaussian(0.5), bx.UniformBall(2.0), bx.TruncatedGaussian(0.5, 2.0)]
)
def test_laws_of_the_tilt(law):
    like = {"a": jnp.zeros(3), "b": jnp.zeros((2, 2))}
    draws = jax.vmap(lambda key: law.sample(like, key=key))(jr.split(KEY, 20_000))
    assert draws["b"].shape == (20_000, 2, 2)
    flat = np.concatenate([draws["a"], draws["b"].reshape(-1, 4)], axis=1)
    # Four standard errors around zero mean.
    spread = flat.std()
    assert np.abs(flat.mean(axis=0)).max() < 4 * spread / np.sqrt(len(flat))
    norms = np.linalg.norm(flat, axis=1)
    assert norms.max() <= float(law.radius(7))
    if isinstance(law, bx.UniformBall):
        # Uniform in the ball: (|q| / radius)^7 is uniform on [0, 1].
        assert abs(((norms / 2) ** 7).mean() - 0.5) < 4 * 0.29 / np.sqrt(len(flat))
    if isinstance(law, bx.TruncatedGaussian):
        assert np.abs(flat).max() <= 1.0
    if isinstance(law, bx.Gaussian):
        assert abs(spread - 0.5) < 0.01


def test_numpy_integers_and_scalars_are_accepted():
    problem = bx.Problem(
        lambda x, y: jnp.sum(y) * x,
        lambda x, y: 0.5 * jnp.sum((y - x) ** 2),
        bx.Polyhedron(A=[[1, 1]], b=[1]),
        domain=bx.Box(0, 5),
    )
    e = bx.hypergradient(problem, 3)
    np.testing.assert_allclose(e.lower.y, [0.5, 0.5], atol=zoo.IDENTITY)
    np.testing.assert_allclose(e.grad, 1.0, atol=zoo.IDENTITY)


def test_no_constraints_at_all():
    problem = bx.Problem(
        lambda x, y: jnp.sum(y**2),
        lambda x, y: 0.5 * jnp.sum((y - 2 * x) ** 2),
        y0=np.zeros(3),
    )
    e = bx.hypergradient(problem, np.arange(3.0))
    np.testing.assert_allclose(e.grad, 8 * np.arange(3.0), atol=zoo.IDENTITY)
    assert e.lower.multipliers.shape == (0,)
    assert e.margin == np.inf
    layer = jax.grad(lambda x: jnp.sum(bx.solution_map(problem, x)))(jnp.ones(3))
    np.testing.assert_allclose(layer, 2 * np.ones(3), atol=zoo.IDENTITY)


def test_a_domain_fixes_the_shape_of_x():
    problem = bx.Problem(
        lambda x, y: jnp.sum(y),
        lambda x, y: jnp.sum((y - x[0]) ** 2),
        ROWS,
        domain=bx.Polyhedron(A=np.ones((1, 3)), b=np.ones(1)),
    )
    with pytest.raises(ValueError, match="`domain`"):
        bx.hypergradient(problem, np.ones(2))


def test_lists_of_numbers_are_vectors():
    problem = bx.Problem(
        lambda x, y: jnp.sum(x * y),
        lambda x, y: 0.5 * jnp.sum((y - x) ** 2),
        bx.Box([0.0, 0], [1.0, 2]),
        domain=bx.Box([-1, -1], [3, 3]),
    )
    e = bx.hypergradient(problem, [0.5, 3.0])
    np.testing.assert_allclose(e.lower.y, [0.5, 2.0])
