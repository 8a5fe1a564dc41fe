"""Recurrent models on the bytes of novels: what a scan over tokens carries is stored.

An LSTM of Linen, and linear attention by the delta rule (Yang et al., 2024) in plain
JAX, whose state is a matrix for each head.
"""

from pathlib import Path

import jax
import jax.numpy as jnp
from flax import linen as nn
from model_tasks import Task, adamw, novels, shifted

WIDTH, HEADS, LAYERS = 96, 3, 2
STEPS = 1500


class Lstm(nn.Module):
    vocabulary: int

    @nn.compact
    def __call__(self, tokens_bt):
        x_btd = nn.Embed(self.vocabulary, WIDTH)(tokens_bt)
        for _ in range(LAYERS):
            x_btd += nn.RNN(nn.OptimizedLSTMCell(WIDTH))(x_btd)
        return nn.Dense(self.vocabulary)(x_btd)


def lstm(data: Path, seed: int) -> Task:
    text, batch, held_out = novels(data, seed, shifted)
    model = Lstm(text.vocab_size)
    params = model.init(jax.random.key(seed), held_out[0][0])
    return _task(model.apply, params, batch, held_out)


def deltanet(data: Path, seed: int) -> Task:
    text, batch, held_out = novels(data, seed, shifted)
    keys = iter(jax.random.split(jax.random.key(seed), 99))

    def matrix(n: int, m: int):
        return jax.random.normal(next(keys), (n, m)) / n**0.5

    def layer():
        sizes = {name: WIDTH for name in ("q", "k", "v", "o")}
        sizes |= {"beta": HEADS, "up": 4 * WIDTH}
        params = {name: matrix(WIDTH, size) for name, size in sizes.items()}
        return params | {"down": matrix(4 * WIDTH, WIDTH)}

    params = {
        "embed": matrix(text.vocab_size, WIDTH) * text.vocab_size**0.5,
        "layers": [layer() for _ in range(LAYERS)],
        "head": matrix(WIDTH, text.vocab_size),
    }
    return _task(delta_logits, params, batch, held_out)


def delta_logits(params, tokens_bt):
    x_btd = params["embed"][tokens_bt]
    for p in params["layers"]:
        x_btd += _delta_layer(p, _normalized(x_btd))
        x_btd += jax.nn.gelu(_normalized(x_btd) @ p["up"]) @ p["down"]
    return _normalized(x_btd) @ params["head"]


def _delta_layer(p, x_btd):
    heads = (*x_btd.shape[:2], HEADS, -1)
    q_bthk, k_bthk, v_bthk = ((x_btd @ p[name]).reshape(heads) for name in "qkv")
    k_bthk = _normalized(k_bthk) / k_bthk.shape[-1] ** 0.5
    beta_bth1 = jax.nn.sigmoid(x_btd @ p["beta"])[..., None]
    read_bthv = delta_rule(q_bthk, k_bthk, v_bthk, beta_bth1)
    return read_bthv.reshape(x_btd.shape) @ p["o"]


def delta_rule(q_bthk, k_bthk, v_bthk, beta_bth1):
    """S += beta k (v - S^T k)^T, token by token; S^T q is read, (b, t, h, v)."""

    def token(s_bhkv, inputs):
        q_bhk, k_bhk, v_bhv, beta_bh1 = inputs
        error_bhv = v_bhv - jnp.einsum("bhk,bhkv->bhv", k_bhk, s_bhkv)
        s_bhkv += jnp.einsum("bhk,bhv->bhkv", beta_bh1 * k_bhk, error_bhv)
        return s_bhkv, jnp.einsum("bhk,bhkv->bhv", q_bhk, s_bhkv)

    batch, _, count, size = k_bthk.shape
    inputs = (jnp.moveaxis(a, 1, 0) for a in (q_bthk, k_bthk, v_bthk, beta_bth1))
    start = jnp.zeros((batch, count, size, v_bthk.shape[-1]), v_bthk.dtype)
    _, read_tbhv = jax.lax.scan(token, start, tuple(inputs))
    return jnp.moveaxis(read_tbhv, 0, 1)


def _normalized(x):
    return x * jax.lax.rsqrt((x**2).mean(-1, keepdims=True) + 1e-6)


def _task(logits, params, batch, held_out) -> Task:
    return Task(
        lambda params, state, inputs, key: (logits(params, inputs), state),
        lambda params, state, inputs: logits(params, inputs),
        params,
        {},
        batch=batch,
        held_out=held_out,
        steps=STEPS,
        optimizer=adamw(3e-3, STEPS),
    )
