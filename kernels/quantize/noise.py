"""Rounding noise from a counter hash: uint32 add, xor, multiply and shift alone.

The noise of an entry depends on the tensor's seed, on the entry's place in it and on
the data of its group. So nobody passes a key, two steps share no noise (other data) and
two tensors share none (other seed); the same data and seed give the same bytes.
"""

import jax
import jax.numpy as jnp
import numpy as np

_GOLDEN = 0x9E3779B9  # 2^32 / golden ratio: its multiples are spread evenly


def mix(h: jax.Array) -> jax.Array:
    """A bijection of uint32 in which every bit of h moves half of the result's bits.

    Source: Wellons, "Prospecting for hash functions" (2018), ``lowbias32``.
    """
    h = (h ^ (h >> 16)) * jnp.uint32(0x7FEB352D)
    h = (h ^ (h >> 15)) * jnp.uint32(0x846CA68B)
    return h ^ (h >> 16)


def uniform(x: jax.Array, seed: int | jax.Array, axis: int) -> jax.Array:
    """``u`` in ``[0, 1)``, 24 bits, for each entry of ``float32 x`` in groups.

    ``seed`` is an int, or an integer scalar of at most 32 bits; ``axis`` is the axis of
    a group's entries.
    """
    place = _along(x, axis, 1)
    digest = jnp.sum(digested(x, place), axis, keepdims=True, dtype=jnp.uint32)
    # The entry's number in the tensor. It starts from the data: what depends on none,
    # jax's scan makes ahead of the loop, in full size, and keeps.
    number, stride = digest & 0, 1
    for a in reversed(range(x.ndim)):
        number += _along(x, a - x.ndim, stride)
        stride *= x.shape[a]
    return entry_noise(number, group_key(digest, mixed_seed(seed)))


def mixed_seed(seed: int | jax.Array) -> jax.Array:
    seed = jnp.uint32(seed % 2**32 if isinstance(seed, int) else seed)
    return mix(seed + jnp.uint32(_GOLDEN))


def digested(x: jax.Array, place: jax.Array) -> jax.Array:
    """What an entry at this place in its group adds to the group's digest.

    The digest is a sum of integers: the same bits in any order of summation.
    """
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    return mix(bits ^ place * jnp.uint32(_GOLDEN))


def group_key(digest: jax.Array, seed: jax.Array) -> jax.Array:
    return mix(digest ^ seed)


def entry_noise(number: jax.Array, key: jax.Array) -> jax.Array:
    h = mix(mix(number * jnp.uint32(_GOLDEN) + key) ^ key)
    return (h >> 8).astype(jnp.float32) * np.float32(2.0**-24)


def _along(x: jax.Array, axis: int, stride: int) -> jax.Array:
    """0, stride, 2 stride ... along an axis of x, to be added to x."""
    count = jnp.arange(x.shape[axis], dtype=jnp.uint32) * jnp.uint32(stride % 2**32)
    return jnp.expand_dims(count, [a for a in range(x.ndim) if a != x.ndim + axis])
