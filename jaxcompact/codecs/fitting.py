"""A codec, symmetric or not as a sample of the data asks for."""

import dataclasses
import math

import jax
import jax.numpy as jnp

from jaxcompact.codecs.codec import Codec


def fitted[C: Codec](codec: C, x: jax.Array) -> C:
    """The codec with ``symmetric`` as a sample of the data asks for.

    Asymmetric (with ``scale_bits=16``, which that needs) where the values have one
    sign: those of the other reach no further than a thousandth of the largest. For
    `Quantized` and `OutlierQuantized`.

    Raises ValueError for a codec without ``symmetric``, and for an x that is no array,
    has a NaN, or values that are not known: call it outside jit.

    >>> import jax, jaxcompact as jc
    >>> jc.codecs.fitted(jc.Quantized(4), jax.nn.relu(jax.numpy.arange(-3.0, 9.0)))
    Quantized(bits=4, group_size=64, symmetric=False, stochastic=False, axis=-1,
              scale_bits=16, bound=None, standardized=False, equalized=False)
    """
    if isinstance(x, jax.core.Tracer) or not hasattr(x, "dtype"):
        raise ValueError(f"x must be an array with known values, got {x}")
    names = {field.name for field in dataclasses.fields(codec)}
    if "symmetric" not in names:
        raise ValueError(f"codec must have a field symmetric, got {codec!r}")
    low, high = float(jnp.min(x, initial=0.0)), float(jnp.max(x, initial=0.0))
    if math.isnan(low):
        raise ValueError("x must have no NaN, which has no sign")
    if max(-low, high) * 1e-3 < min(-low, high) or low == high:
        return dataclasses.replace(codec, symmetric=True)
    wide = {"scale_bits": 16} if "scale_bits" in names else {}
    return dataclasses.replace(codec, symmetric=False, **wide)
