"""A RoBERTa made here from masked words, then fine-tuned, exact and compressed.

    python benchmarks/finetuning.py run --data ../shared/data
    python benchmarks/finetuning.py table
    python benchmarks/finetuning.py memory    # of roberta-base, compiled for an H200

The weights come from `pretrain.py --model roberta-tiny` on english_novels; the task is
banking77. `run` appends rows to benchmarks/results/finetuning.jsonl; those that are
there are not made again.
"""

import argparse
import dataclasses
import json
import statistics
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "train"), str(ROOT / "benchmarks")]

from provenance import append, provenance, rows_of  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "finetuning.jsonl"

SEEDS = (0, 1)
PRETRAINING = [
    *("--model", "roberta-tiny", "--method", "exact", "--tokenizer", "roberta:1024"),
    *("--max-tokens", "2000000", "--batch-size", "16", "--seq-len", "64"),
    *("--steps", "500", "--lr", "1e-3", "--eval-every", "100", "--log-every", "100"),
    "--export",
]
TASK = [
    *("--task", "classify", "--label-column", "category", "--seq-len", "32"),
    *("--batch-size", "32", "--epochs", "4", "--lr", "1e-3", "--log-every", "300"),
]
VARIANTS = {
    "exact": ["--method", "exact"],
    "exact, int4": ["--method", "exact", "--checkpoint", "int4"],
    "CompAct r = 8": ["--method", "compact", "--rank", "8"],
    "CompAct r = 4": ["--method", "compact", "--rank", "4"],
    "CompAct r = 4, a quarter of the rate": [
        *("--method", "compact", "--rank", "4", "--lr", "2.5e-4"),
    ],
    "CompAct r = 8, int4": [
        *("--method", "compact", "--rank", "8", "--checkpoint", "int4"),
    ],
    "GaLore r = 8": ["--method", "galore", "--rank", "8"],
}


def run(data: Path, out: Path) -> None:
    import finetune
    import pretrain

    weights = out / "words" / "exact" / "weights"
    if not weights.is_dir():
        given = ["--data", str(data / "english_novels"), "--out", str(out / "words")]
        if pretrain.main([*PRETRAINING, *given, "--overwrite"]):
            raise SystemExit("the pretraining failed")
    summary = json.loads((weights.parent / "summary.json").read_text())
    have = {(row["label"], row["seed"]) for row in rows_of(RESULTS)}
    for seed in SEEDS:
        for label, options in VARIANTS.items():
            if (label, seed) in have:
                continue
            folder, start = out / f"{label}-{seed}", time.perf_counter()
            given = [
                *("--task-data", str(data / "banking77"), "--weights", str(weights)),
                *("--out", str(folder), "--seed", str(seed), "--overwrite"),
            ]
            if finetune.main([*TASK, *options, *given]):
                raise SystemExit(f"{label} failed")
            (path,) = folder.glob("*/summary.json")
            found = json.loads(path.read_text())
            row = {
                "label": label,
                "seed": seed,
                "accuracy": found["scores"]["accuracy"],
                "gradient_bytes": found["gradient_bytes"],
                "optimizer_bytes": found["optimizer_bytes"],
                "words_loss": summary["valid_loss"],
                "seconds": round(time.perf_counter() - start, 1),
            }
            append(RESULTS, row | provenance())


def table() -> None:
    done = rows_of(RESULTS)
    print("| method | accuracy % | of seeds | gradients MiB | optimizer MiB |")
    print("|---|---|---|---|---|")
    for label in VARIANTS:
        own = [row for row in done if row["label"] == label]
        if not own:
            print(f"| {label} | not run yet | | | |")
            continue
        scores = [100 * row["accuracy"] for row in own]
        each = ", ".join(f"{score:.1f}" for score in sorted(scores))
        held = (own[0][f"{name}_bytes"] / 2**20 for name in ("gradient", "optimizer"))
        sizes = " | ".join(f"{size:.1f}" for size in held)
        print(f"| {label} | {statistics.fmean(scores):.1f} | {each} | {sizes} |")


def memory() -> None:
    """CompAct's peaks on RTE: batches of 16, 512 tokens, bfloat16, float32 moments."""
    import jax
    import jax.numpy as jnp
    import optax

    import jaxcompact as jc
    from configs import MODELS
    from dropout import noise_of
    from methods import Method
    from roberta import Examples
    from training import Training

    cfg = dataclasses.replace(MODELS["roberta-base"], labels=2)
    tokens = jax.ShapeDtypeStruct((1, 16, 512), jnp.int32)
    target = jax.ShapeDtypeStruct((1, 16), jnp.int32)
    noise = jax.eval_shape(lambda: noise_of(0, 0, 1))
    print("| method | checkpoint | peak GiB |\n|---|---|---|")
    for checkpoint in ("none", "int4", "nothing"):
        for name, rank in (("exact", 8), ("galore", 8), ("compact", 8), ("compact", 4)):
            method = Method(name, checkpoint, rank=rank, kind="gaussian", period=500)
            training = Training(
                cfg,
                method,
                optax.constant_schedule(1e-5),
                dtype=jnp.bfloat16,
                param_dtype=jnp.bfloat16,
                attention="cudnn",
            )
            step = jax.jit(training.step, donate_argnums=0)
            args = training.abstract, Examples(tokens, target, noise)
            found = jc.memory.peak(step, *args, device="h200")
            label = name if name == "exact" else f"{name} r = {rank}"
            print(f"| {label} | {checkpoint} | {found.peak_bytes / 2**30:.2f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    running = commands.add_parser("run", help="train what is not in the results yet")
    running.add_argument("--data", type=Path, required=True, help="folder of the sets")
    running.add_argument("--out", type=Path, default=Path("runs/finetuning"))
    commands.add_parser("table", help="print the table")
    commands.add_parser("memory", help="print peaks, compiled for a GPU")
    arguments = parser.parse_args()
    if arguments.command == "run":
        run(arguments.data, arguments.out)
    elif arguments.command == "memory":
        memory()
    else:
        table()


if __name__ == "__main__":
    main()
