"""Tables from rows, and tables as text: CSV, LaTeX, Markdown, HTML, plain."""

import csv
import html
import io
import math
from typing import Any

import numpy as np

from .curves import gaps, grouped, read_looks, references

# Counters of work, and how a table calls them.
_WORK = {
    "lower_solves": "LL solves",
    "lower_passes": "LL iterations",
    "upper_gradients": "UL gradients",
    "hessian_products": "Hessian products",
    "linear_solves": "linear solves",
    "penalty_solves": "penalty or saddle solves",
    "samples": "samples",
}
_LATEX = {
    "\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}",
    **{mark: "\\" + mark for mark in "&%$#_{}"},
}  # fmt: skip


def result_table(rows: list[dict]) -> list[dict]:
    """The end of the runs of every method on every problem, and what tuning cost."""
    known, table = references(rows), []
    for (problem, method), runs in _ran(rows):
        ended = [row for row in runs if len(read_looks(row).value)]
        ends = [read_looks(row).value[-1] for row in ended]
        tuning = runs[0]["tuning"] or {}
        low, median, high = _quartiles(ends)
        table.append(
            {
                "problem": problem,
                "method": method,
                "runs": len(runs),
                "failed": sum(row["status"] == "failed" for row in runs),
                "F (median)": median,
                "F (25 %)": low,
                "F (75 %)": high,
                "gap (median)": _median([gaps(row, known)[-1] for row in ended]),
                "seconds": _median([read_looks(row).seconds[-1] for row in ended]),
                "seconds to compile": _median(
                    [row["compile_seconds"] for row in ended]
                ),
                "step": tuning.get("chosen"),
                "trials": tuning.get("trials", 0),
                "solves of trials": tuning.get("solves", 0),
                "seconds of trials": tuning.get("seconds", 0.0),
            }
        )
    return table


def summary(rows: list[dict]) -> str:
    """The end of the runs for a terminal; then refusals and failures."""
    names = (
        "problem", "method", "runs", "failed", "F (median)", "gap (median)", "seconds",
        "step",
    )  # fmt: skip
    lines = [
        to_text([{name: row[name] for name in names} for row in result_table(rows)])
    ]
    for row in trouble_table(rows):
        lines.append(f"{row['method']} on {row['problem']} {row['what']}: {row['why']}")
    return "\n".join(filter(None, lines))


def work_table(rows: list[dict]) -> list[dict]:
    """Medians over the runs of all counters."""
    table = []
    for (problem, method), runs in _ran(rows):
        counted = [row["totals"] for row in runs if row["totals"]]
        work = {
            title: _median([totals[name] for totals in counted])
            for name, title in _WORK.items()
        }
        steps = [row["step"][-1] for row in runs if row["step"]]
        table.append(
            {"problem": problem, "method": method, "iterations": _median(steps)} | work
        )
    return table


def trouble_table(rows: list[dict]) -> list[dict]:
    """Refusals, failures and runs without a result, with their reasons."""
    bad = [row for row in rows if row["status"] != "finished"]
    for row in rows:
        if row["status"] == "finished" and _only_started(row):
            why = "the budget was spent before the first look; look more often."
            bad.append(row | dict(status="has no result", message=why))
    groups = grouped(bad, "problem", "method", "status", "message")
    names = ("problem", "method", "what", "why")
    return [
        dict(zip(names, key, strict=True)) | {"runs": len(group)}
        for key, group in groups.items()
    ]


def _only_started(row: dict) -> bool:
    """Whether no look but that at the start lies within the budget."""
    return len(row["value"]) > 1 and len(read_looks(row).value) == 1


def _ran(rows: list[dict]):
    ran = [row for row in rows if row["status"] != "refused"]
    return grouped(ran, "problem", "method").items()


def _median(numbers: list) -> float | None:
    return _quartiles(numbers)[1]


def _quartiles(numbers: list) -> list:
    known = [number for number in numbers if number is not None]
    if not known:
        return [None, None, None]
    return [float(q) for q in np.quantile(known, (0.25, 0.5, 0.75))]


def shown(value: Any) -> str:
    """A number as a person reads it."""
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return "-"
    if isinstance(value, float):
        if value == int(value) and abs(value) < 1e6:
            return str(int(value))
        return f"{value:.4g}"
    return str(value)


def to_csv(table: list[dict]) -> str:
    """All digits; empty where there is no number."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(table[0] if table else [])
    for row in table:
        writer.writerow("" if shown(v) == "-" else v for v in row.values())
    return file.getvalue()


def to_latex(table: list[dict]) -> str:
    """A `tabular` that needs no package."""
    escaped = lambda text: text.translate(str.maketrans(_LATEX))
    line = lambda cells: " & ".join(escaped(shown(cell)) for cell in cells) + r" \\"
    if not table:
        return ""
    return "\n".join(
        [
            rf"\begin{{tabular}}{{{_alignment(table, 'l', 'r')}}}",
            r"\hline",
            line(table[0]),
            r"\hline",
            *(line(row.values()) for row in table),
            r"\hline",
            r"\end{tabular}",
            "",
        ]
    )


def to_markdown(table: list[dict]) -> str:
    if not table:
        return ""
    escaped = lambda text: text.replace("|", r"\|").replace("\n", " ")
    line = lambda cells: "| " + " | ".join(escaped(shown(c)) for c in cells) + " |"
    rule = [{"l": "---", "r": "---:"}[kind] for kind in _alignment(table, "l", "r")]
    return "\n".join(
        [line(table[0]), line(rule), *(line(row.values()) for row in table), ""]
    )


def to_html(table: list[dict]) -> str:
    if not table:
        return ""
    kinds = _alignment(table, "l", "r")

    def line(cells, tag):
        parts = [
            f'<{tag} class="{kind}">{html.escape(shown(cell))}</{tag}>'
            for kind, cell in zip(kinds, cells, strict=True)
        ]
        return "<tr>" + "".join(parts) + "</tr>"

    body = "\n".join(line(row.values(), "td") for row in table)
    head = line(table[0], "th")
    return f"<table><thead>{head}</thead>\n<tbody>{body}</tbody></table>"


def to_text(table: list[dict]) -> str:
    """Columns for a terminal."""
    if not table:
        return ""
    cells = [list(table[0])] + [[shown(v) for v in row.values()] for row in table]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    kinds = _alignment(table, "l", "r")
    pad = lambda text, width, kind: (
        text.ljust(width) if kind == "l" else text.rjust(width)
    )
    return "\n".join(
        "  ".join(map(pad, line, widths, kinds)).rstrip() for line in cells
    )


def _alignment(table: list[dict], text: str, number: str) -> str:
    """One letter per column: words to the left, numbers to the right."""
    columns = zip(*(row.values() for row in table), strict=True)
    is_text = [any(isinstance(v, str) for v in column) for column in columns]
    return "".join(text if words else number for words in is_text)
