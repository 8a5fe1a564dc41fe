"""Models of other packages, trained with encoded residuals.

    pip install "transformers<5" jax-resnet jraph
    python benchmarks/models.py run --data ../shared/data
    python benchmarks/models.py table

Each of model_tasks.py, recurrent_tasks.py and graph_tasks.py is wrapped once, whole:
``jc.checkpoint(apply, policy=jc.policies.int4(), params=(0, 1))``. `run` appends rows
to benchmarks/results/models.jsonl; rows that are there are not made again.

GACT's settings: groups of 256, asymmetric, stochastic, the same bits for all; or for
each tensor 8, 4, 2 or 1 bits by `jc.sensitivity`, as many in all: of the gradient, or
of Adam's steps, which is the gradient by the root of its second moment.

A plan is `jc.plan_step`'s of the whole step, as Adacc's, from the sensitivity of the
first batch: in int4's memory, compiled for an H200, and a tenth of what exact training
takes more, or four tenths where no plan fits.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "train"), str(ROOT / "benchmarks")]

from graph_tasks import gat, gcn, graphsage  # noqa: E402
from model_errors import checkpointed, cross_entropy, gradient  # noqa: E402
from model_tasks import Task, bert, gpt2, mlp, resnet, swin, vgg, vit  # noqa: E402
from provenance import append, provenance, rows_of  # noqa: E402
from recurrent_tasks import deltanet, lstm  # noqa: E402

import jaxcompact as jc  # noqa: E402
from jaxcompact import memory  # noqa: E402
from jaxcompact.planner import measuring  # noqa: E402

MODELS = {
    "gpt2": gpt2,
    "bert": bert,
    "vit": vit,
    "swin": swin,
    "resnet": resnet,
    "vgg": vgg,
    "mlp": mlp,
    "lstm": lstm,
    "deltanet": deltanet,
    "gcn": gcn,
    "graphsage": graphsage,
    "gat": gat,
}
SOURCES = {
    "gpt2": "transformers, Linen",
    "bert": "transformers, Linen",
    "vit": "transformers, Linen",
    "swin": "ours, Linen",
    "resnet": "jax-resnet, Linen",
    "vgg": "ours, Linen",
    "mlp": "Flax, NNX",
    "lstm": "Flax, Linen",
    "deltanet": "ours, plain JAX",
    "gcn": "jraph, plain JAX",
    "graphsage": "ours, plain JAX",
    "gat": "jraph, plain JAX",
}

RESULTS = ROOT / "benchmarks" / "results" / "models.jsonl"
SEEDS = {"vit": 10, "vgg": 10}  # 3 for all others, whose results differ less by seed
POLICIES = {"int8": jc.policies.int8(), "int4": jc.policies.int4()}


def gact(bits: int) -> jc.Quantized:
    return jc.Quantized(bits, 256, symmetric=False, stochastic=True)


@dataclass(frozen=True)
class Automatic:
    """Bits by sensitivity, looked at again after 16, 64, 256, ... updates.

    ``steps``: of Adam's steps, the gradient by the root of its second moment. At first
    there is none: bits are those of all.
    """

    bits: int
    steps: bool = False

    @property
    def looks(self) -> tuple[int, ...]:
        return (1 if self.steps else 0), 16, 64, 256, 1024

    def choosing(self, loss_of: Callable[[Any], Callable], args: tuple) -> Callable:
        """``args -> policy``; args: the second moment, and the loss's."""

        def make_gradient(policy):
            loss = loss_of(policy)

            def gradient(moment, *args):
                found = jax.grad(lambda *args: loss(*args)[0])(*args)
                if not self.steps:
                    return found
                return jax.tree.map(
                    lambda g, v: g / (jnp.sqrt(v) + 1e-8), found, moment
                )

            return gradient, args

        measure, _ = measuring(
            make_gradient,
            policy=jc.policies.uniform(gact(4)),
            codecs=tuple(map(gact, (8, 4, 2, 1))),
            probes=2,
        )

        def choose(*args) -> jc.Policy:
            found = measure(jax.random.key(0), *args)
            uniform = dict.fromkeys(found.effects, gact(self.bits))
            return found.policy(found.bits(uniform))

        return choose


GACT = {f"GACT {bits} bits": jc.policies.uniform(gact(bits)) for bits in (4, 2)}
GACT |= {f"GACT automatic {bits}": Automatic(bits) for bits in (4, 2)}
GACT |= {f"automatic {bits} of Adam's steps": Automatic(bits, True) for bits in (4, 2)}
LABELS = ["exact", *POLICIES, *GACT, "plan"]


# --- measuring ---


def loss_of(task: Task, policy: Any) -> Callable:
    apply = checkpointed(task, policy)

    def loss(params, state, batch, key):
        inputs, labels, weights = batch
        logits, new = apply(params, state, inputs, key)
        return cross_entropy(logits, labels, weights), new

    return loss


def step_of(task: Task, policy: Any) -> Callable:
    @jax.jit
    def step(params, state, moments, batch, key):
        gradient = jax.grad(loss_of(task, policy), has_aux=True)
        grads, state = gradient(params, state, batch, key)
        updates, moments = task.optimizer.update(grads, moments, params)
        return optax.apply_updates(params, updates), state, moments

    return step


def planned(task: Task) -> jc.Plan:
    """Of the whole step, in a little more than int4's memory."""
    batch, moments = task.batch(0), task.optimizer.init(task.params)

    def make_step(policy):
        args = task.params, task.state, moments, batch, task.key
        return step_of(task, policy), args

    def make_gradient(policy):
        gradient = jax.grad(loss_of(task, policy), has_aux=True)
        args = task.params, task.state, batch, task.key
        return lambda *args: gradient(*args)[0], args

    def peak(policy) -> int:
        step, args = make_step(policy)
        return memory.peak(step, *args).peak_bytes

    least, most = peak(POLICIES["int4"]), peak(None)
    found = jc.sensitivity(make_gradient)
    try:
        tenth = least + (most - least) // 10
        return jc.plan_step(make_step, budget=tenth, sensitivity=found)
    except ValueError as error:
        print(error, file=sys.stderr)
    more = least + (most - least) * 4 // 10
    return jc.plan_step(make_step, budget=more, sensitivity=found)


def train(task: Task, policy: Any, seed: int) -> dict[str, float]:
    """Held-out loss and accuracy after training."""

    @jax.jit
    def measure(params, state, batch):
        inputs, labels, weights = batch
        logits = task.evaluate(params, state, inputs)
        right = (logits.argmax(-1) == labels) * weights
        return cross_entropy(logits, labels, weights), right.sum() / weights.sum()

    params, state = task.params, task.state
    moments = task.optimizer.init(params)
    automatic = isinstance(policy, Automatic)
    chosen = GACT[f"GACT {policy.bits} bits"] if automatic else policy
    step, choose = step_of(task, chosen), None
    for i in range(task.steps):
        key, batch = jax.random.fold_in(jax.random.key(seed), i), task.batch(i)
        if automatic and i in policy.looks:
            moment = optax.tree.get(moments, "nu")
            args = moment, params, state, batch, key
            choose = choose or policy.choosing(partial(loss_of, task), args)
            before, chosen = chosen, choose(*args)
            step = step if chosen == before else step_of(task, chosen)
        params, state, moments = step(params, state, moments, batch, key)
    found = [measure(params, state, batch) for batch in task.held_out]
    loss, accuracy = (statistics.fmean(map(float, x)) for x in zip(*found, strict=True))
    return {"loss": loss, "accuracy": accuracy}


# --- rows ---


def run(data: Path, names: list[str], labels: list[str]) -> None:
    done = {(r["model"], r["policy"], r["seed"]) for r in rows_of(RESULTS)}
    for seed in range(max(SEEDS.values())):
        for name in names:
            policies = {"exact": None, **POLICIES}
            policies |= {**GACT, "plan": planned} if seed < 3 else {}
            for label, policy in policies.items():
                if seed >= SEEDS.get(name, 3) or label not in labels:
                    continue
                if (name, label, seed) in done:
                    continue
                start, task = time.perf_counter(), MODELS[name](data, seed)
                row = {"model": name, "policy": label, "seed": seed}
                if policy is planned:
                    policy = planned(task)
                    row |= {"predicted": policy.error}
                    if seed == 0:
                        row |= {"error": gradient(task, policy)["error"]}
                if label in POLICIES and seed == 0:
                    row |= gradient(task, policy)
                row |= train(task, policy, seed)
                row["seconds"] = round(time.perf_counter() - start)
                append(RESULTS, row | provenance())
                print(row, flush=True)


def table() -> None:
    print(
        "| model | policy | gradient error | predicted | bytes | held-out loss "
        "| of exact's | accuracy % | points above exact |\n" + "|---" * 9 + "|"
    )
    found: dict[tuple[str, str], dict[int, dict]] = {}
    for row in rows_of(RESULTS):
        found.setdefault((row["model"], row["policy"]), {})[row["seed"]] = row
    order = [*MODELS, *LABELS]
    for name, label in sorted(found, key=lambda key: [*map(order.index, key)]):
        group = found[name, label]
        exact, first = found[name, "exact"], group[0]

        def mean(of: Callable[[dict, dict], float], form: str = "+.2f") -> str:
            pairs = [(row, exact[seed]) for seed, row in group.items()]  # noqa: B023
            values = [of(*pair) for pair in pairs]
            text = format(statistics.fmean(values), form)
            if form.startswith("+") and len(values) > 1:
                text += f" ± {statistics.stdev(values) / len(values) ** 0.5:.2f}"
            return text

        cells = ["", "", "", mean(lambda row, _: row["loss"], ".4f"), ""]
        accuracy = mean(lambda row, _: 100 * row["accuracy"], ".2f"), ""
        if label != "exact":
            if "error" in first:
                cells[:2] = f"{first['error']:.4f}", f"{first['predicted']:.4f}"
            if "stored" in first:
                cells[2] = f"{100 * first['stored'] / first['exact']:.0f} %"
            cells[4] = mean(lambda a, b: 100 * (a["loss"] / b["loss"] - 1)) + " %"
            gap = mean(lambda a, b: 100 * (a["accuracy"] - b["accuracy"]))
            accuracy = accuracy[0], gap
        model = f"{name} ({SOURCES[name]})"
        print(f"| {' | '.join((model, label, *cells, *accuracy))} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("run", help="train and measure")
    command.add_argument("--data", required=True, type=Path, help="folder of all data")
    command.add_argument(
        "--model", default=",".join(MODELS), help="of these, by commas"
    )
    command.add_argument("--policy", default=",".join(LABELS), help="likewise")
    commands.add_parser("table", help="print the table")
    arguments = parser.parse_args()
    if arguments.command == "table":
        table()
    else:
        labels = arguments.policy.split(",")
        run(arguments.data, arguments.model.split(","), labels)


if __name__ == "__main__":
    main()
