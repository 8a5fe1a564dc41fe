"""Symmetric group quantization to 8 or 4 bits."""

import math
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp

from jaxcompact.kernels.quantize import reference


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["codes", "scales"],
    meta_fields=["size", "dtype"],
)
@dataclass(frozen=True)
class Encoded:
    """What is stored of ``x``: ``codes`` uint8 and ``scales`` bfloat16, no more."""

    codes: jax.Array
    scales: jax.Array
    size: int
    dtype: jnp.dtype


@dataclass(frozen=True)
class Quantized:
    """Store a tensor in ``bits`` bits an entry, one bfloat16 scale per group.

    ``decode(encode(x)) = s * clip(round(x / s), -q, q)`` with ``q = 2^(bits-1) - 1``
    and ``s = max|x| / q`` over each ``group_size`` consecutive entries of the last
    axis (nearest rounding; the error is at most ``s / 2``, and ``s`` again has
    bfloat16's 8 bits, which the largest entries of a group may be clipped by).

    Any float dtype and any shape of at least one axis. Saturates, never wraps. A
    group that holds an Inf or a NaN decodes to NaN, so that a broken step is seen.
    Memory: ``bits + 16 / group_size`` bits an entry; see `nbytes`.

    Raises ValueError if ``bits`` is not 4 or 8, or ``group_size`` not even and >= 2.

    Source: GACT (arXiv 2206.11357), section 4; Adacc (arXiv 2508.00806).

    >>> import jax.numpy as jnp, jaxcompact as jc
    >>> codec = jc.Quantized(bits=4, group_size=2)
    >>> encoded = codec.encode(jnp.array([0.5, -7.0, 3.5, 1.0]))
    >>> encoded.codes.dtype.name, encoded.codes.shape
    ('uint8', (2,))
    >>> codec.decode(encoded).tolist()
    [0.0, -7.0, 3.5, 1.0]
    """

    bits: int = 4
    group_size: int = 64

    def __post_init__(self):
        if self.bits not in (4, 8):
            raise ValueError(f"bits must be 4 or 8, got {self.bits!r}")
        if self.group_size < 2 or self.group_size % 2:
            raise ValueError(
                f"group_size must be even and at least 2, got {self.group_size!r}"
            )

    def _group(self, size: int) -> int:
        """A row shorter than a group is one group: no padding beyond evenness."""
        return min(self.group_size, size + size % 2)

    def encode(self, x: jax.Array) -> Encoded:
        """``x[..., size]`` in codes and scales."""
        size = x.shape[-1]
        codes, scales = reference.quantize(x, bits=self.bits, group=self._group(size))
        return Encoded(codes, scales, size, x.dtype)

    def decode(self, encoded: Encoded) -> jax.Array:
        """``x[..., size]`` again, in the dtype it had."""
        return reference.dequantize(
            encoded.codes,
            encoded.scales,
            bits=self.bits,
            size=encoded.size,
            dtype=encoded.dtype,
        )

    def nbytes(self, shape: tuple[int, ...]) -> int:
        """Bytes that an encoded tensor of this shape takes, exactly."""
        group = self._group(shape[-1])
        groups = math.prod(shape[:-1]) * -(-shape[-1] // group)
        return groups * (group * self.bits // 8 + 2)
