"""Group quantization in pure JAX: the specification, the fallback and the oracle.

A group is ``group`` consecutive entries along one axis. Axes before and after it stay
where they are, so nothing is transposed. Arithmetic is in float32. With b bits:

    symmetric   x = (code - 2^(b-1)) * scale             1 bit: x = (2 code - 1) * scale
    asymmetric  x = low + code * scale

Symmetric scales, rounded away from zero to what is stored:

    stochastic, or 8 bits   absmax / (2^(b-1) - 1)
    2, 3, 4 bits            extreme / -2^(b-1): of the value furthest from zero, with
                            its sign. It gets the lowest code, so no code is wasted; a
                            value of other sign clips, by at most one step
    1 bit                   absmax if stochastic, else mean|x|: least squares

Asymmetric: ``low`` is the minimum rounded down, and the scale is
``(max - low) / (2^b - 1)`` rounded up.

What is stored and decoded depends on no order of operations: sums are of integers, and
a product that is added to is exact (8 bits by 8 bits), so that fusing it changes
nothing. Eager, compiled and in another kernel, the bits are the same. A GPU divides by
``rcp.approx``: its reciprocal of a scale may be the other neighbour of a CPU's, and of
8-bit codes of normal numbers one in 3000 then is as well.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxcompact.kernels.bits import reference as bits_reference
from jaxcompact.kernels.explicit import gathered, part
from jaxcompact.kernels.quantize import levels, scales
from jaxcompact.kernels.quantize.noise import uniform

Encoded = tuple[jax.Array, jax.Array, jax.Array | None]  # codes, scales, lows


def filled_up(x: jax.Array, *, group: int, axis: int, edge: bool) -> jax.Array:
    """``x`` with whole groups along ``axis``: its last entry again, or zeros."""
    missing = -x.shape[axis] % group
    if not missing:
        return x
    if not edge:
        widths = [(0, 0, 0)] * x.ndim
        widths[axis] = 0, missing, 0
        return jax.lax.pad(x, jnp.zeros((), x.dtype), widths)
    x = gathered(x, axis)
    last = jax.lax.slice_in_dim(x, x.shape[axis] - 1, x.shape[axis], axis=axis)
    return jnp.concatenate([x, *[last] * missing], axis)


def split_groups(x: jax.Array, *, group: int, axis: int) -> jax.Array:
    """``[..., groups, group, ...]``. Of an axis sharded in whole groups, groups are.

    An axis whose groups lie on two devices is gathered first.
    """
    at = x.ndim + axis
    shape = (*x.shape[:at], x.shape[at] // group, group, *x.shape[at + 1 :])
    if part(x)[at] % group:
        x = gathered(x, at)
    sharding = jax.typeof(x).sharding
    if sharding.spec[at] is None:
        return x.reshape(shape)
    spec = jax.P(*sharding.spec[: at + 1], None, *sharding.spec[at + 1 :])
    kept = jax.NamedSharding(sharding.mesh, spec)
    return jax.lax.reshape(x, shape, out_sharding=kept)


def join_groups(x: jax.Array, *, axis: int, size: int | None = None) -> jax.Array:
    """The inverse of `split_groups`; of the entries the first ``size``, or all."""
    at = x.ndim + axis
    entries = x.shape[at - 1] * x.shape[at]
    shape = (*x.shape[: at - 1], entries, *x.shape[at + 1 :])
    sharding = jax.typeof(x).sharding
    if sharding.spec[at - 1] is None:
        x = x.reshape(shape)
    else:
        spec = jax.P(*sharding.spec[:at], *sharding.spec[at + 1 :])
        kept = jax.NamedSharding(sharding.mesh, spec)
        x = jax.lax.reshape(x, shape, out_sharding=kept)
    return x if size in (None, entries) else jax.lax.slice_in_dim(x, 0, size, axis=axis)


def extreme(x: jax.Array, axis: int | Sequence[int]) -> tuple[jax.Array, jax.Array]:
    """What is furthest from zero along axes, of two the negative; are all finite?

    Of integers, since a NaN is forgotten by XLA's maximum of floats on a CPU. And one
    number alone: of several reductions XLA makes several readings of x.
    """
    x = _of_16_or_32_bits(x)
    largest = jnp.max(levels.ranked(x), axis, keepdims=True, initial=0)
    return levels.unranked(largest, x.dtype)


def ends(x: jax.Array, axis: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The lowest and the highest along an axis; are all finite? As `extreme`."""
    x = _of_16_or_32_bits(x)
    kind = jnp.dtype(f"int{8 * x.dtype.itemsize}")
    most = kind.type(np.iinfo(kind).max)

    def ordered(number):  # integers in the order of floats; its own inverse
        return number ^ ((number >> (8 * kind.itemsize - 1)) & most)

    def both(a, b):
        return jnp.minimum(a[0], b[0]), jnp.maximum(a[1], b[1])

    number = ordered(jax.lax.bitcast_convert_type(x, kind))
    found = jax.lax.reduce((number, number), (most, ~most), both, (x.ndim + axis,))
    infinity = np.array(np.inf, x.dtype).view(kind)[()]
    finite = (found[0] > ~infinity) & (found[1] < infinity)
    low, high = (jax.lax.bitcast_convert_type(ordered(a), x.dtype) for a in found)
    return tuple(
        jax.lax.expand_dims(a, (x.ndim + axis,))
        for a in (low.astype(jnp.float32), high.astype(jnp.float32), finite)
    )


def _of_16_or_32_bits(x: jax.Array) -> jax.Array:
    return x if x.dtype.itemsize in (2, 4) else x.astype(jnp.float32)


def level_dtypes(symmetric: bool, scale_bits: int) -> list[Any]:
    """Of the scales and, if there are any, of the lows."""
    lows = [] if symmetric else [jnp.bfloat16]
    return [jnp.uint8 if scale_bits == 8 else jnp.bfloat16, *lows]


def quantize(
    x: jax.Array,
    *,
    bits: int,
    group: int,
    axis: int = -1,
    symmetric: bool = True,
    scale_bits: int = 16,
    bound: levels.Bound | None = None,
    seed: int | jax.Array | None = None,
) -> Encoded:
    """Codes ``uint8[..., g * group * bits / 8, ...]``; scales, lows ``[..., g, ...]``.

    ``g = ceil(x.shape[axis] / group)``. Scales and lows are bfloat16, or scales uint8;
    lows are None if symmetric. Rounds to nearest, or stochastically with a seed, what
    is left of x beyond ``bound``'s ends (`levels.squeezed`). A group that holds a NaN,
    or an Inf on a side without an end, has a NaN for a scale.
    """
    size = x.shape[axis]
    if bound is not None:
        x = levels.squeezed(x.astype(jnp.float32), bound)
    # Cast last: what of this reaches memory is then no wider than x.
    x = filled_up(x, group=group, axis=axis, edge=not symmetric)
    narrow = split_groups(x, group=group, axis=axis)
    x = narrow.astype(jnp.float32)
    if symmetric:
        furthest, finite = extreme(narrow, axis)
        mean = None
        if bits == 1 and seed is None:
            mean = _mean_size(x, jnp.abs(furthest), size, axis)
        of = levels.symmetric_levels(
            furthest,
            finite,
            bits=bits,
            scale_bits=scale_bits,
            stochastic=seed is not None,
            mean=mean,
        )
    else:
        of = levels.asymmetric_levels(*ends(narrow, axis), bits=bits)
    u = None if seed is None else uniform(x, seed, axis)
    if u is not None:
        # Always so. XLA else computes in x's own shape up to where u comes in, and
        # writes that, in float32, if a group goes on in the next row. No constant is
        # in the other place: a scan would hold it, in x's shape.
        x = jnp.where(u < 1, x, -x)
    code = levels.code(x, of, u, bits=bits).astype(jnp.uint8)
    packed = bits_reference.pack(code, bits=bits, axis=axis)
    lows = None if of.lows is None else of.lows.squeeze(axis)
    return join_groups(packed, axis=axis), of.scales.squeeze(axis), lows


def dequantize(
    codes: jax.Array,
    stored: jax.Array,
    lows: jax.Array | None,
    *,
    bits: int,
    group: int,
    size: int,
    axis: int = -1,
    dtype: jnp.dtype,
    bound: levels.Bound | None = None,
) -> jax.Array:
    """The inverse, as ``dtype[..., size, ...]``."""
    codes = split_groups(codes, group=group * bits // 8, axis=axis)
    codes = bits_reference.unpack(codes, bits=bits, axis=axis)
    scale = jnp.expand_dims(scales.load(stored), axis)
    if lows is not None:
        lows = jnp.expand_dims(lows.astype(jnp.float32), axis)
    # Cast first: whatever of this reaches memory is then no larger than x.
    x = levels.value(codes, scale, lows, bits=bits, dtype=dtype, bound=bound)
    return join_groups(x, size=size, axis=axis)


def _mean_size(x: jax.Array, absmax: jax.Array, size: int, axis: int) -> jax.Array:
    """Mean of |x| over the entries of a group that are no padding.

    The sum is of integers: any order of summation gives the same bits.
    """
    groups, group = x.shape[axis - 1], x.shape[axis]
    unit = 2.0 ** (31 - group.bit_length())
    counts = np.minimum(size - group * np.arange(groups), group)
    weights = (1 / (counts * unit)).astype(np.float32).reshape(-1, *[1] * -axis)
    absmax = jnp.maximum(absmax, scales.SMALLEST)
    parts = (scales.ratio(jnp.abs(x), absmax) * unit).astype(jnp.uint32)
    total = jnp.sum(parts, axis, keepdims=True, dtype=jnp.uint32).astype(jnp.float32)
    return absmax * (total * jnp.expand_dims(weights, range(x.ndim - weights.ndim)))
