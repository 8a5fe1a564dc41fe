"""Group quantization in pure JAX: the specification, the fallback and the oracle.

Per group of ``group`` consecutive entries of the last axis, symmetric:

    scale = absmax / qmax      rounded to bfloat16, with qmax = 2^(bits-1) - 1
    code  = clip(round(x / scale), -qmax, qmax) + 2^(bits-1)    unsigned

With 4 bits the first half of a group lies in the low nibbles and the second half in
the high ones, so that packing moves whole lanes and never interleaves.
"""

import jax
import jax.numpy as jnp

_TINY = float(jnp.finfo(jnp.bfloat16).tiny)


def quantize(x: jax.Array, *, bits: int, group: int) -> tuple[jax.Array, jax.Array]:
    """Codes ``uint8[..., g * group * bits / 8]`` and scales ``bfloat16[..., g]``.

    ``g = ceil(x.shape[-1] / group)``; the last group is filled up with zeros, which
    leave its scale as it is. A group that holds an Inf or a NaN decodes to NaN.
    """
    size = x.shape[-1]
    groups = -(-size // group)
    x = x.astype(jnp.float32)
    x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, groups * group - size)])
    x = x.reshape(*x.shape[:-1], groups, group)
    qmax = 2 ** (bits - 1) - 1
    absmax = jnp.max(jnp.abs(x), axis=-1, keepdims=True, initial=0.0)
    # The scale is rounded first and the codes use the rounded one, so its rounding
    # costs range (a clip of at most half a step), never a drift of every value.
    scale = (absmax / qmax).astype(jnp.bfloat16)
    step = jnp.maximum(scale.astype(jnp.float32), _TINY)
    code = jnp.clip(jnp.round(x / step), -qmax, qmax)
    finite = jnp.isfinite(absmax)
    code = (jnp.where(finite, code, 0.0) + 2 ** (bits - 1)).astype(jnp.uint8)
    scale = jnp.where(finite, scale, jnp.bfloat16(jnp.nan))
    if bits == 4:
        code = code[..., : group // 2] | (code[..., group // 2 :] << 4)
    return code.reshape(*code.shape[:-2], groups * code.shape[-1]), scale[..., 0]


def dequantize(
    codes: jax.Array, scales: jax.Array, *, bits: int, size: int, dtype
) -> jax.Array:
    """The inverse: ``(code - 2^(bits-1)) * scale`` as ``dtype[..., size]``."""
    *rows, groups = scales.shape
    codes = codes.reshape(*rows, groups, codes.shape[-1] // groups)
    if bits == 4:
        codes = jnp.concatenate([codes & 0xF, codes >> 4], axis=-1)
    x = codes.astype(jnp.float32) - 2 ** (bits - 1)
    x = x * scales[..., None].astype(jnp.float32)
    return x.reshape(*rows, groups * x.shape[-1])[..., :size].astype(dtype)
