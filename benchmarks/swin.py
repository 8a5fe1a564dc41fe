"""Swin Transformer (Liu et al., ICCV 2021, arXiv 2103.14030) in Linen.

Without stochastic depth. Shapes in names: b batch, y and x places, d channels.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn


class Attention(nn.Module):
    """In windows of ``window`` x ``window``, moved by ``shift``."""

    heads: int
    window: int
    shift: int
    dtype: Any

    @nn.compact
    def __call__(self, x_byxd: jax.Array) -> jax.Array:
        b, height, width, d = x_byxd.shape
        w, heads = self.window, self.heads
        x = jnp.roll(x_byxd, (-self.shift, -self.shift), axis=(1, 2))
        x = x.reshape(b, height // w, w, width // w, w, d).swapaxes(2, 3)
        x = x.reshape(b, -1, w * w, d)  # b, windows, places of one, d
        qkv = nn.Dense(3 * d, dtype=self.dtype)(x)
        q, k, v = jnp.split(qkv.reshape(*x.shape[:3], heads, -1), 3, axis=-1)
        scores = jnp.einsum("bnqhk,bnthk->bnhqt", q, k) * (d // heads) ** -0.5
        init = nn.initializers.truncated_normal(0.02)
        biases = self.param("bias", init, ((2 * w - 1) ** 2, heads))
        scores += biases[_offsets(w)].transpose(2, 0, 1).astype(x.dtype)
        if self.shift:
            apart = _apart(height, width, w, self.shift)[:, None]
            scores = jnp.where(apart, jnp.asarray(-1e4, x.dtype), scores)
        p = jax.nn.softmax(scores.astype(jnp.float32), axis=-1).astype(x.dtype)
        x = jnp.einsum("bnhqt,bnthk->bnqhk", p, v).reshape(x.shape)
        x = nn.Dense(d, dtype=self.dtype)(x)
        x = x.reshape(b, height // w, width // w, w, w, d).swapaxes(2, 3)
        x = x.reshape(x_byxd.shape)
        return jnp.roll(x, (self.shift, self.shift), axis=(1, 2))


def _offsets(w: int) -> np.ndarray:
    """(w^2, w^2): the row of the table of biases, for each pair of places."""
    places = np.indices((w, w)).reshape(2, -1)
    apart = places[:, :, None] - places[:, None] + w - 1
    return apart[0] * (2 * w - 1) + apart[1]


def _apart(height: int, width: int, w: int, shift: int) -> np.ndarray:
    """(windows, w^2, w^2): pairs that the shift alone brought into one window."""
    rows, columns = (
        np.searchsorted((n - w, n - shift), np.arange(n), side="right")
        for n in (height, width)
    )
    region = 3 * rows[:, None] + columns
    region = region.reshape(height // w, w, width // w, w).swapaxes(1, 2)
    region = region.reshape(-1, w * w)
    return region[:, :, None] != region[:, None]


class Block(nn.Module):
    heads: int
    window: int
    shift: int
    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        norm, dense = (partial(f, dtype=self.dtype) for f in (nn.LayerNorm, nn.Dense))
        attention = Attention(self.heads, self.window, self.shift, self.dtype)
        x += attention(norm()(x))
        hidden = jax.nn.gelu(dense(4 * x.shape[-1])(norm()(x)), approximate=False)
        return x + dense(x.shape[-1])(hidden)


class Swin(nn.Module):
    """``(b, y, x, colours) -> (b, classes)``; the defaults are Swin-T's.

    Attributes:
        block: `Block`, or wrapped, as by ``nn.remat``.
    """

    classes: int = 1000
    width: int = 96
    depths: tuple[int, ...] = (2, 2, 6, 2)
    heads: tuple[int, ...] = (3, 6, 12, 24)
    patch: int = 4
    window: int = 7
    dtype: Any = jnp.float32
    block: Any = Block

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        norm = partial(nn.LayerNorm, dtype=self.dtype)
        patch = (self.patch, self.patch)
        x = nn.Conv(self.width, patch, patch, dtype=self.dtype)(images)
        x = norm()(x)
        for stage, (depth, heads) in enumerate(
            zip(self.depths, self.heads, strict=True)
        ):
            if stage:  # four places become one, of twice the width
                b, height, width, d = x.shape
                x = x.reshape(b, height // 2, 2, width // 2, 2, d).swapaxes(2, 3)
                x = norm()(x.reshape(b, height // 2, width // 2, 4 * d))
                x = nn.Dense(2 * d, use_bias=False, dtype=self.dtype)(x)
            for i in range(depth):
                whole = min(x.shape[1:3]) <= self.window
                shift = self.window // 2 if i % 2 and not whole else 0
                x = self.block(heads, self.window, shift, self.dtype)(x)
        x = jnp.mean(norm()(x), axis=(1, 2))
        return nn.Dense(self.classes, dtype=self.dtype)(x).astype(jnp.float32)
