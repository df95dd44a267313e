"""Hypergradients of followers spread over all devices; see `driver/test_followers.py`.

python tests/followers_on_devices.py OUT.npz [ADDRESS PROCESSES PROCESS]
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

jax.config.update("jax_enable_x64", True)
if len(sys.argv) > 2:
    jax.distributed.initialize(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))

import bilevax as bx  # noqa: E402

rng = np.random.default_rng(0)
DATA = dict(
    C=rng.normal(size=(8, 3, 2)), A=rng.normal(size=(8, 4, 3)),
    b=rng.uniform(0.05, 0.5, size=(8, 4)),
)  # fmt: skip


def instance(d):
    upper = lambda x, y: jnp.sum((y - d["C"] @ x) ** 2) + y[0]
    lower = lambda x, y: 0.5 * jnp.sum(y**2) + y @ (d["C"] @ x)
    return bx.Problem(upper, lower, bx.Polyhedron(A=d["A"], b=d["b"]))


mesh = Mesh(np.array(jax.devices()), ("followers",))
spread = NamedSharding(mesh, PartitionSpec("followers"))
put = lambda leaf: jax.make_array_from_callback(leaf.shape, spread, lambda i: leaf[i])
followers = bx.Followers(instance, jax.tree.map(put, DATA))
e = bx.hypergradient(followers, jnp.array([0.7, -0.4]), throw=False)
assert len(e.lower.margin.sharding.device_set) == len(jax.devices())
if jax.process_index() == 0:
    np.savez(
        sys.argv[1], devices=len(jax.devices()), value=e.value, grad=e.grad,
    )  # fmt: skip
