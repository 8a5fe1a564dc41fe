"""Project and quantize in pure JAX: one after the other, z is written and read."""

import jax
import jax.numpy as jnp

from jaxcompact.kernels.explicit import without
from jaxcompact.kernels.quantize.api import quantize

Encoded = tuple[jax.Array, jax.Array, jax.Array | None]


def project(x: jax.Array, p_nr: jax.Array, **fields) -> Encoded:
    """`quantize` of ``x P``, which is rounded to x's dtype first."""
    return quantize(jnp.matmul(x, p_nr, out_sharding=without(x, -1)), **fields)
