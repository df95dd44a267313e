"""Figures from rows: PNG and SVG files, and SVG to be set into a page."""

import functools
import io
import re
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from .curves import AXES, Curve, curves, in_order
from .profiles import TARGETS, profiles

# Readable on white and on black, and told apart by colour-blind readers.
_COLOURS = (
    "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8f6bb8",
    "#8c6d4f",
)  # fmt: skip
_STYLES = ("-", "--", ":")
# Replaced by the colour of the text where a figure is set into a page.
_INK = "#1b1e23"
# Gaps below this are drawn at it: the best run ends with a gap of zero.
_FLOOR = 1e-9


def _pyplot():
    try:
        import matplotlib
    except ImportError as error:
        raise ImportError(
            "Figures are drawn with matplotlib: install bilevax[plot]. The rows are "
            "kept; the same command then makes the report from them."
        ) from error
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def _style():
    plt = _pyplot()
    ink = dict.fromkeys(
        (
            "text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color",
            "ytick.color", "axes.titlecolor", "grid.color",
        ),
        _INK,
    )  # fmt: skip
    style: Any = ink | {
        "font.size": 9,
        "font.family": "sans-serif",
        "svg.fonttype": "none",
        "svg.hashsalt": "bilevax",
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "grid.alpha": 0.15,
        "legend.frameon": False,
    }
    return plt.rc_context(style)


def _styled(function: Callable) -> Callable:
    """In the style of the house; ticks take their colours only when they are drawn."""

    @functools.wraps(function)
    def call(*arguments, **named):
        with _style():
            return function(*arguments, **named)

    return call


@_styled
def gap_figure(rows: list[dict], problem: str):
    """Gap of every method on one problem against iterations, solves and seconds."""
    mine = [row for row in rows if row["problem"] == problem]
    figure, axes = _canvas(1, len(AXES))
    looks = _looks(rows)
    for axis, place in zip(AXES, axes[0], strict=True):
        for curve in curves(mine, axis):
            _draw(place, curve, axis, looks[curve.method], floor=_FLOOR)
        place.set_yscale("log")
        _label(place, axis)
    axes[0, 0].set_ylabel("(F - F best) / (F start - F best)")
    _legend(figure, axes)
    return figure


@_styled
def value_figure(rows: list[dict], axis: str = "seconds", columns: int = 2):
    """`F` of every method against one axis, one panel per problem."""
    problems, looks = in_order(rows, "problem"), _looks(rows)
    count = -(-len(problems) // columns)
    figure, axes = _canvas(count, min(columns, len(problems)))
    for place in axes.flat[len(problems) :]:
        place.set_visible(False)
    found = curves(rows, axis, "value")
    for problem, place in zip(problems, axes.flat, strict=False):
        for curve in found:
            if curve.problem == problem:
                _draw(place, curve, axis, looks[curve.method])
        place.set_title(problem, fontsize=10)
        place.set_ylabel("F")
        _label(place, axis)
    _legend(figure, axes)
    return figure


@_styled
def profile_figure(rows: list[dict], targets=TARGETS):
    """Performance profiles by solves and by seconds, one row per target."""
    looks = _looks(rows)
    ran = {row["method"] for row in rows if row["status"] != "refused"}
    rows = [row for row in rows if row["method"] in ran]
    figure, axes = _canvas(len(targets), 2)
    for target, line in zip(targets, axes, strict=True):
        for axis, place in zip(("solves", "seconds"), line, strict=True):
            found = profiles(rows, axis, target)
            largest = max([2.0, *(p.ratios[-1] for p in found if len(p.ratios))])
            for profile in found:
                at = np.concatenate([[1.0], profile.ratios, [1.1 * largest]])
                share = np.array([profile.share(factor) for factor in at])
                colour, style = looks[profile.method]
                place.step(
                    at, share, where="post", label=profile.method, color=colour,
                    linestyle=style, linewidth=1.6,
                )  # fmt: skip
            _logarithmic(place)
            place.set_ylim(-0.03, 1.03)
            place.set_xlabel(f"times the {AXES[axis]} of the best")
            place.set_title(f"gap {target:g}", fontsize=10)
        line[0].set_ylabel("share of problems and seeds")
    _legend(figure, axes)
    return figure


@_styled
def save(figure, folder: Path, name: str) -> dict[str, str]:
    """Write `name.png` and `name.svg`; returns their paths by ending."""
    paths = {ending: str(folder / f"{name}.{ending}") for ending in ("png", "svg")}
    for path in paths.values():
        figure.savefig(path, dpi=150, facecolor="white")
    return paths


@_styled
def as_inline_svg(figure) -> str:
    """SVG without a background, its ink in the colour of the text around it."""
    file = io.StringIO()
    figure.savefig(file, format="svg", transparent=True)
    text = file.getvalue()
    text = text[text.index("<svg") :].replace(_INK, "currentColor")
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    # Figures on one page must not share names of their parts.
    mark = f"f{zlib.crc32(text.encode()):x}-"
    text = re.sub(r'(id="|url\(#|href="#)', rf"\g<1>{mark}", text)
    return re.sub(r'(<svg[^>]*?) width="[^"]*" height="[^"]*"', r"\1", text, count=1)


def close(figure) -> None:
    _pyplot().close(figure)


def _canvas(rows: int, columns: int):
    return _pyplot().subplots(
        rows, columns, figsize=(3.5 * columns, 2.7 * rows + 0.5), squeeze=False,
        layout="constrained",
    )  # fmt: skip


def _looks(rows: list[dict]) -> dict[str, tuple[str, str]]:
    """Colour and line of each method, the same in all figures of a report."""
    return {
        method: (
            _COLOURS[i % len(_COLOURS)],
            _STYLES[i // len(_COLOURS) % len(_STYLES)],
        )
        for i, method in enumerate(in_order(rows, "method"))
    }


def _draw(place, curve: Curve, axis: str, look: tuple[str, str], floor=-np.inf):
    colour, style = look
    # Looks of methods share iterations only; elsewhere a value holds until the next.
    steps = None if axis == "step" else "post"
    show = lambda y: np.where(np.isfinite(y), np.maximum(y, floor), np.nan)
    place.plot(
        curve.at, show(curve.median), color=colour, linestyle=style, linewidth=1.6,
        label=curve.method,
        drawstyle="default" if steps is None else "steps-post",
    )  # fmt: skip
    place.fill_between(
        curve.at, show(curve.low), show(curve.high), color=colour, alpha=0.18,
        linewidth=0, step=steps,
    )  # fmt: skip


def _label(place, axis: str):
    place.set_xlabel(AXES[axis])
    if axis == "seconds":
        _logarithmic(place)


def _logarithmic(place):
    """A logarithmic axis with a few plain numbers; for a panel that is drawn."""
    from matplotlib import ticker

    place.set_xscale("log")
    low, high = place.get_xlim()
    marks = (1, 2, 5) if high < 100 * low else (1,)
    place.xaxis.set_major_locator(ticker.LogLocator(10, marks))
    place.xaxis.set_major_formatter(ticker.StrMethodFormatter("{x:g}"))
    place.xaxis.set_minor_formatter(ticker.NullFormatter())


def _legend(figure, axes):
    """One for all panels, above them."""
    known = {}
    for place in axes.flat:
        for line, name in zip(*place.get_legend_handles_labels(), strict=True):
            known.setdefault(name, line)
    if known:
        # As many as fit the width, with names as long as these.
        widest = 0.6 + 0.085 * max(map(len, known))
        columns = min(len(known), max(1, int(figure.get_figwidth() / widest)))
        figure.legend(known.values(), known, loc="outside upper center", ncols=columns)
