"""Wrong arguments of the theory are named."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import bilevax as bx
from bilevax import theory

from .. import zoo
from ..theory_tools import box, constants


def any_(value) -> Any:
    """A value of the wrong type, past the type checker."""
    return value


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: theory.measure(any_("p"), box((0, 1)), box((0, 1))), "`problem`"),
        (lambda: theory.measure(zoo.t1(), any_(3), box((0, 1))), "`region_x`"),
        (
            lambda: theory.measure(zoo.t1(), box((0, np.inf)), box((0, 1))),
            "`region_x` must be bounded",
        ),
        (
            lambda: theory.measure(zoo.t1(), box((0, 1)), box((1, 0))),
            "`region_y` must have lower <= upper",
        ),
        (
            lambda: theory.measure(zoo.t1(), box((0, 1)), box((0, 1), (0, 1))),
            "`region_y` must have the structure",
        ),
        (
            lambda: theory.measure(zoo.t1(), box((0, 1)), box((0, 1)), num_samples=0),
            "`num_samples`",
        ),
        (lambda: theory.Lbar_A(Lbar_gyy=1, lambda_min=0), "`lambda_min`"),
        (lambda: theory.Lbar_y(mu_g=0, Lbar_gxy=1, L_A=1, Lbar_lambda=1), "`mu_g`"),
        (lambda: theory.perturbation_gap(Lbar_f=1, mu_g=1, norm=np.inf), "`norm`"),
        (lambda: theory.tilt_norm(bx.Gaussian(1.0), 0), "`size`"),
        (
            lambda: theory.algorithm_inputs(
                constants(delta_v=2), eps=5, delta_bar=1, Delta=1
            ),
            "`eps` must be at most .* = 4; got 5",
        ),
        (
            lambda: theory.algorithm_inputs(constants(), eps=1, delta_bar=0, Delta=1),
            "`delta_bar`",
        ),
        (lambda: theory.transfer(constants(), eps=-1, delta_bar=1), "`eps`"),
        (
            lambda: theory.identification_steps(mu_g=2, Lbar_gyy=1, distance=1),
            "`Lbar_gyy` must be at least",
        ),
        (
            lambda: theory.measure(zoo.t1(), box((0, 1)), box((0, 1))).label("mu"),
            "`name` must be one of",
        ),
    ],
)
def test_mistakes_are_named(call, words):
    with pytest.raises(ValueError, match=words):
        call()


def test_a_flat_lower_level_and_a_pole_are_named():
    flat = bx.Problem(
        lambda x, y: jnp.sum(y), lambda x, y: jnp.sum(y * x), y0=np.ones(1)
    )
    with pytest.raises(ValueError, match="strongly convex"):
        theory.measure(flat, box((0, 1)), box((0, 1)))
    pole = bx.Problem(
        lambda x, y: jnp.sum(y), lambda x, y: -jnp.sum(jnp.log(y)), y0=np.ones(1)
    )
    with pytest.raises(ValueError, match="must be finite on the region"):
        theory.measure(pole, box((0, 1)), box((-1, 1)))
