"""Many problems in one process: programs are forgotten before Linux ends it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bilevax as bx
from bilevax._programs import room as _room
from bilevax._programs.quick import quick_jit


@pytest.fixture
def counted(monkeypatch, tmp_path):
    """The files in which the system counts, under our pen."""
    used, limit = tmp_path / "maps", tmp_path / "limit"
    used.write_text("a mapping\n" * 10)
    limit.write_text("100\n")
    monkeypatch.setattr(_room, "_MAPPINGS", used)
    monkeypatch.setattr(_room, "_LIMIT", limit)
    _room.limit.cache_clear()
    yield used, limit
    _room.limit.cache_clear()


def a_problem(target):
    return bx.Problem(
        lambda x, y: jnp.sum((y - target) ** 2),
        lambda x, y: 0.5 * jnp.sum((y - x) ** 2),
        bx.Box(-jnp.ones(2), jnp.ones(2)),
    )


def test_programs_are_forgotten_only_near_the_limit(counted):
    used, _ = counted
    traces = []
    program = jax.jit(lambda x: (traces.append(x), x + 1)[1])
    program(1.0)
    assert not _room.make_room()
    program(1.0)
    assert len(traces) == 1
    used.write_text("a mapping\n" * 51)
    assert _room.make_room()
    assert float(program(1.0)) == 2
    assert len(traces) == 2


@pytest.mark.parametrize("gone", [0, 1])
def test_where_nobody_counts_nothing_is_forgotten(counted, gone):
    counted[0].write_text("a mapping\n" * 51)
    counted[gone].unlink()
    assert not _room.make_room()


def test_a_new_problem_makes_room_and_the_old_one_still_solves(counted, monkeypatch):
    rooms = []
    make_room = lambda: rooms.append(_room.make_room())
    monkeypatch.setattr("bilevax._implicit.hypergradient.make_room", make_room)
    problem, x = a_problem(0.5), jnp.array([0.2, 3.0])
    before = bx.hypergradient(problem, x)
    bx.hypergradient(problem, x)
    quiet = len(rooms)
    # Nothing new was compiled, so nobody counts.
    bx.hypergradient(problem, x)
    assert len(rooms) == quiet
    counted[0].write_text("a mapping\n" * 51)
    bx.hypergradient(a_problem(0.25), x)
    after = bx.hypergradient(problem, x)
    assert rooms[-1]
    np.testing.assert_array_equal(before.grad, after.grad)


def test_mappings_are_those_of_this_process():
    if not _room._MAPPINGS.exists():
        pytest.skip("no one counts mappings here")
    few = _room.mappings()
    programs = [jax.jit(lambda x, i=i: jnp.sin(x) + i) for i in range(20)]
    for program in programs:
        program(1.0)
    assert _room.mappings() > few
    assert _room.limit() > _room.mappings()


def test_quick_programs_are_parts_of_others_too():
    sine = quick_jit(jnp.sin)
    points = jnp.linspace(0.0, 1.0, 3)
    expected = np.sin(points)
    add = lambda total, _: (total + sine(2.0), None)
    summed = jax.jit(lambda x: jax.lax.scan(add, x, length=3)[0])
    np.testing.assert_allclose(sine(points), expected)
    np.testing.assert_allclose(jax.jit(sine)(points), expected)
    np.testing.assert_allclose(jax.vmap(sine)(points), expected)
    np.testing.assert_allclose(jax.vmap(jax.grad(sine))(points), np.cos(points))
    np.testing.assert_allclose(summed(0.0), 3 * np.sin(2.0))
