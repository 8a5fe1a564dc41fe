"""LLaMA in Flax NNX: RMSNorm, RoPE, grouped-query attention, SwiGLU; scan over layers.

Shapes in names: b batch, t tokens, d width, h heads, k a head's width, v vocabulary.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from configs import ModelConfig
from jaxcompact.nnx import Linear
from layers import (
    Checkpoint,
    Decoder,
    attend,
    check_length,
    check_options,
    default_attention,
    heads,
    scan_layers,
    split,
    stacked_layers,
)
from sharding import of_batch, product, rows


class RMSNorm(nnx.Module):
    """Float32 inside, one cast out."""

    def __init__(self, width: int, eps: float, *, param_dtype: Any):
        self.scale = nnx.Param(jnp.ones(width, param_dtype))
        self.eps = eps

    def __call__(self, x_btd: jax.Array) -> jax.Array:
        x = x_btd.astype(jnp.float32)
        x *= jax.lax.rsqrt(jnp.mean(x**2, axis=-1, keepdims=True) + self.eps)
        return (x * self.scale[None, None].astype(jnp.float32)).astype(x_btd.dtype)


class Embed(nnx.Module):
    def __init__(self, cfg: ModelConfig, *, dtype: Any, param_dtype: Any, rngs):
        shape = (cfg.vocab_size, cfg.width)
        init = nnx.initializers.normal(cfg.init_std)
        self.embedding = nnx.Param(init(rngs.params(), shape, param_dtype))
        self.dtype = dtype

    def __call__(self, tokens_bt: jax.Array) -> jax.Array:
        # The cast comes last, so that a frequent token's gradients are summed in the
        # parameters' dtype. An id outside the vocabulary gives NaN.
        return rows(self.embedding[...], tokens_bt).astype(self.dtype)


def rope_tables(
    length: int, head_dim: int, theta: float
) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines, float32 (t, k/2), of the angles t * theta^(-2i/k)."""
    frequencies = theta ** -(jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)
    angles = jnp.outer(jnp.arange(length, dtype=jnp.float32), frequencies)
    return jnp.cos(angles), jnp.sin(angles)


def rope(x_bthk: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotates the pairs (i, i + k/2) of every head, as Hugging Face's LLaMA does."""
    cos, sin = cos[None, :, None], sin[None, :, None]
    a, b = jnp.split(x_bthk.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
    return rotated.astype(x_bthk.dtype)


class Attention(nnx.Module):
    def __init__(self, cfg: ModelConfig, linear: Callable, attention: str | Callable):
        inner, kv_inner = cfg.width, cfg.num_kv_heads * cfg.head_dim
        self.q = linear(cfg.width, inner)
        self.k = linear(cfg.width, kv_inner)
        self.v = linear(cfg.width, kv_inner)
        self.o = linear(inner, cfg.width)
        self.head_dim = cfg.head_dim
        self.implementation = attention

    def __call__(self, x_btd: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
        q_bthk = rope(heads(self.q, x_btd, self.head_dim), cos, sin)
        k_bthk = rope(heads(self.k, x_btd, self.head_dim), cos, sin)
        v_bthk = heads(self.v, x_btd, self.head_dim)
        mixed_bthk = attend(self.implementation, q_bthk, k_bthk, v_bthk)
        return product(self.o, of_batch(mixed_bthk.reshape(x_btd.shape), "tensor"))


class MLP(nnx.Module):
    """SwiGLU."""

    def __init__(self, cfg: ModelConfig, linear: Callable):
        self.gate = linear(cfg.width, cfg.ff)
        self.up = linear(cfg.width, cfg.ff)
        self.down = linear(cfg.ff, cfg.width)

    def __call__(self, x_btd: jax.Array) -> jax.Array:
        gate, up = split(self.gate, x_btd), split(self.up, x_btd)
        return product(self.down, jax.nn.silu(gate) * up)


class Block(nnx.Module):
    def __init__(
        self,
        cfg: ModelConfig,
        linear: Callable,
        norm: Callable,
        attention: str | Callable,
    ):
        self.attn_norm = norm()
        self.attn = Attention(cfg, linear, attention)
        self.mlp_norm = norm()
        self.mlp = MLP(cfg, linear)

    def __call__(self, x_btd: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
        x_btd += self.attn(self.attn_norm(x_btd), cos, sin)
        return x_btd + self.mlp(self.mlp_norm(x_btd))


class Llama(Decoder):
    """A decoder whose layers are stacked, ``layers/attn/q/kernel`` is (L, n, m).

    Args:
        cfg: the shape.
        dtype: of the computation and of the residual stream. Norms, rotations, softmax
            and logits are float32 inside.
        param_dtype: of the parameters.
        checkpoint: what the backward pass finds of a layer: None for all that it needs,
            "nothing" for full recomputation, a policy of `jax.checkpoint` or one of
            `jaxcompact.checkpoint`.
        attention: ``implementation`` of `jax.nn.dot_product_attention`, or a function
            of q, k, v (b, t, h, k). By default cuDNN's on a GPU with a 16-bit dtype,
            else XLA's: say it where the program is compiled for another device than
            this process has.
        rngs: the stream ``params`` makes the initial weights.

    >>> from configs import ModelConfig
    >>> cfg = ModelConfig(vocab_size=256, width=32, ff=64, layers=2, heads=4)
    >>> model = Llama(cfg, rngs=nnx.Rngs(0))
    >>> model(jnp.zeros((1, 8), jnp.int32)).shape
    (1, 8, 256)
    """

    def __init__(
        self,
        cfg: ModelConfig,
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
            use_bias=False,
            dtype=dtype,
            param_dtype=param_dtype,
            kernel_init=nnx.initializers.normal(cfg.init_std),
        )
        norm = partial(RMSNorm, cfg.width, cfg.norm_eps, param_dtype=param_dtype)

        self.embed = Embed(cfg, dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        self.layers = stacked_layers(
            lambda linear: Block(cfg, linear, norm, attention), linear, cfg.layers, rngs
        )
        self.norm = norm()
        if not cfg.tied:
            self.head = linear(cfg.width, cfg.vocab_size, rngs=rngs)
        self.cfg = cfg
        self.checkpoint = checkpoint

    def hidden(self, tokens_bt: jax.Array) -> jax.Array:
        """What the output matrix reads: (b, t, d), after the final norm.

        Raises ValueError for sequences longer than ``cfg.max_seq``.
        """
        cfg, length = self.cfg, check_length(tokens_bt, self.cfg.max_seq)
        tables = rope_tables(length, cfg.head_dim, cfg.rope_theta)
        x_btd = scan_layers(
            self.layers,
            lambda layer, x_btd: layer(x_btd, *tables),
            of_batch(self.embed(tokens_bt)),
            self.checkpoint,
        )
        return self.norm(x_btd)

    def output_kernel(self) -> jax.Array:
        """The matrix (d, v) that makes the logits."""
        if self.cfg.tied:
            return self.embed.embedding[...].T
        return self.head.kernel[...]


def generate(model: Decoder, ids: list[int], count: int) -> list[int]:
    """The ``count`` likeliest ids, one by one, after ``ids``. Keeps no cache."""
    total = len(ids) + count

    # A model's logits do not depend on what comes later, so the places that are still
    # to be filled may hold anything.
    @jax.jit
    def extended(state, tokens_1t):
        model = nnx.merge(graphdef, state)

        def step(i, tokens_1t):
            last_11d = jax.lax.dynamic_slice_in_dim(model.hidden(tokens_1t), i, 1, 1)
            token_11 = jnp.argmax(model.logits(last_11d), axis=-1).astype(jnp.int32)
            return jax.lax.dynamic_update_slice_in_dim(tokens_1t, token_11, i + 1, 1)

        return jax.lax.fori_loop(len(ids) - 1, total - 1, step, tokens_1t)

    graphdef, state = nnx.split(model)
    tokens_1t = jnp.zeros((1, total), jnp.int32).at[0, : len(ids)].set(jnp.array(ids))
    return extended(state, tokens_1t)[0, len(ids) :].tolist()
