"""GPT-2 as Adacc trains it: LayerNorm, GELU, dropout of 0.1 everywhere.

Attention in plain JAX. Shapes in names: b batch, t tokens, d width.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

import jaxcompact as jc

DTYPE = jnp.bfloat16
VOCABULARY = 50257


def build(
    layers: int, width: int, heads: int, batch: int, seq: int, policy: Any
) -> tuple[Callable, Any, tuple]:
    """``loss(params, *rest)``, params, rest, of which there are shapes alone.

    ``policy``: None, "nothing" for full recomputation, or one of `jax.checkpoint` or
    `jaxcompact.checkpoint`, of each layer.
    """

    def norm(w, x):
        x32 = x.astype(jnp.float32)
        mean = jnp.mean(x32, axis=-1, keepdims=True)
        centered = x32 - mean
        variance = jnp.mean(jnp.square(centered), axis=-1, keepdims=True)
        y = centered * jax.lax.rsqrt(variance + 1e-5)
        return y.astype(x.dtype) * w[0] + w[1]

    def dropout(key, x):
        keep = jax.random.bernoulli(key, 0.9, x.shape)
        return jnp.where(keep, x / jnp.asarray(0.9, x.dtype), jnp.zeros((), x.dtype))

    def layer(w, x_btd, key):
        keys = jax.random.split(key, 3)
        y = norm(w["norm1"], x_btd) @ w["qkv"]
        q, k, v = jnp.split(y.reshape(*y.shape[:2], heads, -1), 3, axis=-1)
        s = jnp.einsum("bqhk,bthk->bhqt", q, k).astype(jnp.float32) / 8
        s = jnp.where(jnp.tril(jnp.ones(s.shape[-2:], bool)), s, -1e9)
        p = dropout(keys[0], jax.nn.softmax(s, axis=-1).astype(x_btd.dtype))
        mixed = jnp.einsum("bhqt,bthk->bqhk", p, v).reshape(x_btd.shape)
        x_btd += dropout(keys[1], mixed @ w["out"])
        y = jax.nn.gelu(norm(w["norm2"], x_btd) @ w["up"])
        return x_btd + dropout(keys[2], y @ w["down"])

    block = layer
    if hasattr(policy, "decide"):
        block = jc.checkpoint(layer, policy=policy, params=0, prevent_cse=False)
    elif policy is not None:
        saved = None if policy == "nothing" else policy
        block = jax.checkpoint(layer, policy=saved, prevent_cse=False)

    def of(*shape):
        return jax.ShapeDtypeStruct(shape, DTYPE)

    params = {
        "embed": of(VOCABULARY, width),
        "positions": of(seq, width),
        "layers": {
            "norm1": of(layers, 2, width),
            "norm2": of(layers, 2, width),
            "qkv": of(layers, width, 3 * width),
            "out": of(layers, width, width),
            "up": of(layers, width, 4 * width),
            "down": of(layers, 4 * width, width),
        },
        "norm": of(2, width),
    }

    def loss(params, tokens, key):
        first, *keys = jax.random.split(key, layers + 1)
        x = params["embed"][tokens[:, :-1]] + params["positions"]
        x = dropout(first, x)

        def body(x, w_and_key):
            return block(w_and_key[0], x, w_and_key[1]), None

        x, _ = jax.lax.scan(body, x, (params["layers"], jnp.stack(keys)))
        x = norm(params["norm"], x)

        @partial(jax.checkpoint, prevent_cse=False)
        def of_sequence(total, x_and_target):  # logits never exist whole
            x, target = x_and_target
            logits = (x @ params["embed"].T).astype(jnp.float32)
            return total + optax.softmax_cross_entropy_with_integer_labels(
                logits, target
            ).sum(), None

        total, _ = jax.lax.scan(of_sequence, 0.0, (x, tokens[:, 1:]))
        return total / tokens[:, 1:].size

    tokens = jax.ShapeDtypeStruct((batch, seq + 1), jnp.int32)
    return loss, params, (tokens, jax.eval_shape(lambda: jax.random.key(0)))


def adam_step(loss: Callable, params: Any, rest: tuple) -> tuple[Callable, tuple]:
    """A jitted step of AdamW that overwrites its state, and its arguments' shapes."""
    tx = optax.adamw(1e-4)

    def step(params, state, *rest):
        grads = jax.grad(loss)(params, *rest)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    state = jax.eval_shape(tx.init, params)
    return jax.jit(step, donate_argnums=(0, 1)), (params, state, *rest)
