"""What travels arrives as it was; what cannot travel is refused with a remedy."""

import json
import sys
import types

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.tree_util import Partial

import bilevax as bx
from bilevax._executors.description import NotDescribed, described, rebuilt
from bilevax._executors.names import found, name_of
from bilevax._files.checkpoint import fingerprint
from bilevax._methods.catalogue import CATALOGUE
from bilevax.experiments.families import family_case

from .tools import Revenue, squares, tolls


def travelled(*things):
    """Through what JSON can hold and plain arrays."""
    forms, arrays = described(list(things))
    assert all(type(array) is np.ndarray for array in arrays)
    assert not any(array.dtype.hasobject for array in arrays)
    there = rebuilt(json.loads(json.dumps(forms)), arrays)
    return there[0] if len(things) == 1 else there


@pytest.mark.parametrize("name", CATALOGUE)
def test_methods_arrive_as_they_were(name):
    method = CATALOGUE[name].kind()
    there = travelled(method)
    assert fingerprint(there) == fingerprint(method)
    # The same structure and weak types: the same compiled programs.
    assert jax.tree.structure(there) == jax.tree.structure(method)
    weak = lambda tree: [getattr(a, "weak_type", None) for a in jax.tree.leaves(tree)]
    assert weak(there) == weak(method)


@pytest.mark.parametrize(
    "thing",
    [
        tolls([4.0, 5.0]),
        family_case("tight-10").instance(3).problem,
        bx.Status.kink,
        jax.random.key(3),
        jax.random.key(3, impl="rbg"),
        jnp.arange(3.0).astype(jnp.bfloat16),
        np.ones((2, 0), np.int8),
        np.float32(0.1),
        np.array(["a", "bc"]),
        jnp.full(2, 5.0),
        {"a": float("nan"), "2": (1, [2.5, 1j, b"x", None, True]), "e": {1, 2}},
        Partial(jnp.add, 1),
        bx.DSBLO().init,
        jnp.float32,
        range(3),
        2**80,
    ],
    ids=lambda thing: type(thing).__name__,
)
def test_data_and_names_arrive_as_they_were(thing):
    there = travelled(thing)
    assert type(there) is type(thing)
    assert fingerprint(there) == fingerprint(thing)
    assert jax.tree.structure(there) == jax.tree.structure(thing)
    weak = lambda tree: [getattr(a, "weak_type", None) for a in jax.tree.leaves(tree)]
    assert weak(there) == weak(thing)


def test_functions_and_classes_arrive_as_themselves():
    assert travelled(squares) is squares
    assert travelled(Revenue) is Revenue
    assert travelled(jnp.sum) is jnp.sum
    assert travelled(eqx) is eqx


def test_what_is_shared_travels_once_and_stays_shared():
    array = jnp.arange(3.0)
    assert len(described([array, {"a": array}])[1]) == 1
    one, other = travelled(array, {"a": array})
    assert other["a"] is one


def test_lambdas_and_local_functions_are_refused_by_name_and_place():
    def local(x, y):
        return jnp.sum(x)

    for function, words in ((lambda x, y: 1.0, "a lambda"), (local, "<locals>.local")):
        problem = bx.Problem(function, squares, y0=jnp.ones(1))
        with pytest.raises(NotDescribed, match="`problem.upper` is") as error:
            described([{"problem": problem}], ["start 0"])
        text = str(error.value)
        assert text.startswith("start 0: ")
        assert words in text
        assert "test_description.py, line " in text
        assert "top level of a file" in text
        assert "jax.tree_util.Partial(function, data)" in text
    for wrapped in (jax.jit(local), Partial(local), Partial(jax.jit(local), 1.0)):
        with pytest.raises(NotDescribed, match="local function"):
            described([wrapped])


def test_things_that_are_no_data_are_refused():
    with pytest.raises(NotDescribed, match="array of Python objects"):
        described([np.array([None])])
    with pytest.raises(NotDescribed, match="a generator, which is neither data"):
        described([(n for n in ())])
    loop: list = []
    loop.append(loop)
    with pytest.raises(NotDescribed, match="holds itself"):
        described([loop])


def test_functions_of_a_script_travel_as_its_file(tmp_path, monkeypatch):
    path = tmp_path / "script.py"
    path.write_text("import json\n\ndef half(x):\n    return x / 2\n")
    script = types.ModuleType("__main__")
    script.__file__ = str(path)
    monkeypatch.setitem(sys.modules, "__main__", script)
    exec(compile(path.read_text(), str(path), "exec"), vars(script))
    name = name_of(script.half)
    assert name is not None
    assert name[:2] == ["file", str(path)]
    assert found(name) is script.half
    # In another process it is not there yet.
    monkeypatch.undo()
    there = found(name)
    assert there is not script.half
    assert there(3) == 1.5
    assert there.__module__ != "__main__"
    assert found(name) is there
    path.write_text("def half(x):\n    return x / 3\n")
    with pytest.raises(ValueError, match="has changed since"):
        found(name)


def test_functions_of_a_session_without_a_file_are_refused(monkeypatch):
    session = types.ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", session)
    exec("def half(x):\n    return x / 2\n", vars(session))
    with pytest.raises(NotDescribed, match="found under this name in no module"):
        described([session.half])
