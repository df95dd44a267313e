"""Precision is the caller's choice: no global setting, one warning."""

import subprocess
import sys

SCRIPT = """
import warnings
import jax, jax.numpy as jnp, numpy as np
before = {name: jax.config.read(name) for name in ("jax_enable_x64",)}
import bilevax as bx
assert before == {name: jax.config.read(name) for name in before}

rows = bx.Polyhedron(A=np.array([[1.0, 0], [0, 1], [1, 1]]), b=np.array([1.0, 1, 1.5]))
lower = lambda x, y: 0.5 * jnp.sum((y - x) ** 2)
problem = bx.Problem(lambda x, y: jnp.sum(y**2), lower, rows)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    e = bx.hypergradient(problem, np.array([0.7, 2.0], np.float32))
    bx.hypergradient(problem, np.array([0.7, 2.0], np.float32))
assert len([w for w in caught if "float64" in str(w.message)]) == 1, caught
assert e.grad.dtype == jnp.float32 and e.lower.y.dtype == jnp.float32
np.testing.assert_allclose(e.lower.y, [0.5, 1.0], atol=1e-6)
np.testing.assert_allclose(e.grad, [0.0, 0.0], atol=1e-5)
kink = bx.hypergradient(problem, np.array([1.0, 0.0], np.float32), throw=False)
assert bx.status_name(kink.status) == "kink"
box = bx.Problem(lambda x, y: jnp.sum(y), lower, bx.Box(np.zeros(300), np.ones(300)))
e = bx.hypergradient(box, np.full(300, 0.5, np.float32))
np.testing.assert_allclose(e.grad, np.ones(300), atol=1e-5)
print("fine")
"""


def test_float32_works_and_importing_changes_nothing():
    out = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=False
    )
    assert out.stdout.strip() == "fine", out.stderr[-2000:]
