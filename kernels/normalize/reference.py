"""Normalize and quantize in pure JAX: one after the other, each reads the array."""

from collections.abc import Callable, Sequence

import jax

from jaxcompact.kernels.quantize.api import quantize
from jaxcompact.kernels.quantize.reference import Encoded


def normalize(
    f: Callable[..., Sequence[jax.Array]],
    x: jax.Array,
    parameters: Sequence[jax.Array],
    **fields,
) -> tuple[list[jax.Array], Encoded]:
    """``f(x, *parameters)``, a norm and its statistics, and `quantize` of x."""
    return list(f(x, *parameters)), quantize(x, **fields)
