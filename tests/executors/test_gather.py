"""Work that is handed over comes back once, whatever happens to it on the way."""

import concurrent.futures
import json
import multiprocessing

import jax
import jax.numpy as jnp
import pytest

import bilevax as bx
from bilevax._executors.gather import Job, Lost, check_executor, gathered
from bilevax._executors.orders import WorkFailed, order, perform, results_of

from .tools import Backwards, Failing, Here, Merging, kinds, picky, squares


def of(executor, numbers, size=1, function=squares):
    jobs = [Job(f"number {n}", n) for n in numbers]
    return list(gathered(executor, function, jobs, size))


@pytest.mark.parametrize("kind", [Here, Merging])
@pytest.mark.parametrize("size", [1, 2, 9])
def test_every_job_comes_back_once(kind, size):
    assert dict(of(kind(), range(5), size)) == {i: i * i for i in range(5)}


def test_equal_work_is_done_as_often_as_it_is_asked_for():
    executor = Merging()
    assert of(executor, [3, 3, 3]) == [(0, 9), (1, 9), (2, 9)]
    assert len(executor.known) == 3


def test_jobs_come_back_as_they_end():
    assert of(Backwards(), range(4)) == [(i, i * i) for i in (3, 2, 1, 0)]


def test_threads_are_workers_too():
    with concurrent.futures.ThreadPoolExecutor(2) as executor:
        assert dict(of(executor, range(5))) == {i: i * i for i in range(5)}


@pytest.mark.parametrize("size", [1, 3])
def test_what_is_lost_once_is_tried_again_alone(size):
    executor = Failing(lose=[0])
    assert dict(of(executor, range(3), size)) == {0: 0, 1: 1, 2: 4}
    sizes = [len(json.loads(text)["arguments"]) for text in executor.texts]
    assert sizes == [1, 1, 1, 1] if size == 1 else [3, 1, 1, 1]


def test_what_is_lost_twice_is_reported_and_the_rest_is_right():
    # Work 0 is tried again after the three others were submitted.
    found = dict(of(Failing(lose=[0, 3]), range(3)))
    assert found[0] == Lost("ConnectionError: the worker is gone")
    assert (found[1], found[2]) == (1, 4)


def test_errors_of_the_work_are_told_in_words():
    """Errors that cannot be pickled would break a pool."""
    found = dict(of(Here(), [1, 3, 5], function=picky))
    assert found[1] == Lost("BilevelError: three is too many")
    assert (found[0], found[2]) == (1, 5)


def test_where_an_executor_takes_no_more_the_rest_is_done_here():
    with pytest.warns(UserWarning, match="closed for today") as told:
        found = dict(of(Failing(refuse_at=1), range(4)))
    assert len(told) == 1
    assert found == {i: i * i for i in range(4)}


def test_what_may_have_killed_a_worker_is_not_done_here():
    with pytest.warns(UserWarning, match="takes no more work"):
        found = dict(of(Failing(lose=[1], refuse_at=2), range(2)))
    assert found[0] == 0
    assert isinstance(found[1], Lost)


def test_work_is_done_under_the_settings_of_the_caller():
    """Without x64 in a worker that has it, and the worker keeps its own."""
    executor = Here()
    with jax.enable_x64(False):
        jobs = [Job("one", jnp.zeros(2))]
        work = gathered(executor, kinds, jobs)
    assert [result for _, result in work] == [["float32", "float32"]]
    assert of(executor, [jnp.zeros(2)], function=kinds)[0][1] == ["float64"] * 2
    assert jnp.zeros(()).dtype == jnp.float64


def test_work_of_another_version_is_not_done(monkeypatch):
    text, *arrays = order(squares, [1], ["one"])
    assert results_of(perform(text, *arrays)) == [1]
    monkeypatch.setattr(bx, "__version__", "another")
    with pytest.raises(WorkFailed, match="install the same version"):
        results_of(perform(text, *arrays))


def test_what_is_no_answer_is_told():
    with pytest.raises(WorkFailed, match="which is no answer"):
        results_of(None)


def test_what_is_no_executor_is_told():
    with pytest.raises(ValueError, match="must have `submit"):
        check_executor(3)
    fork = concurrent.futures.ProcessPoolExecutor(
        1, multiprocessing.get_context("fork")
    )
    with pytest.raises(ValueError, match='get_context\\("spawn"\\)'):
        check_executor(fork)
    fork.shutdown()


def test_nothing_is_submitted_where_one_job_cannot_travel():
    executor = Here()
    with pytest.raises(ValueError, match="number 1: It is a lambda"):
        gathered(executor, squares, [Job("number 0", 0), Job("number 1", lambda: 0)])
    assert executor.texts == []
