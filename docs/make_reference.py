"""Prints docs/reference.md: signatures and docstrings of every public name.

    python docs/make_reference.py > docs/reference.md

A signature and a docstring is all there is to show, so no documentation generator.
"""

import inspect
import textwrap

import bilevax as bx
from bilevax import adversarial, extend, theory
from bilevax._methods.base import AbstractMethod

GROUPS = {
    "Modelling": (
        "Problem", "penalised", "from_cvxpy", "Followers", "HostFollowers",
        "StochasticProblem", "AbstractLocalLower",
        "Polyhedron", "Box", "Simplex", "Intersection",
        "Gaussian", "UniformBall", "TruncatedGaussian",
    ),
    "Values and derivatives": (
        "hypergradient", "Evaluation", "FollowersEvaluation", "LowerSolution",
        "Quality", "solution_map", "constraint_gradients", "UpperConstraints",
        "penalty_gradient", "equality_gradient", "FirstOrderEvaluation",
    ),
    "Solving": (
        "solve", "solve_many", "Solution", "UpperReport", "Stop", "History",
        "tune", "Tuning", "certify", "Certificate", "moreau", "explain", "Explanation",
    ),
    "Looking closer": (
        "check", "Check", "profile", "Profile", "sensitivity", "Sensitivity",
        "scipy_objective",
    ),
    "What went wrong": ("Status", "status_name", "BilevelError", "CheckpointError"),
    "Lower-level solvers": (
        "ActiveSet", "SparseActiveSet", "InteriorPoint", "ProjectedGradient",
        "ClosedForm",
    ),
    "Adjoints": (
        "DenseAdjoint", "ConjugateGradient", "Neumann", "ScaledIdentity", "Danskin",
    ),
    "Methods": (
        *sorted(
            name for name, value in vars(bx).items()
            if isinstance(value, type) and issubclass(value, AbstractMethod)
        ),
        "scale_by_normalised_momentum",
    ),
    "Comparing": ("compare", "Comparison", "Case", "Budget", "StepGrid", "ablations"),
}  # fmt: skip
HEAD = """# Reference

Every public name with its arguments, made from the code by `docs/make_reference.py`.
What to use when is in the [README](../README.md). Methods are in `bx.methods` too,
where there is nothing else.
"""


def public(module) -> list[str]:
    """What a module exports by name, without its submodules."""
    return [
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and not inspect.ismodule(value)
    ]


def signature(name: str, value) -> str:
    """`name(arguments)`, one argument per line where one line is too short."""
    if isinstance(value, type) and issubclass(value, Exception):
        return name
    try:
        parameters = inspect.signature(value).parameters.values()
    except (TypeError, ValueError):
        return name
    parts, keyword_only = [], False
    for parameter in parameters:
        if parameter.kind is parameter.KEYWORD_ONLY and not keyword_only:
            parts.append("*")
            keyword_only = True
        parts.append(argument(parameter))
    line = f"{name}({', '.join(parts)})"
    if len(line) <= 88:
        return line
    return f"{name}(\n" + "".join(f"    {part},\n" for part in parts) + ")"


def argument(parameter: inspect.Parameter) -> str:
    prefix = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}
    text = prefix.get(parameter.kind, "") + parameter.name
    if parameter.default is parameter.empty:
        return text
    default = repr(parameter.default)
    if isinstance(parameter.default, str):  # in the quotes of the formatter
        default = f'"{parameter.default}"'
    # Some defaults are functions or sentinels, whose address says nothing.
    return (
        f"{text}=..." if " at 0x" in default or "<" in default else f"{text}={default}"
    )


def own_methods(value: type) -> list[str]:
    """Public methods and properties that this class documents itself."""
    lines = []
    for name, member in vars(value).items():
        function = getattr(member, "fget", None) or getattr(member, "__func__", member)
        if name.startswith("_") or not inspect.isfunction(inspect.unwrap(function)):
            continue
        text = inspect.getdoc(function)
        if text and not is_inherited(value, name):
            shown = name if isinstance(member, property) else f"{name}()"
            lines.append(f"- `{shown}`: {' '.join(text.split(chr(10) * 2)[0].split())}")
    return lines


def is_inherited(value: type, name: str) -> bool:
    return any(name in vars(base) for base in value.__mro__[1:])


def entry(prefix: str, name: str, value) -> str:
    text = inspect.getdoc(value) or ""
    if text.startswith(f"{name}("):  # what dataclasses write themselves
        text = ""
    parts = [
        f"### {prefix}{name}",
        f"```python\n{signature(prefix + name, value)}\n```",
    ]
    if text:
        parts.append(textwrap.dedent(text))
    if value is bx.Status:
        names = ((name, bx.Status[item]) for name, item in value._name_to_item.items())
        parts.append("\n".join(f"- `{name}`: {text or '–'}" for name, text in names))
    elif isinstance(value, type) and (methods := own_methods(value)):
        parts.append("\n".join(methods))
    return "\n\n".join(parts)


def as_markdown() -> str:
    parts = [HEAD.rstrip()]
    for title, names in GROUPS.items():
        parts.append(f"## {title}")
        parts += [entry("bx.", name, getattr(bx, name)) for name in names]
    modules = ((extend, "bx.extend."), (theory, "bx.theory."), (adversarial, ""))
    for module, prefix in modules:
        parts.append(f"## `{module.__name__}`\n\n{inspect.getdoc(module)}")
        names = [name for name in public(module) if not hasattr(bx, name)]
        parts += [entry(prefix, name, getattr(module, name)) for name in names]
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    print(as_markdown(), end="")
