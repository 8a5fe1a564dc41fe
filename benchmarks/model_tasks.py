"""Small models, most of other packages, and the text or the digits that they learn.

GPT-2, BERT and ViT of Hugging Face, jax-resnet's ResNet, a VGG and a Swin (Linen), an
MLP of NNX layers with dropout.
"""

import csv
import gzip
import os
import re
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax import nnx

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "train"), str(ROOT / "benchmarks")]

from swin import Swin  # noqa: E402

from data import prepare  # noqa: E402

os.environ.setdefault("HF_HUB_OFFLINE", "1")
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


def gpt2(data: Path, seed: int) -> Task:
    """Two layers on bytes of novels, with GPT-2's own dropout."""
    from transformers import FlaxGPT2LMHeadModel, GPT2Config

    text, batch, held_out = novels(data, seed, shifted)
    config = GPT2Config(
        vocab_size=text.vocab_size, n_embd=96, n_layer=2, n_head=3, n_positions=64
    )
    model = FlaxGPT2LMHeadModel(config, seed=seed)
    return Task(
        *_hugging_face(model),
        batch=batch,
        held_out=held_out,
        steps=1500,
        optimizer=adamw(3e-3, 1500),
    )


def bert(data: Path, seed: int) -> Task:
    """Two layers that tell which of 77 things a customer of a bank asks."""
    from transformers import BertConfig, FlaxBertForSequenceClassification

    batch, held_out, words = _questions(data / "banking77", seed)
    config = BertConfig(
        vocab_size=words,
        hidden_size=96,
        num_hidden_layers=2,
        num_attention_heads=3,
        intermediate_size=384,
        max_position_embeddings=32,
        num_labels=77,
    )
    model = FlaxBertForSequenceClassification(config, seed=seed)
    return Task(
        *_hugging_face(model, lambda ids: (ids, (ids > 0).astype(jnp.int32))),
        batch=batch,
        held_out=held_out,
        steps=1500,
        optimizer=adamw(1e-3, 1500),
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
        *_hugging_face(model, lambda images: (images.transpose(0, 3, 1, 2),)),
        batch=batch,
        held_out=held_out,
        steps=2000,
        optimizer=adamw(2e-3, 2000),
    )


def _hugging_face(model: Any, prepared: Callable = lambda x: (x,)) -> tuple:
    def apply(params, state, inputs, key):
        out = model(*prepared(inputs), params=params, dropout_rng=key, train=True)
        return out.logits, state

    def evaluate(params, state, inputs):
        return model(*prepared(inputs), params=params).logits

    return apply, evaluate, model.params, {}


def swin(data: Path, seed: int) -> Task:
    """Two stages of two blocks: 14 x 14 patches in four windows, then one window."""
    model = Swin(classes=10, width=24, depths=(2, 2), heads=(2, 4), patch=2)
    batch, held_out = _digits(data, seed)

    def apply(params, state, inputs, key):
        return model.apply(params, inputs), state

    return Task(
        apply,
        lambda params, state, inputs: model.apply(params, inputs),
        model.init(jax.random.key(seed), held_out[0][0]),
        {},
        batch=batch,
        held_out=held_out,
        steps=500,
        optimizer=adamw(2e-3, 500),
    )


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
        optimizer=adamw(3e-3, 250),
    )


class VGG(nn.Module):
    """VGG11 (Simonyan & Zisserman, ICLR 2015, arXiv 1409.1556), narrow.

    Without the last of its five poolings: of 28 x 28 pixels one is left.
    """

    @nn.compact
    def __call__(self, x, train: bool = False):
        init = nn.initializers.he_normal()
        for widths in ((16,), (32,), (64, 64), (128, 128)):
            for width in widths:
                x = nn.relu(nn.Conv(width, (3, 3), kernel_init=init)(x))
            x = nn.max_pool(x, (2, 2), strides=(2, 2))
        for _ in range(2):
            x = nn.relu(nn.Conv(128, (3, 3), kernel_init=init)(x))
        x = x.reshape(len(x), -1)
        for _ in range(2):
            x = nn.relu(nn.Dense(256, kernel_init=init)(x))
            x = nn.Dropout(0.5, deterministic=not train)(x)
        return nn.Dense(10)(x)


def vgg(data: Path, seed: int) -> Task:
    model = VGG()
    batch, held_out = _digits(data, seed)

    def apply(params, state, inputs, key):
        return model.apply(params, inputs, train=True, rngs={"dropout": key}), state

    return Task(
        apply,
        lambda params, state, inputs: model.apply(params, inputs),
        model.init(jax.random.key(seed), held_out[0][0]),
        {},
        batch=batch,
        held_out=held_out,
        steps=500,
        optimizer=adamw(1e-3, 500),
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
        optimizer=adamw(1e-3, 500),
    )


def adamw(rate: float, steps: int) -> optax.GradientTransformation:
    schedule = optax.warmup_cosine_decay_schedule(0.0, rate, steps // 10, steps)
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule))


def shifted(tokens) -> Batch:
    """To predict the next byte."""
    tokens = jnp.asarray(tokens)
    labels = tokens[:, 1:]
    return tokens[:, :-1], labels, jnp.ones(labels.shape)


def novels(data: Path, seed: int, made: Callable) -> tuple[Any, Callable, list[Batch]]:
    text = prepare(data / "english_novels", "bytes")

    def batch(step: int) -> Batch:
        return made(text.batch(step, batch_size=16, seq_len=64, seed=seed))

    held_out = text.eval_batches(batch_size=64, seq_len=64, count=8)
    return text, batch, list(map(made, held_out))


def _questions(
    data: Path, seed: int
) -> tuple[Callable[[int], Batch], list[Batch], int]:
    """Banking77: 10,003 questions to train on, 3,080 held out; and how many words.

    A row is a mark, 31 words and zeros; words that are asked once alone are one word.
    """

    def read(name: str) -> tuple[list[list[str]], list[str]]:
        with (data / name).open(newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
        texts = [re.findall(r"[a-z0-9]+", row["text"].lower()) for row in rows]
        return texts, [row["category"] for row in rows]

    (texts, names), (held_texts, held_names) = map(read, ("train.csv", "test.csv"))
    counts = Counter(word for text in texts for word in text)
    known = sorted(word for word, count in counts.items() if count > 1)
    index = {word: 3 + i for i, word in enumerate(known)}
    classes = {name: i for i, name in enumerate(sorted(set(names)))}

    def take(texts: list[list[str]], names: list[str]) -> Batch:
        ids = np.zeros((len(texts), 32), np.int32)
        for row, text in zip(ids, texts, strict=True):
            words = [1, *(index.get(word, 2) for word in text[:31])]
            row[: len(words)] = words
        labels = np.array([classes[name] for name in names], np.int32)
        return ids, labels, np.ones(len(labels), np.float32)

    every = take(texts, names)

    def batch(step: int) -> Batch:
        epoch, place = divmod(step, len(texts) // 32)
        order = np.random.default_rng((seed, epoch)).permutation(len(texts))
        chosen = order[32 * place : 32 * place + 32]
        return tuple(x[chosen] for x in every)

    parts = range(0, len(held_texts), 385)
    held_out = [take(held_texts[i : i + 385], held_names[i : i + 385]) for i in parts]
    return batch, held_out, len(index) + 3


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
