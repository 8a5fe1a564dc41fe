"""Step time, peak memory and tokens/s of one method, as one JSON row.

    python benchmarks/step.py --model 350m --batch 128 --seq 256 --method compact

One method a process: the allocator's peak can't be reset. The tokens are random. Step
times are of single steps, each waited for; GaLore is timed between two of its SVDs.
Several at once compile together and measure in turn (`turns.py`).
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

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import optax  # noqa: E402
import turns  # noqa: E402
from provenance import provenance  # noqa: E402

import jaxcompact as jc  # noqa: E402
from configs import MODELS  # noqa: E402
from jaxcompact import memory  # noqa: E402
from jaxcompact.kernels import choice  # noqa: E402
from jaxcompact.memory.traffic import traffic  # noqa: E402
from methods import Method  # noqa: E402
from training import Training  # noqa: E402


def main() -> None:
    arguments = parse()
    fields = {f.name for f in dataclasses.fields(Method)} - {"name"}
    chosen = {k: v for k, v in vars(arguments).items() if k in fields and v is not None}
    method = Method(arguments.method, **chosen)
    row = {
        "part": arguments.part or arguments.method,
        "method": dataclasses.asdict(method),
        "model": arguments.model,
        "batch": arguments.batch,
        "seq": arguments.seq,
        "plan": arguments.plan,
        "kernels": arguments.kernels,
        "dtype": arguments.dtype,
        **measure(method, arguments),
        **provenance(),
    }
    print(json.dumps(row), flush=True)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--part", help="name of the row (default: the method)")
    parser.add_argument("--model", choices=MODELS, default="tiny")
    parser.add_argument("--method", default="exact")
    parser.add_argument("--checkpoint")
    parser.add_argument(
        "--rank", type=lambda text: float(text) if "." in text else int(text)
    )
    parser.add_argument("--kind")
    parser.add_argument("--bits", type=int)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--seq", type=int, default=64)
    parser.add_argument("--dtype", default="bfloat16", help="of compute and parameters")
    parser.add_argument(
        "--plan",
        metavar="BUDGET",
        help="of jc.plan_step, as 7GiB; recomputed: the peak of full recomputation; "
        "FILE.json: the plan that Plan.to_json gave",
    )
    parser.add_argument("--kernels", choices=choice.IMPLEMENTATIONS, help="forced")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=30, help="timing ends here")
    return parser.parse_args()


def measure(method: Method, arguments: argparse.Namespace) -> dict:
    dtype = jnp.dtype(arguments.dtype)
    shape = (1, arguments.batch, arguments.seq + 1)

    def training_under(policy, method=method):
        cfg = MODELS[arguments.model]
        cfg = dataclasses.replace(cfg, max_seq=max(arguments.seq, cfg.max_seq))
        schedule = optax.constant_schedule(1e-4)
        return Training(
            cfg, method, schedule, dtype=dtype, param_dtype=dtype, policy=policy
        )

    def stepping(training):
        tokens = jax.ShapeDtypeStruct(shape, jnp.int32)
        return jax.jit(training.step, donate_argnums=0), (training.abstract, tokens)

    def make_step(policy):
        return stepping(training_under(policy))

    def compiled(training):
        step, args = stepping(training)
        return step.lower(*args).compile()

    def planned(budget):
        if budget.endswith(".json"):
            return jc.Plan.from_json(Path(budget).read_text())
        if budget == "recomputed":
            budget = peak(compiled(training_under(None, Method("remat"))))
        layers = MODELS[arguments.model].layers
        return jc.plan_step(make_step, layers=layers, budget=budget)

    with turns.compiling():
        training = training_under(arguments.plan and planned(arguments.plan))
        start = time.perf_counter()
        with choice.using(arguments.kernels):
            step_fn = compiled(training)
        compile_seconds = time.perf_counter() - start
        init = jax.jit(training.init).lower().compile()
    vocabulary = MODELS[arguments.model].vocab_size

    turns.measure()
    tokens = jax.random.randint(jax.random.key(1), shape, 0, vocabulary)
    state = between_svds(init())
    for _ in range(min(3, arguments.steps)):
        state, measured = step_fn(state, tokens)
    jax.block_until_ready(state)
    times, end = [], time.perf_counter() + arguments.seconds
    while len(times) < arguments.steps and time.perf_counter() < end:
        start = time.perf_counter()
        state, measured = step_fn(state, tokens)
        jax.block_until_ready(state)
        times.append(1000 * (time.perf_counter() - start))
    median = statistics.median(times)
    stats = jax.local_devices()[0].memory_stats() or {}
    return {
        "step_ms": round(median, 3),
        "step_ms_range": [round(min(times), 3), round(max(times), 3)],
        "steps": len(times),
        "tokens_per_s": round(1000 * arguments.batch * arguments.seq / median),
        "peak_bytes": stats.get("peak_bytes_in_use"),  # None where nobody counts (CPU)
        "compiled_bytes": peak(step_fn),
        "least_ms": least_ms(step_fn.as_text()),
        "compile_s": round(compile_seconds, 1),
        "loss": float(measured["loss"]),
    }


def peak(program) -> int:
    """Bytes of the compiled program."""
    m = program.memory_analysis()
    sizes = m.argument_size_in_bytes + m.output_size_in_bytes + m.temp_size_in_bytes
    return sizes - m.alias_size_in_bytes


def least_ms(text: str) -> float | None:
    """What the program's bytes and products take at the card's full rate."""
    card = memory.devices()[memory.here()]
    if jax.default_backend() != "gpu" or card.name != jax.devices()[0].device_kind:
        return None
    try:
        moved = traffic(text, card).values()
    except ValueError:  # an SVD's loop ends nobody knows when
        return None
    return round(1000 * sum(one.seconds for one in moved), 3)


def between_svds(state):
    """GaLore's counter one step on: its SVDs at step 0 are no part of a usual step."""
    kind = optax.contrib.GaLoreState

    def advanced(node):
        return node._replace(count=node.count + 1) if isinstance(node, kind) else node

    return jax.tree.map(advanced, state, is_leaf=lambda node: isinstance(node, kind))


if __name__ == "__main__":
    main()
