"""exp, exp2 and the logistic function of 16 bits, in few instructions of a GPU.

All are made of the card's exp2 and log2 of float32. With ``approx_math`` these are one
instruction each, what they give below float32's normal numbers is 0, and their error is
2^-22 of exp2's result, and of log2's, or of 1 between 1/2 and 2 (PTX ISA, ex2, lg2).
"""

import jax
import jax.numpy as jnp
import numpy as np

_LOG2_E = np.float32(1.4426950408889634)


def exp(x: jax.Array) -> jax.Array:
    """exp of x, of its dtype.

    Of 16 bits within ``2^-22 + |x| 2^-23`` of itself before it is rounded, which is to
    exp's own neighbour but for 2 of bfloat16's 65280 finite x, and 1 of float16's, at
    most (on a CPU, of normal float32 numbers).
    """
    return _exp(x, _LOG2_E).astype(x.dtype) if x.dtype.itemsize == 2 else jnp.exp(x)


def exp2(x: jax.Array) -> jax.Array:
    """2 to the power of x, of its dtype."""
    return jnp.exp2(_wide(x)).astype(x.dtype)


def logistic(x: jax.Array) -> jax.Array:
    """``1 / (1 + exp(-x))``, of x's dtype, to which each operation is rounded.

    Of bfloat16 the quotient is made of a logarithm, with the same bits up to y = 2^64:
    ``1 / y`` of 8 bits is 2^-16 of itself away from where it would round to another
    neighbour, at least, and log2 within ``64 * 2^-22``. Beyond, of two y in 128 it may.
    """
    if x.dtype.itemsize > 2:
        return jax.nn.sigmoid(x)
    y = 1 + _exp(x, -_LOG2_E).astype(x.dtype)
    if x.dtype == jnp.float16:
        return 1 / y
    return jnp.exp2(-jnp.log2(_wide(y))).astype(x.dtype)


def _exp(x: jax.Array, times: np.float32) -> jax.Array:
    return jnp.exp2(_wide(x) * times)


def _wide(x: jax.Array) -> jax.Array:
    """float32, of bfloat16 by its bits: of a cast XLA may drop what rounded before."""
    if x.dtype != jnp.bfloat16:
        return x.astype(jnp.float32)
    bits = jax.lax.bitcast_convert_type(x, jnp.uint16).astype(jnp.uint32) << 16
    return jax.lax.bitcast_convert_type(bits, jnp.float32)
