"""Functions without a best x are told from those that have one."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

import bilevax as bx

UNBOUNDED = {
    "x": lambda x: x,
    "-x^2": lambda x: -(x**2),
    "x^3": lambda x: x**3,
    "-exp x": lambda x: -jnp.exp(x),
    "-log x": lambda x: -jnp.log(x),
    "-sqrt x": lambda x: -jnp.sqrt(x),
}
NOT_ATTAINED = {
    "exp -x": lambda x: jnp.exp(-x),
    "1 / x": lambda x: 1 / x,
    "-arctan x": lambda x: -jnp.arctan(x),
    "softplus": lambda x: jnp.log1p(jnp.exp(-x)),
    # Without bound, but no number of digits tells it from a function that has one.
    "-log log x": lambda x: -jnp.log(jnp.log(x + 2)),
}
ATTAINED = {
    "far away": lambda x: (x - 1e5) ** 2,
    "far away and flat": lambda x: jnp.sqrt(1 + (x - 1e6) ** 2),
    "degenerate": lambda x: (x - 1) ** 4,
    "kink": lambda x: jnp.abs(x - 2),
    "one of many": jnp.cos,
    "one of two": lambda x: (x**2 - 1) ** 2 + 0.3 * x,
    "a local one before a fall": lambda x: x**3 - x,
    "constant": lambda x: 0 * x,
}
ALL = UNBOUNDED | NOT_ATTAINED | ATTAINED
FUNCTIONS = list(ALL.values())


class Chosen(eqx.Module):
    """One of the functions, by number: one program for all."""

    number: jax.Array

    def __call__(self, x, y):
        return jax.lax.switch(self.number, FUNCTIONS, jnp.sum(x)) + 0 * jnp.sum(y)


class Still(eqx.Module):
    """A follower who does not move."""

    def __call__(self, x, y):
        return 0.5 * jnp.sum(y**2)


def end(name: str, domain=None, polish=True) -> bx.Solution:
    problem = bx.Problem(
        Chosen(jnp.asarray(list(ALL).index(name))), Still(), y0=jnp.zeros(1),
        domain=domain,
    )  # fmt: skip
    return bx.solve(
        problem,
        bx.DSBLO(),
        jnp.array([0.5]),
        key=jr.key(0),
        num_steps=50,
        throw=False,
        polish=polish,
    )


@pytest.mark.parametrize("name", UNBOUNDED)
def test_a_fall_without_bound_is_no_success(name):
    s = end(name)
    assert not s.success
    assert s.status_name == "unbounded"
    assert "without bound" in s.message
    assert "without bound" in s.stopped


@pytest.mark.parametrize("name", ["x", "-x^2", "-log x"])
def test_a_fall_without_bound_is_told_without_a_polish_too(name):
    s = end(name, polish=False)
    assert s.polish is None
    assert s.status_name == "unbounded"
    assert not s.success


@pytest.mark.parametrize("name", ATTAINED)
def test_without_a_polish_a_bounded_function_is_no_fall(name):
    assert end(name, polish=False).success


@pytest.mark.parametrize("name", NOT_ATTAINED)
def test_an_infimum_that_is_not_attained_is_told_and_a_success(name):
    s = end(name)
    assert s.success
    assert "may not be attained" in s.stopped


@pytest.mark.parametrize("name", ATTAINED)
def test_a_minimiser_is_a_minimiser(name):
    s = end(name)
    assert s.success
    assert "attained" not in s.stopped


def test_a_fall_raises_unless_told_otherwise():
    problem = bx.Problem(
        lambda x, y: jnp.sum(x + y), lambda x, y: 0.5 * jnp.sum(y**2), y0=jnp.zeros(1)
    )
    with pytest.raises(bx.BilevelError, match="falls without bound"):
        bx.solve(problem, bx.DSBLO(), jnp.zeros(1), key=jr.key(0))


def test_a_domain_holds_a_fall():
    half, whole = bx.Box([-3.0], [np.inf]), bx.Box([-3.0], [5.0])
    for domain in (half, whole):
        s = end("x", domain)
        assert s.success
        np.testing.assert_allclose(s.x, [-3.0])
    # The other way the half line has no end.
    assert end("-x^2", half).status_name in ("unbounded", "successful")
    assert end("-log x", half).status_name == "unbounded"


def test_a_valley_leads_to_the_fall():
    # The way down is not straight: one entry has a minimiser, the other has none.
    for fall in (lambda x: x, lambda x: -jnp.log(3 - x)):
        problem = bx.Problem(
            lambda x, y, fall=fall: fall(x[0]) + (x[1] - 1) ** 2 + 0 * jnp.sum(y),
            lambda x, y: 0.5 * jnp.sum(y**2),
            y0=jnp.zeros(1),
        )
        s = bx.solve(problem, bx.DSBLO(), jnp.zeros(2), key=jr.key(0), throw=False)
        assert s.status_name == "unbounded"
