"""Calls from Python run stage by stage, inside `jit` as a program: the same functions.

The two ways agree to rounding, and which way is taken depends on the call alone.
"""

import ast
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.tree_util import Partial

import bilevax as bx
from bilevax._driver.steps import runs_in_stages
from bilevax._implicit.hypergradient import evaluate, staged
from bilevax._programs.control import (
    UsualPath,
    loop,
    rarely,
    stage_by_stage,
    usual_path,
    usual_path_in_use,
)

from .test_architecture import ROOT

KEY = jax.random.key(0)


def follower(data, x, y):
    z = y - data["c"] - x[0] * data["d"]
    return 0.5 * z @ data["H"] @ z + data["bend"] * jnp.sum(jnp.exp(0.3 * y))


def leader(data, x, y):
    return jnp.sum((y - 1) ** 2) + x @ x


def problem_of(data, **more):
    rows = bx.Polyhedron(A=data["A"], B=data["B"], b=data["b"])
    return bx.Problem(Partial(leader, data), Partial(follower, data), rows, **more)


def random_data(rng, bend, n=4, k=7):
    root = rng.normal(size=(n, n))
    return dict(
        H=jnp.asarray(root @ root.T + np.eye(n)),
        c=jnp.asarray(2 * rng.normal(size=n)),
        d=jnp.asarray(rng.normal(size=n)),
        A=jnp.asarray(rng.normal(size=(k, n))),
        B=jnp.asarray(0.2 * rng.normal(size=(k, 2))),
        b=jnp.asarray(rng.uniform(0.2, 1, size=k)),
        bend=jnp.asarray(bend),
    )


@jax.jit
def as_program(data, x):
    return bx.hypergradient(problem_of(data), x, throw=False)


@pytest.mark.parametrize("bend", [0.0, 1.0])
def test_stages_and_the_program_agree(bend):
    rng = np.random.default_rng(int(bend))
    for _ in range(12):
        data, x = random_data(rng, bend), jnp.asarray(rng.normal(size=2))
        one = bx.hypergradient(problem_of(data), x, throw=False)
        other = as_program(data, x)
        assert bx.status_name(one.status) == bx.status_name(other.status)
        np.testing.assert_allclose(one.value, other.value, rtol=1e-11)
        np.testing.assert_allclose(one.grad, other.grad, rtol=1e-8, atol=1e-10)
        np.testing.assert_array_equal(one.lower.active, other.lower.active)
        again = bx.hypergradient(problem_of(data), x, warm=other.lower, throw=False)
        np.testing.assert_allclose(again.grad, one.grad, rtol=1e-8, atol=1e-10)


def test_eager_transformations_are_programs():
    data = random_data(np.random.default_rng(3), 0.5)
    problem, xs = problem_of(data), jnp.asarray([[0.1, 0.2], [-0.3, 0.4]])
    value = lambda x: bx.hypergradient(problem, x, throw=False).value
    gradients = jax.vmap(lambda x: bx.hypergradient(problem, x, throw=False).grad)(xs)
    for x, gradient in zip(xs, gradients, strict=True):
        alone = bx.hypergradient(problem, x)
        np.testing.assert_allclose(gradient, alone.grad, rtol=1e-9)
        np.testing.assert_allclose(jax.jit(value)(x), alone.value, rtol=1e-12)


def test_the_way_of_a_run_depends_on_the_run_alone():
    problem = problem_of(random_data(np.random.default_rng(4), 0.0))
    assert runs_in_stages(problem, bx.DSBLO(), 300)
    assert not runs_in_stages(problem, bx.DSBLO(), 5000)
    assert not runs_in_stages(problem, bx.DSIGD(), 300)
    products = problem_of(
        random_data(np.random.default_rng(4), 0.0), adjoint=bx.ConjugateGradient()
    )
    assert not staged(products, jnp.zeros(2), bx.ActiveSet(), products.adjoint)


def leaves_of(answers):
    arrays = [leaf for leaf in jax.tree.leaves(answers) if hasattr(leaf, "dtype")]
    return [np.asarray(leaf) for leaf in arrays]


def test_what_ran_before_changes_no_bit_of_an_answer():
    problem, x = problem_of(random_data(np.random.default_rng(6), 0.7)), jnp.ones(2)
    near = bx.hypergradient(problem, 0.99 * x, throw=False).lower

    def answers():
        yield bx.hypergradient(problem, x, throw=False)
        yield bx.hypergradient(problem, x, warm=near, throw=False)
        found = bx.solve(problem, None, x, key=KEY, num_steps=20, throw=False)
        yield found.x, found.y, found.value, found.history.steps
        sure = bx.certify(problem, x, 1e-2, key=KEY)
        yield jnp.asarray([sure.measure, sure.gradient_error, *sure.weights])

    first = [leaves_of(answer) for answer in answers()]
    for i in range(60):
        bx.hypergradient(problem, x + 0.01 * i, throw=False)
        bx.hypergradient(problem, x + 0.01 * i, warm=near, throw=False)
    for _ in range(35):
        bx.solve(problem, None, x, key=KEY, num_steps=2, polish=False, throw=False)
    bx.solve(problem, None, x, key=KEY, num_steps=20, throw=False)
    for before, after in zip(first, map(leaves_of, answers()), strict=True):
        for one, other in zip(before, after, strict=True):
            np.testing.assert_array_equal(one, other)


def test_a_first_import_inside_jit_leaves_calls_outside_what_they_are():
    """In another process: here the library was imported long ago."""
    code = """
import jax
import jax.numpy as jnp

@jax.jit
def inside(x):
    import bilevax._programs.quick
    return x

inside(1.0)
from bilevax._programs.quick import in_transform
assert not in_transform()
jax.vmap(lambda x: print(in_transform()) or x)(jnp.zeros(2))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout == "True\n"


def steps_as(monkeypatch, short: int, long: int, problem, **options) -> bx.Solution:
    """A solve by the way that these limits of numbers of steps lead to."""
    monkeypatch.setattr("bilevax._driver.steps._SHORT", short)
    monkeypatch.setattr("bilevax._driver.steps.LONG", long)
    named: Any = dict(x0=jnp.ones(2), key=KEY, num_steps=25, throw=False) | options
    return bx.solve(problem, bx.DSBLO(), **named)


def test_a_run_takes_the_same_steps_by_every_way(monkeypatch):
    problem = problem_of(random_data(np.random.default_rng(5), 0.3))
    stages = steps_as(monkeypatch, 500, 3000, problem, average=0.9)
    for short, long in ((0, 3000), (0, 0)):
        program = steps_as(monkeypatch, short, long, problem, average=0.9)
        for one, other in zip(stages.stochastic, program.stochastic, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-9)
        np.testing.assert_allclose(stages.value, program.value, rtol=1e-9)
        pair: Any = (stages.average, program.average)
        np.testing.assert_allclose(*pair, rtol=1e-9)
        assert set(stages.history.steps) == set(program.history.steps)
        for name in ("value", "move", "tilt", "momentum_norm", "status"):
            np.testing.assert_allclose(
                stages.history[name], program.history[name], rtol=1e-7, atol=1e-12
            )


def test_a_run_without_rare_branches_goes_on_where_it_was_cut(monkeypatch, tmp_path):
    problem = problem_of(random_data(np.random.default_rng(6), 0.3))
    limits: Any = dict(monkeypatch=monkeypatch, short=0, long=3000, problem=problem)
    whole = steps_as(**limits, chunk=5)
    again: Any = dict(chunk=5, checkpoint=tmp_path / "run.npz")
    stop = lambda step, *rest: step == 10
    cut = steps_as(**limits, callback=stop, **again)
    assert len(cut.history) == 10
    rest = steps_as(**limits, stop=bx.Stop(0, 0, seconds=1e9), **again)
    np.testing.assert_array_equal(whole.x, rest.x)
    np.testing.assert_array_equal(whole.stochastic[0], rest.stochastic[0])
    for name, column in whole.history.steps.items():
        np.testing.assert_array_equal(column, rest.history[name])


@pytest.mark.parametrize("bend", [0.0, 1.0])
def test_the_usual_path_agrees_with_the_stages(bend):
    rng = np.random.default_rng(10 + int(bend))
    for _ in range(12):
        data, x = random_data(rng, bend), jnp.asarray(rng.normal(size=2))
        problem = problem_of(data)
        one = bx.hypergradient(problem, x, throw=False)
        with stage_by_stage(often=True):
            usual = evaluate(problem, x, bx.ActiveSet(), None, None)
        assert bx.status_name(one.status) == bx.status_name(usual.status)
        np.testing.assert_allclose(one.value, usual.value, rtol=1e-11)
        np.testing.assert_allclose(one.grad, usual.grad, rtol=1e-8, atol=1e-10)
        np.testing.assert_array_equal(one.lower.active, usual.lower.active)
        if bx.status_name(one.status) == "successful":
            with stage_by_stage(often=True):
                evaluate(problem, x + 1e-6, bx.ActiveSet(), None, one.lower)
                path = usual_path_in_use()
            assert path is not None
            assert (path.taken, path.missed) == (1, 0)


def test_what_the_usual_path_leaves_out_is_noticed():
    def halved(x):
        small = rarely(x < 1, lambda x: x - 100, x)
        return loop(
            lambda s: s > 1, lambda s: rarely(s < 1.5, lambda s: -s, s / 2), small, 9
        )

    path = usual_path(halved)
    for x, answer in ((8.0, 1.0), (3.0, 0.75)):
        result, left_out = path(jnp.asarray(x), large=False)
        assert not left_out
        assert result == answer
    for x in (0.5, 2.8, 1.4):
        assert path(jnp.asarray(x), large=False)[1]
    with stage_by_stage():
        assert halved(np.asarray(0.5)) == -99.5
    assert jax.jit(halved)(0.5) == -99.5


def test_a_path_that_misses_is_given_up():
    path = UsualPath()
    for _ in range(7):
        path.met(True)
    assert path.pays()
    path.met(True)
    assert not path.pays()
    for _ in range(9):
        path.met(False)
    assert path.pays()


@pytest.mark.parametrize("short", [500, 0])
def test_an_empty_lower_level_is_left_in_stages_too(monkeypatch, short):
    monkeypatch.setattr("bilevax._driver.steps._SHORT", short)
    rows = bx.Polyhedron(
        A=jnp.array([[1.0], [-1.0]]),
        B=jnp.array([[-1.0], [0.0]]),
        b=jnp.array([0, 0.0]),
    )
    problem = bx.Problem(
        lambda x, y: (x[0] + 2) ** 2 + y[0], lambda x, y: 0.5 * y[0] ** 2, rows
    )
    solution = bx.solve(problem, bx.DSBLO(), jnp.array([1.0]), key=KEY, num_steps=60)
    assert np.any(solution.history["recovered"] > 0)
    np.testing.assert_allclose(solution.x, [0.0], atol=1e-7)


def test_a_loop_in_a_batch_ends_for_every_member():
    # Halving from a step that the condition and the body might round differently.
    halve = lambda x: loop(
        lambda s: x * s * s > 0.1 * x, lambda s: s / 2, x * 0 + 1, 40
    )
    xs = jnp.asarray(np.random.default_rng(0).uniform(size=1000))
    assert jnp.all(jax.jit(jax.vmap(halve))(xs) == 0.25)


def test_loops_stand_in_one_file():
    """`lax.while_loop` decides twice under vmap; only whole steps are counted so."""
    allowed = {"control.py", "run.py"}
    for path in ROOT.rglob("*.py"):
        names = {
            node.attr
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.Attribute)
        }
        assert path.name in allowed or not names & {"while_loop", "cond"}, path


def test_what_functions_close_over_may_be_mapped_and_differentiated():
    rows = bx.Polyhedron(A=-np.eye(2), b=np.zeros(2))
    lower = lambda x, y: 0.5 * jnp.sum((y - x) ** 2)

    def value(c):
        problem = bx.Problem(lambda x, y: c @ y, lower, rows)
        return bx.hypergradient(problem, jnp.ones(2), throw=False).value

    cs = jnp.array([[1.0, 2.0], [3.0, 5.0]])
    np.testing.assert_allclose(jax.vmap(value)(cs), [3.0, 8.0], rtol=1e-12)
    both = jax.jvp(value, (cs[0],), (cs[1],))
    np.testing.assert_allclose(both, [3.0, 8.0], rtol=1e-12)
