"""Channels far larger than all others, divided by powers of two.

Beside such a one little is left in few bits of a row's others. As no number's digits
change, what is no such channel has the codes that it has without.
"""

from math import prod
from typing import Any

import jax
import jax.numpy as jnp

from jaxcompact.codecs.codec import narrowed
from jaxcompact.kernels.explicit import typed

_ROWS = 256  # of which channels' sizes are found
_LEAST = 2  # of powers: a channel within twice of the others' largest is left
_MOST = 100


def powers_of(x: jax.Array) -> jax.Array | None:
    """By which power of two each channel is divided, uint8 of the last axis's size.

    ::

        size = sqrt(mean(x^2)),  usual = mean(sqrt(max|x|))^2
        power = floor(log2(2^1.5 size / usual)),  0 where that is less than 2

    where the mean is over channels that are not zero. So a channel's size comes to
    between 0.35 and 0.71 of what a usual one reaches: it hides nothing, and is not lost
    itself. One that is far larger in a few rows alone, as a first token's, or that
    others match where they are not zero, is left, and so is one whose squares float32
    does not hold. None for arrays that have no rows, or nothing in them.

    Of 256 rows or more, at equal distances; of all under explicit sharding.
    """
    if x.ndim < 2 or not x.size:
        return None
    values = jnp.abs(narrowed(x if typed(x) else _some(x)).astype(jnp.float32))
    rows = tuple(range(x.ndim - 1))
    size = jnp.sqrt(jnp.mean(jnp.square(values), rows))
    largest = jnp.max(values, rows)
    count = jnp.maximum(1, jnp.count_nonzero(largest)).astype(jnp.float32)
    usual = jnp.square(jnp.sum(jnp.sqrt(largest)) / count)
    ratio = 2**1.5 * size / jnp.maximum(usual, float(jnp.finfo(jnp.float32).tiny))
    bits = jax.lax.bitcast_convert_type(ratio, jnp.int32)
    power = jnp.minimum((bits >> 23) - 127, _MOST)  # its exponent: exactly
    far = jnp.isfinite(ratio) & (power >= _LEAST)
    return jnp.where(far, power, 0).astype(jnp.uint8)


def _some(x: jax.Array) -> jax.Array:
    steps, rows = [], prod(x.shape[:-1])
    for size in x.shape[:-1]:
        steps.append(max(1, min(size, rows // _ROWS)))
        rows = rows // size * -(-size // steps[-1])
    return x[tuple(slice(None, None, step) for step in steps)]


def divided(x: jax.Array, powers: jax.Array) -> jax.Array:
    """``x / 2^powers``, in a `wide` dtype; float64 as float32."""
    x = narrowed(x)
    return (x.astype(jnp.float32) * _scale(-1, powers, x)).astype(wide(x.dtype))


def multiplied(x: jax.Array, powers: jax.Array, dtype: Any) -> jax.Array:
    """``x * 2^powers``. What is decoded is no infinity, and is none then."""
    most = min(float(jnp.finfo(d).max) for d in (dtype, jnp.float32))
    values = x.astype(jnp.float32) * _scale(1, powers, x)
    return jnp.clip(values, -most, most).astype(dtype)


def wide(dtype: Any) -> jnp.dtype:
    """In which dtype a division by powers of two changes no digits."""
    return jnp.dtype(jnp.float32 if dtype == jnp.float16 else dtype)


def _scale(sign: int, powers: jax.Array, x: jax.Array) -> jax.Array:
    bits = (sign * powers.astype(jnp.int32) + 127) << 23
    scale = jax.lax.bitcast_convert_type(bits, jnp.float32)
    return jnp.expand_dims(scale, range(x.ndim - 1))
