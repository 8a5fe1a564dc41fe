"""A rotation that spreads outliers over a block, for the codec that comes after it."""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxcompact.codecs.codec import Codec, is_float, narrowed
from jaxcompact.kernels.quantize.levels import saturated
from jaxcompact.kernels.quantize.reference import join_groups, split_groups

_MAX = float(np.finfo(np.float32).max)


@dataclass(frozen=True)
class Hadamard(Codec):
    """Rotate blocks of the last axis by the orthonormal Walsh-Hadamard matrix H.

    ``encode(x) = x H`` and ``decode(y) = y H``, since H is symmetric and its own
    inverse. Its entries are ``+-1 / sqrt(block)``: one outlier becomes ``block``
    entries of one size, which cost the quantizer after it in a `Chain` less range. What
    does not fill a block is rotated in smaller powers of two.

    It saves nothing alone: shape and dtype stay. The inverse is exact up to rounding,
    in float32 and once to the dtype. Saturates: entries that the rotation takes out of
    the dtype's range, and float32 above ``3.4e38 / (2 sqrt(block))``. A block that
    holds an Inf or a NaN decodes to Inf or NaN.

    Raises ValueError if block is not a power of two, and for dtypes that are not
    floating point.

    Source: QuaRot (arXiv 2404.00456), for weights and activations of LLMs.

    >>> import jax.numpy as jnp, jaxcompact as jc
    >>> jc.Hadamard(4).encode(jnp.array([8.0, 0.0, 0.0, 0.0])).tolist()
    [4.0, 4.0, 4.0, 4.0]
    >>> jc.Chain(jc.Hadamard(64), jc.Quantized(4)).nbytes((64, 64))
    2176
    """

    block: int = 64

    def __post_init__(self):
        whole = type(self.block) is int and self.block > 0
        if not whole or self.block & (self.block - 1):
            raise ValueError(f"block must be a power of two, got {self.block!r}")

    def supports(self, dtype: Any) -> bool:
        return is_float(dtype)

    def encode(self, x: jax.Array, seed: int = 0) -> jax.Array:
        self._require(x, seed)
        return self._rotated(x)

    def decode(self, encoded: jax.Array) -> jax.Array:
        return self._rotated(encoded)

    def _rotated(self, x: jax.Array) -> jax.Array:
        if x.ndim == 0:
            return x
        limit = _MAX / (2 * self.block**0.5)
        values = narrowed(x).astype(jnp.float32)
        values = jnp.where(jnp.isinf(values), values, jnp.clip(values, -limit, limit))
        parts, start, block = [], 0, self.block
        while start < x.shape[-1]:
            count = (x.shape[-1] - start) // block * block
            part = values[..., start : start + count]
            if count:
                part = split_groups(part, group=block, axis=-1)
                part = jnp.matmul(part, _matrix(block), precision="highest")
                parts.append(join_groups(part, axis=-1))
            start, block = start + count, block // 2
        return saturated(jnp.concatenate(parts, -1) if parts else values, x.dtype)


@lru_cache
def _matrix(block: int) -> np.ndarray:
    matrix = np.ones((1, 1))
    while len(matrix) < block:
        matrix = np.kron([[1, 1], [1, -1]], matrix) / np.sqrt(2)
    return matrix.astype(np.float32)
