"""What the README and the pages in docs/ show runs, and links lead somewhere."""

import inspect
import pathlib
import re
import runpy

import jax
import jax.monitoring
import numpy as np
import pytest

import bilevax as bx

REPOSITORY = pathlib.Path(bx.__file__).parent.parent.parent
PAGES = [
    str(path.relative_to(REPOSITORY))
    for folder in (".", "docs", "benchmarks")
    for path in sorted((REPOSITORY / folder).glob("*.md"))
]


def blocks(page: str) -> list[str]:
    text = (REPOSITORY / page).read_text()
    return re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)


def run(page: str) -> dict:
    scope: dict = {}
    for block in blocks(page):
        exec(compile(block, page, "exec"), scope)
    return scope


def test_the_readme_is_one_screen_and_its_example_runs():
    assert len((REPOSITORY / "README.md").read_text().splitlines()) <= 100
    (example,) = blocks("README.md")
    assert len([line for line in example.splitlines() if line.strip()]) <= 15
    scope = run("README.md")
    assert scope["e"].success
    assert abs(scope["s"].value + 6) < 1e-6


def test_the_tour_runs():
    scope = run("docs/tour.md")
    assert scope["e"].success
    assert abs(scope["s"].value + 6) < 1e-6
    statuses = [row["status"] for row in scope["comparison"].rows]
    assert sorted(statuses) == ["finished"] * 10 + ["refused"] * 5


def test_the_example_of_comparing_runs():
    scope = run("docs/compare.md")
    assert -6 - 1e-9 <= scope["best"] < -4
    assert "[S]SIGD" in str(scope["comparison"])


def test_the_page_on_followers_runs():
    scope = run("docs/followers.md")
    assert scope["e"].lower.y.shape == (20, 2)
    assert scope["bad"].message.startswith("Follower 7 of 20: infeasible")
    assert np.isfinite(scope["value"])
    # A minibatch run ends where a run over all does.
    assert scope["s"].success
    assert scope["s"].value < float(scope["e"].value)


def test_the_page_on_upper_constraints_runs():
    scope = run("docs/upper_constraints.md")
    # F is flat to second order there: `x` is known to the root of its rounding.
    np.testing.assert_allclose(scope["s"].x, 2.5, rtol=3e-8)
    np.testing.assert_allclose(scope["s"].value, -7.5, rtol=1e-13)
    np.testing.assert_allclose(scope["report"].multipliers, 1, rtol=1e-7)
    assert scope["none"].status_name == "upper_infeasible"
    np.testing.assert_allclose(scope["none"].violation, 1, rtol=1e-6)
    np.testing.assert_allclose(scope["e"].jacobian, [-1, -1], rtol=1e-9)
    np.testing.assert_allclose(scope["same"].value, -7.5, rtol=1e-7)


def test_the_page_on_prices_runs():
    scope = run("docs/prices.md")
    # Congested: 2 p1 + p2 = 12 and p1 + p2 = 9.
    np.testing.assert_allclose(scope["e"].lower.y["output"], [3, 6], atol=1e-9)
    np.testing.assert_allclose(
        scope["e"].lower.prices["balance"], [3, 6.5, 10], atol=1e-9
    )
    assert bx.status_name(scope["one"].status) == "prices_not_unique"
    assert scope["both"].success
    assert scope["s"].success


def test_the_page_on_sets_runs():
    scope = run("docs/sets.md")
    assert "bridges[north]" in scope["e"].lower.row_names
    assert scope["e"].success
    assert scope["f"].success


def test_the_page_on_instances_compiles_once():
    scope = run("docs/instances.md")
    found = [float(s.value) for s in scope["solutions"]]
    # A follower who values the roads at 4 pays 6 at best; these value them more.
    assert all(value < -6 for value in found)
    names = bx.status_name(scope["batch"].status).tolist()
    assert names[:2] == ["infeasible"] * 2
    assert set(names[3:]) <= {"successful", "kink"}
    assert np.all(np.isfinite(scope["batch"].value[3:]))
    compiled = []

    def listener(event: str, duration_secs: float, **named):
        compiled.append((event, named))

    another = scope["tolls"](scope["values"][0] + 0.1, 1.9)
    jax.monitoring.register_event_duration_secs_listener(listener)
    try:
        bx.solve(another, bx.DSBLO(), scope["start"], key=scope["key"])
    finally:
        jax.monitoring.unregister_event_duration_listener(listener)
    assert not compiled


def test_the_page_on_executors_runs(tmp_path, monkeypatch):
    model, work = blocks("docs/executors.md")
    (tmp_path / "road_model.py").write_text(model)
    monkeypatch.syspath_prepend(str(tmp_path))
    scope: dict = {"__name__": "__main__"}
    exec(compile(work, "docs/executors.md", "exec"), scope)
    assert [s.success for s in scope["solutions"]] == [True, True]
    assert abs(scope["solutions"][0].value + 6) < 1e-6
    statuses = [row["status"] for row in scope["comparison"].rows]
    assert statuses == ["finished"] * 4


def test_the_page_on_results_runs():
    scope = run("docs/results.md")
    assert scope["s"].converged
    np.testing.assert_allclose(scope["s"].value, -6, atol=1e-6)


def test_the_page_on_tools_runs():
    scope = run("docs/tools.md")
    assert not scope["wrong"].agrees
    np.testing.assert_allclose(scope["line"].lowest[1], -6, atol=1e-4)
    # Both roads at the limit: F* = -2 (wish - 1) for a wish of 4 and all of capacity 2.
    np.testing.assert_allclose(scope["worth"].data.lower.args[0], [-1, -1], atol=1e-5)
    np.testing.assert_allclose(scope["worth"].data.constraints.b[0], -2, atol=1e-5)
    assert bx.status_name(scope["e"].status) == "violated"


def test_the_reference_is_made_from_the_code():
    """Regenerate with `python docs/make_reference.py > docs/reference.md`."""
    made = runpy.run_path(str(REPOSITORY / "docs" / "make_reference.py"))
    assert (REPOSITORY / "docs" / "reference.md").read_text() == made["as_markdown"]()


def test_the_reference_has_every_public_name():
    text = (REPOSITORY / "docs" / "reference.md").read_text()
    for name, value in vars(bx).items():
        if not name.startswith("_") and not inspect.ismodule(value):
            assert f"\n### bx.{name}\n" in text, name


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    path = REPOSITORY / page
    text = re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" not in target and not target.startswith("#"):
            assert (path.parent / target.split("#")[0]).exists(), target
