"""Project and quantize in pure JAX: one after the other, z is written and read."""

import jax
import jax.numpy as jnp

from jaxcompact.kernels.explicit import without
from jaxcompact.kernels.quantize.api import quantize
from jaxcompact.kernels.quantize.reference import Encoded


def project(x: jax.Array, p_nr: jax.Array, **fields) -> Encoded:
    """`quantize` of the product."""
    return quantize(product(x, p_nr), **fields)


def product(x: jax.Array, p_nr: jax.Array) -> jax.Array:
    """``x P``, rounded to x's dtype; on several devices it has whole rows."""
    return jnp.matmul(x, p_nr, out_sharding=without(x, -1))
