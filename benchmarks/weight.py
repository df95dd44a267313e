"""How heavy the library is: lines, equations of a program, memory of many problems.

    git worktree add ../before c9a83af
    python -m benchmarks.weight --before ../before/src [--json OUT]

- *lines*: of the lower level, without blank lines, comments and docstrings; and of the
  active-set part of it.
- *equations*: of one traced `hypergradient` of the README's example, those inside
  branches and loops included.
- *memory*: the most that one process holds while it solves 40 problems of different
  functions and two shapes (a `hypergradient` and a `solve` of 50 steps each), and how
  much that grows from the first problem on.
"""

import argparse
import ast
import io
import json
import os
import resource
import subprocess
import sys
import tokenize
from pathlib import Path

HERE = Path(__file__).resolve().parent.parent
PROBLEMS = 40
NO_CODE = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT,
    tokenize.ENDMARKER,
}  # fmt: skip
# What is not the active-set method.
OTHERS = {"interior_point", "projected", "closed_form", "free", "choose", "base"}


def lines_of(path: Path) -> int:
    """Lines of code."""
    text = path.read_text()
    kinds = ast.Module, ast.ClassDef, ast.FunctionDef
    words: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, kinds) and ast.get_docstring(node) is not None:
            first = node.body[0]
            words |= set(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    code: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in NO_CODE:
            code |= set(range(token.start[0], token.end[0] + 1))
    return len(code - words)


def lines(source: Path) -> dict[str, int]:
    files = sorted((source / "bilevax" / "_lower").glob("*.py"))
    count = {path.stem: lines_of(path) for path in files}
    part = {name: n for name, n in count.items() if name not in OTHERS}
    return {
        "lines of the lower level": sum(count.values()),
        "lines of the active-set part": sum(part.values()),
    }


def equations() -> int:
    import jax

    from .first_answer import model

    jax.config.update("jax_enable_x64", True)
    import bilevax as bx

    problem, x = model("readme", 1.0)
    call = lambda x: bx.hypergradient(problem, x, throw=False).grad
    return _counted(jax.make_jaxpr(call)(x).jaxpr)


def _counted(jaxpr) -> int:
    total = 0
    for equation in jaxpr.eqns:
        nested = [_counted(part) for part in _inside(equation.params)]
        # A call is its body, a loop or branch an equation with a body.
        call = equation.primitive.name in ("jit", "pjit", "closed_call")
        total += sum(nested) + (0 if call else 1)
    return total


def _inside(params):
    for value in params.values():
        for part in value if isinstance(value, tuple | list) else (value,):
            part = getattr(part, "jaxpr", part)
            if hasattr(part, "eqns"):
                yield part


def memory() -> dict[str, float]:
    import jax

    jax.config.update("jax_enable_x64", True)
    import jax.numpy as jnp

    import bilevax as bx

    held = []
    for i in range(PROBLEMS):
        n = 3 + i % 2
        problem = bx.Problem(
            lambda x, y, i=i: jnp.sum((x - 1) ** 2) + (i + 1) * jnp.sum(jnp.sin(y)),
            lambda x, y, i=i: jnp.sum((y - x) ** 2) + 0.1 * i * jnp.sum(y),
            bx.Polyhedron(A=jnp.ones((1, n)), b=jnp.ones(1)),
        )
        x = jnp.full(n, 0.5)
        bx.hypergradient(problem, x, throw=False)
        bx.solve(problem, bx.DSBLO(), x, key=jax.random.key(0), num_steps=50)
        held.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
    return {"MB at the first": held[0], "MB in the end": held[-1],
            "MB a further problem": (held[-1] - held[1]) / (PROBLEMS - 2)}  # fmt: skip


def child(source: Path, what: str) -> str:
    environment = dict(
        os.environ, JAX_ENABLE_COMPILATION_CACHE="false", PYTHONPATH=str(source)
    )
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.weight"]
    out = subprocess.run(
        [*command, "--measure", what], cwd=HERE, env=environment, check=True,
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    return out.stdout.splitlines()[-1]


def main():
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--before", type=Path, help="src of the version before")
    parser.add_argument("--after", type=Path, default=HERE / "src")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(memory() if options.measure == "memory" else equations()))
        return
    found = {}
    for what in ("before", "after"):
        source = getattr(options, what)
        if source is not None:
            source = source.resolve()
            found[what] = lines(source) | {
                "equations": json.loads(child(source, "equations"))
            }
            found[what] |= json.loads(child(source, "memory"))
    print("| | " + " | ".join(found) + " |\n|---|" + "---:|" * len(found))
    for label in found["after"]:
        cells = " | ".join(f"{part[label]:.0f}" for part in found.values())
        print(f"| {label} | {cells} |")
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
