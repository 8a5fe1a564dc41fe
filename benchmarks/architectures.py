"""The models of GACT's and Adacc's papers, at their sizes: peaks and largest batches.

    pip install ".[train,memory]" jax-resnet jraph
    python benchmarks/architectures.py all [MODEL ...]
    python benchmarks/architectures.py table

Whole training steps with AdamW, compiled for an H200: GPT-2 and BERT with
attention in plain JAX, ResNet-50 of jax-resnet, Swin-T (swin.py), GCN and GAT of jraph
on graphs as large as ogbn-arxiv. Full recomputation is `jax.checkpoint` around each
layer or block. GACT's settings are models.py's; its automatic bits come from
`jc.sensitivity` of a narrow model of the same operations, weighed by the large one's
sizes. A plan is `jc.plan_step`'s in full recomputation's memory. Rows of
results/architectures.jsonl that are there are not made again, but for those of
another commit that lack batches.
"""

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "train"), str(ROOT / "benchmarks")]
RESULTS = ROOT / "benchmarks/results/architectures.jsonl"
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import adacc_gpt2  # noqa: E402
import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import jax_resnet  # noqa: E402
import jraph  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402
import swin  # noqa: E402
from flax import linen as nn  # noqa: E402
from graph_tasks import gat_logits, gcn_logits  # noqa: E402
from jax_resnet.resnet import STAGE_SIZES  # noqa: E402
from models import gact  # noqa: E402
from plans import step_seconds  # noqa: E402
from step import provenance  # noqa: E402

import jaxcompact as jc  # noqa: E402
from configs import MODELS as CONFIGS  # noqa: E402
from jaxcompact import memory  # noqa: E402
from jaxcompact.planner.block import block_of  # noqa: E402
from methods import Method  # noqa: E402
from roberta import Examples  # noqa: E402
from training import Training  # noqa: E402

# Nothing runs here but the narrow models, twice: they take longer to compile.
jax.config.update("jax_disable_most_optimizations", True)
BF16 = jnp.bfloat16
S = jax.ShapeDtypeStruct
Built = tuple[Callable, Any, tuple]  # loss(params, *rest), params, rest: shapes
UNIFORM = {bits: jc.policies.uniform(gact(bits)) for bits in (4, 2)}
BUDGETS = ("16 GB", "32 GB", "80 GB")


def gpt2_of(layers: int, width: int, heads: int, batch: int, policy, small) -> Built:
    if small:
        return adacc_gpt2.build(2, 256, 4, batch, 256, policy)
    return adacc_gpt2.build(layers, width, heads, batch, 1024, policy)


def bert(batch: int, policy, small, layers: int = 24, width: int = 1024) -> Built:
    """Its form is RoBERTa's: one kind of segment. Sequences of 128, three classes."""
    cfg, seq = replace(CONFIGS["roberta-large"], vocab_size=30522, labels=3), 128
    cfg = replace(cfg, layers=layers, width=width, ff=4 * width, heads=width // 64)
    if small:
        cfg, seq = replace(cfg, vocab_size=512, width=64, ff=256, layers=2, heads=4), 32
    schedule = optax.constant_schedule(1e-4)
    training = Training(
        cfg, Method("exact"), schedule, dtype=BF16, attention="xla", policy=policy
    )
    tokens, target = S((batch, seq), jnp.int32), S((batch,), jnp.int32)
    examples = Examples(tokens, target, S((), jnp.int32))
    return training.loss, training.abstract.params, (examples,)


def resnet50(batch: int, policy, small, pixels: int = 224) -> Built:
    block = jax_resnet.ResNetBottleneckBlock
    model = jax_resnet.ResNet(
        nn.remat(block) if policy == "nothing" else block,
        stage_sizes=STAGE_SIZES[50],
        hidden_sizes=(8, 16, 32, 64) if small else (64, 128, 256, 512),
        n_classes=1000,
        stem_cls=jax_resnet.ResNetStem,
        conv_cls=partial(nn.Conv, dtype=BF16),
        norm_cls=partial(nn.BatchNorm, momentum=0.9, dtype=BF16),
    )

    def apply(params, images, statistics):
        variables = {"params": params, "batch_stats": statistics}
        return model.apply(variables, images, mutable=["batch_stats"])[0]

    return _classifier(model, apply, batch, 64 if small else pixels, policy)


def swin_t(batch: int, policy, small) -> Built:
    block = nn.remat(swin.Block) if policy == "nothing" else swin.Block
    model = swin.Swin(width=12 if small else 96, dtype=BF16, block=block)

    def apply(params, images, statistics):
        return model.apply({"params": params}, images)

    return _classifier(model, apply, batch, 224, policy)


def _classifier(model, apply: Callable, batch: int, size: int, policy) -> Built:
    images = S((batch, size, size, 3), BF16)
    variables = jax.eval_shape(model.init, jax.random.key(0), images)
    apply = _wrapped(apply, policy)

    def loss(params, images, labels, statistics):
        logits = apply(params, images, statistics).astype(jnp.float32)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return losses.mean()

    labels, statistics = S((batch,), jnp.int32), variables.get("batch_stats", {})
    return loss, variables["params"], (images, labels, statistics)


def _wrapped(apply: Callable, policy) -> Callable:
    """A whole network as one block."""
    if hasattr(policy, "decide"):
        return jc.checkpoint(apply, policy=policy, params=0)
    return apply


def graphs(logits: Callable, sizes: tuple, loops: bool, batch: int, policy, small):
    """So many graphs of ogbn-arxiv's size: 169,343 papers, 1,166,243 citations."""
    nodes, edges = (256, 512) if small else (169_343, 2 * 1_166_243)
    nodes, edges = batch * nodes, batch * edges + loops * batch * nodes
    index = S((edges,), jnp.int32)
    graph = jraph.GraphsTuple(
        nodes=S((nodes, 128), jnp.float32),
        edges=None,
        senders=index,
        receivers=index,
        globals=None,
        n_node=S((1,), jnp.int32),
        n_edge=S((1,), jnp.int32),
    )
    wrap = jax.checkpoint if policy == "nothing" else lambda layer: layer
    apply = _wrapped(partial(logits, wrap=wrap), policy)

    def loss(params, graph, labels, keys):
        out = apply(params, graph, keys)
        return optax.softmax_cross_entropy_with_integer_labels(out, labels).mean()

    params = jax.tree.map(lambda shape: S(shape, jnp.float32), sizes, is_leaf=_is_shape)
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), len(sizes)))
    return loss, params, (graph, S((nodes,), jnp.int32), keys)


def _is_shape(x: Any) -> bool:
    return isinstance(x, tuple) and isinstance(x[0], int)


def gcn(batch: int, policy, small, layers: int = 3) -> Built:
    sizes = ((128, 256), *[(256, 256)] * (layers - 2), (256, 40))
    return graphs(gcn_logits, sizes, False, batch, policy, small)


GAT = (  # three heads of 250, three times
    {"w": (128, 750), "a": (500, 1)},
    {"w": (750, 750), "a": (500, 1)},
    {"w": (750, 120), "a": (80, 1)},
)


@dataclass(frozen=True)
class Model:
    """How it is built, and at which sizes.

    Attributes:
        build: ``(batch, policy, small)``; small is narrow, of the same operations.
        batch: whose peaks are shown.
        layers: how often its block runs.
        multiple: of what the batches that are searched for are.
        budget: of the plan, where none fits in full recomputation's memory.
    """

    build: Callable[..., Built]
    batch: int
    layers: int
    multiple: int
    budget: str | None = None

    def step(self, batch: int, policy: Any) -> tuple[Callable, tuple]:
        return adacc_gpt2.adam_step(*self.build(batch, policy, False))


MODELS = {
    "GPT-2 117M": Model(partial(gpt2_of, 12, 768, 12), 16, 12, 2),
    "GPT-2 345M": Model(partial(gpt2_of, 24, 1024, 16), 16, 24, 2),
    "BERT-large": Model(bert, 128, 24, 16),
    "BERT-base": Model(partial(bert, layers=12, width=768), 128, 12, 16),
    "ResNet-50": Model(resnet50, 128, 1, 16, "2.7GiB"),
    "Swin-T": Model(swin_t, 128, 1, 16),
    "GCN": Model(gcn, 1, 1, 1),
    "GAT": Model(
        partial(graphs, partial(gat_logits, heads=(3, 3, 3)), GAT, True), 1, 1, 1
    ),
}


@dataclass(frozen=True)
class Larger:
    """What is made larger of a model at one batch, in which multiples."""

    build: Callable[..., Built]
    batch: int
    of: str
    multiple: int

    def step(self, size: int, policy: Any) -> tuple[Callable, tuple]:
        sized = {self.of: size}
        return adacc_gpt2.adam_step(*self.build(self.batch, policy, False, **sized))


LARGER = {
    "BERT-large, layers": Larger(bert, 16, "layers", 1),
    "BERT-large, width": Larger(bert, 16, "width", 64),
    "ResNet-50, pixels": Larger(resnet50, 64, "pixels", 32),
    "GCN, layers": Larger(gcn, 1, "layers", 2),
}
LARGER_WITH = {"exact": None, "recomputed": "nothing"}
LARGER_WITH |= {f"GACT {bits} bits": policy for bits, policy in UNIFORM.items()}


def automatic(model: Model, bits: int) -> Any:
    """GACT's bits: of a narrow model's sensitivity, at the large one's sizes."""
    base = UNIFORM[4]

    def make_gradient(policy):
        loss, params, rest = model.build(4, policy, True)
        return jax.grad(loss), _random((params, *rest))

    found = jc.sensitivity(
        make_gradient, policy=base, codecs=tuple(map(gact, (8, 4, 2, 1))), probes=2
    )
    traces = block_of(lambda policy: model.step(model.batch, policy), base, "step")
    shapes = {s.tensor.name: s.tensor.shape for s in traces.replay.slots}
    effects = {
        name: replace(effect, shape=shapes[name])
        for name, effect in found.effects.items()
    }
    found = replace(found, effects=effects)
    policy = found.policy(found.bits(dict.fromkeys(effects, gact(bits))))
    alike = set(dict(policy.rules).values()) == {gact(bits)}
    return UNIFORM[bits] if alike else policy


def _random(shapes: Any) -> Any:
    """Normal weights and images, the integers 0 and 1, and random keys."""
    rng = np.random.default_rng(0)

    def one(x):
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            return (
                jax.random.split(jax.random.key(0), x.shape)
                if x.shape
                else (jax.random.key(0))
            )
        if jnp.issubdtype(x.dtype, jnp.integer):
            return jnp.asarray(rng.integers(2, 16, x.shape), x.dtype)
        fan = x.shape[0] if len(x.shape) == 2 else 16
        return jnp.asarray(rng.normal(size=x.shape) / fan**0.5, x.dtype)

    return jax.tree.map(one, shapes)


# --- rows ---


def policies(model: Model, row_of: Callable[[str], dict]) -> Iterator[tuple[str, Any]]:
    yield "exact", None
    yield "recomputed", "nothing"
    yield "int4", jc.policies.int4()
    for bits, policy in UNIFORM.items():
        yield f"GACT {bits} bits", policy
        yield f"GACT automatic {bits}", partial(automatic, model, bits)
    budget = model.budget or row_of("recomputed")["peak_bytes"]
    yield "plan", partial(planned, model, model.batch, budget)


def planned(model: Model, batch: int, budget: int | str) -> jc.Plan:
    return jc.plan_step(partial(model.step, batch), layers=model.layers, budget=budget)


def make(name: str, search: bool) -> None:
    model, commit = MODELS[name], provenance()["commit"]
    done = {row["method"]: row for row in rows() if row["model"] == name}
    for method, policy in policies(model, done.__getitem__):
        blank = {"model": name, "method": method, "batch": model.batch}
        row = done.get(method, blank)
        missing = [b for b in BUDGETS if b not in row] * search
        if "peak_bytes" in row and not missing:
            continue
        if row.get("commit") != commit:  # a row's figures are all of one commit
            row, missing = blank, list(BUDGETS) * search
        if callable(policy) and ("peak_bytes" not in row or method != "plan"):
            policy = policy()
        for bits, uniform in UNIFORM.items():  # automatic bits may be these
            twin = done.get(f"GACT {bits} bits", {})
            if policy is uniform and twin.get("commit") == commit:
                row = {**twin, **row, "method": method}
                missing = [b for b in missing if b not in row]
        if "peak_bytes" not in row:
            step, args = model.step(model.batch, policy)
            row["peak_bytes"] = memory.peak(step, *args).peak_bytes
            if not hasattr(policy, "decide"):
                row["seconds"] = step_seconds(step, args)
            if method == "plan":
                extra = model.layers * policy.seconds
                row |= {"seconds": done["exact"]["seconds"] + extra}
                row |= {"error": policy.error}
        for budget in missing:
            if method == "plan":
                row[budget] = largest_planned(model, budget, done["recomputed"][budget])
            else:
                row[budget] = largest(model, policy, budget)
        done[method] = write(row)


def make_larger(name: str) -> None:
    """Not a batch, but that size of the model, is searched for."""
    larger = LARGER[name]
    known = {row["method"] for row in rows() if row["model"] == name}
    for method, policy in LARGER_WITH.items():
        if method not in known:
            row = {"model": name, "method": method, "batch": larger.batch}
            write(row | {"16 GB": largest(larger, policy, "16 GB")})


def largest(model: Model | Larger, policy: Any, budget: str) -> int:
    try:
        return memory.largest_batch(
            lambda size: model.step(size, policy),
            budget=budget,
            multiple=model.multiple,
        ).batch
    except ValueError as error:  # one is too large
        print(error, file=sys.stderr)
        return 0


def largest_planned(model: Model, budget: str, near: int) -> int:
    """Each batch with a plan of its own; within 2 %."""

    def fits(count: int) -> bool:
        try:
            planned(model, count * model.multiple, budget)
        except ValueError as error:
            print(error, file=sys.stderr)
            return False
        return True

    count, good, bad = max(1, near // model.multiple), 0, None
    while bad is None or bad - good > max(1, good // 50):
        if fits(count):
            good = count
        else:
            bad = count
        if bad is None:
            count = good + max(1, good // 4)
        else:
            count = (good + bad) // 2 if good else bad * 4 // 5
    return good * model.multiple


def rows() -> list[dict]:
    if not RESULTS.exists():
        return []
    return list(map(json.loads, RESULTS.read_text().splitlines()))


def write(row: dict) -> dict:
    """In its place, where it is there already."""
    row |= provenance() | {"device": "h200"}
    kept = {(each["model"], each["method"]): each for each in (*rows(), row)}
    RESULTS.write_text("".join(f"{json.dumps(each)}\n" for each in kept.values()))
    print(row, flush=True)
    return row


def table() -> str:
    head = ("model", "method", "GiB", "of exact", "modelled ms", *BUDGETS)
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for name, model in MODELS.items():
        own = {row["method"]: row for row in rows() if row["model"] == name}
        for method, row in own.items():
            size, exact = row["peak_bytes"], own["exact"]["peak_bytes"]
            cells = [
                f"{name}, batch {model.batch}",
                method,
                f"{size / 2**30:.2f}",
                f"{size / exact:.0%}",
                f"{row['seconds'] * 1e3:.1f}" if "seconds" in row else "",
            ]
            for budget in BUDGETS:
                most, first = row.get(budget), own["exact"].get(budget)
                times = f" ({most / first:.1f}x)" if most and first else ""
                cells.append("" if most is None else f"{most}{times}")
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def table_of_larger() -> str:
    lines = [f"| in 16 GB | batch | {' | '.join(LARGER_WITH)} |"]
    lines.append("|---" * (len(LARGER_WITH) + 2) + "|")
    for name, larger in LARGER.items():
        most = {row["method"]: row["16 GB"] for row in rows() if row["model"] == name}
        found = map(most.get, LARGER_WITH)
        cells = (f"{n} ({n / most['exact']:.1f}x)" if n else "" for n in found)
        lines.append(f"| {name} | {larger.batch} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("command", choices=("all", "table"))
    parser.add_argument("models", nargs="*", help="whose names contain one of these")
    arguments = parser.parse_args()
    if arguments.command == "table":
        print(table(), table_of_larger(), sep="\n\n")
        return

    def asked(models: Iterable[str]) -> list[str]:
        words = arguments.models or [""]
        return [name for name in models if any(word in name for word in words)]

    for search in (False, True):  # peaks first
        for name in asked(MODELS):
            make(name, search)
    for name in asked(LARGER):
        make_larger(name)


if __name__ == "__main__":
    main()
