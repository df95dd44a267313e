"""The shape of the house is a test: imports point down, public names are documented."""

import ast
import inspect
import pathlib

import numpy as np

import bilevax as bx

# Rooms and files, from the ground up; those of one line know nothing of each other.
LAYERS = (
    ("_tolerances", "_arguments", "_status", "_files", "_executors", "readers"),
    ("_programs",),
    ("_constraints",),
    ("_problem",),
    ("_lower", "theory", "_cvxpy"),
    ("_implicit",),
    ("_methods",),
    ("methods", "extend"),
    ("_judge",),
    ("_driver", "torch"),
    ("_compare",),
    ("experiments", "adversarial.data"),
    ("adversarial.networks",),
    ("adversarial.attacks", "adversarial.files"),
    ("adversarial.training", "adversarial._former"),
    ("adversarial",),
    ("examples",),
    ("_cli",),
    ("__main__",),
)  # fmt: skip
RANK = {name: i for i, layer in enumerate(LAYERS) for name in layer}
ROOT = pathlib.Path(bx.__file__).parent
REPOSITORY = ROOT.parent.parent


def room_of(module):
    """The longest name in `LAYERS` that a dotted module starts with."""
    parts = module.split(".")
    starts = (".".join(parts[:n]) for n in range(len(parts), 0, -1))
    return next(name for name in starts if name in RANK)


def modules():
    """Dotted names and paths; the face of the package, which imports all, left out."""
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        if parts != ("__init__",):
            yield parts, path


def test_imports_point_downwards():
    seen = set()
    for parts, path in modules():
        package = parts[:-1]
        own = parts[:-1] if parts[-1] == "__init__" else parts
        room = room_of(".".join(own))
        seen.add(room)
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.ImportFrom) or not node.level:
                continue
            base = ".".join(package[: len(package) - node.level + 1])
            for name in node.names if node.module is None else [node.module]:
                name = name if isinstance(name, str) else name.name
                target = room_of(f"{base}.{name}".strip("."))
                fine = target == room or RANK[target] < RANK[room]
                assert fine, f"{path} imports {target}"
    assert seen == set(RANK)


def test_the_map_of_the_house_is_the_house():
    tree = (REPOSITORY / "CONTRIBUTING.md").read_text().split("```")[1].splitlines()[2:]
    listed, rooms = set(), {2: ""}
    for line in tree:
        depth = len(line) - len(line.lstrip())
        for word in line.split() if depth < 10 else ():
            if word.endswith("/"):
                rooms[depth + 2] = rooms[depth] + word
            elif word.endswith(".py"):
                listed.add(rooms[depth] + word)
            else:
                break
    there = {
        str(path.relative_to(ROOT))
        for _, path in modules()
        if path.name not in ("__init__.py", "__main__.py")
    }
    assert listed == there


def test_public_names_are_documented_and_few():
    public = [name for name in vars(bx) if not name.startswith("_")]
    assert len(public) <= 90
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
