"""Rounding noise from a counter hash: uint32 add, xor, multiply and shift alone.

The noise of an entry depends on the tensor's seed, on the entry's place in it and on
the data of its group. So nobody passes a key, two steps share no noise (other data) and
two tensors share none (other seed); the same data and seed give the same bytes.
"""

import jax
import jax.numpy as jnp

_GOLDEN = 0x9E3779B9  # 2^32 / golden ratio: its multiples are spread evenly


def mix(h: jax.Array) -> jax.Array:
    """A bijection of uint32 in which every bit of h moves half of the result's bits.

    Source: Wellons, "Prospecting for hash functions" (2018), ``lowbias32``.
    """
    h = (h ^ (h >> 16)) * jnp.uint32(0x7FEB352D)
    h = (h ^ (h >> 15)) * jnp.uint32(0x846CA68B)
    return h ^ (h >> 16)


def uniform(x: jax.Array, seed: int | jax.Array, axis: int) -> jax.Array:
    """Between -1/2 and 1/2, 15 bits, for each entry of ``float32 x`` in groups.

    ``seed`` is an int, or an integer scalar of at most 32 bits; ``axis`` is the axis of
    a group's entries: the first half of them and the other share their hashes.
    """
    place = jnp.arange(x.shape[axis], dtype=jnp.uint32)
    second, first = jnp.divmod(place, jnp.uint32(pairs(len(place))))
    of_entries = digested(x, _along(x, axis, place))
    digest = jnp.sum(of_entries, axis, keepdims=True, dtype=jnp.uint32)
    # The number in the tensor of a pair's first entry. It starts from the data: what
    # depends on none, jax's scan makes ahead of the loop, in full size, and keeps.
    nothing, stride = digest & 0, 1
    number, half = nothing, nothing + _along(x, axis, second)
    for a in reversed(range(x.ndim)):
        count = first if a == x.ndim + axis else jnp.arange(x.shape[a])
        count = count.astype(jnp.uint32) * jnp.uint32(stride % 2**32)
        number += _along(x, a - x.ndim, count)
        stride *= x.shape[a]
    noise = pair_noise(number, group_key(digest, mixed_seed(seed)))
    return jnp.where(half == 0, *noise)


def pairs(entries: int) -> int:
    """Of a group: entry i shares its hash with entry i + pairs."""
    return -(-entries // 2)


def mixed_seed(seed: int | jax.Array) -> jax.Array:
    seed = jnp.uint32(seed % 2**32 if isinstance(seed, int) else seed)
    return mix(seed + jnp.uint32(_GOLDEN))


def digested(x: jax.Array, place: jax.Array) -> jax.Array:
    """What an entry at this place in its group adds to the group's digest.

    The digest is a sum of integers: the same bits in any order of summation. Each is
    a pattern times an odd number of its place, so that any bit that changes is seen,
    and in all of the digest if it is a low one: first come the upper 16 bits, all that
    most data has, and the sign in the lowest as well.
    """
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    turned = ((bits << 16) | (bits >> 16)) ^ (bits >> 31)
    spread = place * jnp.uint32(_GOLDEN)
    return turned * (spread ^ (spread >> 16) | 1)


def group_key(digest: jax.Array, seed: jax.Array) -> jax.Array:
    return mix(digest ^ seed)


def pair_noise(number: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Of a pair's entries: of halves of a hash, in the middle of steps of 2^-15.

    So a code up to 255 that is exact stays what it is: their sum has 24 bits.
    """
    h = mix(number * (key | 1) + key)
    return _centred(h << 7), _centred(h >> 9)


def _centred(h: jax.Array) -> jax.Array:
    # Written as the number between 1 and 2 of these bits: GPUs convert slowly.
    bits = (h & jnp.uint32(0x7FFF00)) | jnp.uint32(0x3F800080)
    return jax.lax.bitcast_convert_type(bits, jnp.float32) - 1.5


def _along(x: jax.Array, axis: int, count: jax.Array) -> jax.Array:
    """One number for each place along an axis of x, to be added to x."""
    return jnp.expand_dims(count, [a for a in range(x.ndim) if a != x.ndim + axis])
