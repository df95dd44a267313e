"""A digest tells apart what computes differently, and nothing else."""

import os
import subprocess
import sys
from typing import Any

import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
import pytest

import bilevax as bx
from bilevax._files.digest import digest

HEAD = """
import collections, decimal, functools, math, operator, sys, types
from dataclasses import dataclass, field
import scipy.sparse
import equinox as eqx, jax, jax.numpy as jnp, numpy as np, optax
import bilevax as bx
"""

# A program, and what to replace by what so that it computes another thing.
CHANGES = {
    "a constant": ("thing = lambda x: x + 2.0", "2.0", "3.0"),
    "an operator": ("thing = lambda x, y: x * y", "*", "+"),
    "a function it calls": ("thing = lambda x: jnp.sin(x)", "sin", "cos"),
    "an attribute": ("thing = lambda x: x.real", "real", "imag"),
    "a constant of an inner function": (
        "def thing(x):\n    def inner(z):\n        return z * 2\n    return inner(x)",
        "2", "3",
    ),
    "a set of constants": ("thing = lambda x: x in {'a', 'b', 'c'}", "'b'", "'d'"),
    "a default": ("def thing(x, a=1.0): return a * x", "1.0", "2.0"),
    "a keyword default": ("def thing(x, *, a=1.0): return a * x", "1.0", "2.0"),
    "a global number": ("scale = 2.0\nthing = lambda x: scale * x", "2.0", "3.0"),
    "a global array": ("A = np.zeros(2)\nthing = lambda x: A @ x", "zeros", "ones"),
    "a global of a global function": (
        "scale = 2.0\ndef help(x): return scale * x\ndef thing(x): return help(x)",
        "2.0", "3.0",
    ),
    "a global read in an inner function": (
        "scale = 2.0\nthing = lambda x: (lambda z: scale * z)(x)", "2.0", "3.0",
    ),
    "what is closed over": (
        "def make(a): return lambda x: a * x\nthing = make(2.0)", "2.0", "3.0",
    ),
    "an argument of a partial": (
        "thing = functools.partial(math.pow, 2.0)", "2.0", "3.0",
    ),
    "an argument of a Partial": (
        "thing = jax.tree_util.Partial(lambda a, x: a * x, 2.0)", "2.0", "3.0",
    ),
    "the function of a partial": (
        "thing = functools.partial(lambda a, x: a * x, 2.0)", "a * x", "a - x",
    ),
    "the object of a method": (
        "class K:\n    def __init__(self, a): self.a = a\n"
        "    def f(self, x): return self.a * x\nthing = K(2.0).f",
        "2.0", "3.0",
    ),
    "the code of a method": (
        "class K:\n    def f(self, x): return 2.0 * x\nthing = K().f", "2.0", "3.0",
    ),
    "what calls do": (
        "class K:\n    def __call__(self, x): return 2.0 * x\nthing = K()",
        "2.0", "3.0",
    ),
    "a slot": (
        "class K:\n    __slots__ = ('a',)\n    def __init__(self, a): self.a = a\n"
        "thing = K(2.0)",
        "2.0", "3.0",
    ),
    "a base class": (
        "class B:\n    def f(self, x): return 2.0 * x\nclass K(B): pass\nthing = K()",
        "2.0", "3.0",
    ),
    "a field": ("@dataclass\nclass K:\n    a: float\nthing = K(2.0)", "2.0", "3.0"),
    "a static field": (
        "class K(eqx.Module):\n    a: float = eqx.field(static=True)\nthing = K(2.0)",
        "2.0", "3.0",
    ),
    "the code of a module": (
        "class K(eqx.Module):\n    a: float\n"
        "    def __call__(self, x): return self.a * x\nthing = K(2.0)",
        "self.a * x", "self.a - x",
    ),
    "a class variable": (
        "class K:\n    a = 2.0\n    def f(self): return self.a\nthing = K()",
        "2.0", "3.0",
    ),
    "a function under jit": ("thing = jax.jit(lambda x: 2.0 * x)", "2.0", "3.0"),
    "a function under filter_jit": (
        "thing = eqx.filter_jit(lambda x: 2.0 * x)", "2.0", "3.0",
    ),
    "a derivative by hand": (
        "@jax.custom_vjp\ndef thing(x): return x\n"
        "thing.defvjp(lambda x: (x, None), lambda r, c: (2.0 * c,))",
        "2.0", "3.0",
    ),
    "a rate of an optimiser": ("thing = optax.adam(0.1)", "0.1", "0.2"),
    "a bound": (
        "thing = bx.Box(jnp.zeros(2), jnp.ones(2))", "ones(2)", "full(2, 2.0)",
    ),
    "the lower level of a problem": (
        "thing = bx.Problem(lambda x, y: jnp.sum(y), lambda x, y: 2.0 * jnp.sum(y**2),"
        " y0=jnp.ones(2))",
        "2.0", "3.0",
    ),
    "the solver of a problem": (
        "thing = bx.Problem(lambda x, y: jnp.sum(y), lambda x, y: jnp.sum(y**2),"
        " y0=jnp.ones(2), solver=bx.ActiveSet(max_passes=20))",
        "20", "30",
    ),
    "a number of a method": ("thing = bx.DSBLO(first_step=0.1)", "0.1", "0.2"),
    "a law": ("thing = bx.DSBLO(1.0, 2.0, perturbation=bx.Gaussian(1e-3))", "-3", "-4"),
    "a module inside an own package": (
        "own = types.ModuleType('own'); own.sub = types.ModuleType('own.sub')\n"
        "own.sub.a = 2.0\nthing = lambda x: own.sub.a * x",
        "2.0", "3.0",
    ),
    "a part of a module, looked up by its name": (
        "own = types.ModuleType('own'); own.a, own.b = 2.0, 3.0\n"
        "thing = lambda x: getattr(own, 'a' if x else 'b')",
        "2.0", "7.0",
    ),
    "a part of a module that is handed on": (
        "own = types.ModuleType('own'); own.a = 2.0\n"
        "def part(m): return m.a\ndef thing(x): return part(own) * x",
        "2.0", "3.0",
    ),
    "a part of a module that is closed over": (
        "own = types.ModuleType('own'); own.a = 2.0\n"
        "def make(m): return lambda x: m.a * x\nthing = make(own)",
        "2.0", "3.0",
    ),
    "a module that is imported by a function": (
        "own = sys.modules['own_a'] = types.ModuleType('own_a'); own.a = 2.0\n"
        "def thing(x):\n    import own_a\n    return own_a.a * x",
        "2.0", "3.0",
    ),
    "a name that a function imports": (
        "own = sys.modules['own_b'] = types.ModuleType('own_b'); own.a = 2.0\n"
        "def thing(x):\n    from own_b import a\n    return a * x",
        "2.0", "3.0",
    ),
    "a global looked up by its name": (
        "scale = 2.0\nthing = lambda x: globals()['sca' + 'le'] * x", "2.0", "3.0",
    ),
    "a private attribute of a class": (
        "class K:\n    _a = 2.0\n    def f(self): return self._a\nthing = K()",
        "2.0", "3.0",
    ),
    "a hidden attribute of a class": (
        "class K:\n    __a = 2.0\n    def f(self): return self.__a\nthing = K()",
        "2.0", "3.0",
    ),
    "the class of a class": (
        "class M(type):\n    def __add__(self, x): return 2.0 * x\n"
        "class K(metaclass=M): pass\nthing = K",
        "2.0", "3.0",
    ),
    "a factory of a field": (
        "@dataclass\nclass K:\n    a: float = field(default_factory=lambda: 2.0)\n"
        "thing = lambda x: K().a * x",
        "2.0", "3.0",
    ),
    "an attribute of a function": (
        "def thing(x): return thing.a * x\nthing.a = 2.0", "2.0", "3.0",
    ),
    "an array of objects": ("thing = np.array([2.0, None], object)", "2.0", "3.0"),
    "a record with objects": (
        "thing = np.array([(2.0,)], [('a', object)])", "2.0", "3.0",
    ),
    "a mask": ("thing = np.ma.array([1.0, 2.0], mask=[0, 1])", "[0, 1]", "[1, 0]"),
    "a name space": (
        "thing = types.SimpleNamespace(a={'b': types.SimpleNamespace(c=2.0)})",
        "2.0", "3.0",
    ),
    "a read-only dictionary": (
        "thing = types.MappingProxyType({'a': 2.0})", "2.0", "3.0",
    ),
    "a decimal number": ("thing = decimal.Decimal('2.0')", "2.0", "3.0"),
    "a queue": ("thing = collections.deque([2.0])", "2.0", "3.0"),
    "what a getter gets": ("thing = operator.itemgetter(2)", "2", "3"),
    "a default of a dictionary": (
        "thing = collections.defaultdict(lambda: 2.0)", "2.0", "3.0",
    ),
    "the class of a list": (
        "class K(list):\n    def f(self): return 2.0\nthing = K()", "2.0", "3.0",
    ),
    "a sparse matrix": (
        "thing = scipy.sparse.csr_array(np.diag([1.0, 2.0]))", "2.0", "3.0",
    ),
    "an entry of a dictionary": ("thing = {'a': 2.0}", "2.0", "3.0"),
    "the precision": ("thing = np.zeros(2, 'f4')", "f4", "f8"),
    "the shape": ("thing = np.zeros((2, 3))", "(2, 3)", "(3, 2)"),
}  # fmt: skip


def thing(source: str, **scope) -> Any:
    scope = {"__name__": "__bilevax__"} | scope
    exec(compile(HEAD + source, "problem.py", "exec"), scope)
    return scope["thing"]


@pytest.mark.parametrize("name", CHANGES)
def test_what_computes_another_thing_has_another_digest(name):
    source, old, new = CHANGES[name]
    assert source.count(old) == 1
    first, again = digest(thing(source)), digest(thing(source))
    assert first == again
    assert digest(thing(source.replace(old, new))) != first


def test_lines_comments_and_the_name_of_the_file_do_not_count():
    plain = thing("scale = 2.0\ndef thing(x): return scale * x")
    source = "\n# A remark.\nother = 7\nscale = 2.0\n\ndef thing(x): return scale * x"
    moved = thing(source, __name__="elsewhere")
    assert digest(plain) == digest(moved)


def test_a_program_without_a_name_is_not_taken_for_python_itself():
    found = []
    for number in ("2.0", "3.0"):
        scope: dict = {}
        source = f"class K:\n    a = {number}\nthing = lambda x: {number} * x"
        exec(source, scope)
        found.append((digest(scope["thing"]), digest(scope["K"])))
    assert found[0][0] != found[1][0]
    assert found[0][1] != found[1][1]


def test_cycles_end():
    source = "def a(x): return b(x - {0})\ndef b(x): return a(x)\nthing = a"
    assert digest(thing(source.format(1))) != digest(thing(source.format(2)))
    ring: list = [1]
    ring.append(ring)
    assert digest(ring)
    late = thing("def make():\n    f = lambda x: f(x)\n    return f\nthing = make()")
    assert digest(late)


def test_a_cell_without_a_content_is_walked():
    source = "def thing():\n    f = lambda x: late\n    return f\n    late = 1"
    assert digest(thing(source)())


def test_what_was_computed_and_cached_does_not_count():
    source = (
        "class K:\n    @functools.cached_property\n    def twice(self): return 2\n"
        "thing = K()"
    )
    object_ = thing(source)
    before = digest(object_)
    assert object_.twice == 2
    assert digest(object_) == before


def test_compiling_and_solving_leave_the_digest_as_it_is():
    source = (
        "thing = bx.Problem(jax.jit(lambda x, y: jnp.sum((x - y) ** 2)),"
        " eqx.filter_jit(lambda x, y: jnp.sum((y - x) ** 2)), bx.Simplex(2))"
    )
    problem = thing(source)
    before = digest(problem)
    bx.hypergradient(problem, jnp.ones(2))
    assert digest(problem) == before


def test_the_digest_is_that_of_every_other_process():
    """Whatever the seed of hashes, and whether a program is run or imported."""
    program = (
        "import sys\nsys.path.insert(0, sys.argv[1])\n"
        "from tests.driver.test_digest import CHANGES, thing\n"
        "from bilevax._files.digest import digest\n"
        "print(*(digest(thing(source)) for source, *_ in CHANGES.values()))"
    )
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    here = [digest(thing(source)) for source, *_ in CHANGES.values()]
    for seed in ("1", "2"):
        env = os.environ | {"PYTHONHASHSEED": seed, "JAX_ENABLE_X64": "1"}
        run = subprocess.run(
            [sys.executable, "-c", program, root], env=env, capture_output=True,
            text=True, check=True,
        )  # fmt: skip
        found = run.stdout.split()
        differ = [
            name for name, a, b in zip(CHANGES, here, found, strict=True) if a != b
        ]
        assert not differ


def problem(slope=1.0):
    return bx.Problem(
        lambda x, y: jnp.sum((x - 1) ** 2 + slope * y),
        lambda x, y: 0.5 * jnp.sum((y - x) ** 2),
        bx.Polyhedron(A=[[1.0]], b=[0.0]),
    )


def run(path, problem, method=None, x0=1.0, **changes):
    options: dict[str, Any] = dict(num_steps=4, chunk=2, polish=False) | changes
    return bx.solve(
        problem, bx.DSBLO() if method is None else method, jnp.array([x0]),
        key=jr.key(0), checkpoint=path, **options,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        (dict(problem=problem(2.0)), "functions or data"),
        (dict(x0=1.5), "x0"),
        (dict(output="random"), "output"),
        (dict(polish=True), "polish"),
        (dict(method=bx.DSBLO(first_step=0.3)), "method"),
        (dict(method=bx.GradientDescent(optax.sgd(0.1))), "method"),
    ],
)
def test_a_checkpoint_belongs_to_one_problem_start_and_choice(tmp_path, changes, cause):
    path = tmp_path / "run.npz"
    first = run(path, problem())
    content = path.read_bytes()
    with pytest.raises(bx.CheckpointError, match=cause):
        run(path, **(dict(problem=problem()) | changes))
    assert path.read_bytes() == content
    # The same code, built again, is the same problem.
    np.testing.assert_array_equal(run(path, problem()).x, first.x)
