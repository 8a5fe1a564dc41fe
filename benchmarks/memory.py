"""Peak memory of training steps on GPUs that need not be here.

    python benchmarks/memory.py --model 350m --batch 128 --seq 256 --device h200 \\
        --method exact,remat,compact,int4,compact+int4 --json --plot peak.png
    python benchmarks/memory.py all      # the rows of docs/results.md, 10 minutes
    python benchmarks/memory.py all --full                         # an hour or two
    python benchmarks/memory.py table [--plot sizes.png]

A method is an optimizer's (exact, compact, galore), a checkpoint policy's (remat, dots,
int8, int4, ...) or both, with a +. compact/8 is compact at n/8; without, it is n/4. On
several devices parameters, moments and tokens are sharded over all of them. Each step
is compiled for the card, not run (`jaxcompact.memory`): pip install ".[train,memory]".
Compiles are cached.
"""

import argparse
import itertools
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "train"), str(ROOT / "benchmarks")]
RESULTS = ROOT / "benchmarks/results/memory.jsonl"

if "--measure" not in sys.argv:
    os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import optax  # noqa: E402
from memory_tables import batches, markdown, matrix, plot  # noqa: E402
from provenance import provenance, rows_of  # noqa: E402

import sharding  # noqa: E402
from configs import MODELS  # noqa: E402
from jaxcompact import memory  # noqa: E402
from methods import CHECKPOINT, Method  # noqa: E402
from training import Training  # noqa: E402

KEYS = ("table", "model", "batch", "seq", "devices", "device", "method")
# Which rows docs/results.md has: (model, batch, seq, devices, methods).
POLICIES = ("exact", "dots", "dots_no_batch", "dots_offload", "remat", "offload")
POLICIES += ("galore", "int8", "int4", "int2")
COMPACT = ("compact", "compact+int4", "compact+int3", "compact+remat")
VARIANTS = ("int3", "int4_attention", "uniform4", "galore+remat")
METHODS = [
    ("350m", 128, 256, 1, ("everything", *POLICIES, *VARIANTS, *COMPACT)),
    ("1b", 32, 1024, 1, ("exact", "dots_no_batch", "remat", "int4", "int3", *COMPACT)),
]
# CompAct's Table 3 and Figure 1: 128 x 256 tokens on each card, 32 x 256 of the last.
FIGURE = ("exact", "galore", "compact/2", "compact", "compact/8", "remat", "int4")
FIGURE += ("compact+int4",)
SIZES = [(m, 128, 256, 1, FIGURE) for m in ("60m", "130m", "350m", "1b")]
SIZES_FULL = [
    ("7b", 128 * 8, 256, 8, FIGURE),
    ("13b", 128 * 8, 256, 8, FIGURE),
    ("70b", 32 * 64, 256, 64, FIGURE),
]
LENGTHS_FULL = [  # the same number of tokens on each card
    (model, devices * 2**15 // seq, seq, devices, (*POLICIES, *COMPACT[:2]))
    for (model, devices), seq in itertools.product(
        (("350m", 1), ("1b", 1), ("7b", 1), ("7b", 8)), (256, 2048, 8192)
    )
]
LARGEST = (("350m", 256, 1), ("1b", 1024, 1), ("7b", 2048, 1), ("7b", 2048, 8))
BUDGETS = ("16 GB", "32 GB", "80 GB", "141 GB")  # of each card
BATCHES = (*POLICIES, *COMPACT[:2])
FIRST = ("exact", "remat", "int4")  # in 16 GB, of the rows that take 10 minutes


def main() -> None:
    if sys.argv[1:2] == ["table"]:
        table()
    elif sys.argv[1:2] == ["all"]:
        everything(full="--full" in sys.argv)
    else:
        chosen()


def chosen() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0],
        epilog="also: memory.py all [--full], and memory.py table",
    )
    parser.add_argument("--model", choices=MODELS, default="350m")
    parser.add_argument("--batch", type=int, default=128, help="of all devices")
    parser.add_argument("--seq", type=int, default=256)
    parser.add_argument("--dtype", default="bfloat16", help="of compute and parameters")
    parser.add_argument(
        "--device", default=memory.here(), help=", ".join(memory.devices())
    )
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--method", default="exact", help=f"of {', '.join(names())}")
    parser.add_argument("--json", action="store_true", help="one JSON row a line")
    parser.add_argument("--plot", type=Path, help="writes a bar chart of what it is")
    parser.add_argument(
        "--measure", action="store_true", help="on the GPU here as well"
    )
    arguments = parser.parse_args()
    rows = []
    for method in arguments.method.split(","):
        setting = arguments.model, arguments.batch, arguments.seq, arguments.devices
        rows.append(
            measure(
                *setting,
                method,
                arguments.device,
                arguments.dtype,
                run=arguments.measure,
            )
        )
        if arguments.json:
            print(json.dumps(rows[-1]), flush=True)
    if not arguments.json:
        print(markdown(rows))
    if arguments.plot:
        plot(rows, arguments.plot)


def names() -> list[str]:
    optimizers = ["exact", "compact", "compact/2", "compact/8", "galore"]
    return [*optimizers, "remat", *list(CHECKPOINT)[1:]]


def parse(name: str) -> Method:
    """``"compact+int4"``."""
    fields: dict[str, Any] = {}
    for part in name.split("+"):
        if part in ("compact/2", "compact/8"):
            fields["rank"], part = 1 / int(part[-1]), "compact"
        key = "name" if part in ("exact", "compact", "galore") else "checkpoint"
        value = "nothing" if part == "remat" else part
        if part not in names() or key in fields:
            raise SystemExit(f"--method is of {', '.join(names())}, got {name!r}")
        fields[key] = value
    return Method(**fields)


def make_step(
    model: str,
    batch: int,
    seq: int,
    devices: int,
    method: str,
    dtype: str = "bfloat16",
    device: str = "h200",
):
    """The jitted step and its abstract arguments."""
    kind = jnp.dtype(dtype)
    cfg = MODELS[model]
    training = Training(
        replace(cfg, max_seq=max(seq, cfg.max_seq)),
        parse(method),
        optax.constant_schedule(1e-4),
        dtype=kind,
        param_dtype=kind,
        attention="cudnn" if kind.itemsize == 2 and "tpu" not in device else "xla",
    )
    args = abstract(training, batch, seq, (1, devices, 1))
    if devices == 1:  # as the trainer: without a mesh
        args = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), args)
    return jax.jit(training.step, donate_argnums=0), args


def abstract(
    training: Training, batch: int, seq: int, sizes: tuple[int, ...]
) -> tuple[Any, jax.ShapeDtypeStruct]:
    """State and tokens on a mesh of so many devices for data, fsdp and tensor."""
    kinds = (jax.sharding.AxisType.Explicit,) * len(sizes)
    mesh = jax.sharding.AbstractMesh(sizes, sharding.AXES, axis_types=kinds)
    place = jax.NamedSharding(mesh, jax.P(None, sharding.BATCH))
    tokens_abt = jax.ShapeDtypeStruct((1, batch, seq + 1), jnp.int32, sharding=place)
    return sharding.placed(training.abstract, mesh), tokens_abt


def measure(
    model: str,
    batch: int,
    seq: int,
    devices: int,
    method: str,
    device: str = "h200",
    dtype: str = "bfloat16",
    run: bool = False,
) -> dict:
    start = time.perf_counter()
    step, args = make_step(model, batch, seq, devices, method, dtype, device)
    found = memory.peak(step, *args, device=device)
    row = {
        "model": model,
        "batch": batch,
        "seq": seq,
        "dtype": dtype,
        "devices": devices,
        "method": method,
        "peak_bytes": found.peak_bytes,
        "host_bytes": found.host_bytes,
        "breakdown": found.breakdown,
        **found.operations,
        "seconds": round(time.perf_counter() - start, 1),
        **provenance(),
        "device": device,
    }
    if run:
        row["measured_bytes"] = memory.measure(step, *args)
    return row


# --- the rows of docs/results.md ---


def everything(full: bool) -> None:
    """Rows that are not there yet, two at a time."""
    done = {tuple(row.get(k) for k in KEYS) for row in rows_of(RESULTS)}
    settings = METHODS + SIZES + (SIZES_FULL + LENGTHS_FULL if full else [])
    jobs = [("peaks", measure, *key) for key in keys(settings)]
    jobs = [j for j in jobs if ("peaks", *j[2:6], "h200", j[6]) not in done]
    for budget, setting, method in itertools.product(BUDGETS, LARGEST, BATCHES):
        model, seq, devices = setting
        key = ("batches", model, None, seq, devices, budget, method)
        first = (model, budget) == ("350m", "16 GB") and method in FIRST
        if key not in done and (full or first):
            jobs.append(("batches", largest, *setting, method, budget))
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(2, mp_context=context) as pool, RESULTS.open("a") as file:
        futures = {pool.submit(row_of, *job): job for job in jobs}
        for future in as_completed(futures):
            if error := future.exception():
                print(f"{futures[future]}: {error}", file=sys.stderr, flush=True)
                continue
            row = future.result()
            file.write(json.dumps(row) + "\n")
            file.flush()
            print(
                json.dumps({k: row.get(k) for k in (*KEYS, "peak_bytes")}), flush=True
            )


def row_of(name: str, make: Callable[..., dict], *setting) -> dict:
    return {"table": name, **make(*setting)}


def largest(model: str, seq: int, devices: int, method: str, budget: str) -> dict:
    """The largest batch in a budget for each card; 0 if one on each is too large."""
    row = {"model": model, "seq": seq, "devices": devices, "method": method}
    try:
        found = memory.largest_batch(
            lambda batch: make_step(model, batch, seq, devices, method),
            budget=budget,
            multiple=devices,
        )
        answer = {"largest_batch": found.batch, "peak_bytes": found.peak.peak_bytes}
    except ValueError as error:
        print(error, file=sys.stderr)
        answer = {"largest_batch": 0, "peak_bytes": None}
    return row | answer | provenance() | {"device": budget}


# --- tables ---


def table() -> None:
    rows = rows_of(RESULTS)
    peaks = {
        (*(row[k] for k in ("model", "batch", "seq", "devices")), row["method"]): row
        for row in rows
        if row["table"] == "peaks"
    }
    sizes, lengths, methods = (
        [peaks[key] for key in keys(settings) if key in peaks]
        for settings in (SIZES + SIZES_FULL, LENGTHS_FULL, METHODS)
    )
    parts = {
        "**Model sizes** (CompAct's Table 3 and Figure 1, as compiled), peak in GiB:": (
            matrix(sizes)
        ),
        "**Methods**:": markdown(methods),
        "**Lengths of sequences**, peak in GiB:": matrix(lengths),
        "**Largest batch**, and how many times that of exact:": (
            batches([row for row in rows if row["table"] == "batches"], BUDGETS)
        ),
    }
    print("\n\n".join(f"{heading}\n\n{text}" for heading, text in parts.items()))
    if "--plot" in sys.argv:
        plot(sizes, Path(sys.argv[sys.argv.index("--plot") + 1]))


def keys(settings: Sequence[tuple]) -> list[tuple]:
    """``(model, batch, seq, devices, method)`` of each row, once."""
    return list(dict.fromkeys((*s[:4], method) for s in settings for method in s[4]))


if __name__ == "__main__":
    main()
