"""Kernels beside XLA's code for the same ops, and beside a copy or a plain product.

    python benchmarks/kernels.py [--op quantize,...] [--shape 350m,...] [--json]
    python benchmarks/kernels.py --tune      # keeps what was best in config.json
    python benchmarks/kernels.py predict     # of an H200, from bytes and operations

Device times, by CUPTI, the median of some runs of one process. What moves bytes stands
beside a copy of as many, what multiplies beside the plain product of 16-bit matrices of
its shape. Without a GPU it runs at toy size, and times XLA alone, by the clock.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "train"), str(ROOT / "benchmarks")]

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
from step import provenance  # noqa: E402

from jaxcompact.kernels import choice  # noqa: E402
from jaxcompact.kernels.activate.api import activate  # noqa: E402
from jaxcompact.kernels.normalize.api import normalize  # noqa: E402
from jaxcompact.kernels.project.api import project  # noqa: E402
from jaxcompact.kernels.quantize.api import dequantize, quantize  # noqa: E402
from jaxcompact.kernels.weight_gradient.api import weight_gradient  # noqa: E402
from jaxcompact.memory import devices  # noqa: E402

# Tokens, width of x, width of dy: residual streams and MLPs of LLaMAs.
SHAPES = {
    "350m": (32768, 1024, 1024),
    "350m_mlp": (32768, 2736, 1024),
    "1b": (32768, 2048, 2048),
    "7b": (32768, 4096, 4096),
    "7b_mlp": (32768, 11008, 4096),
}
TOY = {"toy": (64, 128, 64)}
CONFIGS = {
    "quantize": [{"groups": n} for n in (1, 2, 4, 8)],
    "dequantize": [{"groups": n} for n in (1, 2, 4, 8)],
    "quantize_channels": [{"columns": n} for n in (128, 256)],
    "dequantize_channels": [{"columns": n} for n in (128, 256)],
    "weight_gradient": [
        {"columns": columns, "steps": steps}
        for columns in (128, 256)
        for steps in (2, 3, 4)
    ],
    "activate": [{"columns": n} for n in (64, 128)],
    "normalize": [
        {"columns": columns, "workers": workers}
        for columns in (64, 128, 256)
        for workers in (2, 4)
    ],
    "project": [
        {"columns": columns, "steps": steps}
        for columns in (128, 256)
        for steps in (2, 3, 4)
    ],
}
FOLDERS = {op: "quantize" for op in CONFIGS if "quantize" in op}
RUNS = 20


@dataclass(frozen=True)
class Case:
    """One op at one shape, and the plain op that it stands beside.

    ``bytes`` are those that it must read and write, ``flops`` those of its product; a
    case without a product stands beside a copy.
    """

    op: str
    name: str
    fun: Callable
    args: tuple
    bytes: int
    flops: int = 0
    plain: tuple[Callable, tuple] | None = None  # the product
    apart: Callable | None = None  # of kernels for parts of it

    def beside(self) -> tuple[Callable, tuple]:
        if self.plain:
            return self.plain
        return jnp.copy, (jax.ShapeDtypeStruct((self.bytes // 2,), jnp.uint8),)


def cases(name: str, tokens: int, n: int, m: int) -> Iterator[Case]:
    """Ops on ``x``, ``[tokens, n]``, and ``dy``, ``[tokens, m]``, in bfloat16."""
    x = jax.ShapeDtypeStruct((tokens, n), jnp.bfloat16)
    dy = jax.ShapeDtypeStruct((tokens, m), jnp.bfloat16)
    for bits, seed in ((8, None), (4, None), (2, None), (4, 0)):
        fields = {"bits": bits, "group": 64}

        def encode(x, fields=fields, seed=seed):
            return quantize(x, seed=seed, **fields)

        encoded = jax.eval_shape(encode, x)
        kind = f"{name}_int{bits}" + ("" if seed is None else "_stochastic")
        yield Case("quantize", kind, encode, (x,), size(x, encoded))
        if seed is not None:
            continue
        fields = fields | {"size": n, "dtype": jnp.bfloat16}

        def decode(codes, stored, fields=fields):
            return dequantize(codes, stored, None, **fields)

        yield Case("dequantize", kind, decode, encoded[:2], size(x, encoded))
        fields = fields | {"preferred_element_type": jnp.float32}

        def gradient(codes, stored, dy, fields=fields):
            return weight_gradient(codes, stored, None, dy, **fields)

        moved, flops = size(encoded, dy) + 4 * n * m, 2 * tokens * n * m
        args = (*encoded[:2], dy)
        plain = (lambda x, dy: x.T @ dy), (x, dy)
        yield Case("weight_gradient", kind, gradient, args, moved, flops, plain)
        fields = {"bits": bits, "group": 64}

        def swiglu(gate, up, fields=fields):
            return activate(lambda g, u: jax.nn.silu(g) * u, (gate, up), **fields)

        def apart(gate, up, fields=fields):
            return jax.nn.silu(gate) * up, [quantize(a, **fields) for a in (gate, up)]

        moved = size(x, x, jax.eval_shape(swiglu, x, x))
        args, kind = (x, x), f"{kind}_swiglu"
        yield Case("activate", kind, swiglu, args, moved, apart=apart)

        def gelu(x, bias):
            return jax.nn.gelu(x + bias.reshape(1, -1), approximate=False)

        def biased(x, bias, fields=fields):
            return activate(gelu, (x,), (bias,), **fields)

        def after(x, bias, fields=fields):
            return gelu(x, bias), [quantize(x, **fields)]

        args = x, jax.ShapeDtypeStruct((n,), x.dtype)
        moved = size(*args, jax.eval_shape(biased, *args))
        kind = kind.replace("swiglu", "gelu")
        yield Case("activate", kind, biased, args, moved, apart=after)
    yield of_norms(name, x)
    yield from of_channels(name, x)
    # As a compressed layer stores z, in 4 bits at n/2.
    p = jax.ShapeDtypeStruct((n, 64 * max(1, n // 128)), jnp.bfloat16)

    def sketch(x, p):
        return project(x, p, bits=4, group=64)

    moved, flops = size(x, p, jax.eval_shape(sketch, x, p)), 2 * tokens * p.size
    plain = jnp.matmul, (x, p)
    yield Case("project", f"{name}_int4", sketch, (x, p), moved, flops, plain)


def of_norms(name: str, x: jax.ShapeDtypeStruct) -> Case:
    """RMSNorm, as LLaMAs have it, and x in 4 bits."""

    def norm(x, w):
        wide = x.astype(jnp.float32)
        mean = jnp.mean(jnp.square(wide), -1, keepdims=True) + 1e-6
        y = wide * jax.lax.rsqrt(mean) * w[None]
        return y.astype(x.dtype), mean

    def together(x, w):
        return normalize(norm, x, [w], bits=4, group=64)

    def apart(x, w):
        return norm(x, w), quantize(x, bits=4, group=64)

    args = x, jax.ShapeDtypeStruct(x.shape[1:], jnp.float32)
    moved = size(args, jax.eval_shape(together, *args))
    return Case("normalize", f"{name}_int4", together, args, moved, apart=apart)


def of_channels(name: str, x: jax.ShapeDtypeStruct) -> Iterator[Case]:
    """As policies store q and k."""
    fields: dict = {"bits": 8, "group": 64, "axis": -2}

    def encode(x):
        return quantize(x, symmetric=False, **fields)

    def decode(*encoded):
        return dequantize(*encoded, size=x.shape[0], dtype=x.dtype, **fields)

    encoded = jax.eval_shape(encode, x)
    moved = size(x, encoded)
    yield Case("quantize_channels", f"{name}_int8", encode, (x,), moved)
    yield Case("dequantize_channels", f"{name}_int8", decode, encoded, moved)


def size(*trees: Any) -> int:
    return sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(trees))


def seconds(fun: Callable, args: tuple) -> float:
    """Of the device; of the clock on a CPU. A function is traced anew: see `using`."""
    keys = iter(jax.random.split(jax.random.key(0), 8))

    def filled(a):
        if jnp.issubdtype(a.dtype, jnp.floating):
            return jax.random.normal(next(keys), a.shape, a.dtype)
        return jax.random.randint(next(keys), a.shape, 0, 255).astype(a.dtype)

    args = jax.tree.map(filled, args)
    run = jax.jit(lambda *args: fun(*args))
    if jax.default_backend() == "gpu":
        from jax.experimental.mosaic.gpu import profiler

        _, times = profiler.measure(run, iterations=RUNS)(*args)
        return statistics.median(times) / 1e3
    times = []
    for _ in range(RUNS + 1):
        start = time.perf_counter()
        jax.block_until_ready(run(*args))
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def measured(case: Case, tune: bool) -> Iterator[dict]:
    """Rows: XLA's, and on a GPU the kernel's, with each config or with the file's.

    Between them, where there are kernels for parts, XLA's with these.
    """
    beside = seconds(*case.beside())
    ways = [("xla", None, case.fun)]
    if jax.default_backend() == "gpu":
        if case.apart:
            ways.append(("mosaic_gpu", None, case.apart))
        configs = CONFIGS[case.op] if tune else [None]
        ways += [("mosaic_gpu", config, case.fun) for config in configs]
    first = None
    for implementation, config, fun in ways:
        row = {"op": case.op, "case": case.name, "implementation": implementation}
        row["config"] = config
        if fun is case.apart:
            row["implementation"] = "in parts"
        try:
            with choice.using(implementation, config):
                took = seconds(fun, case.args)
        except ValueError as error:  # more shared memory than there is
            yield row | {"error": str(error).splitlines()[0]}
            continue
        first = first or took
        yield row | {
            "microseconds": took * 1e6,
            "bytes": case.bytes,
            "flops": case.flops,
            "of_plain": beside / took,  # of the copy's bandwidth, the product's rate
            "of_xla": first / took,
        }


def keep(rows: list[dict]) -> None:
    """Of each op the config that is best over all cases, if it is faster than others.

    These are XLA's code, and kernels for parts of the op.
    """
    card = jax.devices()[0].device_kind
    for op in {row["op"] for row in rows}:
        of = [row for row in rows if row["op"] == op and "microseconds" in row]
        others: dict[str, float] = {}
        for row in of:
            if row["config"] is None:
                took = row["microseconds"]
                others[row["case"]] = min(others.get(row["case"], took), took)
        best, gain = None, 1.0
        for config in CONFIGS[op]:
            ratios = [
                others[row["case"]] / row["microseconds"]
                for row in of
                if row["config"] == config
            ]
            if ratios and statistics.geometric_mean(ratios) > gain:
                best, gain = config, statistics.geometric_mean(ratios)
        file = ROOT / "kernels" / FOLDERS.get(op, op) / "config.json"
        configs = json.loads(file.read_text())
        configs[op].pop(card, None)
        if best is not None:
            configs[op][card] = best
        lines = (f'  "{name}": {json.dumps(of)}' for name, of in configs.items())
        file.write_text("{\n" + ",\n".join(lines) + "\n}\n")
        print(f"{op} on {card}: {best or 'others'}, {gain:.2f}x their speed")


def predict() -> None:
    """The least time of each case: that of its bytes or of its product."""
    card = devices()["h200"]
    print("| op | case | MB | GFLOP | microseconds at least |\n|---|---|---|---|---|")
    for shape, sizes in SHAPES.items():
        for case in cases(shape, *sizes):
            least = max(case.bytes / card.memory_bandwidth, case.flops / card.flops)
            print(
                f"| {case.op} | {case.name} | {case.bytes / 1e6:.0f} "
                f"| {case.flops / 1e9:.0f} | {least * 1e6:.0f} |"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("predict", nargs="?", choices=["predict"])
    parser.add_argument("--op", default=",".join(CONFIGS))
    parser.add_argument("--shape", help=f"of {', '.join(SHAPES)} (default: all)")
    parser.add_argument("--json", action="store_true", help="one JSON row a line")
    parser.add_argument("--tune", action="store_true", help="try all configs")
    arguments = parser.parse_args()
    if arguments.predict:
        return predict()
    shapes = SHAPES if jax.default_backend() == "gpu" else TOY
    names = arguments.shape.split(",") if arguments.shape else shapes
    rows = []
    for name in names:
        for case in cases(name, *(SHAPES | TOY)[name]):
            if case.op not in arguments.op.split(","):
                continue
            for row in measured(case, arguments.tune):
                rows.append(row | provenance())
                text = json.dumps(rows[-1]) if arguments.json else line(row)
                print(text, flush=True)
    if arguments.tune and jax.default_backend() == "gpu":
        keep(rows)
    return None


def line(row: dict) -> str:
    head = f"{row['op']:19} {row['case']:26} {row['implementation']:10} "
    if "error" in row:
        return head + row["error"]
    text = f"{row['microseconds']:9.1f} us {row['of_plain']:5.2f} of the plain op"
    return head + text + f" {row['of_xla']:5.2f}x XLA {row['config'] or ''}"


if __name__ == "__main__":
    main()
