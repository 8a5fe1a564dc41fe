"""The weight gradient in pure JAX: the input is decoded, then multiplied."""

import jax
import jax.numpy as jnp

from jaxcompact.kernels.quantize.api import dequantize


def weight_gradient(
    codes: jax.Array,
    stored: jax.Array,
    lows: jax.Array | None,
    dy: jax.Array,
    *,
    bits: int,
    group: int,
    size: int,
    dtype: jnp.dtype,
    **product,
) -> jax.Array:
    """``dW = decode(x)^T dy``, ``[size, m]``, summed over all axes but the last.

    ``dtype``: of the decoded x; ``product``: what `jax.lax.dot_general` takes besides.
    """
    x = dequantize(codes, stored, lows, bits=bits, group=group, size=size, dtype=dtype)
    tokens = tuple(range(dy.ndim - 1))
    return jax.lax.dot_general(x, dy, ((tokens, tokens), ((), ())), **product)
