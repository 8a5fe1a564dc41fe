"""What a training step sends between devices, as compiled for cards that are not here.

    python benchmarks/collectives.py run     # the rows of docs/results.md
    python benchmarks/collectives.py table

Needs no card: pip install ".[train,memory]". Methods as of memory.py, the projections
of compact in as many blocks as tensor has devices.
"""

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "train"), str(ROOT / "benchmarks")]
RESULTS = ROOT / "benchmarks/results/collectives.jsonl"

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import memory  # noqa: E402
import optax  # noqa: E402
from provenance import append, provenance, rows_of  # noqa: E402

import sharding  # noqa: E402
import summary  # noqa: E402
from configs import MODELS  # noqa: E402
from jaxcompact.memory import compiler, devices  # noqa: E402
from jaxcompact.memory.collectives import KINDS, collectives  # noqa: E402
from training import Training  # noqa: E402

METHODS = ("exact", "remat", "compact", "int4")
# (model, batch, seq, sizes of data, fsdp and tensor)
SETTINGS = [
    ("350m", 8 * 128, 256, (8, 1, 1)),
    ("350m", 8 * 128, 256, (1, 8, 1)),
    ("350m", 8 * 128, 256, (2, 2, 2)),
    ("7b", 8 * 128, 256, (2, 2, 2)),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("command", choices=("run", "table"))
    if parser.parse_args().command == "table":
        table()
        return
    known = {key(row) for row in rows_of(RESULTS)}
    for model, batch, seq, sizes in SETTINGS:
        for method in METHODS:
            if (model, batch, seq, sizes, method) not in known:
                row = measure(model, batch, seq, sizes, method)
                print(json.dumps(row), flush=True)
                append(RESULTS, row)


def key(row: dict) -> tuple:
    names = ("model", "batch", "seq", "mesh", "method")
    return tuple(tuple(x) if isinstance(x := row[n], list) else x for n in names)


def program(
    model: str, batch: int, seq: int, sizes: tuple[int, ...], method: str
) -> tuple[Training, jax.ShapeDtypeStruct, compiler.Program]:
    cfg = MODELS[model]
    training = Training(
        replace(cfg, max_seq=max(seq, cfg.max_seq)),
        replace(memory.parse(method), blocks=sizes[-1]),
        optax.constant_schedule(1e-4),
        dtype=jnp.bfloat16,
        param_dtype=jnp.bfloat16,
        attention="cudnn",
    )
    args = memory.abstract(training, batch, seq, sizes)
    card = devices()["h200"]
    jitted = jax.jit(training.step, donate_argnums=0)
    lowered = compiler.lower(jitted, args, card, None, None)
    return training, args[1], compiler.compile_lowered(lowered, card)


def measure(
    model: str, batch: int, seq: int, sizes: tuple[int, ...], method: str
) -> dict:
    training, tokens_abt, compiled = program(model, batch, seq, sizes, method)
    held = summary.held_bytes(training, tokens_abt, batch * seq)
    return {
        "model": model,
        "batch": batch,
        "seq": seq,
        "mesh": sizes,
        "method": method,
        "gradient_bytes": held["gradient_bytes"],
        **collectives(compiled.text),
        "peak_bytes": compiled.peak_bytes,
        **provenance(),
        "device": "h200",
    }


def table() -> None:
    kinds = [kind for kind in KINDS if any(row.get(kind) for row in rows_of(RESULTS))]
    print(f"| model | mesh | method | gradients | {' | '.join(kinds)} | peak GiB |")
    print("|---" * (len(kinds) + 5) + "|")
    order = [(*setting, method) for setting in SETTINGS for method in METHODS]
    for row in sorted(rows_of(RESULTS), key=lambda row: order.index(key(row))):
        sizes = zip(sharding.AXES, row["mesh"], strict=True)
        mesh = " ".join(f"{axis}={n}" for axis, n in sizes if n > 1)
        sent = " | ".join(f"{row.get(kind, 0) / 2**20:,.1f}" for kind in kinds)
        print(
            f"| {row['model']} | {mesh} | {row['method']} "
            f"| {row['gradient_bytes'] / 2**20:,.1f} | {sent} "
            f"| {row['peak_bytes'] / 2**30:.2f} |"
        )


if __name__ == "__main__":
    main()
