"""Mistakes raise a `ValueError` before tracing, naming argument, expected, received."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import bilevax as bx

A, B, b = np.ones((2, 3)), np.ones((2, 4)), np.ones(2)
f = lambda x, y: jnp.sum(y)
g = lambda x, y: jnp.sum(y**2)


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: bx.Polyhedron(A, B, np.ones(3)), ("`b`", "rows", "3")),
        (lambda: bx.Polyhedron(A, np.ones((3, 4)), b), ("`B`", "rows", "3")),
        (lambda: bx.Polyhedron(A), ("`A`", "`b`")),
        (lambda: bx.Polyhedron(B=B, b=b), ("`A`", "domain")),
        (lambda: bx.Polyhedron(np.ones(3), b=b), ("`A`", "matrix", "(3,)")),
        (lambda: bx.Polyhedron(A, b=np.ones((2, 1))), ("`b`", "vector")),
        (
            lambda: bx.Polyhedron(A, b=b, A_eq=np.ones((1, 2)), b_eq=np.ones(1)),
            ("`A_eq`", "3", "2"),
        ),
        (lambda: bx.Polyhedron(A + 1j, b=b), ("`A`", "real")),
        (lambda: bx.Box(np.zeros(2), np.ones(3)), ("`lower`", "(2,)", "(3,)")),
        (lambda: bx.Box({"a": np.zeros(2)}, [np.ones(2)]), ("`upper`", "structure")),
        (lambda: bx.Simplex((2, 3), total=np.ones(3)), ("`total`", "(2,)", "(3,)")),
        (lambda: bx.Box({"a": 0.0}, [1.0]), ("`upper`", "structure", "'a'")),
        (lambda: bx.Box(None, 1.0), ("`lower`", "None")),
        (lambda: bx.Simplex(0), ("`shape`",)),
        (lambda: bx.Simplex(2.5), ("`shape`", "integer", "2.5")),  # pyright: ignore[reportArgumentType]
        (lambda: bx.Simplex("ab"), ("`shape`", "integer", "'ab'")),  # pyright: ignore[reportArgumentType]
        (lambda: bx.Simplex((2.5,)), ("`shape`", "integer", "(2.5,)")),  # pyright: ignore[reportArgumentType]
        (lambda: bx.Simplex(3, None), ("`total`", "None")),  # pyright: ignore[reportArgumentType]
        (lambda: bx.Simplex(3, "one"), ("`total`", "one")),  # pyright: ignore[reportArgumentType]
        (lambda: bx.Polyhedron(np.ones((2, 0)), b=b), ("`A`", "column", "(2, 0)")),
        (lambda: bx.Problem(f, g, y0=jnp.zeros(0)), ("`y0`", "(0,)")),
        (lambda: bx.Problem(f, g, y0={"a": None}), ("`y0`", "None")),
        (lambda: bx.Problem(f, 3.0, bx.Polyhedron(A, b=b)), ("`lower`", "float")),
        (lambda: bx.Problem(f, g, "box"), ("`constraints`", "str")),
        (lambda: bx.Problem(f, g), ("`y0`",)),
        (lambda: bx.Problem(f, g, bx.Polyhedron(A, b=b), y0=np.ones(5)), ("5", "3")),
        (
            lambda: bx.Problem(
                f, g, bx.Polyhedron(A, b=b), domain=bx.Polyhedron(A, B, b)
            ),
            ("`domain`", "`B`"),
        ),
        (
            lambda: bx.Problem(f, g, bx.Polyhedron(A, b=b), domain=bx.Simplex(3)),
            ("`domain`", "Simplex"),
        ),
        (
            lambda: bx.Problem(f, g, bx.Polyhedron(A, b=b)).perturbed(np.ones(2)),
            ("`q`", "(3,)", "(2,)"),
        ),
        (
            lambda: bx.StochasticProblem.from_data((np.ones(3), np.ones(4)), 2, f),
            ("`data`", "leading"),
        ),
        (
            lambda: bx.StochasticProblem.from_data(np.ones((0, 3)), 2, f),
            ("`data`", "row", "0"),
        ),
        (
            lambda: bx.StochasticProblem.from_data(np.ones(3), 2.5, f),  # pyright: ignore[reportArgumentType]
            ("`batch_size`", "integer", "2.5"),
        ),
    ],
)
def test_construction(build, words):
    with pytest.raises(ValueError, match=".") as info:
        build()
    for word in words:
        assert word in str(info.value)


@pytest.mark.parametrize(
    ("upper", "lower", "x", "words"),
    [
        (f, g, np.ones(5), ("`B`", "5", "4")),
        (f, lambda x, y: y, np.ones(4), ("`lower(x, y)`", "scalar", "(3,)")),
        (lambda x, y: x, g, np.ones(4), ("`upper(x, y)`", "scalar")),
        (f, lambda x, y: jnp.sum(x @ y), np.ones(4), ("`lower(x, y)`", "(4,)")),
        (f, g, "here", ("`x`",)),
        (f, lambda x, y: None, np.ones(4), ("`lower(x, y)`", "None", "return")),
        (f, lambda x, y: (g(x, y), y), np.ones(4), ("`lower(x, y)`", "tuple")),
        (lambda x, y: 1, g, np.ones(4), ("`upper(x, y)`", "floating", "int")),
        (
            lambda x, y: (1.0, x, y),
            g,
            np.ones(4),
            ("`upper(x, y)`", "pair", "tuple of 3"),
        ),
    ],
)
def test_evaluation(upper, lower, x, words):
    problem = bx.Problem(upper, lower, bx.Polyhedron(A, B, b))
    with pytest.raises(ValueError, match=".") as info:
        bx.hypergradient(problem, x)
    for word in words:
        assert word in str(info.value)


def test_a_sampled_problem_must_be_drawn_first():
    sampled = bx.StochasticProblem(lambda key: None, lambda batch: None)
    with pytest.raises(ValueError, match="draw"):
        bx.hypergradient(sampled, np.ones(2))  # pyright: ignore[reportArgumentType]


def test_a_solver_refuses_what_it_cannot_handle():
    problem = bx.Problem(f, g, bx.Polyhedron(A, b=b))
    with pytest.raises(ValueError, match=r"ProjectedGradient.*Polyhedron"):
        bx.hypergradient(problem, np.ones(4), solver=bx.ProjectedGradient())


@pytest.mark.parametrize("evaluate", [bx.hypergradient, bx.solution_map])
@pytest.mark.parametrize(
    ("choice", "words"),
    [
        ({"solver": "ip"}, ("`solver`", "ActiveSet()", "str")),
        ({"solver": bx.InteriorPoint}, ("`solver=InteriorPoint()`", "class")),
        ({"adjoint": "cg"}, ("`adjoint`", "ConjugateGradient()", "str")),
        ({"adjoint": bx.Neumann}, ("`adjoint=Neumann()`", "class")),
        (
            {"adjoint": bx.DenseAdjoint(), "solver": bx.ProjectedGradient()},
            ("`adjoint=DenseAdjoint()`", "ProjectedGradient", "ActiveSet()"),
        ),
        ({"adjoint": bx.DenseAdjoint()}, ("by default", "`solver=ActiveSet()`")),
    ],
)
def test_choice_of_solver_and_adjoint(evaluate, choice, words):
    # Large enough for the default to be a solver without factor.
    problem = bx.Problem(f, g, bx.Box(-np.ones(600), np.ones(600)))
    with pytest.raises(ValueError, match=".") as info:
        evaluate(problem, np.ones(4), **choice)
    for word in words:
        assert word in str(info.value)


def test_a_warm_start_must_fit_the_problem():
    free = lambda y0: bx.Problem(f, g, y0=y0)
    evaluation = bx.hypergradient(free(np.zeros(3)), np.ones(4))
    for problem, warm, words in (
        (free(np.zeros(3)), evaluation, ("`warm`", "Evaluation", "evaluation.lower")),
        (free(np.zeros(3)), evaluation.lower.y, ("`warm`", "LowerSolution")),
        (free(np.zeros(5)), evaluation.lower, ("`warm.y`", "(5,)", "(3,)")),
        (free({"a": np.zeros(3)}), evaluation.lower, ("`warm.y`", "structure")),
        (bx.Problem(f, g, bx.Polyhedron(A, b=b)), evaluation.lower, ("`warm`", "rows")),
    ):
        with pytest.raises(ValueError, match=".") as info:
            bx.hypergradient(problem, np.ones(4), warm=warm)  # pyright: ignore[reportArgumentType]
        for word in words:
            assert word in str(info.value)


BOX = bx.Box(np.zeros(2), np.ones(2))
POINT = np.ones(2)
fitting = lambda: bx.Problem(f, lambda x, y: jnp.sum((y - x) ** 2), BOX)
one = lambda d: bx.Problem(f, lambda x, y: jnp.sum((y - d * x) ** 2), BOX)


def given(changes, **usual) -> dict[str, Any]:
    return usual | changes


def solve(**changes):
    options: dict[str, Any] = dict(key=0, num_steps=2, polish=False) | changes
    x0 = options.pop("x0", POINT)
    return bx.solve(fitting(), options.pop("method", None), x0, **options)


def solve_many(**changes):
    options: dict[str, Any] = dict(problems=[fitting()], x0s=[POINT], keys=0) | changes
    return bx.solve_many(**options)


def tune(**changes):
    options: dict[str, Any] = dict(x0=POINT, key=0, num_steps=2) | changes
    return bx.tune(fitting(), None, **options)


def certify(**changes):
    options: dict[str, Any] = dict(problem=fitting(), x=POINT, radius=0.1, key=0)
    return bx.certify(**(options | changes))


def moreau(**changes):
    return bx.moreau(**given(changes, problem=fitting(), x=POINT, smoothing=1.0))


def compare(**changes):
    usual: Any = dict(problems={"p": (fitting(), POINT)}, seeds=1)
    return bx.compare(**given(changes, methods=[bx.DSBLO()], **usual))


def sampled(**changes):
    parts: dict[str, Any] = dict(sample=lambda key: 1.0, instance=one) | changes
    return bx.StochasticProblem(**parts)


# A function, and for each of its arguments what it does not take.
WRONG = {
    solve: dict(
        x0=("here", None), method=("DSBLO", bx.DSBLO), key=("a", 1.5, np.ones((2, 2))),
        num_steps=("a", 0, True, 2.5), throw=("no", 1), starts=(3, "a", [None]),
        num_starts=(True, "2"), polish=("yes", 1), certify=("a", 0.0, True, 1j),
        output=("first", ["last"], np.ones(2)), average=("a", 2.0, True), chunk=(0,),
        looks=(0, "no"), stop=(60, "a"), progress=("yes",), callback=(3,),
        checkpoint=(3, ["run.npz"]), executor=("dask",),
    ),
    solve_many: dict(
        problems=(3, None), x0s=(3, None, [POINT, POINT], "a"), keys=(2.5, None, ["a"]),
        num_starts=(None, "a", True), batch=(0, "a"), progress=(1,),
    ),
    tune: dict(parameter=(3, "no_such_number"), grid=(0.1, [], "ab", [[1.0]], [None])),
    certify: dict(
        problem=("p", None), x=("here",), radius=("a", 0.0, True), key=("a",),
        num_samples=("a", 0, -1, 2.5, True), perturbation=("normal", bx.Gaussian),
        num_tilts=(1, "a", True, 2.5),
    ),
    moreau: dict(
        problem=("p",), x=("here",), smoothing=("a", 0.0, -1.0, None, np.ones(2)),
    ),
    lambda **changes: bx.explain(**given(changes, problem=fitting(), x=POINT)): dict(
        problem=("p", None), x=("here",),
    ),
    lambda **changes: bx.hypergradient(fitting(), POINT, **given(changes)): dict(
        warm=(3, POINT), quality=("yes", 1), throw=("no", None),
    ),
    lambda **changes: bx.solution_map(fitting(), POINT, **changes): dict(
        multipliers=("yes", 1),
    ),
    compare: dict(
        problems=(3, None, [fitting()], {}), methods=(3, "DSBLO", [bx.DSBLO], []),
        seeds=(0, None, 2.5, [1, 1], ["a"]), budget=(3,), tune=("a", 2.5, 0, True),
        folder=(3,), progress=("yes",), executor=("dask",),
    ),
    bx.Stop: dict(
        momentum=("a", -1.0, None, np.ones(2)), move=("a", -1.0), seconds=("a", None),
        certificate=(3, (1.0,), ("a", 1.0), (0.0, 1.0), (1.0, -1.0)),
    ),
    bx.Budget: dict(
        steps=(0, "a", None, 2.5, [], True), lower_solves=(0, "a", True),
        seconds=("a", 0.0, True), look_every=(0, None, 1j),
    ),
    bx.StepGrid: dict(
        trials=(0, None, 2.5), low=("a", 0.0), high=("a", 1e-9, None), by=(3,),
        seeds=(3, (), ("a",)),
    ),
    lambda **changes: bx.Case(**given(changes, name="p", problem=fitting())): dict(
        name=(3,), problem=("p", 3), target=("a", [], POINT), signature=(3,),
    ),
    lambda **changes: bx.Followers(**given(changes, instance=one, data=POINT)): dict(
        instance=(3,), data=(3.0, [], "bc", object()), upper=(3,), domain=("box",),
        always_feasible=("yes",), batch=(0, "a", True),
    ),
    lambda **changes: bx.Followers(one, POINT).minibatch(**changes): dict(
        size=(0, 3, "a", True),
    ),
    lambda instance: bx.Followers.padded(instance, [POINT]): dict(instance=(3, "a")),
    sampled: dict(
        sample=(3, None), instance=(3, None), population=("p", 3), absorb=(3,),
    ),
    lambda **changes: bx.StochasticProblem.from_data(
        **given(changes, data=POINT, batch_size=1, instance=one)
    ): dict(batch_size=(0, "a", True), epochs=("yes",), instance=(3,), data=("bc",)),
    lambda **changes: bx.Problem(f, g, BOX, **changes): dict(
        y0=("bc",), domain=("box",), always_feasible=("yes",),
    ),
    bx.DSBLO: dict(
        first_step=("a", None, [1.0, 2.0], True, np.nan), perturbation=("normal", 3),
        window=("a", -1, 2.5, None), fresh_tilt=("yes", 1), segment=(None,),
    ),
    bx.methods.AiPOD: dict(lower_steps=("a", 2.5, None), neumann=("a",), decay=("a",)),
    bx.methods.ZeroOrder: dict(block=("a",), radius=("a", [1.0, 2.0])),
    bx.ActiveSet: dict(max_passes=("a", 2.5, None, True), diagnose=("yes", None)),
    bx.ProjectedGradient: dict(accuracy=("a", np.nan), max_steps=("a", -1)),
    bx.ConjugateGradient: dict(rtol=("a", True), max_steps=("a",)),
    bx.ScaledIdentity: dict(weight=("a", None, lambda: 1.0, 0.0)),
    bx.ClosedForm: dict(curvature=("a", None, lambda: 1.0, -1.0)),
    bx.Gaussian: dict(std=("a", None)),
}  # fmt: skip


@pytest.mark.parametrize(
    ("call", "name", "value"),
    [
        (call, name, value)
        for call, arguments in WRONG.items()
        for name, values in arguments.items()
        for value in values
    ],
)
def test_every_argument_of_a_wrong_kind_is_named(call, name, value):
    # One of the `keys` is a `key`, and `x0` an `x`.
    with pytest.raises(ValueError, match=name.rstrip("s0")):
        call(**{name: value})


def test_starts_may_come_from_a_generator():
    found = solve(starts=(0.5 * POINT * i for i in range(2)), throw=False)
    assert len(found.starts) == 3


def on_domain(**changes) -> bx.Problem:
    """F = |y - 1|^2 with y = x, over a box of two coordinates."""
    parts = dict(
        upper=lambda x, y: jnp.sum((y - 1) ** 2),
        lower=lambda x, y: 0.5 * jnp.sum((y - x) ** 2),
        y0=np.zeros(2),
        domain=bx.Box(np.zeros(2), np.full(2, 3.0)),
    )
    return bx.Problem(**{**parts, **changes})  # pyright: ignore[reportArgumentType]


SMALL = on_domain()
# Whatever is given: types are what these calls get wrong.
front: Any = bx
HERE = np.array([0.5, 0.7])
NAMED = on_domain(
    upper=lambda x, y: jnp.sum((y - 1) ** 2) + 0 * x["toll"][0],
    lower=lambda x, y: 0.5 * jnp.sum((y - x["toll"]) ** 2),
    domain=bx.Box({"toll": np.zeros(2)}, {"toll": np.ones(2)}),
)
NOT_A_NUMBER = on_domain(upper=lambda x, y: jnp.sum((y - jnp.nan) ** 2))
NO_ANSWER = bx.Problem(f, g, bx.Polyhedron([[1.0], [-1.0]], b=[-1.0, -1.0]))
SAMPLED = bx.StochasticProblem(lambda key: None, lambda batch: None)


def load(path):
    return bx.Solution.load(path)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        # solve
        (
            lambda: front.solve(on_domain(domain=None), key=0),
            ValueError,
            ("`x0`", "Box"),
        ),
        (
            lambda: front.solve(SMALL, x0=np.zeros(3), key=0),
            ValueError,
            ("`x`", "(2,)", "(3,)"),
        ),
        (
            lambda: front.solve(NAMED, x0={"tolls": np.zeros(2)}, key=0),
            ValueError,
            ("`x`", "structure", "toll"),
        ),
        (lambda: front.solve(SMALL, x0="0.5", key=0), ValueError, ("`x`",)),
        (lambda: front.solve(f, x0=HERE, key=0), ValueError, ("`problem`", "function")),
        (
            lambda: front.solve(SMALL, bx.DSBLO, key=0),
            ValueError,
            ("`method`", "DSBLO()"),
        ),
        (lambda: front.solve(SMALL, HERE, key=0), ValueError, ("`method`", "DSBLO()")),
        (lambda: front.solve(SMALL, key="seed"), ValueError, ("`key`", "'seed'")),
        (
            lambda: front.solve(SMALL, key=0, num_starts=0),
            ValueError,
            ("`num_starts`", "positive", "0"),
        ),
        (
            lambda: front.solve(SMALL, key=0, starts=[np.zeros(5)]),
            ValueError,
            ("`x`", "(5,)"),
        ),
        (
            lambda: front.solve(NOT_A_NUMBER, key=0, num_steps=2),
            bx.BilevelError,
            ("NaN", "`upper`", "data"),
        ),
        (
            lambda: front.solve(NO_ANSWER, x0=np.zeros(1), key=0, num_steps=2),
            bx.BilevelError,
            ("No `y`", "relax `b`"),
        ),
        (
            lambda: on_domain(domain=bx.Box(np.ones(2), np.zeros(2))),
            ValueError,
            ("`domain`", "x"),
        ),
        # check
        (lambda: front.check(SMALL, np.zeros(3)), ValueError, ("`x`", "(3,)")),
        (lambda: front.check(SMALL, HERE, key=1.5), ValueError, ("`key`", "1.5")),
        (
            lambda: front.check(SMALL, HERE, names=["one"]),
            ValueError,
            ("`names`", "2 different texts"),
        ),
        (
            lambda: front.check(SAMPLED, HERE),
            ValueError,
            ("Problem", "draw"),
        ),
        # profile
        (
            lambda: front.profile(SMALL, HERE, "y[0]"),
            ValueError,
            ("`along`", "x[0], x[1]", "'y[0]'"),
        ),
        (
            lambda: front.profile(NAMED, {"toll": HERE}, "x[0]"),
            ValueError,
            ("`along`", "toll[0], toll[1]"),
        ),
        (lambda: front.profile(SMALL, HERE, 2), ValueError, ("`along`", "0 to 1", "2")),
        (
            lambda: front.profile(SMALL, HERE, np.zeros(3)),
            ValueError,
            ("`along`", "(2,)", "(3,)"),
        ),
        (
            lambda: front.profile(SMALL, HERE, np.zeros(2)),
            ValueError,
            ("`along`", "direction", "zero"),
        ),
        (
            lambda: front.profile(SMALL, HERE, span=(1.0, 0.0)),
            ValueError,
            ("`span`", "upwards"),
        ),
        (
            lambda: front.profile(SMALL, HERE, span=3.0),
            ValueError,
            ("`span`", "(from, to)", "3.0"),
        ),
        (
            lambda: front.profile(SMALL, HERE, (0, 1), span=(0.0, 1.0)),
            ValueError,
            ("`span`", "pair"),
        ),
        (
            lambda: front.profile(SMALL, HERE, points=2.5),
            ValueError,
            ("`points`", "2.5"),
        ),
        (
            lambda: front.profile(SMALL, HERE, points=3).plot(rows=["a"]),
            ValueError,
            ("`rows`", "0 rows", "1"),
        ),
        # scipy_objective
        (
            lambda: front.scipy_objective(on_domain(domain=None)),
            ValueError,
            ("`x0`", "`domain`"),
        ),
        (
            lambda: front.scipy_objective(SMALL).fun(np.zeros(3)),
            ValueError,
            ("2 numbers", "(3,)"),
        ),
        (
            lambda: front.scipy_objective(SAMPLED, HERE),
            ValueError,
            ("StochasticProblem", "draw"),
        ),
        (
            lambda: front.scipy_objective(NOT_A_NUMBER, throw=True).fun(HERE),
            bx.BilevelError,
            ("no value", "NaN"),
        ),
        # sensitivity
        (
            lambda: front.sensitivity(SAMPLED, HERE),
            ValueError,
            ("StochasticProblem", "draw"),
        ),
        (
            lambda: front.sensitivity(NO_ANSWER, np.zeros(1)),
            bx.BilevelError,
            ("No `y`", "relax `b`"),
        ),
        # save and load
        (lambda: load("/no/such/file.npz"), FileNotFoundError, ("file.npz",)),
        (lambda: load(__file__), bx.CheckpointError, ("test_mistakes.py", "damaged")),
    ],
)  # fmt: skip
def test_each_mistake_is_answered_by_cause_and_remedy(call, error, words):
    with pytest.raises(error, match=".") as info:
        call()
    for word in words:
        assert word in str(info.value)
