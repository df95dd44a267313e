"""Perturbed INGD: descent directions from ordinary gradients, for any Lipschitz `F`."""

import equinox as eqx
import jax.numpy as jnp

from .._arguments import check_fields
from .base import AbstractMethod, Number, number, tree_norm, tree_step
from .ingd import (
    check_pair,
    descend,
    first_state,
    interpolated,
    most_gradients,
    unit_ball,
)
from .search import needs_values, shortest_between


class PerturbedINGD(AbstractMethod):
    """Like `INGD`, with directions perturbed so that gradients exist.

    At `x`, starting from `m = grad F` at a uniform point of the ball of radius `delta`
    around `x`, until a case ends the step:

    1. `|m| <= eps`: `x` is a `(delta, eps)`-Goldstein point and stays.
    2. `z = x - delta m / |m|` has `F(x) - F(z) >= delta |m| / 4`: move to `z`.
    3. Otherwise draw `d` uniformly from the ball of radius `r` around `m`, take the
       gradient `g` at a uniform point of the segment `[x, x - delta d / |d|]` and go on
       with the shortest vector of the segment `[m, g]`. The radius is `radius` times
       its bound `|m| sqrt(1 - (1 - |m|^2 / (128 L^2))^2)`.

    Almost every such segment meets the points without a gradient in a set of measure
    zero, which is why no directional oracle is needed.

    - `variant`: "davis" is the above; "tian" goes on with the average of `m` and `g`
      that `INGD` uses.
    - `delta`, `eps`: radius and tolerance of the certificate, both or none. Given, the
      method is that of the paper. By default the radius is at first `first_step` in
      units of the length of the problem and the tolerance `first_eps` in units of the
      slope of `F`, both measured at the start; see below.
    - `lipschitz`: the `L` above; by default the longest gradient met so far.
    - `max_gradients`: of step 3, at one `x`. By default `64 L^2 / eps^2`, and without
      `delta` and `eps` at most 50.
    - `shrink`: factor on the radius and the tolerance.

    "davis": Davis, Drusvyatskiy, Lee, Padmanabhan and Ye, A gradient sampling method
    with complexity guarantees for Lipschitz functions in high and low dimensions,
    NeurIPS 2022. "tian": Tian, Zhou and So, On the finite-time complexity and practical
    computation of approximate stationarity concepts of Lipschitz functions, ICML 2022.

    Reconstruction: "tian" was rebuilt from its purpose, an ordinary gradient in place
    of the directional oracle; where its paper perturbs may differ.

    Deviations: a search that needs more gradients than its expected number is given up
    and begun anew, whereas the paper allows a logarithmic factor more. Without `delta`
    and `eps` the radius shrinks whenever no descent was found, and the tolerance with
    it whenever that was certified. Points are projected on the domain, and `|m|` above
    is then the decrease per length that `m` predicts for the projected step. A point at
    which the lower level is empty is replaced by the nearest at which it is not.
    """

    delta: Number | None = number(None)
    eps: Number | None = number(None)
    lipschitz: Number | None = number(None)
    max_gradients: Number | None = number(None)
    first_step: Number = number(0.05)
    first_eps: Number = number(0.1)
    shrink: Number = number(0.5)
    radius: Number = number(0.5)
    variant: str = eqx.field(default="davis", static=True)

    def __check_init__(self):
        check_fields(self)
        check_pair(self)
        if self.variant not in ("davis", "tian"):
            raise ValueError(
                f"`variant` must be 'davis' or 'tian'; got {self.variant!r}."
            )

    @property
    def takes_followers(self):
        return True

    def refusal(self, problem):
        return needs_values("PerturbedINGD", problem)

    def init(self, problem, x, lower, scales, *, key):
        return first_state(self, x, lower, scales)

    def step(self, problem, state, *, step, num_steps, key):
        limit = most_gradients(self, state, 64.0)
        combine = interpolated if self.variant == "tian" else _shortest
        return descend(
            self, problem, state, key, limit, self._end, combine, from_ball=True
        )

    def _end(self, m, lipschitz, key):
        """A uniform point of the ball around `m`."""
        size = tree_norm(m)
        ratio = size / jnp.maximum(lipschitz, jnp.finfo(size.dtype).tiny)
        bound = size * jnp.sqrt(1 - (1 - ratio**2 / 128) ** 2)
        return tree_step(m, self.radius * bound, unit_ball(m, key))


def _shortest(m, g, lipschitz):
    return shortest_between(m, g)
