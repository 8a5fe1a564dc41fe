"""Activate and quantize in pure JAX: one after the other, each reads the arrays."""

from collections.abc import Callable, Sequence

import jax

from jaxcompact.kernels.quantize.api import quantize

Encoded = tuple[jax.Array, jax.Array, jax.Array | None]


def activate(
    f: Callable[..., jax.Array],
    xs: Sequence[jax.Array],
    parameters: Sequence[jax.Array],
    **fields,
) -> tuple[jax.Array, list[Encoded]]:
    """``f(*xs, *parameters)``, and `quantize` of each x."""
    return f(*xs, *parameters), [quantize(x, **fields) for x in xs]
