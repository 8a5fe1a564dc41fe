"""The rows of `step.py` as a table, each beside the exact step of the same run.

python benchmarks/table.py benchmarks/results/gpu/step.jsonl
"""

import json
import sys
from pathlib import Path


def main() -> None:
    rows = [json.loads(line) for line in Path(sys.argv[1]).read_text().splitlines()]
    exact = next((row for row in rows if row["part"] == "exact"), rows[0])
    print("| part | step ms | range | tokens/s | peak GiB | of exact's time | peak |")
    print("|---|---|---|---|---|---|---|")
    for row in rows:
        peak, whole = (r["peak_bytes"] or r["compiled_bytes"] for r in (row, exact))
        low, high = row["step_ms_range"]
        print(
            f"| {row['part']} | {row['step_ms']:.1f} | {low:.1f} to {high:.1f} "
            f"| {row['tokens_per_s']} | {peak / 2**30:.2f} "
            f"| {row['step_ms'] / exact['step_ms']:.2f} | {peak / whole:.2f} |"
        )
    said = "{device}, jax {jax}, commit {commit}, {date}; {model}, {batch} x {seq}"
    print("\n" + said.format(**exact) + f", {exact['dtype']}")


if __name__ == "__main__":
    main()
