"""What every engine on hypergradients does without arguments, on its worst days too."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

import bilevax as bx
from bilevax._methods.base import Scales
from bilevax.experiments.families import Member

from .test_ds_blo import kink

METHODS = {
    "SSIGD": bx.SSIGD(),
    "DSIGD": bx.DSIGD(),
    "ProximalSubgradient": bx.ProximalSubgradient(),
    "INGD": bx.INGD(),
    "StochasticINGD": bx.StochasticINGD(),
    "PerturbedINGD": bx.PerturbedINGD(),
    "PerturbedINGD-tian": bx.PerturbedINGD(variant="tian"),
    "PerturbedStochasticINGD": bx.PerturbedStochasticINGD(),
}
every = pytest.mark.parametrize("name", METHODS)

# Minimisers of the tight family at dimension 10, seed 0: the best, and a local one.
TIGHT = (-2.144207, -2.058496)


@every
def test_the_analytic_kink_in_any_units(name):
    method = METHODS[name]
    plain = bx.solve(kink(), method, jnp.array([1.7]), key=jr.key(1), polish=False)
    assert abs(float(plain.x[0])) < 1e-2
    for units in ((8.0, 1, 1), (1, 2.0**20, 1), (1, 1, 2.0**-20)):
        scaled = bx.solve(
            kink(*units), method, jnp.array([1.7 * units[0]]), key=jr.key(1),
            polish=False,
        )  # fmt: skip
        np.testing.assert_allclose(scaled.x / units[0], plain.x, rtol=1e-6, atol=1e-9)
        assert scaled.history.totals == plain.history.totals


@every
def test_the_tight_family_ends_at_a_minimiser(name):
    s = bx.solve(
        Member("tight", 10, 0).problem, METHODS[name], np.ones(10), key=jr.key(0),
        polish=False,
    )  # fmt: skip
    assert min(abs(s.value - best) for best in TIGHT) < 1e-2


def test_both_values_of_the_tight_family_belong_to_stationary_points():
    problem = Member("tight", 10, 0).problem
    values = []
    for method in (bx.INGD(), bx.StochasticINGD()):
        s = bx.solve(problem, method, np.ones(10), key=jr.key(0))
        values.append(s.value)
        assert bx.certify(problem, s.x, 1e-4, key=jr.key(1)).measure < 1e-3
    np.testing.assert_allclose(sorted(values), TIGHT, atol=1e-6)


class Outwards(eqx.Module):
    def __call__(self, x, y):
        return (x[0] - 3) ** 2 + y[0]


class Small(eqx.Module):
    def __call__(self, x, y):
        return 0.5 * y[0] ** 2


def edge(highest):
    """`x <= y <= 1`: empty for `x > 1`, towards which `F` falls; `x <= highest`."""
    rows = bx.Polyhedron(
        A=np.array([[-1.0], [1.0]]), B=np.array([[1.0], [0.0]]), b=np.array([0.0, 1.0])
    )
    box = bx.Box(np.array([-4.0]), np.array([highest]))
    return bx.Problem(Outwards(), Small(), rows, domain=box)


# One method per way of moving; the others share their code.
@pytest.mark.parametrize(
    "name", ["SSIGD", "DSIGD", "INGD", "StochasticINGD", "PerturbedINGD"]
)
def test_they_end_at_the_edge_of_what_is_allowed(name):
    # Once where the lower level becomes empty, once where the domain ends.
    for highest, end in ((4.0, 1.0), (0.5, 0.5)):
        s = bx.solve(
            edge(highest), METHODS[name], jnp.array([-2.0]), key=jr.key(0),
            polish=False,
        )  # fmt: skip
        assert s.success
        assert abs(float(s.x[0]) - end) < 1e-3
        assert np.all(np.isfinite(s.history["value"]))


@every
def test_a_step_keeps_structure_and_dtypes(name):
    # `x` and `y` as trees; nothing is computed.
    problem = bx.Problem(
        lambda x, y: jnp.sum(x["a"] ** 2) + x["b"] * jnp.sum(y["u"]),
        lambda x, y: 0.5 * jnp.sum((y["u"] - x["a"]) ** 2),
        bx.Box({"u": np.zeros(2)}, {"u": np.ones(2)}),
    )
    x = {"a": jnp.ones(2), "b": jnp.ones(())}
    one, method = jnp.ones(()), METHODS[name]

    def run(x, key):
        lower = bx.hypergradient(problem, x, throw=False).lower
        first = method.init(problem, x, lower, Scales(one, one, one), key=key)
        now, total = jnp.asarray(0), jnp.asarray(9)
        new = method.step(problem, first, step=now, num_steps=total, key=key)[0]
        return eqx.filter(first, eqx.is_array), eqx.filter(new, eqx.is_array)

    first, new = jax.eval_shape(run, x, jr.key(0))
    assert jax.tree.structure(first) == jax.tree.structure(new)
    for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(new), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
