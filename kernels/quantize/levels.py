"""What a group stores, and which code an entry gets: number by number, in any shape.

The reference and the kernels are made of these, so that their bits are the same. A
product that is added to goes through a comparison first: fused or not, it rounds alike.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxcompact.kernels.quantize import scales

_MAX = float(np.finfo(np.float32).max)
# 1.5 * 2^23: float32 numbers around it are integers, so that adding it rounds to one,
# half to even, which the lower bits are. No conversion: those are slow.
_INTEGERS = 12582912.0
_SQUEEZED = 16
Bound = tuple[float | None, float | None]  # from where to where; one may be None


class Levels(NamedTuple):
    """Of groups.

    Attributes:
        scales: as stored; NaN where a group is not finite.
        lows: as stored, bfloat16; None if symmetric.
        factor, inverse: an entry's place among the codes is ``x * factor * inverse``,
            or ``x * inverse`` where the factor is None.
        low: float32, is subtracted from half of x before; None if symmetric.
        within: no entry's place is below the lowest code.
    """

    scales: jax.Array
    lows: jax.Array | None
    factor: jax.Array | None
    inverse: jax.Array
    low: jax.Array | None
    within: bool


def squeezed(x: jax.Array, bound: Bound | None) -> jax.Array:
    """What lies beyond an end a sixteenth as far beyond, or a third of it; float32.

    The products are exact, so that fusing them changes nothing.
    """
    for end, most, toward in _ends(bound, jnp.maximum, jnp.minimum):
        near = x * (1 / _SQUEEZED) + np.float32(end * (1 - 1 / _SQUEEZED))
        x = toward(x, toward(near, np.float32(end + most / _SQUEEZED)))
    return x


def stretched(x: jax.Array, bound: Bound) -> jax.Array:
    """The inverse, up to 16/3 of an end beyond it. Its products are exact as well.

    Beside what is large on a side without an end, what is small may be rounded to more.
    """
    y = x
    for end, _, toward in _ends(bound, jnp.minimum, jnp.maximum):
        y = toward(y, _SQUEEZED * x - np.float32((_SQUEEZED - 1) * end))
    for end, most, toward in _ends(bound, jnp.maximum, jnp.minimum):
        y = toward(y, np.float32(end + most))
    return y


def _ends(bound: Bound | None, *toward: Callable) -> Iterator[tuple]:
    """Those that there are, how far beyond anything may lie, and which of two."""
    for end, sign, function in zip(bound or (), (-1, 1), toward, strict=False):
        if end is not None:
            yield end, sign * abs(end) * _SQUEEZED / 3, function


def ranked(x: jax.Array) -> jax.Array:
    """Unsigned: by magnitude, then sign; whatever is not finite is above what is."""
    pattern = jax.lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * x.dtype.itemsize}"))
    return (pattern << 1) | (pattern >> (8 * x.dtype.itemsize - 1))


def unranked(largest: jax.Array, dtype: jnp.dtype) -> tuple[jax.Array, jax.Array]:
    """From the largest `ranked`: the value furthest from zero; are all finite?"""
    extreme = (largest >> 1) | (largest << (8 * largest.dtype.itemsize - 1))
    extreme = jax.lax.bitcast_convert_type(extreme, dtype).astype(jnp.float32)
    infinity = np.array(np.inf, dtype).view(largest.dtype)[()]
    return extreme, largest < infinity << 1


def symmetric_levels(
    extreme: jax.Array,
    finite: jax.Array,
    *,
    bits: int,
    scale_bits: int,
    stochastic: bool,
    mean: jax.Array | None = None,
) -> Levels:
    """``extreme``: the value furthest from zero, of two the negative; ``mean`` |x|."""
    top = 2 ** (bits - 1)
    if bits == 1:
        scale = jax.lax.abs(extreme) if stochastic else mean
    elif bits == 8 or stochastic:
        scale = jax.lax.abs(extreme) * np.float32(1 / (top - 1))
    else:
        scale = extreme * np.float32(-1 / top)
    scale = jnp.where(finite, scale, np.float32(np.nan))
    largest = scales.BFLOAT16_MAX / top
    used, stored = scales.store(scale, bits=scale_bits, largest=largest)
    # Of 8 bits, -128 of the largest scale would be no code of -float32's largest.
    within = bits < 8 and scale_bits == 16 and not stochastic
    return Levels(stored, None, *scales.inverse(used, largest), None, within)


def asymmetric_levels(
    low: jax.Array, high: jax.Array, finite: jax.Array, *, bits: int
) -> Levels:
    # In halves: the width of a group can be above float32's largest number.
    width = 2**bits - 1
    largest = min(scales.BFLOAT16_MAX, scales.BFLOAT16_MAX / width * 2)
    low = scales.down(low)
    scale = (high * 0.5 - low * 0.5) * np.float32(2 / width)
    scale = jnp.where(finite, scale, np.float32(np.nan))
    used, stored = scales.store(scale, bits=16, largest=largest)
    lows = jnp.where(finite, low, np.float32(np.nan)).astype(jnp.bfloat16)
    factor, inverse = scales.inverse(used, largest)
    return Levels(stored, lows, factor, 2 * inverse, low * 0.5, within=False)


def code(x: jax.Array, of: Levels, u: jax.Array | None, *, bits: int) -> jax.Array:
    """int32 codes of ``x``, to nearest; noise, if any, moves x by ``u`` steps first."""
    symmetric = of.low is None
    position = x if symmetric else x * 0.5 - of.low
    if of.factor is not None:
        position *= of.factor
    position *= of.inverse
    if bits == 1 and symmetric:  # the levels are -1 and 1
        return (position > (0 if u is None else 2 * u)).astype(jnp.int32)
    zero = 2 ** (bits - 1) if symmetric else 0
    # Before u is added: no product is then added to, which may be rounded or not.
    if not of.within:
        position = jnp.maximum(position, float(-zero))
    position = jnp.minimum(position, float(2**bits - 1 - zero))
    if u is not None:
        position += u
    rounded = jax.lax.bitcast_convert_type(position + (_INTEGERS + zero), jnp.int32)
    return rounded - np.float32(_INTEGERS).view(np.int32)  # of its lower bits, nothing


def value(
    code: jax.Array,
    scale: jax.Array,
    low: jax.Array | None,
    *,
    bits: int,
    dtype,
    bound: Bound | None = None,
) -> jax.Array:
    """The inverse, as ``dtype``; ``scale`` and ``low`` float32."""
    if bound is not None:
        x = value(code, scale, low, bits=bits, dtype=jnp.float32)
        return saturated(stretched(x, bound), dtype)
    bits_of = code.astype(jnp.int32) | np.float32(2.0**23).view(np.int32)
    number = jax.lax.bitcast_convert_type(bits_of, jnp.float32)
    if low is None:
        if bits == 1:
            x = (2 * (number - 2.0**23) - 1) * scale
        else:
            x = (number - (2.0**23 + 2 ** (bits - 1))) * scale
        # Never above bfloat16's largest number: `symmetric_levels` sees to it.
        return x.astype(dtype) if jnp.finfo(dtype).maxexp > 16 else saturated(x, dtype)
    most = min(float(jnp.finfo(dtype).max), _MAX) / 2
    half = low * 0.5 + (number - 2.0**23) * (scale * 0.5)
    return (jnp.clip(half, -most, most) * 2).astype(dtype)


def saturated(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Cast; finite values beyond the dtype's range become its largest."""
    info = jnp.finfo(dtype)
    if info.bits > 32:
        return x.astype(dtype)
    clipped = jnp.clip(x, float(info.min), float(info.max))
    return jnp.where(jax.lax.abs(x) == np.inf, x, clipped).astype(dtype)
