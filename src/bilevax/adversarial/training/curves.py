"""Curves of a training run, from its rows."""

from pathlib import Path

# A column of the rows, and what it is called in the figure.
_PANELS = (
    (("loss", "loss under the training attack"),),
    (
        ("accuracy", "training attack"),
        ("robust", "PGD (training images)"),
        ("clean", "clean (training images)"),
        ("validation", "PGD, averaged weights (validation)"),
    ),
)


def draw(rows: list[dict], path: str | Path) -> Path | None:
    """Loss and accuracies against epochs; None where matplotlib is missing."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return None
    figure = Figure(figsize=(8, 3), layout="constrained")
    for axes, panel in zip(figure.subplots(1, len(_PANELS)), _PANELS, strict=True):
        for column, label in panel:
            epochs = [row["epoch"] for row in rows if column in row]
            axes.plot(
                epochs, [row[column] for row in rows if column in row], label=label
            )
        axes.set_xlabel("epoch")
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(path)
    return Path(path)
