"""Runs on a cluster of dask, of two processes, are those of one process."""

import importlib
import importlib.util
from typing import Any

import numpy as np
import pytest

import bilevax as bx

from .. import comparisons
from .tools import START, Revenue, assert_same, tolls

if importlib.util.find_spec("distributed") is None:
    pytest.skip(
        "needs dask.distributed: pip install 'bilevax[cluster]'",
        allow_module_level=True,
    )

VALUES = 4 + np.arange(6).reshape(3, 2) / 5
GIVEN = ([START] * 3, 0, comparisons.Walk())
BRIEF: Any = dict(num_steps=20, polish=False)


@pytest.fixture(scope="module")
def client():
    dask: Any = importlib.import_module("dask")
    distributed: Any = importlib.import_module("distributed")
    # A worker that died is not tried by dask itself: that is ours to do.
    with dask.config.set({"distributed.scheduler.allowed-failures": 0}):
        cluster = distributed.LocalCluster(
            n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None
        )
    with cluster, distributed.Client(cluster) as client:
        yield client


@pytest.mark.filterwarnings("ignore")
def test_a_cluster_gives_what_one_process_gives(client):
    methods = {"walk": comparisons.Walk(), "faulty": comparisons.Faulty()}
    given = (comparisons.CASES, methods, 2, comparisons.BUDGET)
    there, here = bx.compare(*given, executor=client), bx.compare(*given)
    for one, other in zip(there.rows, here.rows, strict=True):
        assert comparisons.outcome(one) == comparisons.outcome(other)
    problems = [tolls(value) for value in VALUES]
    found = bx.solve_many(problems, *GIVEN, executor=client, **BRIEF)
    expected = bx.solve_many(problems, *GIVEN, **BRIEF)
    for one, other in zip(found, expected, strict=True):
        assert_same(one, other)
    several: Any = dict(key=0, num_starts=2, **BRIEF)
    one = bx.solve(problems[0], comparisons.Walk(), START, executor=client, **several)
    other = bx.solve(problems[0], comparisons.Walk(), START, **several)
    for start, expected in zip(one.starts, other.starts, strict=True):
        assert_same(start, expected)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("times", [1, 9])
def test_a_worker_of_a_cluster_that_dies_costs_one_run_if_any(client, times, tmp_path):
    deadly = Revenue(str(tmp_path), times)
    problems = [tolls(VALUES[0]), tolls(VALUES[1], revenue=deadly), tolls(VALUES[2])]
    found = bx.solve_many(problems, *GIVEN, executor=client, **BRIEF)
    assert found[0].success
    assert found[2].success
    assert len(list(tmp_path.iterdir())) == min(times, 2)
    if times == 1:
        assert found[1].success
    else:
        assert found[1].status_name == "lost"
        assert "instance 1 was lost (KilledWorker" in found[1].message
