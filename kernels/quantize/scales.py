"""Numbers stored once a group, in 16 or 8 bits: rounded so that no value is clipped.

Each function gives float32 that is exactly what is stored: codes must be made with the
stored number, and XLA may drop a pair of casts to bfloat16 and back.
"""

import jax
import jax.numpy as jnp
import numpy as np

BFLOAT16_MAX = float(jnp.finfo(jnp.bfloat16).max)
SMALLEST = 2.0**-125  # its half is a normal number

# 8 bits: the sign, and 7 bits of logarithm: 0 is zero, 127 is NaN and c between is
# 2^((c - 97) / 4), which is 2^-24 to 2^7.25 in steps of 19 %.
_ZERO, _NAN = 0, 127
_LOWEST = -96  # in quarters of an octave
_MANTISSA = [0x000000, 0x1837F0, 0x3504F3, 0x5744FD]  # of 2^(k/4), k = 0..3


def away(x: jax.Array) -> jax.Array:
    """Finite float32 rounded away from zero to bfloat16; overflows to infinity."""
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    bits = (bits + np.uint32(0xFFFF)) & np.uint32(0xFFFF0000)
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def down(x: jax.Array) -> jax.Array:
    """Finite float32 rounded down to bfloat16; saturates."""
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32) & np.uint32(0xFFFF0000)
    truncated = jax.lax.bitcast_convert_type(bits, jnp.float32)
    return jnp.where(x < 0, jnp.maximum(away(x), -BFLOAT16_MAX), truncated)


def store(
    scale: jax.Array, *, bits: int, largest: float
) -> tuple[jax.Array, jax.Array]:
    """A scale as it is used, float32, and as it is stored, bfloat16 or uint8.

    Its magnitude is rounded up, then kept between `SMALLEST` and ``largest`` (8 bits:
    2^-24 and 2^7.25). Zero stays zero. NaN is stored; what is used then means nothing.
    """
    if bits == 8:
        code = _logarithm(scale)
        return load(code), code
    size = jnp.clip(away(jax.lax.abs(scale)), SMALLEST, largest)
    used = jnp.where(scale == 0, 0.0, jax.lax.sign(scale) * size)
    return used, jnp.where(jnp.isnan(scale), jnp.nan, used).astype(jnp.bfloat16)


def inverse(scale: jax.Array, largest: float) -> tuple[jax.Array | None, jax.Array]:
    """``factor`` and ``1 / (scale factor)``: one division a scale; 0 where that is 0.

    XLA divides so by what is broadcast, but may do it or not. Large scales by way of
    their quarter: the reciprocal of 2^127 is below the normal numbers, where XLA has 0.
    (By a factor that is no constant: XLA would move a constant into the reciprocal.)
    Where no scale is above ``largest`` up to 2^126, the factor is None: 1.
    """
    quarter, one, zero = (jax.lax.full_like(scale, x) for x in (0.25, 1.0, 0.0))
    if largest <= 2.0**126:
        return None, jax.lax.select(scale == 0, zero, 1 / scale)
    factor = jax.lax.select(jax.lax.abs(scale) > 1, quarter, one)
    return factor, jax.lax.select(scale == 0, zero, 1 / (scale * factor))


def ratio(x: jax.Array, scale: jax.Array) -> jax.Array:
    """``x / scale``."""
    factor, inverted = inverse(scale, BFLOAT16_MAX)
    return x * factor * inverted


def load(stored: jax.Array) -> jax.Array:
    """float32 again."""
    if stored.dtype != jnp.uint8:
        return stored.astype(jnp.float32)
    stored = stored.astype(jnp.int32)
    code = stored & 127
    quarters = code - 1 + _LOWEST
    mantissa = sum(
        jnp.where(quarters & 3 == k, np.int32(_MANTISSA[k]), 0) for k in (1, 2, 3)
    )
    bits = ((quarters >> 2) + 127 << 23) + mantissa
    size = jax.lax.bitcast_convert_type(bits, jnp.float32)
    size = jnp.where(code == _ZERO, 0.0, jnp.where(code == _NAN, jnp.nan, size))
    return jnp.where(stored > 127, -size, size)


def _logarithm(scale: jax.Array) -> jax.Array:
    """The code of the next quarter octave, compared as integers: no logarithm."""
    bits = jax.lax.bitcast_convert_type(jax.lax.abs(scale), jnp.int32)
    mantissa = bits & 0x7FFFFF
    above = sum((mantissa > m).astype(jnp.int32) for m in _MANTISSA)
    quarters = 4 * ((bits >> 23) - 127) + above
    code = jnp.clip(quarters - _LOWEST + 1, _ZERO + 1, _NAN - 1)
    code = jnp.where(scale == 0, _ZERO, jnp.where(jnp.isnan(scale), _NAN, code))
    return jnp.where(scale < 0, code + 128, code).astype(jnp.uint8)
