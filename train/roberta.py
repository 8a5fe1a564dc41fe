"""RoBERTa in Flax NNX: post-norm encoder, classification and masked-word heads.

Parameters have the names of llama.py's, so that the methods' patterns hold here too.
Shapes in names: b batch, t tokens, d width, h heads, k a head's width, v vocabulary,
c classes.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from configs import RobertaConfig
from dropout import dropout
from jaxcompact.nnx import Linear
from layers import (
    MLP,
    Attention,
    Checkpoint,
    LayerNorm,
    check_length,
    check_options,
    default_attention,
    scan_layers,
    stacked_layers,
)
from loss import next_token_loss
from masking import mask_words
from sharding import laid_out, rows


class Examples(NamedTuple):
    """A batch to classify, or to rate if ``target_b`` is of floats.

    Of several classes a text, ``target_b`` is bool (b, c).
    """

    tokens_bt: jax.Array  # int32, padded on the right
    target_b: jax.Array  # int32, float32 or bool
    noise: jax.Array  # shape=(), int32: what dropout is drawn from


class Embed(nnx.Module):
    """The sum of words, positions and the one type of segment, normed."""

    def __init__(self, cfg: RobertaConfig, norm: Callable, *, dtype, param_dtype, rngs):
        def table(rows: int) -> nnx.Param:
            init = nnx.initializers.normal(cfg.init_std)
            return nnx.Param(init(rngs.params(), (rows, cfg.width), param_dtype))

        self.embedding = table(cfg.vocab_size)
        self.position = table(cfg.positions)
        self.segment = table(1)
        self.norm = norm()
        self.pad_id, self.dtype = cfg.pad_id, dtype

    def __call__(self, tokens_bt: jax.Array) -> jax.Array:
        # Positions count from behind the id of padding, whose row is thus the
        # padding's: an oddity of fairseq's that trained weights have learned.
        real_bt = (tokens_bt != self.pad_id).astype(jnp.int32)
        position_bt = jnp.cumsum(real_bt, axis=1) * real_bt + self.pad_id
        # The casts come last, as in llama.Embed.
        x_btd = rows(self.embedding[...], tokens_bt)
        x_btd += rows(self.position[...], position_bt)
        x_btd += self.segment[...][None]
        return self.norm(x_btd).astype(self.dtype)


class Block(nnx.Module):
    def __init__(
        self,
        cfg: RobertaConfig,
        linear: Callable,
        norm: Callable,
        attention: str | Callable,
    ):
        self.attn = Attention(cfg, linear, attention)
        self.attn_norm = norm()
        self.mlp = MLP(cfg, linear, tanh=False)
        self.mlp_norm = norm()

    def __call__(
        self, x_btd: jax.Array, length_b: jax.Array, drop: Callable
    ) -> jax.Array:
        attn_btd = self.attn(x_btd, length_b)
        x_btd = self.attn_norm(x_btd + drop(attn_btd, 0))
        return self.mlp_norm(x_btd + drop(self.mlp(x_btd), 1))


class ClassHead(nnx.Module):
    def __init__(self, cfg: RobertaConfig, linear: Callable):
        self.dense = linear(cfg.width, cfg.width)
        self.out = linear(cfg.width, cfg.labels)

    def __call__(self, x_bd: jax.Array, drop: Callable) -> jax.Array:
        return self.out(drop(jnp.tanh(self.dense(drop(x_bd, 0))), 1))


class WordHead(nnx.Module):
    """Its output matrix is the embedding."""

    def __init__(
        self, cfg: RobertaConfig, linear: Callable, norm: Callable, param_dtype: Any
    ):
        self.dense = linear(cfg.width, cfg.width)
        self.norm = norm()
        self.bias = nnx.Param(jnp.zeros(cfg.vocab_size, param_dtype))

    def __call__(self, x_btd: jax.Array) -> jax.Array:
        return self.norm(jax.nn.gelu(self.dense(x_btd), approximate=False))


class Roberta(nnx.Module):
    """An encoder and one head: classes (or a rating) if ``cfg.labels``, else words.

    Arguments as of `llama.Llama`. Dropout is that of hidden states and of the head;
    attention's own weights have none.

    >>> from configs import RobertaConfig
    >>> cfg = RobertaConfig(vocab_size=64, width=32, ff=64, layers=2, heads=4, labels=3)
    >>> model = Roberta(cfg, dtype=jnp.float32, rngs=nnx.Rngs(0))
    >>> model(jnp.full((2, 8), 5)).shape
    (2, 3)
    """

    def __init__(
        self,
        cfg: RobertaConfig,
        *,
        dtype: Any = jnp.bfloat16,
        param_dtype: Any = jnp.float32,
        checkpoint: Checkpoint = None,
        attention: str | Callable | None = None,
        rngs: nnx.Rngs,
    ):
        check_options(checkpoint, attention)
        linear = partial(
            Linear,
            dtype=dtype,
            param_dtype=param_dtype,
            kernel_init=nnx.initializers.normal(cfg.init_std),
        )
        norm = partial(LayerNorm, cfg.width, cfg.norm_eps, param_dtype=param_dtype)
        attention = attention or default_attention(dtype)

        self.embed = Embed(cfg, norm, dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        self.layers = stacked_layers(
            lambda linear: Block(cfg, linear, norm, attention), linear, cfg.layers, rngs
        )
        one = partial(linear, rngs=rngs)
        if cfg.labels:
            self.head = ClassHead(cfg, one)
        else:
            self.words = WordHead(cfg, one, norm, param_dtype)
        self.cfg, self.checkpoint = cfg, checkpoint

    def __call__(self, tokens_bt: jax.Array, noise: jax.Array | None = None):
        """Logits, float32: (b, c) of classes, (b, t, v) of words.

        With ``noise``, an int32 to draw it from, hidden states drop out.
        """
        x_btd = self.hidden(tokens_bt, noise)
        if not self.cfg.labels:
            kernel_dv = self.embed.embedding[...].T.astype(x_btd.dtype)
            kernel_dv = laid_out(kernel_dv, None, "tensor")
            x_btd = self.words(x_btd)
            logits = jnp.matmul(x_btd, kernel_dv, preferred_element_type=jnp.float32)
            return logits + self.words.bias[...].astype(jnp.float32)[None, None]
        drop = dropout(self.cfg.dropout, noise, self.cfg.layers + 1)
        return self.head(x_btd[:, 0], drop).astype(jnp.float32)

    def hidden(self, tokens_bt: jax.Array, noise: jax.Array | None = None) -> jax.Array:
        """(b, t, d) after the last layer. Raises ValueError for what is too long."""
        cfg = self.cfg
        check_length(tokens_bt, cfg.max_seq)
        length_b = jnp.sum((tokens_bt != cfg.pad_id).astype(jnp.int32), axis=1)

        def layer(block, x_btd, index):
            return block(x_btd, length_b, dropout(cfg.dropout, noise, index))

        drop = dropout(cfg.dropout, noise, cfg.layers)
        x_btd = drop(self.embed(tokens_bt), 0)
        numbers = jnp.arange(cfg.layers)
        return scan_layers(self.layers, layer, x_btd, self.checkpoint, numbers)

    def loss(self, batch: Examples | jax.Array) -> jax.Array:
        """Of `Examples` what is to be trained; of a text's tokens, the masked words'.

        Cross-entropy of classes, of several each one's own; squared error of ratings.
        A batch of text is (b, t + 1), as `next_token_loss` has it, of which the last
        token is not read.
        """
        if not self.cfg.labels:
            return self._masked_loss(batch)
        logits_bc = self(batch.tokens_bt, batch.noise)
        if self.cfg.multi_label:
            target_bc = batch.target_b.astype(jnp.float32)
            return jnp.mean(optax.sigmoid_binary_cross_entropy(logits_bc, target_bc))
        if jnp.issubdtype(batch.target_b.dtype, jnp.floating):
            return jnp.mean((logits_bc[:, 0] - batch.target_b) ** 2)
        losses_b = optax.softmax_cross_entropy_with_integer_labels(
            logits_bc, batch.target_b
        )
        return jnp.mean(losses_b)

    def _masked_loss(self, batch_bt: jax.Array) -> jax.Array:
        masked_bt, targets_bt = masked(self.cfg, batch_bt)
        x_btd = self.words(self.hidden(masked_bt))
        # The bias as one more row of the matrix, which an input of ones reads.
        matrices = self.embed.embedding[...].T, self.words.bias[...][None]
        kernel_dv = jnp.concatenate([laid_out(w, None, "tensor") for w in matrices])
        x_btd = jnp.pad(x_btd, ((0, 0), (0, 0), (0, 1)), constant_values=1)
        return next_token_loss(x_btd, kernel_dv, targets_bt)


def masked(cfg: RobertaConfig, batch_bt: jax.Array) -> tuple[jax.Array, jax.Array]:
    """What is read of a batch of text, (b, t + 1), and what is to be said, (b, t)."""
    return mask_words(cfg, batch_bt[:, :-1].at[:, 0].set(cfg.bos_id))
