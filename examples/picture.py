"""Draws what the README shows: revenue over two tolls, its kinks, a run of DS-BLO.

python examples/picture.py [OUT.svg]
"""

import sys
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import matplotlib
import matplotlib.pyplot as plt
import numpy as np

import bilevax as bx

jax.config.update("jax_enable_x64", True)

from tolls import problem, x0  # noqa: E402

BLUE, ORANGE, INK = "#0072b2", "#d55e00", "#444444"


@eqx.filter_jit
def evaluate(points):
    return jax.vmap(lambda x: bx.hypergradient(problem, x, throw=False))(points)


def path() -> np.ndarray:
    """The iterates of DS-BLO, and where its polish ended."""
    seen = [np.asarray(x0)]
    solution = bx.solve(
        problem, bx.DSBLO(), x0, key=jax.random.key(0), chunk=1,
        callback=lambda step, x, value, history: seen.append(np.asarray(x)),
    )  # fmt: skip
    return np.stack([*seen, np.asarray(solution.x)])


def draw_plane(axes) -> None:
    """Revenue over both tolls; one shade for each set of active rows."""
    ticks = np.linspace(0, 5, 161)
    grid = np.stack(np.meshgrid(ticks, ticks), axis=-1).reshape(-1, 2)
    e = evaluate(jnp.asarray(grid))
    shape = (len(ticks), len(ticks))
    pieces = np.asarray(e.lower.active) @ 2 ** np.arange(e.lower.active.shape[-1])
    shades = np.random.default_rng(1).permutation(len(np.unique(pieces)))
    shade = shades[np.searchsorted(np.unique(pieces), pieces)].reshape(shape)
    axes.imshow(
        shade, extent=(0, 5, 0, 5), origin="lower", cmap="tab20", alpha=0.3,
        interpolation="nearest", aspect="auto",
    )  # fmt: skip
    revenue = -np.asarray(e.value).reshape(shape)
    levels = np.arange(0.5, 6, 0.5)
    axes.contour(ticks, ticks, revenue, levels=levels, colors=INK, linewidths=0.6)
    steps = path()
    axes.plot(*steps.T, color=ORANGE, linewidth=1.2, label="DS-BLO")
    axes.plot(*steps[0], "o", color=ORANGE, markersize=4)
    axes.plot(*steps[-1], "*", color=ORANGE, markersize=13, label="best tolls")
    axes.set(xlabel="toll 1", ylabel="toll 2", title="revenue and the active sets")
    axes.legend(loc="lower left", framealpha=0.9, edgecolor="none")


def draw_slice(axes) -> None:
    """Revenue along the first toll, with gradients left and right of each kink."""
    ticks = np.linspace(0.5, 5, 400)
    line = lambda first: np.stack([first, np.full_like(first, 3.0)], axis=-1)
    e = evaluate(jnp.asarray(line(ticks)))
    revenue, active = -np.asarray(e.value), np.asarray(e.lower.active)
    axes.plot(ticks, revenue, color=BLUE)
    changes = np.flatnonzero(np.any(active[1:] != active[:-1], axis=-1))
    for i in changes:
        for side in (i - 1, i + 2):
            slope = -float(e.grad[side, 0])
            reach = np.array([-0.35, 0.35])
            axes.plot(
                ticks[side] + reach, revenue[side] + slope * reach, color=ORANGE,
                linewidth=1.2,
            )  # fmt: skip
        axes.plot(ticks[i], revenue[i], "o", color=INK, markersize=4)
    axes.set(
        xlabel="toll 1, toll 2 being 3", ylabel="revenue",
        title="gradients on both sides of each kink",
    )  # fmt: skip


def main(out: Path) -> None:
    matplotlib.use("Agg")
    plt.rcParams.update(
        {
            "font.size": 9,
            "svg.fonttype": "none",
            "svg.hashsalt": "bilevax",
            "axes.spines.top": False,
            "axes.spines.right": False,
        }
    )
    figure, (left, right) = plt.subplots(1, 2, figsize=(8, 3.4), layout="constrained")
    draw_plane(left)
    draw_slice(right)
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, metadata={"Date": None})
    print(f"picture: {out}")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "results/tolls.svg"))
