"""Adversarial training as a bilevel problem: its lower level and its derivative."""

import dataclasses
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
import pytest
from jax.flatten_util import ravel_pytree

import bilevax as bx
from bilevax._arguments import fraction
from bilevax._methods.base import Scales
from bilevax.adversarial.data.batches import Batch, ImageBatches
from bilevax.adversarial.networks.models import build
from bilevax.adversarial.networks.network import statistics_mask
from bilevax.adversarial.training.lower_level import AttackLoss
from bilevax.adversarial.training.problem import (
    Bilevel,
    Madry,
    Trades,
    absorb,
    adversarial_problem,
)
from bilevax.adversarial.training.recipes import instance_of, method_of
from bilevax.adversarial.training.schedules import SCHEDULES, Rate
from bilevax.adversarial.training.settings import BILEVEL, METHODS, Settings
from bilevax.adversarial.training.watch import collapsed

KEY = jr.key(0)
EPSILON = 0.1
CLASSES = 4
SCALES = Scales(*jnp.ones(3))


@pytest.fixture(scope="module")
def model():
    return build(
        "small", key=KEY, classes=CLASSES, channels=1, mean=(0.4,), std=(0.3,),
        dtype="float64", activation="softplus", width=3,
    )  # fmt: skip


@pytest.fixture(scope="module")
def batch():
    images = jr.uniform(jr.key(1), (5, 6, 6, 1), float)
    # Some pixels at the ends of their range, where the box is one-sided.
    images = jnp.where(images < 0.1, 0.0, jnp.where(images > 0.9, 1.0, images))
    return Batch(images, jnp.array([0, 1, 2, 3, 0]), jnp.arange(5), jr.key(2))


def bilevel(**changes):
    options: Any = (
        dict(epsilon=EPSILON, attack_step=3.0, implicit_weight=None, steps=0) | changes
    )
    return Bilevel(**options)


def direction(model):
    flat, unravel = ravel_pytree(model)
    mask = ravel_pytree(
        jax.tree.map(
            lambda s, leaf: jnp.full(leaf.shape, not s), statistics_mask(model), model
        )
    )[0]
    return unravel(jr.normal(jr.key(3), flat.shape) * mask)


def along(tree, d):
    return float(ravel_pytree(tree)[0] @ ravel_pytree(d)[0])


def moved(model, d, t):
    return jax.tree.map(lambda a, b: a + t * b, model, d)


def difference(problem, model, d, t=1e-5):
    """Richardson's difference quotient of `F` along `d`."""
    value = jax.jit(lambda m: bx.hypergradient(problem, m, throw=False).value)
    quotient = lambda t: (
        (value(moved(model, d, t)) - value(moved(model, d, -t))) / t / 2
    )
    return float((4 * quotient(t / 2) - quotient(t)) / 3)


def test_hypergradient_of_the_linearised_attack_is_the_slope_of_F(model, batch):
    problem, d = bilevel()(batch), direction(model)
    e = bx.hypergradient(problem, model)
    assert e.status == bx.Status.successful
    free = ~(e.lower.active[:180] | e.lower.active[180:])
    assert 20 < int(free.sum()) < 160
    slope = difference(problem, model, d)
    assert abs(along(e.grad, d) - slope) < 1e-6 * abs(slope)
    # The implicit part is what makes it right.
    direct = bx.hypergradient(problem, model, adjoint=bx.Danskin()).grad
    assert abs(along(direct, d) - slope) > 1e-3 * abs(slope)


def test_after_a_first_attack_the_linearisation_point_counts_as_constant(model, batch):
    problem, d = bilevel(steps=2)(batch), direction(model)
    e = bx.hypergradient(problem, model)
    slope = difference(problem.localised(model), model, d)
    assert abs(along(e.grad, d) - slope) < 1e-6 * abs(slope)


def test_closed_form_is_the_answer_of_the_general_solvers(model, batch):
    problem = bilevel(steps=1)(batch).localised(model)
    closed = bx.hypergradient(problem, model)
    for solver, adjoint in (
        (bx.ProjectedGradient(), bx.ConjugateGradient()),
        (bx.ActiveSet(), bx.DenseAdjoint()),
    ):
        general = bx.hypergradient(problem, model, solver=solver, adjoint=adjoint)
        np.testing.assert_allclose(closed.lower.y, general.lower.y, atol=1e-9)
        np.testing.assert_array_equal(closed.lower.active, general.lower.active)
        np.testing.assert_allclose(
            closed.lower.multipliers, general.lower.multipliers, atol=1e-7
        )
        a, b = ravel_pytree(closed.grad)[0], ravel_pytree(general.grad)[0]
        np.testing.assert_allclose(a, b, atol=1e-8 * float(jnp.max(jnp.abs(a))))


def test_with_the_curvature_of_the_network_too(model, batch):
    problem = bilevel(attack_step=0.5, linearised=False)(batch)
    d = direction(model)
    e = bx.hypergradient(problem, model)
    assert e.status == bx.Status.successful
    slope = difference(problem, model, d)
    assert abs(along(e.grad, d) - slope) < 1e-5 * abs(slope)


def test_the_implicit_part_is_inverse_to_its_weight(model, batch):
    grad = lambda **w: ravel_pytree(bx.hypergradient(bilevel(**w)(batch), model).grad)[
        0
    ]
    direct = ravel_pytree(
        bx.hypergradient(bilevel()(batch), model, adjoint=bx.Danskin()).grad
    )[0]
    one, ten = (grad(implicit_weight=w) - direct for w in (1.0, 10.0))
    np.testing.assert_allclose(one, 10 * ten, atol=1e-9 * float(jnp.abs(one).max()))
    tied = grad(implicit_weight=None) - direct
    np.testing.assert_allclose(tied, 3 * one, atol=1e-9 * float(jnp.abs(tied).max()))


@pytest.mark.parametrize("every", [2, 5])
def test_the_mean_over_draws_of_an_occasional_implicit_term_is_the_gradient(
    model, batch, every
):
    flat = lambda grad: np.asarray(ravel_pytree(grad)[0])
    of = lambda key: eqx.tree_at(lambda b: b.key, batch, key)
    made = lambda every: jax.jit(
        lambda key: (
            bx.hypergradient(
                bilevel(implicit_every=every)(of(key)), model, throw=False
            ).grad
        )
    )
    direct = jax.jit(
        lambda key: (
            bx.hypergradient(
                bilevel()(of(key)), model, adjoint=bx.Danskin(), throw=False
            ).grad
        )
    )
    occasional, always = made(every), made(1)
    draws = 40
    there = 0
    for key in jr.split(jr.key(11), draws):
        base, whole, found = map(flat, (direct(key), always(key), occasional(key)))
        term, drawn = whole - base, bool((found != base).any())
        assert np.abs(term).max() > 1e-3 * np.abs(whole).max()
        # Either nothing of the implicit term, or all of it so many times.
        np.testing.assert_allclose(
            found,
            base + (every if drawn else 0) * term,
            atol=1e-12 * np.abs(base).max(),
        )
        there += drawn
    # Draws of probability 1 / every, within four deviations.
    deviation = (draws * (1 / every) * (1 - 1 / every)) ** 0.5
    assert abs(there - draws / every) < 4 * deviation


def test_a_tilt_moves_the_perturbation_by_its_length_over_the_curvature(model, batch):
    settings = Settings(epsilon=EPSILON, attack_step=3.0, variance=1e-4)
    assert settings.tilt_deviation == pytest.approx(1e-2 / 3)
    stated = dataclasses.replace(settings, reading="tilt")
    assert stated.tilt_deviation == pytest.approx(1e-2)
    problem = bilevel()(batch)
    plain = bx.hypergradient(problem, model)
    q = 1e-3 * jr.normal(KEY, batch.images.shape)
    tilted = bx.hypergradient(problem.perturbed(q), model)
    box: Any = problem.constraints
    # Where neither reaches a bound, the shift is `-a q`.
    inner = lambda y: (y > box.lower) & (y < box.upper)
    free = inner(plain.lower.y) & inner(tilted.lower.y)
    assert free.sum() > 20
    np.testing.assert_allclose(
        (tilted.lower.y - plain.lower.y)[free], (-3.0 * q)[free], atol=1e-12
    )


def test_an_image_keeps_its_tilt_wherever_it_is_drawn(model, batch):
    method = bx.SSIGD(step_size=0.1, perturbation=bx.Gaussian(1.0))
    problem = bilevel()(batch)
    e = bx.hypergradient(problem, model)
    state = method.init(problem, model, e.lower, SCALES, key=KEY)
    other = bilevel()(eqx.tree_at(lambda b: b.rows, batch, jnp.array([4, 1, 9, 0, 3])))
    a, b = method._members_tilt(problem, state), method._members_tilt(other, state)
    np.testing.assert_array_equal(a[4], b[0])
    np.testing.assert_array_equal(a[1], b[1])
    assert not np.allclose(a[2], b[2])


def test_no_gradient_and_no_decay_reaches_running_statistics(model, batch):
    odd = jax.tree.map(
        lambda s, leaf: leaf + 0.7 if s else leaf, statistics_mask(model), model
    )
    for make in (bilevel(weight_decay=1.0), Madry(EPSILON, weight_decay=1.0)):
        grad = bx.hypergradient(make(batch), odd).grad
        reached = eqx.filter(grad, statistics_mask(model))
        assert all(not leaf.any() for leaf in jax.tree.leaves(reached))


def test_absorbing_moves_statistics_alone(model, batch):
    e = bx.hypergradient(bilevel()(batch), model)
    after = absorb(model, e.aux)
    mask = statistics_mask(model)
    same = jax.tree.map(lambda a, b: bool((a == b).all()), model, after)
    pairs = zip(jax.tree.leaves(mask), jax.tree.leaves(same), strict=True)
    assert all(is_statistic != unchanged for is_statistic, unchanged in pairs)


def test_sign_steps_are_those_of_madry(model, batch):
    problem = Madry(EPSILON, steps=3, step_size=0.03)(batch)
    y = np.asarray(problem.y0)
    box: Any = problem.constraints
    low, high = box.lower, box.upper
    loss = AttackLoss(batch.images, batch.labels)
    for _ in range(3):
        slope = jax.grad(loss, argnums=1)(model, jnp.asarray(y))
        y = np.clip(y - 0.03 * np.sign(slope), low, high)
    e = bx.hypergradient(problem, model)
    np.testing.assert_allclose(e.lower.y, y, atol=1e-15)
    # Held fixed, the attack leaves an ordinary gradient.
    ordinary = jax.grad(lambda m: problem.upper(m, jnp.asarray(y))[0])(model)
    a, b = ravel_pytree(e.grad)[0], ravel_pytree(ordinary)[0]
    np.testing.assert_allclose(a, b, atol=1e-14)
    assert not np.isfinite(float(e.lower.error))


def test_trades_adds_the_divergence_of_the_two_answers(model, batch):
    problem = Trades(EPSILON, beta=2.0, steps=2, weight_decay=0.0)(batch)
    # Sign steps end on bounds, which counts as a kink.
    e = bx.hypergradient(problem, model, throw=False)
    softmax = lambda z: np.exp(z) / np.exp(z).sum(1, keepdims=True)
    p = softmax(np.asarray(model(batch.images, training=True)[0]))
    q = softmax(np.asarray(model(batch.images + e.lower.y, training=True)[0]))
    natural = -np.mean(np.log(p[np.arange(5), batch.labels]))
    divergence = np.mean(np.sum(p * np.log(p / q), axis=1))
    assert float(e.value) == pytest.approx(natural + 2 * divergence, rel=1e-10)
    assert len(e.aux["seen"]) == 2


def test_every_image_comes_once_per_epoch():
    images = jnp.arange(12, dtype=jnp.uint8).reshape(12, 1, 1, 1)
    batches = ImageBatches(images, jnp.arange(12), 5, padding=0, flip=False)
    order = lambda epoch: np.concatenate(
        [batches(KEY, jnp.asarray(2 * epoch + i)).labels for i in range(2)]
    )
    first, second = order(0), order(1)
    assert len(set(first)) == len(set(second)) == 10
    assert list(first) != list(second)
    other = eqx.tree_at(lambda b: b.seed, batches, jnp.asarray(1))
    assert list(other(KEY, jnp.asarray(0)).labels) != list(first[:5])


def test_rates_rise_and_fall_as_they_say():
    steps = np.arange(0, 101)
    rise, fall = optax.linear_schedule(0, 0.3, 40), optax.linear_schedule(0.3, 0, 60)
    known: dict[str, Any] = {
        "triangular": optax.join_schedules([rise, fall], [40]),
        "cosine": optax.warmup_cosine_decay_schedule(0, 0.3, 10, 100),
        "piecewise": optax.piecewise_constant_schedule(0.3, {50: 0.1, 75: 0.1}),
        "constant": optax.constant_schedule(0.3),
    }
    assert set(known) == set(SCHEDULES)
    for kind, expected in known.items():
        rate = Rate(kind, 0.3, 100, 0.4)
        np.testing.assert_allclose(
            [rate(jnp.asarray(t)) for t in steps],
            [expected(jnp.asarray(t)) for t in steps],
            atol=1e-7,
        )
    settings = Settings(rate=0.3, momentum=0.9)
    method: Any = method_of(settings, None, 100)
    assert 1 / float(method.gamma2(40)) == pytest.approx(3.0)
    with pytest.raises(ValueError, match="no schedule"):
        Rate("square", 1.0, 10)


def test_another_rate_or_length_needs_no_other_program():
    for name in ("ds-blo", "bilevel-sgd"):
        one = method_of(Settings(method=name, rate=0.1, momentum=0.8), None, 10)
        two = method_of(Settings(method=name, rate=0.3), None, 1000)
        one, two = (eqx.partition(m, eqx.is_array) for m in (one, two))
        assert jax.tree.structure(one[0]) == jax.tree.structure(two[0])
        assert eqx.tree_equal(one[1], two[1])


def test_settings_say_what_is_wrong_with_them():
    assert fraction("8/255") == 8 / 255
    with pytest.raises(ValueError, match="divides by zero"):
        fraction("1/0")
    with pytest.raises(ValueError, match="is no number; write it as"):
        fraction("a lot")
    wrong: Any
    for wrong, text in (
        (dict(method="adam"), "`method` is one of"),
        (dict(epsilon=8.0), "units of the pixel range"),
        (dict(epochs=0), "at least 1"),
        (dict(momentum=1.0), "momentum"),
        (dict(rate=float("nan")), "`rate` is a positive number"),
        (dict(implicit_weight=0.0), "`implicit_weight` is a positive"),
        (dict(variance=-1.0), "not negative"),
        (dict(weight_decay=float("nan")), "`weight_decay` is a number that is not"),
        (dict(label_smoothing=2.0), r"`label_smoothing` is in \[0, 1\)"),
        (dict(gamma1=-1.0), "`gamma1` is a number that is not negative"),
        (dict(peak_at=0.0), "`peak_at` is in"),
        (dict(schedule="square"), "`schedule` is one of"),
        (dict(attack_steps=-1), "`attack_steps` is not negative"),
        (dict(implicit_every=0), "`implicit_every` is at least 1"),
    ):
        with pytest.raises(ValueError, match=text):
            Settings(**wrong)


@pytest.mark.parametrize("method", BILEVEL)
@pytest.mark.parametrize("epsilon", [0.0, 1 / 255, 8 / 255, 16 / 255, 0.3, 1.0])
def test_the_first_attack_reaches_all_of_the_box_at_every_radius(method, epsilon):
    attack: Any = Settings(method=method, epsilon=epsilon).attack
    steps, size, last = attack
    assert steps * size >= 2 * epsilon
    if epsilon:
        assert last / epsilon == pytest.approx(12.5)
    instance: Any = instance_of(Settings(method=method, epsilon=epsilon))
    assert int(instance.steps) == steps
    assert float(instance.sign_step) == pytest.approx(size)
    assert float(instance.attack_step) == pytest.approx(last)


def test_a_plain_step_of_a_given_length_is_the_attack_of_the_paper():
    for steps in (None, 1):
        settings = Settings(attack_steps=steps, attack_step=5000 / 255)
        assert settings.attack == (1, None, 5000 / 255)
        assert instance_of(settings).sign_step is None  # pyright: ignore
    assert Settings(attack_step=1.0, sign_step=0.01).attack == (4, 0.01, 1.0)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("epsilon", [0.0, 8 / 255, 0.3])
def test_a_row_of_settings_gives_the_run_back(method, epsilon):
    settings = Settings(method=method, epsilon=epsilon)
    again = Settings(**settings.as_row())
    assert again.attack == settings.attack
    assert again.as_row() == settings.as_row()
    assert again.tilt_deviation == settings.tilt_deviation


def test_the_sign_steps_of_at_grow_with_the_box():
    for method in ("at", "trades"):
        for epsilon in (8 / 255, 0.3):
            instance: Any = instance_of(Settings(method=method, epsilon=epsilon))
            assert float(instance.step_size) == pytest.approx(epsilon / 4)
    instance = instance_of(Settings(method="at", sign_step=0.01))
    assert float(instance.step_size) == pytest.approx(0.01)


def test_fast_at_takes_one_long_step():
    instance = instance_of(Settings(method="fast-at", epsilon=0.1))
    assert isinstance(instance, Madry)
    assert int(instance.steps) == 1
    assert float(instance.step_size) == pytest.approx(0.125)


def test_a_collapse_is_a_training_attack_that_says_nothing():
    def seen(attacked, clean, robust):
        return collapsed(
            dict(accuracy=attacked, clean_by_batch=clean, robust_by_batch=robust)
        )

    # Easier than clean images; far easier than under PGD.
    assert seen(1.0, 0.2, 0.2)
    assert seen(0.57, 0.75, 0.08)
    # Healthy; an attack that is only weak; the first epoch.
    assert not seen(0.5, 0.8, 0.45)
    assert not seen(0.55, 0.93, 0.3)
    assert not seen(0.2, 0.3, 0.0)


def test_solve_moves_the_weights_and_sets_the_statistics(model, batch):
    images = jr.randint(KEY, (20, 6, 6, 1), 0, 256).astype(jnp.uint8)
    batches = ImageBatches(
        images, jnp.arange(20) % CLASSES, 5, padding=0, flip=False, dtype="float64"
    )
    problem = adversarial_problem(batches, bilevel())
    method = bx.DSBLO(1.0, 1.0, perturbation=bx.Gaussian(1e-3))
    s = bx.solve(
        problem, method, model, key=KEY, num_steps=8, chunk=4, looks=False, average=0.9
    )
    assert s.success
    assert set(s.history["lower_solves"]) == {1}
    assert len(s.history["accuracy"]) == 8
    assert s.y is None
    for tree in (s.x, s.average):
        changed = jax.tree.map(lambda a, b: bool((a != b).any()), model, tree)
        assert all(jax.tree.leaves(changed)), "weights and statistics"
