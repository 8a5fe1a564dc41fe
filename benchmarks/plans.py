"""The planner's step beside `jax.checkpoint`'s policies, at equal budgets.

    python benchmarks/plans.py all [MODEL ...]
    python benchmarks/plans.py table [--plot plans.png]
    python benchmarks/plans.py solver             # how long the integer programs take
    python benchmarks/plans.py segments         # what a plan for each layer would gain
    python benchmarks/plans.py actions MODEL      # on a GPU: modelled and measured

Peaks are those of whole training steps, compiled for an H200; times are modelled, by
the same roofline for both: of all operations of the traced step, those that are made
again included, and of a plan's encoding. Budgets run from full recomputation's peak to
no checkpointing's, or to the card. GPT-2 has dropout, and attention in plain JAX.
Rows of results/plans.jsonl that are there are not made again: pip install
".[train,memory]".
"""

import argparse
import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "train"), str(ROOT / "benchmarks")]
RESULTS = ROOT / "benchmarks/results/plans.jsonl"
if "actions" not in sys.argv:
    os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402
from adacc_gpt2 import adam_step, build  # noqa: E402
from provenance import append, provenance, rows_of  # noqa: E402
from scipy.optimize import linprog  # noqa: E402

import jaxcompact as jc  # noqa: E402
from configs import MODELS as LLAMAS  # noqa: E402
from jaxcompact.actions import written  # noqa: E402
from jaxcompact.graph import graph_of  # noqa: E402
from jaxcompact.memory import devices, here, peak  # noqa: E402
from jaxcompact.memory.cards import Device, present  # noqa: E402
from jaxcompact.planner import roofline  # noqa: E402
from jaxcompact.planner.front import JAX_POLICIES, mark  # noqa: E402
from jaxcompact.planner.milp import Solution, solve  # noqa: E402
from jaxcompact.planner.problem import CODECS, problem_of  # noqa: E402
from methods import Method  # noqa: E402
from training import Training  # noqa: E402

CARD = devices()["h200"]
DTYPE = jnp.bfloat16


def llama(name: str, batch: int, seq: int, policy):
    cfg = LLAMAS[name]
    training = Training(
        replace(cfg, max_seq=max(seq, cfg.max_seq)),
        Method("exact"),
        optax.constant_schedule(1e-4),
        dtype=DTYPE,
        param_dtype=DTYPE,
        attention="cudnn",
        policy=policy,
    )
    tokens = jax.ShapeDtypeStruct((1, batch, seq + 1), jnp.int32)
    return jax.jit(training.step, donate_argnums=0), (training.abstract, tokens)


def gpt2(batch: int, seq: int, policy):
    """GPT-2 345M."""
    loss, params, rest = build(24, 1024, 16, batch, seq, policy)
    return adam_step(loss, params, rest)


MODELS: dict[str, tuple[Callable, int]] = {
    "GPT-2 345M, 16 x 1024": (partial(gpt2, 16, 1024), 24),
    "LLaMA-350M, 128 x 256": (partial(llama, "350m", 128, 256), 24),
    "LLaMA-1B, 32 x 1024": (partial(llama, "1b", 32, 1024), LLAMAS["1b"].layers),
    "LLaMA-7B, 8 x 2048": (partial(llama, "7b", 8, 2048), LLAMAS["7b"].layers),
}
POLICIES = {"none": None} | JAX_POLICIES | {"nothing_saveable": "nothing"}
BETWEEN = (0, 0.15, 0.4, 0.7)  # of the way to the peak of saved products
MAX_ERROR = 0.2  # the default of plans
BELOW = 0.995  # of the peak of each other policy


def step_seconds(step: Callable, args: tuple) -> float:
    """Modelled, of all operations of a traced step."""
    graph = graph_of(jax.make_jaxpr(step)(*args))
    return sum(roofline.operation_seconds(op, CARD) for op in graph.ops)


def actions(make_step: Callable, card: Device) -> list[tuple[str, float, float]]:
    """What a plan of a step weighs, by seconds modelled and measured on this machine.

    Raises ValueError if there is no such card in it.
    """
    if present(card) is None:
        raise ValueError(f"actions are measured on a {card.name}, which is not here")
    _, asked = problem_of(make_step, card, MAX_ERROR, None, CODECS)
    found = {}
    for op, seconds in asked.runs.items():
        if modelled := roofline.operation_seconds(op, card):
            found[f"{op.name} {op.where}"] = modelled, seconds
    for item in asked.items:
        where = item.tensor.shape, item.tensor.dtype
        for option in item.options:
            if isinstance(option.action, jc.Codec):
                modelled = roofline.codec_seconds(option.action, *where, card)
                name = f"{item.tensor.name} {written(option.action)}"
                found[name] = modelled, option.seconds
    return [(name, *seconds) for name, seconds in found.items()]


def solver_seconds(make_step: Callable) -> list[float]:
    """Of the CPU, for a block: the smallest plan, the fastest in shares of memory."""
    _, asked = problem_of(make_step, CARD, MAX_ERROR, None, CODECS)
    solve(asked, smallest=True)  # imports the solver
    found = []

    def timed(**rules) -> Solution:
        began = time.process_time()
        solution = solve(asked, noise=MAX_ERROR**2, **rules)
        found.append(time.process_time() - began)
        return solution

    ends = timed(smallest=True).nbytes, timed().nbytes
    for share in BETWEEN[1:]:
        timed(nbytes=ends[0] + share * (ends[1] - ends[0]))
    return found


def freedom(model: str, count: int = 25) -> list[float]:
    """Share of the step's time that layers with plans of their own would save.

    Modelled, with any mixture of plans of all sizes and errors, whatever the number of
    layers: at most what segments of layers can, each with one plan.
    """
    make_step, layers = MODELS[model]
    _, asked = problem_of(make_step, CARD, MAX_ERROR, None, CODECS)
    limit = MAX_ERROR**2
    ends = [solve(asked, noise=limit, smallest=smallest) for smallest in (True, False)]
    low, high = (end.nbytes for end in ends)
    found = list(ends)
    for noise in (0.0, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0):
        for size in np.linspace(low, high, 2 * count):
            found.append(solve(asked, noise=noise * limit, nbytes=size))
    found = [solution for solution in found if solution]
    sizes, seconds, noises = np.transpose(
        [(s.nbytes / high, s.seconds * 1e6, s.noise / limit) for s in found]
    )
    step, args = make_step(None)
    whole = step_seconds(step, args) * 1e6
    gains = []
    for size in np.linspace(low, high, count)[1:]:
        one = solve(asked, noise=limit, nbytes=size).seconds * 1e6
        mixed = linprog(
            seconds,
            A_ub=[sizes, noises],
            b_ub=[size / high, 1.0],
            A_eq=[np.ones(len(found))],
            b_eq=[1.0],
        )
        gains.append(layers * (one - mixed.fun) / (whole + layers * one))
    return gains


def make(model: str) -> None:
    make_step, layers = MODELS[model]
    done = {row["policy"]: row for row in rows_of(RESULTS) if row["model"] == model}
    for name, policy in POLICIES.items():
        if name not in done:
            step, args = make_step(policy)
            row = {"model": model, "policy": name, "seconds": step_seconds(step, args)}
            nbytes = peak(step, *args).peak_bytes
            done[name] = write(**row, peak_bytes=nbytes)
    exact = done["none"]["seconds"]
    low, high = (done[n]["peak_bytes"] for n in ("nothing_saveable", "dots_saveable"))
    budgets = {int(low + share * (high - low)) for share in BETWEEN}
    peaks = {done[name]["peak_bytes"] for name in POLICIES}
    budgets |= {int(BELOW * nbytes) for nbytes in peaks if BELOW * nbytes > low}
    budgets |= {min(done["none"]["peak_bytes"], CARD.memory)}
    for budget in sorted(b for b in budgets if b <= CARD.memory):
        name = f"plan for {budget}"
        if name not in done:
            began = time.perf_counter()
            found = jc.plan_step(make_step, layers=layers, budget=budget)
            write(
                model=model,
                policy=name,
                budget=budget,
                seconds=exact + layers * found.seconds,
                peak_bytes=found.peak_bytes,
                error=found.error,
                planned_in=round(time.perf_counter() - began, 1),
            )


def write(**row) -> dict:
    row |= provenance() | {"device": "h200"}
    append(RESULTS, row)
    print(row, flush=True)
    return row


def table() -> str:
    """Each plan beside the fastest policy of jax.checkpoint in its budget."""
    head = "model | budget GiB | plan: GiB | ms | error | jax.checkpoint: policy | ms |"
    lines = [f"| {head} times |", "|---" * 8 + "|"]
    for model in MODELS:
        own = [row for row in rows_of(RESULTS) if row["model"] == model]
        others = [row for row in own if "budget" not in row]
        for row in sorted((r for r in own if "budget" in r), key=lambda r: r["budget"]):
            fits = [o for o in others if o["peak_bytes"] <= row["budget"]]
            best = min(fits, key=lambda o: o["seconds"])
            cells = [
                model,
                f"{row['budget'] / 2**30:.2f}",
                f"{row['peak_bytes'] / 2**30:.2f}",
                f"{row['seconds'] * 1e3:.1f}",
                f"{row['error']:.0%}",
                best["policy"],
                f"{best['seconds'] * 1e3:.1f}",
                f"{best['seconds'] / row['seconds']:.2f}",
            ]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def plot(path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 8), layout="constrained")
    for axes, model in zip(figure.subplots(2, 2).flat, MODELS, strict=True):
        own = [row for row in rows_of(RESULTS) if row["model"] == model]
        plans = sorted(
            (r["peak_bytes"] / 2**30, r["seconds"] * 1e3) for r in own if "budget" in r
        )
        others = {
            r["policy"]: (r["peak_bytes"] / 2**30, r["seconds"] * 1e3)
            for r in own
            if "budget" not in r
        }
        axes.plot(*zip(*plans, strict=True), ".-", label="jc.plan")
        mark(axes, others)
        axes.set_title(model, size=10)
        axes.set_xlabel("peak of the step, GiB")
        axes.set_ylabel("modelled step, ms")
    figure.axes[0].legend(frameon=False)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("all", help="make the rows that are not there")
    command.add_argument("models", nargs="*", help="whose names contain one of these")
    command = commands.add_parser("table", help="print them")
    command.add_argument("--plot", type=Path, help="and draw them to this file")
    commands.add_parser("solver", help="how long the integer programs take")
    commands.add_parser("segments", help="what a plan for each layer would gain")
    command = commands.add_parser("actions", help="on a GPU: modelled and measured")
    command.add_argument("model", help="whose name contains this")
    arguments = parser.parse_args()
    if arguments.command == "all":
        for model in MODELS:
            if any(word in model for word in arguments.models or [""]):
                make(model)
    elif arguments.command == "actions":
        found = [make for name, (make, _) in MODELS.items() if arguments.model in name]
        if len(found) != 1:
            raise SystemExit(f"MODEL is in the name of one of {', '.join(MODELS)}")
        print("| action | modelled us | measured us | times |\n|---|---|---|---|")
        for name, modelled, seconds in actions(found[0], devices()[here()]):
            times = f"{1e6 * modelled:.1f} | {1e6 * seconds:.1f}"
            print(f"| {name} | {times} | {seconds / modelled:.2f} |")
    elif arguments.command == "solver":
        print("| block of | fastest s | slowest s |\n|---|---|---|")
        for model, (make_step, _) in MODELS.items():
            seconds = solver_seconds(make_step)
            print(f"| {model} | {min(seconds):.2f} | {max(seconds):.2f} |", flush=True)
    elif arguments.command == "segments":
        print("| model | saved of the step's time, mean | most |\n|---|---|---|")
        for model in MODELS:
            gains = freedom(model)
            print(f"| {model} | {np.mean(gains):.1%} | {max(gains):.1%} |", flush=True)
    else:
        print(table())
        if arguments.plot:
            plot(arguments.plot)


if __name__ == "__main__":
    main()
