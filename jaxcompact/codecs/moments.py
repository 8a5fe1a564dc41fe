"""Channels that are standardized: each less its mean, over its deviation.

Beside larger ones little is left of a small one in few bits; standardized they are
alike.
"""

from typing import Any

import jax
import jax.numpy as jnp

from jaxcompact.codecs.codec import narrowed

_WIDEST = 2.0**63  # the deviation of a channel that has none in float32


def are_axes(axes: Any) -> bool:
    """Whether they are some, different ones, as numbers from 0."""
    numbers = isinstance(axes, tuple) and all(type(a) is int and a >= 0 for a in axes)
    return numbers and 0 < len(axes) == len({*axes})


def moments_of(x: jax.Array, axes: bool | tuple[int, ...]) -> jax.Array:
    """Mean and deviation over the axes, bfloat16 ``[2, ...]``, the axes of size 1.

    ``axes``: True for all but the last. Raises ValueError for an array that lacks them.

    The product of a deviation and what is decoded is exact then: that a sum is fused
    with it changes nothing.
    """
    if axes is True:
        axes = tuple(range(x.ndim - 1))
    if max(axes, default=-1) >= x.ndim:
        raise ValueError(
            f"standardized {axes} needs an array that has these axes, got {x.shape}"
        )
    values = narrowed(x).astype(jnp.float32)
    # As batch norms find them: XLA then finds both from one reading of x.
    mean, square = (
        jnp.mean(v, axes, keepdims=True) for v in (values, jnp.square(values))
    )
    least = jnp.maximum(jnp.square(mean) * 2.0**-20, 1e-30)
    deviation = jnp.sqrt(jnp.maximum(square - jnp.square(mean), least))
    known = jnp.isfinite(square)
    found = jnp.where(known, mean, 0), jnp.where(known, deviation, _WIDEST)
    return jax.lax.reduce_precision(jnp.stack(found), 8, 7).astype(jnp.bfloat16)


def standardized(x: jax.Array, moments: jax.Array) -> jax.Array:
    """``(x - mean) / deviation``; float64 as float32."""
    x = narrowed(x)
    mean, deviation = moments.astype(jnp.float32)
    # A little wider: nothing finite is to be decoded to an infinity.
    divisor = jnp.where(deviation < _WIDEST, deviation, _WIDEST * (1 + 2**-6))
    return ((x.astype(jnp.float32) - mean) / divisor).astype(x.dtype)


def restored(x: jax.Array, moments: jax.Array) -> jax.Array:
    """``x * deviation + mean``."""
    mean, deviation = moments.astype(jnp.float32)
    values = x.astype(jnp.float32) * deviation + mean
    if x.dtype == jnp.float16:  # of which a step is no small part of the largest
        values = jnp.clip(values, -65504.0, 65504.0)
    return values.astype(x.dtype)
