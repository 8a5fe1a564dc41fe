"""Kernels beside XLA's code for the same ops, and beside a copy or a plain product.

    python benchmarks/kernels.py [--op quantize,...] [--shape 350m,...] [--json]
    python benchmarks/kernels.py --tune      # keeps what was best in config.json
    python benchmarks/kernels.py predict     # of an H200, from bytes and operations

Times by the clock, of a queue that is never empty, over more than the cache holds.
What moves bytes stands beside a copy of as many, what multiplies beside the plain
product of 16-bit matrices, what evaluates a function beside the function. Each op and
shape has a process: all compile at once, and measure alone. Of one op at one shape
nothing is kept. Without a GPU it runs at toy size, and times XLA alone.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "train"), str(ROOT / "benchmarks")]

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import turns  # noqa: E402
from jax import lax  # noqa: E402
from kernel_cases import SHAPES, TOY, Case, cases, size  # noqa: E402
from provenance import provenance  # noqa: E402

from jaxcompact.kernels import choice  # noqa: E402
from jaxcompact.memory import devices  # noqa: E402

CONFIGS = {
    "quantize": [{"groups": n} for n in (1, 2, 4)],
    "quantize_stochastic": [{"groups": n} for n in (1, 2, 4)],
    "dequantize": [{"groups": n} for n in (1, 2, 4)],
    "quantize_channels": [{"columns": n} for n in (128, 256)],
    "quantize_stochastic_channels": [{"columns": n} for n in (128, 256)],
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


def prepared(case: Case, tune: bool) -> Iterator[tuple[dict, Callable[[], float]]]:
    """Rows to be, each with what times it; the first is of what stands beside.

    XLA's, and on a GPU the kernel's, with each config or with the file's; between them,
    where there are kernels for parts, XLA's with these.
    """
    row = {"op": case.op, "case": case.name}
    yield row | {"implementation": "plain", "config": None}, timer(*case.beside())
    ways = [("xla", "xla", None, case.fun)]
    if on_gpu():
        if case.apart:
            ways.append(("in parts", "mosaic_gpu", None, case.apart))
        configs = CONFIGS[case.op] if tune else [None]
        ways += [("mosaic_gpu", "mosaic_gpu", config, case.fun) for config in configs]
    for name, implementation, config, fun in ways:
        named = row | {"implementation": name, "config": config}
        try:
            with choice.using(implementation, config):
                yield named, timer(fun, case.args)
        except ValueError as error:  # more shared memory than there is
            yield named | {"error": str(error).splitlines()[0]}, None


def timer(fun: Callable, args: tuple) -> Callable[[], float]:
    """What times ``fun``, compiled of several ``args``, one after the other.

    Together they are more than a card's cache holds, and so many that its queue
    is never empty. Functions are traced anew: see `using`.
    """
    count = min(max(2**28 // size(args), 2), 8) if on_gpu() else 2

    run = jax.jit(in_turn(fun)).lower([args] * count).compile()

    def seconds() -> float:
        sets = [filled(args, seed) for seed in range(count)]
        elapsed(run, sets, 1)  # the first takes longer
        launches = max(1, min(20, int(0.01 / elapsed(run, sets, 1))))
        return statistics.median(elapsed(run, sets, launches) for _ in range(5)) / count

    return seconds


def in_turn(fun: Callable) -> Callable:
    """``fun`` of each of several tuples of arguments, lowered once."""
    fun = jax.jit(lambda *args, fun=fun: fun(*args))

    def run(sets):
        found = []
        for args in sets:
            if found:  # nothing of one is made together with another
                found[-1], args = lax.optimization_barrier((found[-1], args))
            found.append(fun(*args))
        return found

    return run


def elapsed(run: Callable, sets: list, launches: int) -> float:
    """By the clock, of each of so many launches."""
    start = time.perf_counter()
    for _ in range(launches):
        found = run(sets)
    jax.block_until_ready(found)
    return (time.perf_counter() - start) / launches


def filled(args: tuple, seed: int) -> tuple:
    """Noise: zeros multiply faster."""
    keys = iter(jax.random.split(jax.random.key(seed), 8))

    def random(a):
        if jnp.issubdtype(a.dtype, jnp.floating):
            return jax.random.normal(next(keys), a.shape, a.dtype)
        return jax.random.bits(next(keys), a.shape, a.dtype)

    return jax.block_until_ready(jax.tree.map(random, args))


def measured(case: Case, timers: list[tuple[dict, Callable | None]]) -> Iterator[dict]:
    (_, timed), *rest = timers
    beside, first = timed(), None
    # Of the plain op's speed, or of the copy's bandwidth.
    ratio = "of_plain" if case.plain else "of_copy"
    for row, seconds in rest:
        if seconds is None:
            yield row
            continue
        took = seconds()
        first = first or took
        yield row | {
            "microseconds": took * 1e6,
            "bytes": case.bytes,
            "flops": case.flops,
            ratio: beside / took,
            "of_xla": first / took,
        }


def on_gpu() -> bool:
    return jax.default_backend() == "gpu"


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
    every = ",".join(SHAPES if on_gpu() else TOY)
    shapes, ops = (arguments.shape or every).split(","), arguments.op.split(",")
    alone, found = len(shapes) * len(ops) == 1, []
    of = of_one if alone else of_processes
    for row in of(ops, shapes, arguments.tune):
        found.append(row)
        print(json.dumps(row) if arguments.json else line(row), flush=True)
    if arguments.tune and on_gpu() and not alone:
        keep(found)
    return None


def of_processes(ops: list[str], shapes: list[str], tune: bool) -> Iterator[dict]:
    """A kernel that fails takes its process along, which says on stderr why."""
    with tempfile.NamedTemporaryFile() as file, ThreadPoolExecutor() as pool:
        environment = {"TURNS": file.name} | os.environ

        def rows(op: str, shape: str) -> list[dict]:
            command = [sys.executable, __file__, "--op", op, "--shape", shape, "--json"]
            command += ["--tune"] if tune else []
            done = subprocess.run(command, env=environment, stdout=subprocess.PIPE)
            return [json.loads(line) for line in done.stdout.splitlines()]

        pending = [pool.submit(rows, op, shape) for shape in shapes for op in ops]
        for done in as_completed(pending):
            yield from done.result()


def of_one(ops: list[str], shapes: list[str], tune: bool) -> Iterator[dict]:
    """Compiles all of it, and then times it."""
    (op,), (shape,) = ops, shapes
    some = [case for case in cases(shape, *(SHAPES | TOY)[shape]) if case.op == op]
    with turns.compiling():
        timers = [list(prepared(case, tune)) for case in some]
    turns.measure()
    for case, of in zip(some, timers, strict=True):
        for row in measured(case, of):
            yield row | provenance()


def line(row: dict) -> str:
    head = f"{row['op']:19} {row['case']:26} {row['implementation']:10} "
    if "error" in row:
        return head + row["error"]
    beside = "plain" if "of_plain" in row else "copy"
    text = f"{row['microseconds']:9.1f} us {row[f'of_{beside}']:5.2f} of the {beside}"
    return head + text + f" {row['of_xla']:5.2f}x XLA {row['config'] or ''}"


if __name__ == "__main__":
    main()
