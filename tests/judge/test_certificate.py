"""Certificates and explanations, against values known by hand."""

import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

import bilevax as bx

from ..driver.test_solve import BOX, market, tracking
from ..methods.test_ds_blo import kink


def test_the_goldstein_measure_at_and_beside_a_kink():
    # F' is -1/2 + x/2 on the left of 0 and 1/2 + x/2 on the right.
    for x, radius, exact in ((0.0, 0.1, 0.0), (0.05, 0.1, 0.0), (1.0, 0.1, 0.95)):
        c = bx.certify(kink(), jnp.array([x]), radius, key=jr.key(0))
        assert c.measure >= exact - 1e-12
        assert c.measure <= exact + 0.01
        assert c.undefined == 0
        assert c.path[-1] == (c.samples, c.measure)
        # More samples, a larger hull, a smaller bound.
        values = np.array([value for _, value in c.path])
        assert np.all(np.diff(values) <= 1e-12)
        assert c.gradient_error < 1e-9


def test_a_domain_adds_its_normal_cone():
    problem = tracking((3.0, 1.0), BOX)
    best = jnp.array([0.5, 1.0])
    assert bx.certify(problem, best, 1e-3, key=jr.key(0)).measure < 0.01
    inside = jnp.array([0.2, 1.0])
    assert bx.certify(problem, inside, 1e-3, key=jr.key(0)).measure > 5.0


def test_points_where_F_is_undefined_are_counted():
    c = bx.certify(market(), jnp.array([1.0]), 0.1, key=jr.key(0))
    assert 0 < c.undefined
    assert c.undefined + c.samples == 64
    assert "undefined" in str(c)


def test_the_perturbed_measure_does_not_fit_the_noise():
    # E_q F_q has slope x/2 + 1/2 - P(q > x), zero at 0 by symmetry, 1/2 far right.
    law = bx.Gaussian(0.2)
    for x, exact in ((0.0, 0.0), (1.0, 1.0)):
        c = bx.certify(
            kink(), jnp.array([x]), 1e-3, key=jr.key(1), perturbation=law,
            num_samples=8, num_tilts=64,
        )  # fmt: skip
        assert c.interval is not None
        low, high = c.interval
        assert low - 0.02 <= exact <= high + 0.02
        assert low <= c.measure <= high


def test_the_moreau_measure():
    # Right of the kink F = x^2/4 + x/2: the proximal point of 1 with weight 1/s.
    s = 0.2
    z = (1 / s - 0.5) / (1 / s + 0.5)
    np.testing.assert_allclose(
        bx.moreau(kink(), jnp.array([1.0]), s), (1 - z) / s, rtol=1e-5
    )
    assert bx.moreau(kink(), jnp.array([0.0]), s) < 1e-6


def test_a_radius_must_be_positive():
    with pytest.raises(ValueError, match="radius"):
        bx.certify(kink(), jnp.array([0.0]), 0.0, key=jr.key(0))


def test_explain_finds_what_holds():
    found = {f.assumption: f for f in bx.explain(kink(), jnp.array([-1.0])).findings}
    np.testing.assert_allclose(found["ass:str_cvx_h, strong convexity"].number, 1.0)
    assert found["ass:rank, LICQ"].holds
    assert found["strict complementarity"].holds
    assert not found["ass:sets, bounded lower set"].holds
    at_kink = bx.explain(kink(), jnp.array([0.0]))
    assert not {f.assumption: f for f in at_kink.findings}[
        "strict complementarity"
    ].holds
    assert not at_kink.holds
    assert "weakly active" in str(at_kink)


def test_explain_measures_the_room_for_y():
    for x, room in ((3.0, 1.0), (1.0, 0.0)):
        found = {f.assumption: f for f in bx.explain(market(), jnp.array([x])).findings}
        slater = found["ass:feas, Slater point"]
        np.testing.assert_allclose(slater.number, room, atol=1e-9)
        assert slater.holds == (room > 0)
        assert found["ass:sets, bounded lower set"].holds
    empty = bx.explain(market(), jnp.array([-3.0]))
    assert not empty.findings[0].holds
    assert "No `y` satisfies" in str(empty)
