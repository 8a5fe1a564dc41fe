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
nothing. Eager, compiled and in another kernel, the bits are the same.
"""

import jax
import jax.numpy as jnp
import numpy as np

from jaxcompact.kernels.bits import reference as bits_reference
from jaxcompact.kernels.quantize import scales
from jaxcompact.kernels.quantize.noise import uniform

_MAX = float(np.finfo(np.float32).max)


def filled_up(x: jax.Array, *, group: int, axis: int, edge: bool) -> jax.Array:
    """``x`` with whole groups along ``axis``: its last entry again, or zeros."""
    missing = -x.shape[axis] % group
    if not missing:
        return x
    if not edge:
        widths = [(0, 0, 0)] * x.ndim
        widths[axis] = 0, missing, 0
        return jax.lax.pad(x, jnp.zeros((), x.dtype), widths)
    last = jax.lax.slice_in_dim(x, x.shape[axis] - 1, x.shape[axis], axis=axis)
    return jnp.concatenate([x, *[last] * missing], axis)


def split_groups(x: jax.Array, *, group: int, axis: int) -> jax.Array:
    """``[..., groups, group, ...]``. Of an axis sharded in whole groups, groups are.

    An axis whose groups lie on two devices is gathered first.
    """
    at = x.ndim + axis
    shape = (*x.shape[:at], x.shape[at] // group, group, *x.shape[at + 1 :])
    sharding = jax.typeof(x).sharding
    before, here, after = sharding.spec[:at], sharding.spec[at], sharding.spec[at + 1 :]
    if here is not None and sharding.shard_shape(x.shape)[at] % group:
        here = None
        x = jax.sharding.reshard(x, jax.P(*before, here, *after))
    if here is None:
        return x.reshape(shape)
    return jax.lax.reshape(x, shape, out_sharding=jax.P(*before, here, None, *after))


def join_groups(x: jax.Array, *, axis: int, size: int | None = None) -> jax.Array:
    """The inverse of `split_groups`; of the entries the first ``size``, or all."""
    at = x.ndim + axis
    entries = x.shape[at - 1] * x.shape[at]
    shape = (*x.shape[: at - 1], entries, *x.shape[at + 1 :])
    spec = jax.typeof(x).sharding.spec
    if spec[at - 1] is None:
        x = x.reshape(shape)
    else:
        x = jax.lax.reshape(x, shape, out_sharding=jax.P(*spec[:at], *spec[at + 1 :]))
    return x if size in (None, entries) else jax.lax.slice_in_dim(x, 0, size, axis=axis)


def all_finite(x: jax.Array, axis: int | None = None) -> jax.Array:
    """Asked of each entry: XLA's maximum on a CPU forgets NaNs in longer arrays."""
    return jnp.all(jnp.isfinite(x), axis, keepdims=True)


def saturated(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Cast; finite values beyond the dtype's range become its largest."""
    info = jnp.finfo(dtype)
    if info.bits > 32:
        return x.astype(dtype)
    clipped = jnp.clip(x, float(info.min), float(info.max))
    return jnp.where(jnp.isinf(x), x, clipped).astype(dtype)


def quantize(
    x: jax.Array,
    *,
    bits: int,
    group: int,
    axis: int = -1,
    symmetric: bool = True,
    scale_bits: int = 16,
    seed: int | jax.Array | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Codes ``uint8[..., g * group * bits / 8, ...]``; scales, lows ``[..., g, ...]``.

    ``g = ceil(x.shape[axis] / group)``. Scales and lows are bfloat16, or scales uint8;
    lows are None if symmetric. Rounds to nearest, or stochastically with a seed. A
    group that holds an Inf or a NaN has a NaN for a scale.
    """
    size = x.shape[axis]
    # Cast last: what of this reaches memory is then no wider than x.
    x = filled_up(x, group=group, axis=axis, edge=not symmetric)
    x = split_groups(x, group=group, axis=axis).astype(jnp.float32)
    high = jnp.max(x, axis, keepdims=True)
    low = jnp.min(x, axis, keepdims=True)
    absmax = jnp.maximum(high, -low)
    finite = all_finite(x, axis)
    top, width = 2 ** (bits - 1), 2**bits - 1
    if symmetric:
        largest = scales.BFLOAT16_MAX / top
        if bits == 1:
            scale = absmax if seed is not None else _mean_size(x, absmax, size, axis)
        elif bits == 8 or seed is not None:
            scale = absmax * np.float32(1 / (top - 1))
        else:
            scale = jnp.where(high > -low, high, low) / -top
        scale = jnp.where(finite, scale, jnp.nan)
        used, stored = scales.store(scale, bits=scale_bits, largest=largest)
        position, zero, lows = scales.ratio(x, used), top, None
    else:
        # In halves: the width of a group can be above float32's largest number.
        largest = min(scales.BFLOAT16_MAX, scales.BFLOAT16_MAX / width * 2)
        low = scales.down(low)
        scale = (high / 2 - low / 2) * np.float32(2 / width)
        scale = jnp.where(finite, scale, jnp.nan)
        used, stored = scales.store(scale, bits=16, largest=largest)
        position, zero = 2 * scales.ratio(x / 2 - low / 2, used), 0
        lows = jnp.where(finite, low, jnp.nan).squeeze(axis).astype(jnp.bfloat16)
    u = 0.5 if seed is None else uniform(x, seed, axis)
    if symmetric and bits == 1:  # the levels are -1 and 1
        code = (u * 2 - 1 < position).astype(jnp.float32)
    elif seed is None:
        code = jnp.round(position) + zero
    else:
        # Not position - code < u: XLA may fuse the product in it, and round elsewhere.
        code = jnp.floor(position)
        code += (code + u < position).astype(jnp.float32) + zero
    code = jnp.clip(code, 0, width).astype(jnp.uint8)
    packed = bits_reference.pack(code, bits=bits, axis=axis)
    return join_groups(packed, axis=axis), stored.squeeze(axis), lows


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
) -> jax.Array:
    """The inverse, as ``dtype[..., size, ...]``."""
    codes = split_groups(codes, group=group * bits // 8, axis=axis)
    codes = bits_reference.unpack(codes, bits=bits, axis=axis)
    code = codes.astype(jnp.float32)
    scale = jnp.expand_dims(scales.load(stored), axis)
    if lows is None:
        x = (2 * code - 1 if bits == 1 else code - 2 ** (bits - 1)) * scale
    else:
        low = jnp.expand_dims(lows.astype(jnp.float32), axis)
        half = low / 2 + code * (scale / 2)
        x = jnp.clip(half, -_MAX / 2, _MAX / 2) * 2
    # Cast first: whatever of this reaches memory is then no larger than x.
    return join_groups(saturated(x, dtype), size=size, axis=axis)


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
