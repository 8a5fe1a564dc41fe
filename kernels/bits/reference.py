"""Bit packing in pure JAX: by hand, in uint8, along any axis.

With 1, 2 or 4 bits an axis of n codes is cut in ``8 / bits`` parts, one to a lane: the
first part lies in the low bits of the bytes, the next one above it. So whole slices
move and nothing is interleaved. Parts are added: of a shift and a sum a GPU makes one
instruction. 3 bits are a plane of 2 bits, then a plane of 1.
"""

import math
from functools import reduce
from operator import add

import jax
import jax.numpy as jnp

from jaxcompact.kernels.explicit import gathered


def unit(bits: int) -> int:
    """Codes that fill whole bytes: the packed axis is a multiple of it."""
    return 8 // math.gcd(8, bits)


def pack(codes: jax.Array, *, bits: int, axis: int = -1) -> jax.Array:
    """``n`` codes below ``2^bits`` in ``n * bits / 8`` bytes along ``axis``; uint8."""
    if bits == 8:
        return codes
    if bits == 3:
        planes = (
            pack(codes & 3, bits=2, axis=axis),
            pack(codes >> 2, bits=1, axis=axis),
        )
        return jnp.concatenate(planes, axis)
    parts = jnp.split(codes, 8 // bits, axis)
    return reduce(add, (part << (bits * lane) for lane, part in enumerate(parts)))


def unpack(packed: jax.Array, *, bits: int, axis: int = -1) -> jax.Array:
    """The inverse of `pack`."""
    if bits == 8:
        return packed
    if bits == 3:
        low, high = jnp.split(packed, [packed.shape[axis] * 2 // 3], axis)
        return _of_lanes(low, 2, axis) | (_of_lanes(high, 1, axis) << 2)
    return (_of_parts if bits == 4 else _of_lanes)(packed, bits, axis)


def _of_parts(packed: jax.Array, bits: int, axis: int) -> jax.Array:
    mask = 2**bits - 1
    parts = [(packed >> (bits * lane)) & mask for lane in range(8 // bits)]
    return jnp.concatenate(parts, axis)


def _of_lanes(packed: jax.Array, bits: int, axis: int) -> jax.Array:
    """Each byte again for each lane, by a shift that depends on the lane.

    Of parts that are concatenated XLA's code for a GPU takes one of as many branches an
    entry, and reads each byte by itself: decoding and multiplying, as an H200 would,
    takes 25 instructions an entry of 3 bits in place of 105, of masks 28 in place of
    73. Of 4 bits 16 in place of 25, but XLA then makes more at once, and holds it: a
    network of products and sines takes one activation more.
    """
    at = axis % packed.ndim
    packed = gathered(packed, at)
    wide = jnp.expand_dims(packed, at).astype(jnp.int32)
    shape = [8 // bits if i == at else 1 for i in range(wide.ndim)]
    lane = bits * jax.lax.broadcasted_iota(jnp.int32, shape, at)
    codes = ((wide >> lane) & (2**bits - 1)).astype(jnp.uint8)
    entries = packed.shape[at] * (8 // bits)
    return codes.reshape(*packed.shape[:at], entries, *packed.shape[at + 1 :])
