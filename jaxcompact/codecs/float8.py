"""Float8: E4M3 numbers with a scale for each group."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxcompact.codecs.codec import Codec, in_parts, in_rows, is_float, merged
from jaxcompact.kernels.quantize import scales
from jaxcompact.kernels.quantize.levels import saturated
from jaxcompact.kernels.quantize.reference import (
    extreme,
    filled_up,
    join_groups,
    split_groups,
)

_DTYPE = jnp.float8_e4m3fn
_LARGEST = float(jnp.finfo(_DTYPE).max)  # 448
_LARGEST_SCALE = 145 / 128 * 2.0**119  # of bfloat16, times 448 within float32


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["values", "scales"],
    meta_fields=["shape", "dtype", "parts"],
)
@dataclass(frozen=True)
class Float8Encoded:
    """What is stored: ``values`` float8_e4m3fn and ``scales`` bfloat16, no more.

    ``parts`` as of `quantized.Encoded`.
    """

    values: jax.Array
    scales: jax.Array
    shape: tuple[int, ...]
    dtype: jnp.dtype
    parts: int = 1


@dataclass(frozen=True)
class Float8(Codec):
    """Store a tensor as 8 bit floating point numbers, E4M3, and a scale for each group.

    ``decode(encode(x)) = s * float8(x / s)`` with ``s = max|x| / 448`` over each
    ``group_size`` consecutive entries of the last axis, rounded up to bfloat16; nearest
    rounding. The error of an entry is at most 2^-4 of itself, or ``s * 2^-10`` if that
    is more. So small entries of a group keep their digits, unlike with
    `Quantized(bits=8)`, whose error is smaller for the large ones.

    Any shape and any float dtype; arithmetic is in float32. Saturates. A group that
    holds an Inf or a NaN decodes to NaN. Short last axes are merged as by `Quantized`,
    and groups begin anew on devices as there.

    Memory: ``8 + 16 / group_size`` bits an entry.

    Raises ValueError if group_size is not positive, and for dtypes that are not
    floating point.

    Source: COAT (arXiv 2410.19313), which stores activations so.

    >>> import jax.numpy as jnp, jaxcompact as jc
    >>> codec = jc.Float8(group_size=4)
    >>> codec.decode(codec.encode(jnp.array([0.5, -1.75, 448.0, 3.1]))).tolist()
    [0.5, -1.75, 448.0, 3.0]
    """

    group_size: int = 64

    def __post_init__(self):
        if type(self.group_size) is not int or self.group_size < 1:
            raise ValueError(f"group_size must be positive, got {self.group_size!r}")

    def supports(self, dtype: Any) -> bool:
        return is_float(dtype)

    def _group(self, size: int) -> int:
        return min(self.group_size, max(1, size))

    def encode(self, x: jax.Array, seed: int = 0) -> Float8Encoded:
        self._require(x, seed)
        rows = in_rows(x, merged(x.shape, self.group_size))
        rows, parts = in_parts(rows, -1, self._group(rows.shape[-1]))
        group = self._group(rows.shape[-1])
        rows = filled_up(rows, group=group, axis=-1, edge=False)
        rows = split_groups(rows, group=group, axis=-1).astype(jnp.float32)
        furthest, finite = extreme(rows, -1)
        used, stored = scales.store(
            jnp.where(finite, jnp.abs(furthest) * np.float32(1 / _LARGEST), jnp.nan),
            bits=16,
            largest=_LARGEST_SCALE,
        )
        # At most 448, or 452 where the scale is the largest: the cast makes NaN of 464.
        values = scales.ratio(rows, used).astype(_DTYPE)
        return Float8Encoded(
            join_groups(values, axis=-1), stored[..., 0], x.shape, x.dtype, parts
        )

    def decode(self, encoded: Float8Encoded) -> jax.Array:
        self._require_encoded(encoded, Float8Encoded)
        shape = merged(encoded.shape, self.group_size)
        size = shape[-1] // encoded.parts
        values = split_groups(encoded.values, group=self._group(size), axis=-1)
        scale = encoded.scales[..., None].astype(jnp.float32)
        x = saturated(values.astype(jnp.float32) * scale, encoded.dtype)
        rows = join_groups(x, size=size, axis=-1)
        return rows.reshape(shape).reshape(encoded.shape)
