"""Codecs that lose nothing: booleans in bits, small integers in few."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxcompact.codecs.codec import Codec, in_rows
from jaxcompact.kernels.bits.reference import pack, unpack
from jaxcompact.kernels.explicit import gathered, part


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["data"],
    meta_fields=["shape", "dtype"],
)
@dataclass(frozen=True)
class Exact:
    """What is stored: unsigned integers ``data``, no more."""

    data: jax.Array
    shape: tuple[int, ...]
    dtype: jnp.dtype


@dataclass(frozen=True)
class BitMask(Codec):
    """Store booleans, or integers that are 0 or 1, in one bit each.

    Exact. Integers that are neither 0 nor 1 come back as 1: that they are masks is for
    the caller to know. Any shape; scalars take a byte.

    Memory: ``ceil(n / 8)`` bytes.

    Raises ValueError for dtypes that are not bool or integer.

    Source: GACT (arXiv 2206.11357) and Adacc (arXiv 2508.00806) pack dropout masks.

    >>> import jax.numpy as jnp, jaxcompact as jc
    >>> x = jnp.array([True, False, True])
    >>> encoded = jc.BitMask().encode(x)
    >>> encoded.data.tolist(), jc.BitMask().decode(encoded).tolist()
    ([5], [True, False, True])
    """

    def supports(self, dtype: Any) -> bool:
        return jnp.issubdtype(dtype, jnp.integer) or jnp.issubdtype(dtype, jnp.bool_)

    def encode(self, x: jax.Array, seed: int = 0) -> Exact:
        self._require(x, seed)
        data = _packed(x.astype(bool).astype(jnp.uint8), 1)
        return Exact(data, x.shape, x.dtype)

    def decode(self, encoded: Exact) -> jax.Array:
        self._require_encoded(encoded, Exact)
        return _unpacked(encoded.data, 1, encoded.shape).astype(encoded.dtype)


@dataclass(frozen=True)
class Narrow(Codec):
    """Store integers known to lie in ``[0, limit)`` in the fewest bits.

    Exact within the range, which is for the caller to know: what lies outside becomes 0
    or the largest value that is stored.

    Memory: 1, 2 or 4 bits an entry up to a limit of 2, 4 or 16, in whole bytes; 1 byte
    up to 256, 2 up to 65536, else 4; never more than the dtype itself.

    Raises ValueError if limit is not from 1 to 2^32, and for dtypes that are not
    integer.

    >>> import jax.numpy as jnp, jaxcompact as jc
    >>> codec = jc.Narrow(32000)
    >>> codec.encode(jnp.array([0, 31999])).data
    Array([    0, 31999], dtype=uint16)
    """

    limit: int

    def __post_init__(self):
        if type(self.limit) is not int or not 1 <= self.limit <= 2**32:
            raise ValueError(f"limit must be from 1 to 2^32, got {self.limit!r}")

    def supports(self, dtype: Any) -> bool:
        return jnp.issubdtype(dtype, jnp.integer)

    def encode(self, x: jax.Array, seed: int = 0) -> Exact:
        self._require(x, seed)
        bits, largest = self._bits(x.dtype)
        limits = x.dtype.type(0), x.dtype.type(largest)
        data = jnp.clip(x, *limits).astype(f"uint{max(bits, 8)}")
        return Exact(_packed(data, bits), x.shape, x.dtype)

    def decode(self, encoded: Exact) -> jax.Array:
        self._require_encoded(encoded, Exact)
        bits, _ = self._bits(encoded.dtype)
        x = _unpacked(encoded.data, bits, encoded.shape)
        return x.astype(encoded.dtype)

    def _bits(self, dtype: Any) -> tuple[int, int]:
        """Of an entry, and the largest that is stored."""
        largest = min(self.limit - 1, int(jnp.iinfo(dtype).max))
        return next(b for b in (1, 2, 4, 8, 16, 32) if largest < 2**b), largest


def _packed(data: jax.Array, bits: int) -> jax.Array:
    if bits >= 8:
        return data
    lanes, shape = 8 // bits, _rows(data.shape, bits)
    rows = in_rows(data, shape)
    if part(rows)[-1] % lanes:
        rows = gathered(rows, -1)
    rows = jnp.pad(rows, [(0, 0)] * (rows.ndim - 1) + [(0, -shape[-1] % lanes)])
    return pack(rows, bits=bits)


def _unpacked(data: jax.Array, bits: int, shape: tuple[int, ...]) -> jax.Array:
    if bits >= 8:
        return data
    size = _rows(shape, bits)[-1]
    return unpack(data, bits=bits)[..., :size].reshape(shape)


def _rows(shape: tuple[int, ...], bits: int) -> tuple[int, ...]:
    """Trailing axes merged until they fill whole bytes; all of them if none do.

    Leading axes stay apart, so that one that is sharded stays sharded.
    """
    shape = shape or (1,)
    while len(shape) > 1 and shape[-1] % (8 // bits):
        shape = (*shape[:-2], shape[-2] * shape[-1])
    return shape
