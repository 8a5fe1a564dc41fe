"""Arrays to compute with."""

import math

import jax
import jax.numpy as jnp
import numpy as np


def normal(seed: int, *shape: int, scale: float = 1.0) -> jax.Array:
    """``scale * jax.random.normal(jax.random.key(seed), shape)``, to one bit.

    As many are drawn as a power of two, whose first are the same: to compile the draw
    of another shape takes longer than many a test.
    """
    size = math.prod(shape)
    with jax.ensure_compile_time_eval():
        key, many = jax.random.key(seed), 1 << (size - 1).bit_length()
        drawn = np.asarray(jax.random.normal(key, (many,)))
    return jnp.asarray(scale * drawn[:size].reshape(shape))
