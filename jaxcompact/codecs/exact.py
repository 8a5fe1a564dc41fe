"""Codecs that lose nothing: booleans in bits, small integers in few bytes."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxcompact.codecs.codec import Codec
from jaxcompact.kernels.bits.reference import pack, unpack


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
        self._require(x.dtype)
        rows = x.astype(bool).astype(jnp.uint8).reshape(_rows(x.shape))
        rows = jnp.pad(rows, [(0, 0)] * (rows.ndim - 1) + [(0, -rows.shape[-1] % 8)])
        return Exact(pack(rows, bits=1), x.shape, x.dtype)

    def decode(self, encoded: Exact) -> jax.Array:
        shape = _rows(encoded.shape)
        x = unpack(encoded.data, bits=1)[..., : shape[-1]]
        return x.reshape(encoded.shape).astype(encoded.dtype)


def _rows(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Trailing axes merged until they fill whole bytes; all of them if none do.

    Leading axes stay apart, so that one that is sharded stays sharded.
    """
    shape = shape or (1,)
    while len(shape) > 1 and shape[-1] % 8:
        shape = (*shape[:-2], shape[-2] * shape[-1])
    return shape


@dataclass(frozen=True)
class Narrow(Codec):
    """Store integers known to lie in ``[0, limit)`` in the narrowest unsigned dtype.

    Exact within the range, which is for the caller to know: what lies outside becomes 0
    or the largest value that is stored.

    Memory: 1 byte an entry up to a limit of 256, 2 up to 65536, else 4; never more than
    the dtype itself.

    Raises ValueError if limit is not from 1 to 2^32, and for dtypes that are not
    integer.

    >>> import jax.numpy as jnp, jaxcompact as jc
    >>> codec = jc.Narrow(32000)
    >>> codec.encode(jnp.array([0, 31999])).data
    Array([    0, 31999], dtype=uint16)
    """

    limit: int

    def __post_init__(self):
        if not 1 <= self.limit <= 2**32:
            raise ValueError(f"limit must be from 1 to 2^32, got {self.limit!r}")

    def supports(self, dtype: Any) -> bool:
        return jnp.issubdtype(dtype, jnp.integer)

    def encode(self, x: jax.Array, seed: int = 0) -> Exact:
        self._require(x.dtype)
        largest = min(self.limit - 1, int(jnp.iinfo(x.dtype).max))
        narrow = next(
            dtype
            for dtype in (jnp.uint8, jnp.uint16, jnp.uint32)
            if largest <= jnp.iinfo(dtype).max
        )
        limits = x.dtype.type(0), x.dtype.type(largest)
        return Exact(jnp.clip(x, *limits).astype(narrow), x.shape, x.dtype)

    def decode(self, encoded: Exact) -> jax.Array:
        return encoded.data.astype(encoded.dtype)
