"""The models of GACT's and Adacc's papers, at their sizes, as training steps.

GPT-2 and BERT with attention in plain JAX, ResNet-50 of jax-resnet, Swin-T (swin.py),
GCN and GAT of jraph on graphs as large as ogbn-arxiv. Full recomputation, the policy
"nothing", is `jax.checkpoint` around each layer or block.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import adacc_gpt2
import jax
import jax.numpy as jnp
import jax_resnet
import jraph
import optax
import swin
from flax import linen as nn
from graph_tasks import gat_logits, gcn_logits
from jax_resnet.resnet import STAGE_SIZES

import jaxcompact as jc
from configs import MODELS as CONFIGS
from methods import Method
from roberta import Examples
from training import Training

BF16 = jnp.bfloat16
S = jax.ShapeDtypeStruct
Built = tuple[Callable, Any, tuple]  # loss(params, *rest), params, rest: shapes


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
        cfg = replace(cfg, labels=16)
    schedule = optax.constant_schedule(1e-4)
    training = Training(
        cfg, Method("exact"), schedule, dtype=BF16, attention="xla", policy=policy
    )
    tokens, target = S((batch, seq), jnp.int32), S((batch,), jnp.int32)
    examples = Examples(tokens, target, S((), jnp.int32))
    return training.loss, training.abstract.params, (examples,)


def resnet(batch: int, policy, small, pixels: int = 224, layers: int = 50) -> Built:
    block = jax_resnet.ResNetBottleneckBlock
    model = jax_resnet.ResNet(
        nn.remat(block) if policy == "nothing" else block,
        stage_sizes=STAGE_SIZES[layers],
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
    """

    build: Callable[..., Built]
    batch: int
    layers: int
    multiple: int

    def step(self, batch: int, policy: Any) -> tuple[Callable, tuple]:
        return adacc_gpt2.adam_step(*self.build(batch, policy, False))


MODELS = {
    "GPT-2 117M": Model(partial(gpt2_of, 12, 768, 12), 16, 12, 2),
    "GPT-2 345M": Model(partial(gpt2_of, 24, 1024, 16), 16, 24, 2),
    "BERT-large": Model(bert, 128, 24, 16),
    "BERT-base": Model(partial(bert, layers=12, width=768), 128, 12, 16),
    "ResNet-50": Model(resnet, 128, 1, 16),
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
    "ResNet-50, pixels": Larger(resnet, 64, "pixels", 32),
    "ResNet-152, pixels": Larger(partial(resnet, layers=152), 64, "pixels", 32),
    "GCN, layers": Larger(gcn, 1, "layers", 2),
}
