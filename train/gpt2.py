"""GPT-2 in Flax NNX: learned positions, LayerNorm before each part, GELU, a tied head.

Parameters have the names of llama.py's, so that the methods' patterns hold here too.
Shapes in names: b batch, t tokens, d width, v vocabulary.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from configs import GPT2Config
from dropout import dropout
from jaxcompact.nnx import Linear
from layers import (
    MLP,
    Attention,
    Checkpoint,
    Decoder,
    LayerNorm,
    check_length,
    check_options,
    default_attention,
    scan_layers,
    stacked_layers,
)
from sharding import of_batch, rows


class Text(NamedTuple):
    """A batch to train on; of tokens alone nothing drops out."""

    tokens_bt: jax.Array  # int32
    noise: jax.Array  # shape=(), int32: what dropout is drawn from


class Embed(nnx.Module):
    """The sum of words and positions."""

    def __init__(self, cfg: GPT2Config, *, dtype: Any, param_dtype: Any, rngs):
        def table(rows: int) -> nnx.Param:
            init = nnx.initializers.normal(cfg.init_std)
            return nnx.Param(init(rngs.params(), (rows, cfg.width), param_dtype))

        self.embedding = table(cfg.vocab_size)
        self.position = table(cfg.max_seq)
        self.dtype = dtype

    def __call__(self, tokens_bt: jax.Array) -> jax.Array:
        # The cast comes last, as in llama.Embed.
        x_btd = rows(self.embedding[...], tokens_bt)
        x_btd += self.position[: tokens_bt.shape[1]][None]
        return x_btd.astype(self.dtype)


class Block(nnx.Module):
    def __init__(
        self,
        cfg: GPT2Config,
        linear: Callable,
        norm: Callable,
        attention: str | Callable,
    ):
        # 2 L parts are added up in the residual stream.
        init = nnx.initializers.normal(cfg.init_std / math.sqrt(2 * cfg.layers))
        output = partial(linear, kernel_init=init)
        self.attn_norm = norm()
        self.attn = Attention(cfg, linear, attention, output)
        self.mlp_norm = norm()
        self.mlp = MLP(cfg, linear, tanh=True, output=output)

    def __call__(self, x_btd: jax.Array, drop: Callable) -> jax.Array:
        x_btd += drop(self.attn(self.attn_norm(x_btd)), 0)
        return x_btd + drop(self.mlp(self.mlp_norm(x_btd)), 1)


class Gpt2(Decoder):
    """A decoder whose layers are stacked, ``layers/attn/q/kernel`` is (L, n, m).

    Arguments as of `llama.Llama`. Dropout is that of embeddings and hidden states, as
    `Text` asks for it; attention's own weights have none, for fused attention has none.

    >>> from configs import GPT2Config
    >>> cfg = GPT2Config(vocab_size=256, width=32, ff=64, layers=2, heads=4)
    >>> model = Gpt2(cfg, rngs=nnx.Rngs(0))
    >>> model(jnp.zeros((1, 8), jnp.int32)).shape
    (1, 8, 256)
    """

    def __init__(
        self,
        cfg: GPT2Config,
        *,
        dtype: Any = jnp.bfloat16,
        param_dtype: Any = jnp.float32,
        checkpoint: Checkpoint = None,
        attention: str | Callable | None = None,
        rngs: nnx.Rngs,
    ):
        check_options(checkpoint, attention)
        if attention is None:
            attention = default_attention(dtype)
        linear = partial(
            Linear,
            dtype=dtype,
            param_dtype=param_dtype,
            kernel_init=nnx.initializers.normal(cfg.init_std),
        )
        norm = partial(LayerNorm, cfg.width, cfg.norm_eps, param_dtype=param_dtype)

        self.embed = Embed(cfg, dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        self.layers = stacked_layers(
            lambda linear: Block(cfg, linear, norm, attention), linear, cfg.layers, rngs
        )
        self.norm = norm()
        self.cfg, self.checkpoint = cfg, checkpoint

    def hidden(self, tokens_bt: jax.Array, noise: jax.Array | None = None) -> jax.Array:
        """What the embedding reads: (b, t, d), after the final norm.

        Raises ValueError for sequences longer than ``cfg.max_seq``.
        """
        cfg = self.cfg
        check_length(tokens_bt, cfg.max_seq)

        def layer(block, x_btd, index):
            return block(x_btd, dropout(cfg.dropout, noise, index))

        drop = dropout(cfg.dropout, noise, cfg.layers)
        x_btd = drop(of_batch(self.embed(tokens_bt)), 0)
        numbers = jnp.arange(cfg.layers)
        return self.norm(
            scan_layers(self.layers, layer, x_btd, self.checkpoint, numbers)
        )

    def loss(self, batch: Text | jax.Array) -> jax.Array:
        """Mean loss of every token but the first, given those before it."""
        return super().loss(*(batch if isinstance(batch, Text) else (batch,)))

    def output_kernel(self) -> jax.Array:
        """The matrix (d, v) that makes the logits: the embedding's."""
        return self.embed.embedding[...].T
