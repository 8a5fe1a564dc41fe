"""What whole steps move through a card's memory, as compiled: the least they take.

    pip install ".[train,memory]"
    python benchmarks/traffic.py run      # the rows of docs/results.md; needs no card
    python benchmarks/traffic.py table

Methods as of memory.py, with the kernels that an H200 takes; ", XLA": without them. A
step's time is the sum over its operations of bytes or products at an H200's full rate,
whichever take longer: nothing can be faster.
"""

import argparse
import json
import sys
from contextlib import nullcontext
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "train"), str(ROOT / "benchmarks")]
RESULTS = ROOT / "benchmarks/results/traffic.jsonl"

import memory  # noqa: E402
from provenance import append, provenance, rows_of  # noqa: E402

from jaxcompact.kernels import choice  # noqa: E402
from jaxcompact.memory import compiler, devices  # noqa: E402
from jaxcompact.memory.traffic import KINDS, traffic  # noqa: E402

METHODS = (
    "exact",
    "dots_no_batch",
    "remat",
    "int8",
    "int4",
    "int4, XLA",
    "compact",
    "compact+remat",
    "compact+int4",
    "compact+int4, XLA",
)
SETTINGS = [("350m", 128, 256), ("1b", 32, 1024)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("command", choices=("run", "table"))
    if parser.parse_args().command == "table":
        print(table())
        return
    known = {key(row) for row in rows_of(RESULTS)}
    for setting in SETTINGS:
        for method in METHODS:
            if (*setting, method) not in known:
                row = measure(*setting, method)
                print(json.dumps(row), flush=True)
                append(RESULTS, row)


def measure(model: str, batch: int, seq: int, method: str) -> dict:
    name, _, alone = method.partition(", ")
    step, args = memory.make_step(model, batch, seq, 1, name)
    card = devices()["h200"]
    with choice.using("xla") if alone else nullcontext():
        lowered = compiler.lower(step, args, card, None, None)
        compiled = compiler.compile_lowered(lowered, card)
    found = traffic(compiled.text, card)
    return {
        "model": model,
        "batch": batch,
        "seq": seq,
        "method": method,
        "peak_bytes": compiled.peak_bytes,
        "kinds": {kind: moved._asdict() for kind, moved in found.items()},
        **provenance(),
        "device": "h200",
    }


def key(row: dict) -> tuple:
    return tuple(row[name] for name in ("model", "batch", "seq", "method"))


def table() -> str:
    made = {key(row): row for row in rows_of(RESULTS)}
    kinds = [k for k in KINDS if any(k in row["kinds"] for row in made.values())]
    head = ("model, tokens", "method", "peak GiB", *kinds, "at least ms", "of exact")
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for setting in SETTINGS:
        model, batch, seq = setting
        for method in METHODS:
            row, exact = made[*setting, method], made[*setting, "exact"]
            cells = [f"{model}, {batch} x {seq}", method]
            cells += [f"{row['peak_bytes'] / 2**30:.2f}"]
            moved = (row["kinds"].get(kind) for kind in kinds)
            cells += [f"{m['seconds'] * 1e3:.1f}" if m else "" for m in moved]
            cells += [f"{seconds(row) * 1e3:.1f}"]
            cells += [f"{seconds(row) / seconds(exact):.2f}"]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def seconds(row: dict) -> float:
    return sum(moved["seconds"] for moved in row["kinds"].values())


if __name__ == "__main__":
    main()
