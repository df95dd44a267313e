"""Layers of PyTorch: values, derivatives, batches, failures, and a loop that learns."""

import copy
import json
import os
import subprocess
import sys
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bilevax as bx

from .. import zoo
from ..quadratics import random_quadratic

torch = pytest.importorskip("torch", reason="needs the extra `torch`")
import bilevax.torch as bt  # noqa: E402

ROADS = jnp.array([[1.0, 1.0], [-1, 0], [0, -1]])


def traveller(slope, trips):
    """Two roads and a budget of trips."""
    rows = bx.Polyhedron(ROADS, b=jnp.concatenate([trips[None], jnp.zeros(2)]))
    return lambda y: 0.5 * jnp.sum(y**2) + slope @ y, rows


def quadratic(H, c, A, b):
    return lambda y: 0.5 * y @ H @ y + c @ y, bx.Polyhedron(A, b=b)


def double(values, wanted=True):
    return torch.tensor(np.asarray(values), dtype=torch.float64, requires_grad=wanted)


def random_programs(seed, n=4, m=3, batch=3):
    """Positive definite `H` that all share, and `c`, `A`, `b` of each."""
    rng = np.random.default_rng(seed)
    root = rng.normal(size=(n, n))
    return [
        double(part)
        for part in (
            root @ root.T + np.eye(n),
            rng.normal(size=(batch, n)),
            rng.normal(size=(batch, m, n)),
            rng.uniform(-0.2, 1, size=(batch, m)),
        )
    ]


def test_derivatives_of_answers_and_prices_in_every_parameter():
    layer = bt.layer(quadratic, ndim=(2, 1, 2, 1))
    parameters = random_programs(0)
    assert np.any(layer(*parameters).prices.detach().numpy() > 0)
    assert torch.autograd.gradcheck(lambda *p: tuple(layer(*p)[:2]), parameters)


def test_an_upper_level_in_torch_has_the_hypergradient():
    data = random_quadratic(np.random.default_rng(2), 4, 5, 3, "plain", 10.0)
    data = {name: jnp.asarray(part) for name, part in data.items()}
    problem = zoo.quadratic_problem(data)
    e = bx.hypergradient(problem, data["x"])
    x = double(data["x"])
    y = bt.layer(problem)(x).y
    cotangent = jax.grad(problem.upper, argnums=(0, 1))(data["x"], e.lower.y)
    total = x @ double(cotangent[0], False) + y @ double(cotangent[1], False)
    total.backward()
    np.testing.assert_allclose(x.grad, e.grad, rtol=zoo.EXACT, atol=zoo.EXACT)
    np.testing.assert_allclose(y.detach(), e.lower.y, rtol=zoo.EXACT, atol=zoo.EXACT)


def test_members_of_a_batch_are_answered_as_alone():
    slope, trips = double([[-1.0, -2.0], [-3.0, 1.0]]), double([2.0, 1.0])
    batch = bt.layer(traveller, ndim=(1, 0))(slope, trips)
    for i in range(2):
        one = bt.layer(traveller)(slope[i], trips[i])
        assert one.y.shape == (2,)
        torch.testing.assert_close(one.y, batch.y[i])
        torch.testing.assert_close(one.prices, batch.prices[i])
        assert one.status_name == batch.status_name[i]
        assert one.success


def test_parameters_that_members_share_collect_their_derivatives():
    slope, trips = double([-1.0, -2.0]), double([2.0, 1.0, 0.5])
    layer = bt.layer(traveller, ndim=(1, 0))
    (layer(slope, trips).y[:, 0] ** 2).sum().backward()
    total = torch.zeros(2, dtype=torch.float64)
    for one in trips.detach():
        alone = slope.detach().clone().requires_grad_()
        (bt.layer(traveller)(alone, one).y[0] ** 2).backward()
        total += alone.grad
    torch.testing.assert_close(slope.grad, total)


def test_a_member_without_an_answer_is_masked_and_sends_nothing_back():
    slope = double([-1.0, -2.0])
    trips = double([2.0, -1.0, 1.5])
    layer = bt.layer(traveller, ndim=(1, 0), throw=False)
    answer = layer(slope, trips)
    assert answer.status_name.tolist() == ["successful", "infeasible", "successful"]
    assert answer.success.tolist() == [True, False, True]
    assert answer.message.startswith("1 of 3 (1) infeasible")
    assert torch.isnan(answer.y[1]).all()
    # A loss that squares the NaN does not spoil the others' derivatives either.
    (answer.y**2).sum().backward()
    others = [slope.detach().clone().requires_grad_(), double([2.0, 1.5])]
    (layer(*others).y ** 2).sum().backward()
    torch.testing.assert_close(slope.grad, others[0].grad)
    torch.testing.assert_close(trips.grad[[0, 2]], others[1].grad)
    assert trips.grad[1] == 0


def test_nans_of_a_member_stay_with_it():
    slope = double([[-1.0, -2.0], [np.nan, 0.0]])
    trips = double(2.0)
    answer = bt.layer(traveller, ndim=(1, 0), throw=False, fill=0.0)(slope, trips)
    assert answer.status_name.tolist() == ["successful", "non_finite"]
    assert answer.y[1].tolist() == [0.0, 0.0]
    answer.y[:, 0].sum().backward()
    assert trips.grad == pytest.approx(0.5)
    assert slope.grad[1].tolist() == [0.0, 0.0]


def test_a_batch_in_which_nobody_has_an_answer_has_derivative_zero():
    trips = double([-1.0, -2.0])
    slope = double([-1.0, -2.0])
    answer = bt.layer(traveller, ndim=(1, 0), throw=False, fill=0.0)(slope, trips)
    assert not answer.success.any()
    answer.y.sum().backward()
    assert trips.grad.tolist() == slope.grad.tolist() == [0.0, 0.0]


def test_failures_warn_or_raise_as_asked():
    slope, trips = double([-1.0, -2.0]), double([2.0, -1.0])
    with pytest.warns(UserWarning, match=r"1 of 2 \(1\) infeasible: No `y` satisfies"):
        bt.layer(traveller, ndim=(1, 0))(slope, trips)
    with pytest.raises(bx.BilevelError, match="infeasible") as info:
        bt.layer(traveller, ndim=(1, 0), throw=True)(slope, trips)
    assert info.value.result.success.tolist() == [True, False]


def test_kinks_are_answers_and_are_told():
    # At a slope of -1 and one trip the budget is tight with a price of zero.
    layer = bt.layer(traveller, throw=True)
    answer = layer(double([-0.5, -0.5]), double(1.0))
    assert answer.status_name == "kink"
    assert answer.success
    torch.testing.assert_close(answer.y, double([0.5, 0.5]), check_dtype=False)


def test_degenerate_members_are_as_right_as_others():
    """Rows that are given twice, which the usual path leaves to the other one."""

    def twice(slope):
        return (
            lambda y: 0.5 * jnp.sum(y**2) + slope @ y,
            bx.Polyhedron(jnp.concatenate([ROADS, ROADS]), b=jnp.ones(6)),
        )

    layer = bt.layer(twice, ndim=(1,))
    slope = double([[-1.0, -2.0], [-3.0, -2.5]])
    answer = layer(slope)
    torch.testing.assert_close(
        answer.y.detach(), torch.tensor([[0.0, 1.0], [0.75, 0.25]]).double()
    )
    answer.y[:, 0].sum().backward()
    torch.testing.assert_close(
        slope.grad, torch.tensor([[-0.5, 0.5], [-0.5, 0.5]]).double()
    )


def test_answers_have_the_dtype_of_the_tensors_and_the_accuracy_of_double():
    slope = torch.tensor([-1.0, -2.0], requires_grad=True)
    layer = bt.layer(traveller)
    answer = layer(slope, torch.tensor(2.0))
    assert answer.y.dtype == answer.prices.dtype == torch.float32
    answer.y[0].backward()
    assert slope.grad is not None
    assert slope.grad.dtype == torch.float32
    wider = layer(slope, double(2.0, False))
    assert wider.y.dtype == torch.float64
    torch.testing.assert_close(wider.y, double([0.5, 1.5]), rtol=zoo.EXACT, atol=0)


WITHOUT_X64 = """
import jax, jax.numpy as jnp, numpy as np, torch
import bilevax as bx
import bilevax.torch as bt

rows = np.array([[1.0, 1.0], [-1, 0], [0, -1]])

def follower(slope):
    # Numbers made here and there, in the precision that JAX has there.
    b = jnp.array([1 / 3, 0, 0])
    return lambda y: 0.5 * jnp.sum(y**2) + slope @ y, bx.Polyhedron(rows, b=b)

slope = torch.tensor([-1.0, -1.2], dtype=torch.float64, requires_grad=True)
answer = bt.layer(follower)(slope)
answer.y[0].backward()
problem = bx.Problem(
    lambda x, y: -x @ y,
    lambda x, y: 0.5 * jnp.sum(y**2) + (x - 4) @ y,
    # JAX remembers how it read the very object, so another one.
    bx.Polyhedron(rows.copy(), b=np.array([2.0, 0, 0])),
)
found = bt.hypergradient(problem, torch.tensor([2.5, 3.0]).double())
assert jnp.zeros(1).dtype == jnp.float32
print([abs(answer.y.sum().item() - 1 / 3), *slope.grad.tolist(), *found.grad.tolist()])
"""


def test_the_precision_of_jax_is_neither_needed_nor_touched():
    command = [sys.executable, "-W", "error", "-c", WITHOUT_X64]
    environment = os.environ | {"JAX_ENABLE_X64": "0"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    numbers = json.loads(done.stdout)
    assert numbers == pytest.approx([0, -0.5, 0.5, -1.5, -0.5], abs=zoo.IDENTITY)


def test_only_what_is_asked_for_is_differentiated():
    slope, trips = double([-1.0, -2.0], wanted=False), double(2.0)
    layer = bt.layer(traveller)
    layer(slope, trips).y[0].backward()
    assert slope.grad is None
    assert trips.grad == pytest.approx(0.5)
    with torch.no_grad():
        assert not layer(slope, trips).y.requires_grad
    assert not layer(slope, trips.detach()).y.requires_grad


def test_views_are_read_as_they_are():
    wide = double([[-1.0, 9.0], [-2.0, 9.0]])
    answer = bt.layer(traveller)(wide[:, 0], double(2.0).expand(3)[1])
    torch.testing.assert_close(answer.y.detach(), torch.tensor([0.5, 1.5]).double())
    answer.y[1].backward()
    expected = torch.tensor([[0.5, 0.0], [-0.5, 0.0]]).double()
    torch.testing.assert_close(wide.grad, expected, rtol=0, atol=zoo.EXACT)


def test_answers_may_be_written_into_and_inputs_may_not():
    slope, trips = double([-1.0, -2.0]), double(2.0)
    layer = bt.layer(traveller)
    answer = layer(slope, trips)
    answer.y.mul_(2)
    answer.y[0].backward()
    assert slope.grad.tolist() == pytest.approx([-1.0, 1.0])
    moved = slope.detach().clone()
    answer = layer(moved.requires_grad_(), trips)
    with torch.no_grad():
        moved += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        answer.y[0].backward()


def test_trees_of_tensors_in_and_out():
    def follower(costs):
        def objective(y):
            return 0.5 * y["road"] ** 2 + y["rail"] ** 2 + costs["rail"] * y["rail"]

        return objective, bx.Box(
            {"rail": -9.0, "road": 1.0}, {"rail": 9.0, "road": 2.0}
        )

    layer = bt.layer(follower, ndim=({"rail": 0},))
    rail = double([-1.0, 3.0])
    answer = layer({"rail": rail})
    assert answer.y["rail"].tolist() == pytest.approx([0.5, -1.5])
    assert answer.y["road"].tolist() == pytest.approx([1.0, 1.0])
    answer.y["rail"].sum().backward()
    assert rail.grad.tolist() == pytest.approx([-0.5, -0.5])


def test_a_layer_is_a_module_like_others():
    class Network(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.forecast = torch.nn.Linear(3, 2).double()
            self.plan = bt.layer(traveller, ndim=(1, 0))

        def forward(self, features):
            return self.plan(self.forecast(features), double(1.0, False)).y

    network = Network()
    features = double(np.random.default_rng(0).normal(size=(5, 3)), False)
    twin = copy.deepcopy(network)
    torch.testing.assert_close(twin(features), network(features))
    network(features)[:, 0].sum().backward()
    assert torch.isfinite(network.forecast.weight.grad).all()
    assert set(network.state_dict()) == {"forecast.weight", "forecast.bias"}
    assert "traveller" in repr(network)


def test_a_network_learns_to_forecast_through_the_plans_it_leads_to():
    """Schedules of six hours under ramps and a capacity, for four plants.

    The data were made by a linear forecast, so its plans can be met exactly; training
    sees the plans alone.
    """
    hours, plants = 6, 4
    ramps = jnp.diff(jnp.eye(hours), axis=0)
    rows = jnp.concatenate([ramps, -ramps, jnp.eye(hours), -jnp.eye(hours)])

    def schedule(demand, ramp):
        b = jnp.concatenate(
            [jnp.full(2 * (hours - 1), ramp), jnp.full(hours, 2.0), jnp.zeros(hours)]
        )
        return lambda y: 0.5 * jnp.sum((y - demand) ** 2), bx.Polyhedron(rows, b=b)

    plan = bt.layer(schedule, ndim=(1, 0))
    rng = np.random.default_rng(0)
    days = 10
    features = double(rng.normal(size=(plants * days, 3)), False)
    ramp = double(np.repeat([0.3, 0.5, 0.8, 1.2], days), False)
    truth = double(rng.normal(scale=0.5, size=(3, hours)), False)
    wanted = plan(1 + features @ truth, ramp).y

    weights = torch.zeros(3, hours, dtype=torch.float64, requires_grad=True)
    optimiser = torch.optim.LBFGS(
        [weights], max_iter=60, line_search_fn="strong_wolfe", tolerance_change=1e-14
    )
    losses = []

    def loss():
        optimiser.zero_grad()
        value = ((plan(1 + features @ weights, ramp).y - wanted) ** 2).mean()
        value.backward()
        losses.append(value.item())
        return value

    optimiser.step(loss)
    assert min(losses) < 1e-8 * losses[0]
    torch.testing.assert_close(weights, truth, rtol=0, atol=1e-3, check_dtype=False)


def toll_problem():
    return bx.Problem(
        lambda x, y: -x @ y,
        lambda x, y: 0.5 * jnp.sum(y**2) + (x - 4) @ y,
        bx.Polyhedron(ROADS, b=jnp.array([2.0, 0, 0])),
    )


def test_the_hypergradient_comes_back_as_tensors_and_leads_back():
    x = double([2.5, 3.0])
    found = bt.hypergradient(toll_problem(), x)
    e = bx.hypergradient(toll_problem(), jnp.array([2.5, 3.0]))
    assert found.value.item() == pytest.approx(float(e.value), abs=1e-14)
    np.testing.assert_allclose(found.grad, e.grad, atol=1e-14)
    np.testing.assert_allclose(found.prices, e.lower.multipliers, atol=1e-14)
    (3 * found.value).backward()
    torch.testing.assert_close(x.grad, 3 * found.grad)
    with pytest.raises(bx.BilevelError, match="NaN"):
        bt.hypergradient(toll_problem(), double([np.nan, 1.0]))
    masked = bt.hypergradient(toll_problem(), double([np.nan, 1.0]), throw=False)
    assert bx.status_name(masked.status) == "non_finite"
    assert "NaN" in masked.message


def test_a_leader_in_torch_finds_the_best_tolls():
    x = double([1.0, 2.0])
    optimiser = torch.optim.SGD([x], lr=0.05)
    for _ in range(100):
        optimiser.zero_grad()
        bt.hypergradient(toll_problem(), x).value.backward()
        optimiser.step()
    # A kink: gradient steps of this size stay within one step of it.
    assert torch.linalg.vector_norm(x - 3) < 0.3


def wrong(value) -> Any:
    """A value of a type that is not allowed."""
    return value


def of(*arguments, **options):
    return lambda: bt.layer(traveller, **options)(*arguments)


WRONG_RESULT = lambda result: lambda: bt.layer(lambda c: result)(double([1.0, 2.0]))
SLOPE, TRIPS = double([-1.0, -2.0]), double(2.0)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (of(np.ones(2), TRIPS), ("parameters[0]", "ndarray", "torch.as_tensor")),
        (of(SLOPE, 2.0), ("parameters[1]", "float", "close over")),
        (of(SLOPE, None), ("parameters[1]", "NoneType")),
        (of(SLOPE, torch.tensor(2)), ("parameters[1]", "torch.int64", ".double()")),
        (of(SLOPE * 1j, TRIPS), ("parameters[0]", "complex128", "real part")),
        (of(SLOPE.detach().to_sparse(), TRIPS), ("dense", "`.to_dense()`")),
        (of(SLOPE.to("meta"), TRIPS), ("parameters[0]", "meta", "`.cpu()`")),
        (of(), ("at least one tensor",)),
        (of(SLOPE[None], TRIPS), ("((1, 2), ())", "no `ndim`")),
        (of(SLOPE, TRIPS, ndim=1), ("`ndim`", "tuple", "2 parameters")),
        (of(SLOPE, TRIPS, ndim=(1,)), ("`ndim`", "tuple", "2 parameters")),
        (of(SLOPE, TRIPS, ndim=({"a": 1}, 0)), ("`ndim`", "structure")),
        (of(SLOPE, TRIPS, ndim=(3, 0)), ("parameters[0]", "1 axes", "has 3")),
        (
            of(SLOPE.expand(3, 2), TRIPS.expand(4), ndim=(1, 0)),
            ("as many members", "parameters[0] has 3", "parameters[1] has 4"),
        ),
        (of(SLOPE.expand(0, 2), TRIPS, ndim=(1, 0)), ("at least one member",)),
        (of(SLOPE[:1], TRIPS), ("((1,), ())",)),
        (of(SLOPE, TRIPS, throw="maybe"), ("`throw`", "warn", "'maybe'")),
        (of(SLOPE, TRIPS, solver=bx.ActiveSet), ("`solver`", "ActiveSet()")),
        (lambda: bt.layer(wrong(3.0)), ("`instance`", "function", "float")),
        (WRONG_RESULT(None), ("`instance` must return", "NoneType")),
        (WRONG_RESULT((1.0, None)), ("`instance` must return", "float")),
        (WRONG_RESULT((jnp.sum, "box")), ("`instance` must return", "str")),
        (WRONG_RESULT((jnp.sum, None)), ("`y0` is needed",)),
        (
            WRONG_RESULT((lambda y: y, bx.Box(jnp.zeros(2), 1.0))),
            ("must return a scalar", "(2,)"),
        ),
        (lambda: bt.hypergradient(toll_problem(), np.ones(2)), ("`x`", "ndarray")),
        (lambda: bt.hypergradient(wrong(None), SLOPE), ("`problem`", "NoneType")),
    ],
)
def test_mistakes_are_told_with_their_remedy(call, words):
    with pytest.raises(ValueError, match=".") as info:
        call()
    for word in words:
        assert word in str(info.value)


def test_a_second_derivative_is_refused():
    slope = double([-1.0, -2.0])
    y = bt.layer(traveller)(slope, TRIPS).y
    (first,) = torch.autograd.grad((y**2).sum(), slope, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()


def has_cuda():
    try:
        return torch.cuda.is_available() and bool(jax.devices("cuda"))
    except RuntimeError:
        return False


@pytest.mark.skipif(not has_cuda(), reason="needs CUDA in both torch and jax")
def test_cuda_tensors_stay_on_their_device():
    slope = torch.tensor([[-1.0, -2.0]] * 3, device="cuda").double().requires_grad_()
    trips = torch.tensor([2.0, -1.0, 1.0], device="cuda").double()
    answer = bt.layer(traveller, ndim=(1, 0), throw=False)(slope, trips)
    assert answer.y.device == answer.success.device == slope.device
    torch.testing.assert_close(answer.y[0].cpu(), torch.tensor([0.5, 1.5]).double())
    answer.y[:, 0].nansum().backward()
    assert slope.grad.device == slope.device
    assert slope.grad[1].tolist() == [0.0, 0.0]
    with pytest.raises(ValueError, match="one device"):
        bt.layer(traveller)(slope[0], trips[0].cpu())
    found = bt.hypergradient(toll_problem(), torch.tensor([2.5, 3.0], device="cuda"))
    assert found.grad.device == slope.device


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA in torch")
@pytest.mark.skipif(has_cuda(), reason="needs a JAX without CUDA")
def test_cuda_tensors_are_refused_where_jax_sees_no_device():
    with pytest.raises(ValueError, match=r"jax\[cuda12\]"):
        bt.layer(traveller)(SLOPE.detach().cuda(), TRIPS.detach().cuda())


def test_nothing_warns_where_all_is_well():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        bt.layer(traveller)(SLOPE, TRIPS).y.sum().backward()
