"""`bilevax doctor`: what is installed, on which devices, and whether it computes."""

import argparse
import importlib.metadata
import os
import platform
import time

import jax
import jax.numpy as jnp

import bilevax as bx

from .text import print_json

TEXT = "versions, devices, a solved toy"
_NEEDED = ("jax", "jaxlib", "equinox", "lineax", "optax", "jaxtyping", "numpy", "scipy")
# What brings each in: an extra of bilevax.
_OPTIONAL = dict(
    rich="cli", matplotlib="plot", distributed="cluster", cvxpy="cvxpy", torch="torch"
)


def add_arguments(sub: argparse.ArgumentParser) -> None:
    pass


def run(options) -> int:
    found = dict(
        bilevax=bx.__version__,
        python=platform.python_version(),
        system=platform.platform(),
        packages={name: _version(name) for name in (*_NEEDED, *_OPTIONAL)},
        devices=[str(device) for device in jax.devices()],
        float64=bool(jax.config.jax_enable_x64),
        cores=os.cpu_count(),
        cache=jax.config.jax_compilation_cache_dir,
        toy=_toy(),
    )
    if options.json:
        print_json(found)
    else:
        _show(found)
    return 0 if found["toy"]["right"] else 1


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _toy() -> dict:
    """Two tolls whose best values are known: 3 and 3, for a revenue of 6."""
    roads = bx.Polyhedron(
        A=jnp.array([[1.0, 1.0], [-1, 0], [0, -1]]), b=jnp.array([2.0, 0, 0])
    )
    problem = bx.Problem(
        lambda x, y: -jnp.sum(x * y),
        lambda x, y: 0.5 * jnp.sum(y**2) + jnp.sum((x - 4) * y),
        roads,
        domain=bx.Box(jnp.zeros(2), jnp.full(2, 5.0)),
    )
    begun = time.perf_counter()
    e = bx.hypergradient(problem, jnp.array([2.5, 3.0]))
    first = time.perf_counter() - begun
    solution = bx.solve(problem, bx.DSBLO(), jnp.array([1.0, 2.0]), key=0, num_starts=1)
    both = time.perf_counter() - begun
    exact = 1e-8 if jax.config.jax_enable_x64 else 1e-3
    right = abs(solution.value + 6) < exact and abs(float(e.value) + 5.375) < exact
    return dict(
        value=solution.value, right=right, gradient_s=first, solve_s=both - first
    )


def _show(found: dict) -> None:
    print(f"bilevax {found['bilevax']}, Python {found['python']}, {found['system']}")
    for name, version in found["packages"].items():
        if version is not None:
            print(f"  {name:<12} {version}")
        elif name in _OPTIONAL:
            extra = f"pip install 'bilevax[{_OPTIONAL[name]}]'"
            print(f"  {name:<12} not installed; {extra} if you need it")
        else:
            print(f"  {name:<12} missing")
    print(f"devices: {', '.join(found['devices'])}; {found['cores']} cores")
    print(f"precision here: {'float64' if found['float64'] else 'float32'}")
    cache = found["cache"] or "off; JAX_COMPILATION_CACHE_DIR=FOLDER turns it on"
    print(f"compilation cache on disk: {cache}")
    toy = found["toy"]
    print(
        f"two tolls: F = {toy['value']:.10f}, {'right' if toy['right'] else 'WRONG'} "
        f"(first gradient {toy['gradient_s']:.2f} s, solve {toy['solve_s']:.2f} s)"
    )
