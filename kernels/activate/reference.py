"""Activate and quantize in pure JAX: one after the other, each reads the arrays."""

from collections.abc import Callable, Sequence

import jax

from jaxcompact.kernels.quantize.api import quantize
from jaxcompact.kernels.quantize.levels import Bound
from jaxcompact.kernels.quantize.reference import Encoded


def activate(
    f: Callable[..., jax.Array],
    xs: Sequence[jax.Array],
    parameters: Sequence[jax.Array],
    *,
    bounds: Sequence[Bound | None] | None = None,
    **fields,
) -> tuple[jax.Array, list[Encoded]]:
    """``f(*xs, *parameters)``, and `quantize` of each x with its bound."""
    pairs = zip(xs, bounds or [None] * len(xs), strict=True)
    return f(*xs, *parameters), [quantize(x, bound=b, **fields) for x, b in pairs]
