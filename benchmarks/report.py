"""What `gpu.sh` measured, as tables.

    python benchmarks/report.py [OUT]            prints them
    python benchmarks/report.py [OUT] --write    puts them in docs/results.md

OUT is gpu.sh's folder, benchmarks/results/gpu. Steps stand beside the exact one of
their model and run, kernels beside XLA's code of theirs.
"""

import argparse
import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))

from provenance import rows_of  # noqa: E402

RESULTS = ROOT / "docs/results.md"
GPU = ROOT / "benchmarks/results/gpu"
HEADING = "## On a GPU\n"
PRINTED = {  # by parts that print tables themselves
    "memory": "Peak, compiled and of the allocator",
    "actions": "What a plan of LLaMA-350M weighs, modelled and measured",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", metavar="OUT", nargs="?", type=Path, default=GPU)
    parser.add_argument("--write", action="store_true", help=f"in {RESULTS.name}")
    arguments = parser.parse_args()
    folder = arguments.folder
    if not (folder / "step.jsonl").exists():
        raise SystemExit(f"{folder} holds no step.jsonl: benchmarks/gpu.sh makes it")
    text = report(folder)
    print(text)
    if arguments.write:
        RESULTS.write_text(written(RESULTS.read_text(), text))


def report(folder: Path) -> str:
    steps, kernels = rows_of(folder / "step.jsonl"), rows_of(folder / "kernels.jsonl")
    parts = []
    for setting in dict.fromkeys(map(setting_of, steps)):
        some = [row for row in steps if setting_of(row) == setting]
        model, batch, seq, dtype = setting
        heading = f"**{model}, {batch} x {seq} tokens, {dtype}** ({made(some)}):"
        parts += [heading, step_table(some)]
    if kernels:
        parts += [f"**Kernels** ({made(kernels)}):", kernel_table(kernels)]
    losses = {
        file.stem.removeprefix("train_"): rows_of(file)
        for file in sorted(folder.glob("train_*.jsonl"))
    }
    for name, heading in PRINTED.items():
        file = folder / f"{name}.log"
        lines = file.read_text().splitlines() if file.exists() else []
        if table := "\n".join(line for line in lines if line.startswith("|")):
            parts += [f"**{heading}**:", table]
    if losses:
        parts += ["**Losses at equal steps**:", loss_table(losses)]
    return "\n\n".join(parts)


def made(some: list[dict]) -> str:
    """Where, with what, of which code and when."""
    said = "{device}, jax {jax}, commit {commit}, {date}"
    return "; ".join(dict.fromkeys(said.format(**row) for row in some))


def setting_of(row: dict) -> tuple:
    return tuple(row[name] for name in ("model", "batch", "seq", "dtype"))


def step_table(some: list[dict]) -> str:
    """Without an exact step of that setting, as at the largest batches: no ratios."""
    exact = [r for r in some if r["part"].removeprefix("1b_") == "exact"]
    names = (
        "part",
        "step ms",
        "range",
        "at least",
        "tokens/s",
        "peak GiB",
        "the allocator's",
        "of exact's time",
        "peak",
    )
    lines = [f"| {' | '.join(names)} |", "|---" * len(names) + "|"]
    for row in some:
        low, high = row["step_ms_range"]
        least = f"{row['least_ms']:.1f}" if row.get("least_ms") else ""
        peak, counted = row["compiled_bytes"], row["peak_bytes"]
        allocated = f"{counted / 2**30:.2f}" if counted else ""
        ratios = ("", "")
        if exact:
            time = row["step_ms"] / exact[0]["step_ms"]
            ratios = f"{time:.2f}", f"{peak / exact[0]['compiled_bytes']:.2f}"
        lines.append(
            f"| {row['part']} | {row['step_ms']:.1f} | {low:.1f} to {high:.1f} "
            f"| {least} | {row['tokens_per_s']:,} | {peak / 2**30:.2f} | {allocated} "
            f"| {ratios[0]} | {ratios[1]} |"
        )
    return "\n".join(lines)


def kernel_table(some: list[dict]) -> str:
    """Of each case the kernel as the card runs it: of all configs that were tried."""
    names = "op", "case", "XLA µs", "in parts", "kernel", "of XLA's speed"
    names += "of the copy's", "of the plain op's"
    lines = [f"| {' | '.join(names)} |", "|---" * len(names) + "|"]
    cases: dict[tuple[str, str], list[dict]] = {}
    for row in some:
        cases.setdefault((row["op"], row["case"]), []).append(row)
    for (op, case), same in cases.items():
        by = {row["implementation"]: row for row in same if "error" not in row}
        kernel = taken(op, [r for r in same if r["implementation"] == "mosaic_gpu"])
        shown = [
            f"{by[name]['microseconds']:.0f}" if name in by else ""
            for name in ("xla", "in parts")
        ]
        if kernel is None:
            lines.append(f"| {op} | {case} | {' | '.join(shown)} | | | | |")
            continue
        ratios = (
            f"{kernel[name]:.2f}" if name in kernel else ""
            for name in ("of_copy", "of_plain")
        )
        lines.append(
            f"| {op} | {case} | {' | '.join(shown)} | {kernel['microseconds']:.0f} "
            f"| {kernel['of_xla']:.2f} | {' | '.join(ratios)} |"
        )
    return "\n".join(lines)


def taken(op: str, tried: list[dict]) -> dict | None:
    """The row of the config that the card has figures of, or the fastest one."""
    tried = [row for row in tried if "error" not in row]
    if not tried:
        return None
    folder = "quantize" if "quantize" in op else op
    figures = json.loads((ROOT / f"kernels/{folder}/config.json").read_text())[op]
    config = figures.get(tried[0]["device"])
    same = [row for row in tried if row["config"] in (config, None)]
    return min(same or tried, key=lambda row: row["microseconds"])


def loss_table(losses: dict[str, list[dict]]) -> str:
    lines = ["| training | steps | validation loss |", "|---|---|---|"]
    for name, found in losses.items():
        last = [row for row in found if "valid_loss" in row][-1]
        lines.append(f"| {name} | {last['step']} | {last['valid_loss']:.4f} |")
    return "\n".join(lines)


def written(page: str, text: str) -> str:
    """The page with this as its first section, in the place of the one before."""
    start = page.index("\n## ") + 1
    end = start
    if page[start:].startswith(HEADING):
        end = page.index("\n## ", start) + 1
    command = "```sh\nbenchmarks/gpu.sh && python benchmarks/report.py --write\n```"
    return f"{page[:start]}{HEADING}\n{command}\n\n{text}\n\n{page[end:]}"


if __name__ == "__main__":
    main()
