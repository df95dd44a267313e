"""Two tolls and a follower: `bilevax solve examples/tolls.py`."""

import jax.numpy as jnp

import bilevax as bx

roads = bx.Polyhedron(
    A=jnp.array([[-1.0, 0], [0, -1], [1, 0], [0, 1], [1, 1]]),
    b=jnp.array([0.0, 0, 1.5, 1.5, 2]),
)
problem = bx.Problem(
    lambda x, y: -jnp.sum(x * y),
    lambda x, y: 0.5 * jnp.sum(y**2) + jnp.sum((x - 4) * y),
    roads,
    domain=bx.Box(jnp.zeros(2), jnp.full(2, 5.0)),
)
x0 = jnp.array([1.0, 2.0])
