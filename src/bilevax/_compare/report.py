"""Everything that is made from rows, written into one folder. Nothing here computes."""

from pathlib import Path

from . import figures, page
from .curves import AXES, curves, in_order
from .profiles import TARGETS, profiles, target_table
from .tables import (
    result_table,
    to_csv,
    to_latex,
    to_markdown,
    trouble_table,
    work_table,
)


def write_report(
    folder: Path,
    rows: list[dict],
    *,
    title: str = "Bilevel methods compared",
    intro: str = "",
    values_first: bool = False,
) -> dict[str, str]:
    """Tables, figures and a page; returns their paths by name.

    `values_first` begins with `F` itself against seconds, all problems in one figure.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    ran = any(row["value"] for row in rows)
    tables = {
        "results": result_table(rows),
        "targets": target_table(rows) if ran else [],
        "work": work_table(rows),
        "trouble": trouble_table(rows),
    }
    paths = {}
    for name, table in tables.items():
        if table:
            paths |= _write_table(folder, name, table)
    for name, table in {
        "curves": curve_table(rows),
        "profiles": profile_table(rows),
    }.items():
        paths[name] = str(folder / f"{name}.csv")
        Path(paths[name]).write_text(to_csv(table))

    parts = []

    def draw(name: str, heading: str, figure):
        for ending, path in figures.save(figure, folder, name).items():
            paths[f"{name}.{ending}"] = path
        parts.append((heading, page.figure(figures.as_inline_svg(figure))))
        figures.close(figure)

    if ran:
        if values_first:
            draw("values", "The objective against time", figures.value_figure(rows))
        for problem in in_order([row for row in rows if row["value"]], "problem"):
            draw(f"gap-{_file(problem)}", problem, figures.gap_figure(rows, problem))
        draw("profiles", "Performance profiles", figures.profile_figure(rows))
    for name, heading in (
        ("targets", "Cost to a target"),
        ("results", "Results"),
        ("work", "Work"),
        ("trouble", "Refused and failed"),
    ):
        if tables[name]:
            parts.append((heading, page.table(tables[name])))
    paths["report"] = str((folder / "report.html").resolve())
    Path(paths["report"]).write_text(page.page(title, intro, rows, parts))
    return paths


def curve_table(rows: list[dict]) -> list[dict]:
    """All curves, one line per point."""
    return [
        {
            "problem": curve.problem,
            "method": curve.method,
            "quantity": quantity,
            "axis": axis,
            "at": float(at),
            "median": float(median),
            "25 %": float(low),
            "75 %": float(high),
        }
        for axis in AXES
        for quantity in ("gap", "value")
        for curve in curves(rows, axis, quantity)
        for at, median, low, high in zip(
            curve.at, curve.median, curve.low, curve.high, strict=True
        )
    ]


def profile_table(rows: list[dict]) -> list[dict]:
    """All profiles, one line per jump."""
    return [
        {
            "gap": target,
            "axis": axis,
            "method": profile.method,
            "factor": float(factor),
            "share": profile.share(factor),
        }
        for target in TARGETS
        for axis in ("solves", "seconds")
        for profile in profiles(rows, axis, target)
        for factor in profile.ratios
    ]


def _write_table(folder: Path, name: str, table: list[dict]) -> dict[str, str]:
    texts = {"csv": to_csv(table), "tex": to_latex(table), "md": to_markdown(table)}
    paths = {}
    for ending, text in texts.items():
        paths[f"{name}.{ending}"] = str(folder / f"{name}.{ending}")
        (folder / f"{name}.{ending}").write_text(text)
    return paths


def _file(name: str) -> str:
    """A name for a file."""
    return "".join(mark if mark.isalnum() or mark in "-_." else "-" for mark in name)
