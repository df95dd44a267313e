"""The shape of the house is a test: imports point down, public names are documented."""

import ast
import inspect
import pathlib

import numpy as np

import bilevax as bx

LAYERS = (
    {"_control", "_modules", "_room", "_digest"},
    {"_arrays"},
    {
        "_tolerances",
        "_status",
        "_constraints",
        "_perturbation",
        "_samplers",
        "_arguments",
    },
    {"_problem", "_free", "_checkpoint", "_progress", "_quick", "_average"},
    {"_lower", "theory"},
    {"_adjoint"},
    {"_quality", "_feasible"},
    {"_implicit", "_solution_map"},
    {"_methods", "_polish"},
    {"methods", "extend"},
    {"_scales", "_history", "_certificate", "_explain"},
    {"_steps"},
    {"_run"},
    {"_falling"},
    {"_solve"},
    {"_tune"},
    {"_compare"},
    {"experiments", "adversarial"},
    {"_cli"},
    {"__main__"},
)
RANK = {name: i for i, layer in enumerate(LAYERS) for name in layer}
ROOT = pathlib.Path(bx.__file__).parent
REPOSITORY = ROOT.parent.parent


def test_imports_point_downwards():
    seen = set()
    for path in ROOT.rglob("*.py"):
        parts = path.relative_to(ROOT).parts
        module = parts[0].removesuffix(".py")
        if module == "__init__":
            continue
        seen.add(module)
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.ImportFrom) or not node.level:
                continue
            if len(parts) > 1 and node.level == 1:
                continue
            names = [node.module] if node.module else [n.name for n in node.names]
            for target in (name.split(".")[0] for name in names):
                assert RANK[target] < RANK[module], f"{path} imports {target}"
    assert seen == set(RANK)


def test_public_names_are_documented_and_few():
    public = [name for name in vars(bx) if not name.startswith("_")]
    assert len(public) <= 80
    for name in public:
        assert inspect.getdoc(getattr(bx, name)), name


def test_every_status_is_a_sentence_of_advice():
    for name, item in bx.Status._name_to_item.items():
        text = bx.Status[item]
        if name != "successful":
            assert text.endswith("."), name
            assert len(text) > 80, name


def test_the_demo_prints_its_table():
    import runpy

    scope = runpy.run_path(str(REPOSITORY / "examples" / "first_steps.py"))
    scope["main"]()


def test_the_picture_of_the_readme_is_drawn(tmp_path, monkeypatch):
    import runpy

    examples = REPOSITORY / "examples"
    monkeypatch.syspath_prepend(str(examples))
    out = tmp_path / "new" / "tolls.svg"
    scope = runpy.run_path(str(examples / "picture.py"))
    scope["main"](out)
    assert "best tolls" in out.read_text()
    np.testing.assert_allclose(scope["path"]()[-1], [3, 3], atol=1e-6)
