"""Seconds that limit a run are those in which it runs, not those of compilation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bilevax as bx
from bilevax._programs import stopwatch

COMPILED = "/jax/core/compile/backend_compile_duration"


def test_time_in_compilation_counts_once_however_it_is_nested(monkeypatch):
    here = stopwatch._Compiling()
    # From 4 to 5, and from 6 to 8; both inside a span from 2 to 10; then from 12 to 13.
    for end, seconds in ((5.0, 1.0), (8.0, 2.0), (10.0, 8.0), (13.0, 1.0)):
        monkeypatch.setattr(stopwatch.time, "perf_counter", lambda end=end: end)
        here.add(COMPILED, seconds)
        here.add("/jax/something/else", 100.0)
    assert here.total == 9.0


def test_running_time_leaves_compilation_out(monkeypatch):
    monkeypatch.setattr(stopwatch, "_here", stopwatch._Compiling())
    watch = stopwatch.Stopwatch(spent=50.0, running=20.0)
    assert watch.running == pytest.approx(watch.seconds - 30.0, abs=1.0)
    stopwatch._here.add(COMPILED, 1e6)
    assert watch.running == pytest.approx(watch.seconds - 30.0 - 1e6, abs=1.0)


@pytest.mark.parametrize("method", [bx.DSBLO(), bx.DSIGD()])
def test_compilation_spends_no_time_of_a_run(method):
    def upper(x, y):
        # As if compiling what is traced here took days.
        jax.monitoring.record_event_duration_secs(COMPILED, 1e6)
        return jnp.sum((x - y) ** 2)

    problem = bx.Problem(upper, lambda x, y: jnp.sum((y - x) ** 2), y0=jnp.zeros(1))
    run = lambda stop: bx.solve(
        problem, method, jnp.ones(1), key=0, num_steps=4, chunk=2, polish=False,
        stop=stop, throw=False,
    )  # fmt: skip
    solution = run(bx.Stop(0, 0, seconds=0.0))
    assert solution.stopped == "all steps taken"
    assert np.all(np.diff(solution.history.working) < 1e6)
