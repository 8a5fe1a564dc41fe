"""Models that were not written for this library, trained with encoded residuals.

    pip install "transformers<5" jax-resnet jraph
    python benchmarks/models.py run --data ../shared/data
    python benchmarks/models.py table

GPT-2 and ViT of Hugging Face and jax-resnet's ResNet (Linen), GCN and GAT of jraph
(plain JAX), an MLP of NNX layers with dropout. Each is wrapped once, as a whole:
``jc.checkpoint(apply, policy=jc.policies.int4(), params=(0, 1))``. `run` appends rows
to benchmarks/results/models.jsonl; rows that are there are not made again.
"""

import argparse
import gzip
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "train")]

import jaxcompact as jc  # noqa: E402
from data import prepare  # noqa: E402
from jaxcompact.checkpoint import TRACERS  # noqa: E402

os.environ.setdefault("HF_HUB_OFFLINE", "1")
RESULTS = ROOT / "benchmarks" / "results" / "models.jsonl"
SEEDS = {"vit": 10}  # 3 for all others, whose accuracies differ less by seed
POLICIES = {"int8": jc.policies.int8(), "int4": jc.policies.int4()}
Batch = tuple[Any, jax.Array, jax.Array]  # inputs, labels, weights of the labels


@dataclass(frozen=True)
class Task:
    """A model, and what it learns.

    Attributes:
        apply: ``(params, state, inputs, key) -> logits, state``, in training.
        evaluate: ``(params, state, inputs) -> logits``.
        batch: the batch of a step.
        held_out: batches that the metric is measured on.
    """

    apply: Callable
    evaluate: Callable
    params: Any
    state: Any
    batch: Callable[[int], Batch]
    held_out: list[Batch]
    steps: int
    optimizer: optax.GradientTransformation
    key: jax.Array = field(default_factory=lambda: jax.random.key(0))


# --- models and data ---


def gpt2(data: Path, seed: int) -> Task:
    """Two layers on bytes of novels, with GPT-2's own dropout."""
    from transformers import FlaxGPT2LMHeadModel, GPT2Config

    text = prepare(data / "english_novels", "bytes")
    config = GPT2Config(
        vocab_size=text.vocab_size, n_embd=96, n_layer=2, n_head=3, n_positions=64
    )
    model = FlaxGPT2LMHeadModel(config, seed=seed)

    def batch(tokens) -> Batch:
        tokens = jnp.asarray(tokens)
        labels = tokens[:, 1:]
        return tokens[:, :-1], labels, jnp.ones(labels.shape)

    return Task(
        *_hugging_face(model),
        batch=lambda step: batch(
            text.batch(step, batch_size=16, seq_len=64, seed=seed)
        ),
        held_out=[
            batch(b) for b in text.eval_batches(batch_size=64, seq_len=64, count=8)
        ],
        steps=1500,
        optimizer=_adamw(3e-3, 1500),
    )


def vit(data: Path, seed: int) -> Task:
    from transformers import FlaxViTForImageClassification, ViTConfig

    config = ViTConfig(
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=128,
        image_size=28,
        patch_size=7,
        num_channels=1,
        num_labels=10,
        hidden_dropout_prob=0.1,
        initializer_range=0.1,
    )
    model = FlaxViTForImageClassification(config, seed=seed)
    batch, held_out = _digits(data, seed)
    return Task(
        *_hugging_face(model, lambda images: images.transpose(0, 3, 1, 2)),
        batch=batch,
        held_out=held_out,
        steps=2000,
        optimizer=_adamw(2e-3, 2000),
    )


def _hugging_face(model: Any, prepared: Callable = lambda x: x) -> tuple:
    def apply(params, state, inputs, key):
        out = model(prepared(inputs), params=params, dropout_rng=key, train=True)
        return out.logits, state

    def evaluate(params, state, inputs):
        return model(prepared(inputs), params=params).logits

    return apply, evaluate, model.params, {}


def resnet(data: Path, seed: int) -> Task:
    """Batch norm's running statistics are its state."""
    import jax_resnet

    model = jax_resnet.ResNet(
        jax_resnet.ResNetBlock,
        stage_sizes=(1, 1),
        hidden_sizes=(16, 32),
        n_classes=10,
        stem_cls=partial(jax_resnet.ResNetDStem, stem_width=16),
    )
    batch, held_out = _digits(data, seed)
    variables = model.init(jax.random.key(seed), held_out[0][0])

    def apply(params, state, inputs, key):
        return model.apply({"params": params, **state}, inputs, mutable=["batch_stats"])

    def evaluate(params, state, inputs):
        norms = partial(model.apply, mutable=False)
        return norms({"params": params, **state}, inputs)

    return Task(
        apply,
        evaluate,
        variables["params"],
        {"batch_stats": variables["batch_stats"]},
        batch=batch,
        held_out=held_out,
        steps=250,
        optimizer=_adamw(3e-3, 250),
    )


def mlp(data: Path, seed: int) -> Task:
    rngs = nnx.Rngs(seed)
    model = nnx.Sequential(
        nnx.Linear(784, 256, rngs=rngs),
        nnx.relu,
        nnx.Dropout(0.3, rngs=rngs),
        nnx.Linear(256, 256, rngs=rngs),
        nnx.gelu,
        nnx.Dropout(0.3, rngs=rngs),
        nnx.Linear(256, 10, rngs=rngs),
    )
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)

    def apply(params, state, inputs, key):  # its state counts the random keys
        model = nnx.merge(graphdef, params, state, copy=True)
        logits = model(inputs.reshape(-1, 784))
        return logits, nnx.state(model, nnx.Not(nnx.Param))

    def evaluate(params, state, inputs):
        model = nnx.merge(graphdef, params, state)
        return nnx.view(model, deterministic=True)(inputs.reshape(-1, 784))

    batch, held_out = _digits(data, seed)
    return Task(
        apply,
        evaluate,
        params,
        rest,
        batch=batch,
        held_out=held_out,
        steps=500,
        optimizer=_adamw(1e-3, 500),
    )


def gcn(data: Path, seed: int) -> Task:
    """Kipf and Welling's two layers and settings."""
    import jraph

    graph, labels, parts = _cora(data)
    keys = jax.random.split(jax.random.key(seed))
    params = [_glorot(keys[0], 1433, 16), _glorot(keys[1], 16, 7)]

    def logits(params, graph, keys=None):
        for i, w in enumerate(params):
            x = jax.nn.relu(graph.nodes) if i else graph.nodes
            x = x if keys is None else _dropout(keys[i], x)
            layer = jraph.GraphConvolution(partial(_times, w), add_self_edges=True)
            graph = layer(graph._replace(nodes=x))
        return graph.nodes

    return _on_cora(logits, params, graph, labels, parts, optax.adam(1e-2), decay=5e-4)


def gat(data: Path, seed: int) -> Task:
    """Velickovic et al.: 8 heads of 8, then one; dropout of inputs."""
    import jraph

    graph, labels, parts = _cora(data)
    n = len(labels)
    loops = np.arange(n, dtype=np.int32)
    graph = graph._replace(
        senders=jnp.concatenate([graph.senders, loops]),
        receivers=jnp.concatenate([graph.receivers, loops]),
    )
    keys = jax.random.split(jax.random.key(seed), 4)
    params = [
        {"w": _glorot(keys[0], 1433, 64), "a": _glorot(keys[1], 16, 1)},
        {"w": _glorot(keys[2], 64, 7), "a": _glorot(keys[3], 14, 1)},
    ]

    def logits(params, graph, keys=None):
        for i, (p, heads) in enumerate(zip(params, (8, 1), strict=True)):
            x = graph.nodes if keys is None else _dropout(keys[i], graph.nodes)
            layer = jraph.GAT(
                lambda x, p=p, heads=heads: (x @ p["w"]).reshape(n, heads, -1),
                lambda s, r, _, p=p: jax.nn.leaky_relu(
                    jnp.concatenate([s, r], -1) @ p["a"], 0.2
                ),
                lambda x, i=i: x.reshape(n, -1) if i else jax.nn.elu(x.reshape(n, -1)),
            )
            graph = layer(graph._replace(nodes=x))
        return graph.nodes

    return _on_cora(logits, params, graph, labels, parts, optax.adam(5e-3), decay=5e-4)


MODELS = {
    "gpt2": gpt2,
    "vit": vit,
    "resnet": resnet,
    "mlp": mlp,
    "gcn": gcn,
    "gat": gat,
}
SOURCES = {
    "gpt2": "transformers, Linen",
    "vit": "transformers, Linen",
    "resnet": "jax-resnet, Linen",
    "mlp": "Flax, NNX",
    "gcn": "jraph, plain JAX",
    "gat": "jraph, plain JAX",
}


def _adamw(rate: float, steps: int) -> optax.GradientTransformation:
    schedule = optax.warmup_cosine_decay_schedule(0.0, rate, steps // 10, steps)
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule))


def _times(w, x):
    return x @ w


def _glorot(key, n, m):
    return jax.nn.initializers.glorot_uniform()(key, (n, m))


def _dropout(key, x):
    return jnp.where(jax.random.bernoulli(key, 0.5, x.shape), 2.0 * x, 0.0)


def _digits(data: Path, seed: int) -> tuple[Callable[[int], Batch], list[Batch]]:
    """The 10,000 test images of MNIST: 8,000 to train on, 2,000 held out."""
    folder = data / "mnist_t10k"
    raw = gzip.decompress((folder / "t10k-images-idx3-ubyte.gz").read_bytes())
    images = np.frombuffer(raw, np.uint8, offset=16).reshape(-1, 1, 28, 28) / 255.0
    raw = gzip.decompress((folder / "t10k-labels-idx1-ubyte.gz").read_bytes())
    labels = np.frombuffer(raw, np.uint8, offset=8).astype(np.int32)
    order = np.random.default_rng(0).permutation(len(labels))
    images = (images.astype(np.float32)[order].transpose(0, 2, 3, 1) - 0.13) / 0.31
    labels = labels[order]

    def take(index) -> Batch:
        return images[index], labels[index], np.ones(len(index), np.float32)

    def batch(step: int) -> Batch:
        epoch, place = divmod(step, 125)
        shuffled = np.random.default_rng((seed, epoch)).permutation(8000)
        return take(shuffled[64 * place : 64 * place + 64])

    return batch, [take(np.arange(8000 + i, 8500 + i)) for i in range(0, 2000, 500)]


def _cora(data: Path):
    import jraph

    with np.load(data / "cora" / "cora.npz") as file:
        z = dict(file)
    n = len(z["labels"])
    nodes = np.zeros(tuple(z["x_shape"]), np.float32)
    rows = np.repeat(np.arange(n), np.diff(z["x_indptr"]))
    nodes[rows, z["x_indices"]] = z["x_data"]
    nodes /= np.maximum(nodes.sum(1, keepdims=True), 1.0)
    one, other = z["edges"]
    graph = jraph.GraphsTuple(
        nodes=jnp.asarray(nodes),
        edges=None,
        senders=jnp.asarray(np.concatenate([one, other])),
        receivers=jnp.asarray(np.concatenate([other, one])),
        globals=None,
        n_node=jnp.array([n]),
        n_edge=jnp.array([2 * len(one)]),
    )
    return graph, z["labels"], (z["train_idx"], z["test_idx"])


def _on_cora(logits, params, graph, labels, parts, optimizer, decay) -> Task:
    def masked(index) -> Batch:
        weights = np.zeros(len(labels), np.float32)
        weights[index] = 1.0
        return graph, np.maximum(labels, 0), weights

    def apply(params, state, graph, key):
        return logits(params, graph, jax.random.split(key, len(params))), state

    train, test = map(masked, parts)
    return Task(
        apply,
        lambda params, state, graph: logits(params, graph),
        params,
        {},
        batch=lambda step: train,
        held_out=[test],
        steps=200,
        optimizer=optax.chain(optax.add_decayed_weights(decay), optimizer),
    )


# --- measuring ---


def cross_entropy(logits: jax.Array, labels: jax.Array, weights: jax.Array):
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return (losses * weights).sum() / weights.sum()


def checkpointed(task: Task, policy: Any) -> Callable:
    if policy is None:
        return task.apply
    return jc.checkpoint(task.apply, policy=policy, params=(0, 1))


def train(task: Task, policy: Any, seed: int) -> dict[str, float]:
    """Held-out loss and accuracy after training."""
    apply = checkpointed(task, policy)

    @jax.jit
    def step(params, state, moments, batch, key):
        inputs, labels, weights = batch

        def loss(params):
            logits, new = apply(params, state, inputs, key)
            return cross_entropy(logits, labels, weights), new

        (value, state_new), grads = jax.value_and_grad(loss, has_aux=True)(params)
        updates, moments = task.optimizer.update(grads, moments, params)
        return optax.apply_updates(params, updates), state_new, moments, value

    @jax.jit
    def measure(params, state, batch):
        inputs, labels, weights = batch
        logits = task.evaluate(params, state, inputs)
        right = (logits.argmax(-1) == labels) * weights
        return cross_entropy(logits, labels, weights), right.sum() / weights.sum()

    params, state = task.params, task.state
    moments = task.optimizer.init(params)
    for i in range(task.steps):
        key = jax.random.fold_in(jax.random.key(seed), i)
        params, state, moments, _ = step(params, state, moments, task.batch(i), key)
    found = [measure(params, state, batch) for batch in task.held_out]
    loss, accuracy = (statistics.fmean(map(float, x)) for x in zip(*found, strict=True))
    return {"loss": loss, "accuracy": accuracy}


@dataclass(frozen=True)
class Exactly:
    """A policy that saves what another one would quantize."""

    policy: Any

    def decide(self, tensor):
        action, reason = self.policy.decide(tensor)
        return (jc.Save() if isinstance(action, jc.Quantized) else action), reason


def gradient(task: Task, policy: Any) -> dict[str, float]:
    """Of the first batch: the relative error of the gradient, and the predicted one.

    Predicted is the root of the sum of the squared errors that each stored tensor's
    own error causes by itself.
    """
    inputs, labels, weights = task.batch(0)
    args = task.params, task.state, inputs, task.key

    def vector(leaves):
        return jnp.concatenate([g.ravel() for g in leaves])

    def of(apply):
        def loss(params, *rest):
            return cross_entropy(apply(params, *rest)[0], labels, weights)

        return vector(jax.tree.leaves(jax.jit(jax.grad(loss))(*args)))

    small = checkpointed(task, policy)
    exact = of(task.apply)
    norm = jnp.linalg.norm(exact)
    measured = jnp.linalg.norm(of(small) - exact) / norm

    def plan_of(fun):
        traced, flat = TRACERS[fun](args, {})
        first = len(flat) - len(jax.tree.leaves(args))
        count = len(jax.tree.leaves(task.params))
        mask = tuple(first <= i < first + count for i in range(len(flat)))
        return traced.plan(mask), flat

    plan, flat = plan_of(checkpointed(task, Exactly(policy)))
    outs, stored = plan.forward(*flat)
    cts = jax.tree.map(jnp.zeros_like, outs)
    cts[0] = jax.grad(cross_entropy)(outs[0], labels, weights)
    kept = [flat[i] for i in plan.replay.kept]

    def backward(kept, stored):
        return vector(plan.backward(kept, stored, plan.active(cts)))

    start = backward(kept, stored)
    places = {slot.tensor.name: k for k, slot in enumerate(plan.replay.slots)}
    inputs_at = {plan.replay.graph.inputs[i]: k for k, i in enumerate(plan.replay.kept)}
    squares = []
    real = plan_of(small)[0]
    for slot in real.replay.slots:
        if not isinstance(slot.action, jc.Quantized):
            continue
        other_kept, other = list(kept), list(stored)
        if slot.tensor.name in places:
            k = places[slot.tensor.name]
            store = plan.stores[k]
            x = store.decode(stored[k])
            other[k] = store.encode(slot.action.decode(slot.action.encode(x)))
        else:
            k = inputs_at[slot.source]
            other_kept[k] = slot.action.decode(slot.action.encode(kept[k]))
        squares.append(jnp.sum((backward(other_kept, other) - start) ** 2))
    exact_bytes = {s.tensor.name: s.tensor.nbytes for s in real.replay.slots}
    return {
        "error": float(measured),
        "predicted": float(jnp.sqrt(sum(squares)) / norm),
        "stored": sum(
            leaf.size * leaf.dtype.itemsize
            for store in real.stores
            for leaf in store.leaves
        ),
        "exact": sum(exact_bytes.values()),
    }


# --- rows ---


def rows() -> list[dict]:
    if not RESULTS.exists():
        return []
    return list(map(json.loads, RESULTS.read_text().splitlines()))


def run(data: Path, names: list[str]) -> None:
    done = {(r["model"], r["policy"], r["seed"]) for r in rows()}
    for name in names:
        for seed in range(SEEDS.get(name, 3)):
            for label, policy in {"exact": None, **POLICIES}.items():
                if (name, label, seed) in done:
                    continue
                start, task = time.perf_counter(), MODELS[name](data, seed)
                row = {"model": name, "policy": label, "seed": seed}
                if policy is not None and seed == 0:
                    row |= gradient(task, policy)
                row |= train(task, policy, seed)
                row["seconds"] = round(time.perf_counter() - start)
                with RESULTS.open("a") as file:
                    file.write(json.dumps(row) + "\n")
                print(row, flush=True)


def table() -> None:
    print(
        "| model | policy | gradient error | predicted | bytes | held-out loss "
        "| of exact's | accuracy % | points above exact |\n" + "|---" * 9 + "|"
    )
    found: dict[tuple[str, str], dict[int, dict]] = {}
    for row in rows():
        found.setdefault((row["model"], row["policy"]), {})[row["seed"]] = row
    order = {key: i for i, key in enumerate(MODELS)}
    for name, label in sorted(found, key=lambda key: order[key[0]]):
        group = found[name, label]
        exact, first = found[name, "exact"], group[0]

        def mean(of: Callable[[dict, dict], float], form: str = "+.2f") -> str:
            pairs = [(row, exact[seed]) for seed, row in group.items()]  # noqa: B023
            values = [of(*pair) for pair in pairs]
            text = format(statistics.fmean(values), form)
            spread = statistics.stdev(values) / len(values) ** 0.5
            return f"{text} ± {spread:.2f}" if form.startswith("+") else text

        cells = ["", "", "", mean(lambda row, _: row["loss"], ".4f"), ""]
        accuracy = mean(lambda row, _: 100 * row["accuracy"], ".2f"), ""
        if label != "exact":
            cells[:3] = [
                f"{first['error']:.4f}",
                f"{first['predicted']:.4f}",
                f"{100 * first['stored'] / first['exact']:.0f} %",
            ]
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
    commands.add_parser("table", help="print the table")
    arguments = parser.parse_args()
    if arguments.command == "table":
        table()
    else:
        run(arguments.data, arguments.model.split(","))


if __name__ == "__main__":
    main()
