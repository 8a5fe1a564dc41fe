"""Peak memory of a training step on a GPU that need not be here, as JSON rows.

    python benchmarks/memory.py --model 350m --batch 128 --seq 256 --checkpoint int4
    python benchmarks/memory.py table

Each step is compiled for the card on a CPU: the peak is that of the program's buffers.
Needs jax's CUDA plugin and cuDNN, of jax's own version, but no driver and no card:
pip install "jax[cuda13]" (or jax-cuda13-plugin, jax-cuda13-pjrt, nvidia-cudnn-cu13).
Counted with it are the matrix products and the attention calls of the program: whoever
recomputes has more of them. Rows are also appended to benchmarks/results/memory.jsonl.
"""

import argparse
import collections
import json
import os
import re
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "train"), str(ROOT / "benchmarks")]
RESULTS = ROOT / "benchmarks/results/memory.jsonl"

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402
from jax.experimental import topologies  # noqa: E402
from step import provenance  # noqa: E402

from configs import MODELS  # noqa: E402
from methods import CHECKPOINT, Method  # noqa: E402
from training import Training  # noqa: E402


def main() -> None:
    if sys.argv[1:] == ["table"]:
        table()
        return
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=MODELS, default="350m")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--seq", type=int, default=256)
    parser.add_argument("--dtype", default="bfloat16", help="of compute and parameters")
    parser.add_argument("--method", default="exact", help="exact or compact, or both")
    parser.add_argument(
        "--checkpoint", default="none", help=f"of {', '.join(CHECKPOINT)}"
    )
    parser.add_argument("--rank", type=float, default=0.25, help="of compact")
    arguments = parser.parse_args()
    for name in arguments.method.split(","):
        for policy in arguments.checkpoint.split(","):
            rank = {"rank": arguments.rank} if name == "compact" else {}
            row = measure(Method(name, checkpoint=policy, **rank), arguments)
            print(json.dumps(row), flush=True)
            with RESULTS.open("a") as file:
                file.write(json.dumps(row) + "\n")


def measure(method: Method, arguments: argparse.Namespace) -> dict:
    start = time.perf_counter()
    dtype = jnp.dtype(arguments.dtype)
    training = Training(
        MODELS[arguments.model],
        method,
        optax.constant_schedule(1e-4),
        dtype=dtype,
        param_dtype=dtype,
        attention="cudnn" if dtype.itemsize == 2 else "xla",
    )
    tokens = jax.ShapeDtypeStruct((1, arguments.batch, arguments.seq + 1), jnp.int32)
    compiled = compile_for("h200", training.step, (training.abstract, tokens))
    analysis, text = compiled.memory_analysis(), compiled.as_text()
    return {
        "model": arguments.model,
        "batch": arguments.batch,
        "seq": arguments.seq,
        "dtype": arguments.dtype,
        "method": method.name
        + (f" n*{method.rank}" if method.name == "compact" else ""),
        "checkpoint": method.checkpoint,
        "peak_bytes": analysis.argument_size_in_bytes
        + analysis.output_size_in_bytes
        + analysis.temp_size_in_bytes
        - analysis.alias_size_in_bytes,
        "argument_bytes": analysis.argument_size_in_bytes,
        **operations(text),
        "compile_s": round(time.perf_counter() - start, 1),
        **provenance(),
        "device": "NVIDIA H200, compiled for without a card",
    }


def compile_for(card: str, step, arguments: tuple):
    """``step``, whose first argument is donated, compiled for a card."""
    target = (ROOT / f"benchmarks/targets/{card}.txtpb").read_text()
    topology = topologies.get_topology_desc(
        platform="cuda", topology="1x1x1", target_config=target
    )
    mesh = jax.sharding.Mesh(np.array(topology.devices), ("data",))
    sharding = jax.sharding.NamedSharding(mesh, jax.P())
    arguments = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), arguments
    )
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        traced = jax.jit(step, donate_argnums=0).trace(*arguments)
        return traced.lower(lowering_platforms=("cuda",)).compile()


def operations(text: str) -> dict[str, int]:
    """Matrix products and attention calls of a compiled program; a loop's body once."""
    counts = collections.Counter(re.findall(r'custom_call_target="([^"]+)"', text))
    matmuls = sum(n for target, n in counts.items() if "cublas" in target)
    matmuls += len(re.findall(r"__triton_gemm|__triton_nested_gemm", text))
    backwards = sum(
        n for target, n in counts.items() if "fmha" in target and "Backward" in target
    )
    forwards = sum(n for target, n in counts.items() if "fmha" in target) - backwards
    return {
        "matmuls": matmuls,
        "attention_forwards": forwards,
        "attention_backwards": backwards,
    }


def table() -> None:
    rows = [json.loads(line) for line in RESULTS.read_text().splitlines()]
    latest = {
        (r["model"], r["batch"], r["seq"], r["method"], r["checkpoint"]): r
        for r in rows
    }
    print("| model, tokens | method | checkpoint | peak GiB | matmuls | attention |")
    print("|---|---|---|---|---|---|")
    for (model, batch, seq, method, checkpoint), row in latest.items():
        print(
            f"| {model}, {batch} x {seq} | {method} | {checkpoint} "
            f"| {row['peak_bytes'] / 2**30:.2f} | {row['matmuls']} "
            f"| {row['attention_forwards']} + {row['attention_backwards']} |"
        )


if __name__ == "__main__":
    main()
