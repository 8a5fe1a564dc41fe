"""curves.png: the losses of a run's methods over its steps."""

import importlib
from collections.abc import Sequence
from pathlib import Path

import metrics

_COLORS = {
    "exact": "#3d3d3d",
    "remat": "#8a8a8a",
    "compact": "#d1495b",
    "galore": "#2e86ab",
}


def plot(folders: Sequence[Path]) -> Path | None:
    """Draws the metrics.jsonl of runs, in curves.png beside their folders.

    None without matplotlib, or anything to draw, or where it cannot be written.

    Faint, the loss of each training batch, with a tick below where there was a new
    projection; with dots, the validation loss.
    """
    try:
        figures = importlib.import_module("matplotlib.figure")
    except ImportError:
        return None
    runs = {folder.name: metrics.read(folder / "metrics.jsonl") for folder in folders}
    runs = {name: rows for name, rows in sorted(runs.items()) if rows}
    if not runs:
        return None
    figure = figures.Figure(figsize=(7, 4.3), layout="constrained")
    axes = figure.subplots()
    tops = []
    for name, rows in runs.items():
        color = _COLORS.get(name)
        train = [(row["step"], row["loss"]) for row in rows if "loss" in row]
        valid = [
            (row["step"], row["valid_loss"]) for row in rows if "valid_loss" in row
        ]
        axes.plot(*_columns(train), color=color, alpha=0.25, linewidth=0.8)
        for step in new_projections(rows):
            axes.axvline(step, ymax=0.02, color=color, linewidth=0.8)
        label = f"{name}  {valid[-1][1]:.3f}" if valid else name
        axes.plot(
            *_columns(valid),
            "o-",
            color=color,
            markersize=3.5,
            linewidth=1.5,
            label=label,
        )
        # The first steps' fall from log(vocabulary) would flatten all that follows.
        tops += [loss for step, loss in train if step >= len(train) / 20][:1]
    if tops:
        axes.set_ylim(top=max(tops))
    axes.set(xlabel="step", ylabel="loss (nats per token)")
    axes.legend(title="validation loss", frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#eeeeee")
    axes.set_axisbelow(True)
    path = folders[0].parent / "curves.png"
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        print(f"{path} cannot be written: {error.strerror}")
        return None
    return path


def new_projections(rows: list[dict]) -> list[int]:
    """The steps of which the projection is not that of the step before.

    >>> new_projections([{"step": n, "projection": n // 3} for n in range(1, 8)])
    [3, 6]
    """
    rows = [row for row in rows if "projection" in row]
    pairs = zip(rows, rows[1:], strict=False)
    return [b["step"] for a, b in pairs if a["projection"] != b["projection"]]


def _columns(points: list[tuple[int, float]]) -> tuple[list[int], list[float]]:
    return [x for x, _ in points], [y for _, y in points]
