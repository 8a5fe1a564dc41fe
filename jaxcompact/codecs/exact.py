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
    """Store whole numbers known to lie in ``[least, limit)`` in the fewest bits.

    Exact within the range, which is for the caller to know: what lies outside becomes
    the least or the largest value that is stored, and what is no number one of these.

    Args:
        limit: above all of them.
        least: of them; 0 unless it is given. If it is, floats are taken as well, of
            which whole numbers alone come back as they were.

    Memory: 1, 2 or 4 bits an entry for 2, 4 or 16 numbers, in whole bytes; 1 byte for
    256, 2 for 65536, else 4; of an integer never more than its dtype takes.

    Raises ValueError if it is not of 1 to 2^32 numbers, and for dtypes that are not
    integer, or floats that hold all of these.

    >>> import jax.numpy as jnp, jaxcompact as jc
    >>> codec = jc.Narrow(32000)
    >>> codec.encode(jnp.array([0, 31999])).data
    Array([    0, 31999], dtype=uint16)
    >>> jc.Narrow(8, least=-8).encode(jnp.array([-8.0, 7.0])).data
    Array([240], dtype=uint8)
    """

    limit: int
    least: int | None = None

    def __post_init__(self):
        least = 0 if self.least is None else self.least
        if type(least) is not int or not -(2**31) <= least < 2**32:
            raise ValueError(f"least must be from -2^31 to 2^32, got {self.least!r}")
        if type(self.limit) is not int or not 1 <= self.limit - least <= 2**32:
            beside = f" above least={least}" if least else ""
            raise ValueError(
                f"limit must be from 1 to 2^32{beside}, got {self.limit!r}"
            )

    def supports(self, dtype: Any) -> bool:
        if jnp.issubdtype(dtype, jnp.floating) and self.least is not None:
            return holds(dtype, self.least, self.limit - 1)
        return jnp.issubdtype(dtype, jnp.integer)

    def encode(self, x: jax.Array, seed: int = 0) -> Exact:
        self._require(x, seed)
        whole = x.astype(_integer(x.dtype))
        bits, least, most = self._bits(whole.dtype)
        whole = jnp.clip(whole, whole.dtype.type(least), whole.dtype.type(most))
        unsigned = f"uint{max(bits, 8)}"  # in which differences wrap around
        data = whole.astype(unsigned) - jnp.array(least % 2 ** max(bits, 8), unsigned)
        return Exact(_packed(data, bits), x.shape, x.dtype)

    def decode(self, encoded: Exact) -> jax.Array:
        self._require_encoded(encoded, Exact)
        dtype = _integer(encoded.dtype)
        bits, least, _ = self._bits(dtype)
        whole = _unpacked(encoded.data, bits, encoded.shape).astype(dtype)
        return (whole + dtype.type(least)).astype(encoded.dtype)

    def _bits(self, dtype: Any) -> tuple[int, int, int]:
        """Of an entry; the least and the largest that are stored."""
        info = jnp.iinfo(dtype)
        ends = self.least or 0, self.limit - 1
        least, most = (min(max(end, int(info.min)), int(info.max)) for end in ends)
        bits = next(b for b in (1, 2, 4, 8, 16, 32) if most - least < 2**b)
        return bits, least, most


def holds(dtype: Any, least: float, most: float) -> bool:
    """Whether numbers of this type hold all whole ones from the least to the most."""
    if jnp.issubdtype(dtype, jnp.floating):
        return max(-least, most) <= 2 ** (jnp.finfo(dtype).nmant + 1)
    return jnp.iinfo(dtype).min <= least and most <= jnp.iinfo(dtype).max


def _integer(dtype: Any) -> jnp.dtype:
    """In which whole numbers of this dtype are counted."""
    if jnp.issubdtype(dtype, jnp.integer):
        return jnp.dtype(dtype)
    return jnp.dtype("int64" if jnp.dtype(dtype).itemsize == 8 else "int32")


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
