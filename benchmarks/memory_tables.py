"""The rows of memory.py as tables and as a plot."""

from collections.abc import Sequence
from pathlib import Path

from jaxcompact import memory


def matrix(rows: Sequence[dict]) -> str:
    """A line for each setting, a column for each method."""
    methods = list(dict.fromkeys(row["method"] for row in rows))
    found = {(_setting(row), row["method"]): row for row in rows}
    lines = [["model, tokens", *methods], ["---"] * (1 + len(methods))]
    for setting in dict.fromkeys(map(_setting, rows)):
        each = (found.get((setting, method)) for method in methods)
        cells = (f"{row['peak_bytes'] / 2**30:.2f}" if row else "" for row in each)
        lines.append([setting, *cells])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _setting(row: dict) -> str:
    several = f" on {row['devices']}" if row["devices"] > 1 else ""
    return f"{row['model']}, {row.get('batch', 'n')} x {row['seq']}{several}"


def markdown(rows: Sequence[dict]) -> str:
    kinds = _shown(rows)
    head = ["model, tokens", "method", "peak GiB", *kinds, "matmuls", "attention"]
    measured = any("measured_bytes" in row for row in rows)
    lines = [head + ["measured"] * measured, ["---"] * (len(head) + measured)]
    for row in rows:
        cells = [
            _setting(row),
            row["method"],
            f"{row['peak_bytes'] / 2**30:.2f}",
            *(f"{row['breakdown'].get(kind, 0) / 2**30:.2f}" for kind in kinds),
            str(row["matmuls"]),
            f"{row['attention_forwards']} + {row['attention_backwards']}",
        ]
        if measured:
            cells.append(f"{row['measured_bytes'] / 2**30:.2f}")
        lines.append(cells)
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _shown(rows: Sequence[dict]) -> list[str]:
    """The kinds that can be seen; older rows lack the newest."""
    return [
        kind
        for kind in memory.KINDS
        if any(r["breakdown"].get(kind, 0) > 0.002 * r["peak_bytes"] for r in rows)
    ]


def batches(rows: Sequence[dict], budgets: Sequence[str]) -> str:
    lines = [["model, tokens", "method", *budgets], ["---"] * (2 + len(budgets))]
    found = {(_setting(row), row["method"], row["device"]): row for row in rows}
    for setting, method in dict.fromkeys(key[:2] for key in found):
        cells = [setting, method]
        for budget in budgets:
            row = found.get((setting, method, budget))
            exact = found.get((setting, "exact", budget))
            text = "" if row is None else str(row["largest_batch"])
            if row and exact and exact["largest_batch"] and method != "exact":
                text += f" ({row['largest_batch'] / exact['largest_batch']:.1f}x)"
            cells.append(text)
        lines.append(cells)
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def plot(rows: Sequence[dict], path: Path) -> None:
    """A panel for each model; in it a bar for each method, of what it is made of."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    groups: dict[tuple, list[dict]] = {}
    for row in rows:
        key = row["model"], row["batch"], row["seq"], row["devices"], row["device"]
        groups.setdefault(key, []).append(row)
    across = min(len(groups), 4)
    down = -(-len(groups) // across)
    width = sum(sorted(map(len, groups.values()))[-across:])
    figure, panels = plt.subplots(
        down, across, squeeze=False, figsize=(2 + 0.7 * width, 4.2 * down)
    )
    kinds = _shown(rows)
    colors = dict(zip(memory.KINDS, plt.get_cmap("tab10").colors, strict=False))
    panels = list(panels.flat)
    for axes, (setting, bars) in zip(panels, groups.items(), strict=False):
        _panel(axes, setting, bars, {kind: colors[kind] for kind in kinds})
    for axes in panels[len(groups) :]:
        axes.set_axis_off()
    for axes in panels[::across]:
        axes.set_ylabel("peak of one card, GiB")
    handles, labels = panels[0].get_legend_handles_labels()
    spare = panels[len(groups) :]
    where = spare[0] if spare else panels[0]
    where.legend(
        handles[::-1],
        labels[::-1],
        frameon=False,
        fontsize=8,
        loc="center" if spare else "best",
    )
    figure.tight_layout()
    figure.savefig(path, dpi=100)


def _panel(axes, setting: tuple, rows: Sequence[dict], colors: dict[str, tuple]):
    model, batch, seq, devices, device = setting
    several = f"on {devices} {memory.devices()[device].name}"
    axes.set_title(f"{model}, {batch} x {seq} tokens\n{several}", fontsize=9)
    bottom = [0.0] * len(rows)
    for kind, color in colors.items():
        heights = [row["breakdown"][kind] / 2**30 for row in rows]
        methods = [row["method"].replace("+", "\n+") for row in rows]
        axes.bar(methods, heights, bottom=bottom, label=kind, color=color)
        bottom = [a + b for a, b in zip(bottom, heights, strict=True)]
    for i, row in enumerate(rows):
        total = row["peak_bytes"] / 2**30
        axes.text(i, total, f"{total:.1f}", ha="center", va="bottom", fontsize=8)
    axes.set_ylim(0, 1.1 * max(bottom))
    axes.tick_params(axis="x", labelsize=7, rotation=45)
    axes.spines[["top", "right"]].set_visible(False)
