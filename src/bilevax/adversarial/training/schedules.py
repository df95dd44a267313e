"""Learning rates along a run."""

import equinox as eqx
import jax.numpy as jnp

from ..._methods.base import Number, number

SCHEDULES = ("triangular", "cosine", "piecewise", "constant")


class Rate(eqx.Module):
    """A learning rate by step.

    - "triangular": from zero up to `peak` at the share `peak_at` of the run, and down
      to zero at its end.
    - "cosine": up as before over the first tenth, then half a cosine down.
    - "piecewise": `peak`, a tenth of it from half of the run on, and a hundredth from
      three quarters on.
    - "constant".

    Written by hand, since the schedules of optax hold the number of steps as a
    constant: here neither another length nor another peak compiles a new program.
    """

    kind: str = eqx.field(static=True)
    peak: Number = number(0.1)
    num_steps: Number = number(1000)
    peak_at: Number = number(0.4)

    def __check_init__(self):
        if self.kind not in SCHEDULES:
            raise ValueError(
                f"no schedule {self.kind!r}; there are {', '.join(SCHEDULES)}."
            )

    def __call__(self, step):
        return self.peak * self._share(step, self.num_steps)

    def _share(self, step, end):
        """Of the peak."""
        if self.kind == "triangular":
            top = jnp.maximum(1, jnp.round(self.peak_at * end))
            fall = (end - step) / jnp.maximum(1, end - top)
            return jnp.clip(jnp.minimum(step / top, fall), 0, 1)
        if self.kind == "cosine":
            top = jnp.maximum(1, end // 10)
            fallen = jnp.clip((step - top) / jnp.maximum(1, end - top), 0, 1)
            return jnp.minimum(step / top, (1 + jnp.cos(jnp.pi * fallen)) / 2)
        if self.kind == "piecewise":
            drops = (step >= end // 2), (step >= 3 * end // 4)
            return 0.1 ** sum(drop.astype(self.peak.dtype) for drop in drops)
        return jnp.ones_like(self.peak)
