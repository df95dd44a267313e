"""Figure, table and page from rows; nothing here computes."""

import html
from collections import defaultdict
from pathlib import Path

import matplotlib
import numpy as np

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402


def write_report(folder: Path, rows: list[dict]) -> dict:
    """Write `figure.png`, `figure.svg`, `table.csv` and `report.html`."""
    groups = _groups(rows)
    figure = _figure(groups)
    paths = {}
    for ending in ("png", "svg"):
        paths[ending] = str(folder / f"figure.{ending}")
        figure.savefig(paths[ending], dpi=150)
    plt.close(figure)
    table = _table(groups)
    lines = [",".join(table[0])] + [",".join(map(str, row.values())) for row in table]
    (folder / "table.csv").write_text("\n".join(lines) + "\n")
    page = _page(Path(paths["svg"]).read_text(), table)
    (folder / "report.html").write_text(page)
    report = str((folder / "report.html").resolve())
    return {**paths, "table": str(folder / "table.csv"), "report": report}


def _groups(rows):
    groups = defaultdict(list)
    for row in rows:
        groups[row["size"], row["family"]].append(row)
    return dict(sorted(groups.items()))


def _figure(groups):
    """Gap to the best value, against iterations (top) and seconds (bottom)."""
    figure, axes = plt.subplots(
        2, len(groups), figsize=(3.4 * len(groups), 5.6), squeeze=False,
        layout="constrained",
    )  # fmt: skip
    for column, ((size, family), rows) in enumerate(groups.items()):
        for axis, key in zip(axes[:, column], ("step", "seconds"), strict=True):
            for row in rows:
                best = min(row["polished"], *row["value"])
                scale = max(abs(row["value"][0] - best), 1e-300)
                gap = np.maximum((np.array(row["value"]) - best) / scale, 1e-12)
                at = np.array(row[key], float)
                axis.semilogy(at, gap, color="C0", alpha=0.6, linewidth=1.2)
            axis.set_xlabel("iterations" if key == "step" else "seconds")
            axis.grid(alpha=0.3)
        axes[0, column].set_title(f"d = {size}, {family}")
    for axis in axes[:, 0]:
        axis.set_ylabel("(F - F best) / (F start - F best)")
    return figure


def _table(groups):
    table = []
    for (size, family), rows in groups.items():
        ends = np.array([row["value"][-1] for row in rows])
        polished = np.array([row["polished"] for row in rows])
        seconds = np.array([row["seconds"][-1] for row in rows])
        steps = np.array([row["step"][-1] for row in rows])
        table.append(
            {
                "d": size,
                "family": family,
                "runs": len(rows),
                "F after the run (median)": f"{np.median(ends):.6f}",
                "F after the polish (median)": f"{np.median(polished):.6f}",
                "steps": int(np.median(steps)),
                "seconds (median)": f"{np.median(seconds):.3f}",
                "seconds to compile": f"{rows[0]['compile']:.1f}",
            }
        )
    return table


def _page(svg: str, table: list[dict]) -> str:
    head = "".join(f"<th>{html.escape(name)}</th>" for name in table[0])
    body = "".join(
        "<tr>"
        + "".join(f"<td>{html.escape(str(v))}</td>" for v in row.values())
        + "</tr>"
        for row in table
    )
    drawing = svg[svg.index("<svg") :]
    return f"""<!doctype html>
<meta charset="utf-8"><title>bilevax: the numerical experiment</title>
<style>
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; }}
table {{ border-collapse: collapse; }}
td, th {{ padding: .3rem .8rem; text-align: right; border-bottom: 1px solid #ddd; }}
svg {{ max-width: 100%; height: auto; }}
</style>
<h1>DS-BLO on random quadratic problems</h1>
<p>The family of section 4.1 of the paper: both levels have d variables, the rows of the
lower level couple both. In the uniform family no row is active at the minimiser; in the
tight family several are. One line per seed, from x = 1; F is evaluated with the
unperturbed lower level, solved exactly. Seconds exclude compilation.</p>
{drawing}
<table><tr>{head}</tr>{body}</table>
"""
