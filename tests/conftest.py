"""Tests run in float64; the library itself changes no global setting."""

import jax

jax.config.update("jax_enable_x64", True)
