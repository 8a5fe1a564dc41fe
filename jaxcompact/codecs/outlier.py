"""Quantization with the channels that would spoil it kept apart."""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxcompact.codecs.codec import Codec, Written, is_float
from jaxcompact.codecs.quantized import Encoded, Quantized
from jaxcompact.kernels.explicit import gathered, without
from jaxcompact.kernels.quantize.levels import saturated
from jaxcompact.kernels.quantize.reference import extreme


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["rest", "kept", "index"],
    meta_fields=[],
)
@dataclass(frozen=True)
class OutlierEncoded:
    """What is stored: ``rest`` of all channels, and the K ``kept`` ones, no more.

    ``kept`` is ``[..., K]`` bfloat16 (float16 for float16 tensors); ``index`` says
    which channel each is, and the number of channels for a slot that is not used.
    """

    rest: Encoded
    kept: jax.Array
    index: jax.Array


@dataclass(frozen=True, eq=False)
class OutlierQuantized(Written, Codec):
    """Quantize a tensor, but keep its outlier channels in 16 bits.

    A channel is an entry of the last axis. With ``m`` its largest magnitude over all
    other axes, and mean and standard deviation taken over channels, it is an outlier if
    ``(m - mean) / std > threshold``. Of these the largest ``slots`` are kept, in
    bfloat16 (float16 if x is), and are zero in what `Quantized` stores, whose groups
    they would have coarsened.

    The error of a kept entry is at most 2^-9 of it, of the others as `Quantized` says.
    No more channels than slots can be outliers; with ``C`` channels none is beyond
    ``sqrt(C - 1)`` standard deviations, so few channels have no outliers. Arrays
    of less than two axes have no channels, and no slots. An Inf or a NaN anywhere turns
    the separation off; its group decodes to NaN.

    Memory: that of `Quantized`, and per slot 2 bytes for each row and for the index
    (4 above 65535 channels).

    Args:
        bits, group_size, symmetric: as in `Quantized`.
        slots: channels for which there is room: an int, or a float for a fraction of
            the channels, rounded up.
        threshold: in standard deviations.

    Raises ValueError for slots that are neither a positive int nor a fraction up to 1,
    for a threshold that is not positive, for what `Quantized` raises it for, and for
    dtypes that are not floating point.

    Source: Adacc (arXiv 2508.00806). What statistic the paper takes is not known here.

    >>> import jax.numpy as jnp, jaxcompact as jc
    >>> codec = jc.OutlierQuantized(bits=4, slots=1)
    >>> encoded = codec.encode(jnp.ones((8, 64)).at[:, 5].set(1000.0))
    >>> encoded.index.tolist(), encoded.kept[0].tolist()
    ([5], [1000.0])
    >>> codec.decode(encoded)[0, 4:7].tolist()
    [1.0, 1000.0, 1.0]
    """

    bits: int = 4
    group_size: int = 64
    slots: int | float = 0.01
    threshold: float = 3.0
    symmetric: bool = True

    def __post_init__(self):
        most = 1.0 if isinstance(self.slots, float) else math.inf
        if not _is_number(self.slots) or not 0 < self.slots <= most:
            raise ValueError(
                f"slots must be a positive int, or a fraction of the channels of at "
                f"most 1.0, got {self.slots!r}"
            )
        if not _is_number(self.threshold) or not self.threshold > 0:
            raise ValueError(f"threshold must be positive, got {self.threshold!r}")
        self._quantizer()  # raises for what it does not take

    def _quantizer(self) -> Quantized:
        return Quantized(self.bits, self.group_size, self.symmetric)

    def supports(self, dtype: Any) -> bool:
        return is_float(dtype)

    def encode(self, x: jax.Array, seed: int = 0) -> OutlierEncoded:
        self._require(x, seed)
        x = jnp.asarray(x)
        channels = x.shape[-1] if x.ndim > 1 else 0
        index = _outliers(x, self._count(channels), float(self.threshold))
        # One more entry than channels: what unused slots point to.
        outlier = jnp.zeros(channels + 1, bool).at[index].set(True)[:channels]
        rest = x
        kept = jnp.zeros((*x.shape[:-1], 0), x.dtype)
        if channels:
            outlier = jnp.expand_dims(outlier, range(x.ndim - 1))
            rest = x * (~outlier).astype(x.dtype)  # finite, if there are outliers
            kept = x.at[..., index].get(
                mode="fill", fill_value=0, out_sharding=without(x, -1)
            )
        wide = jnp.uint16 if channels < 2**16 else jnp.uint32
        kept = saturated(kept, x.dtype if x.dtype == jnp.float16 else jnp.bfloat16)
        return OutlierEncoded(self._quantizer().encode(rest), kept, index.astype(wide))

    def decode(self, encoded: OutlierEncoded) -> jax.Array:
        self._require_encoded(encoded, OutlierEncoded)
        rest = self._quantizer().decode(encoded.rest)
        slots = encoded.kept.shape[-1]
        if slots == 0:
            return rest
        channels = rest.shape[-1]
        # Each channel's slot: reading by it fuses with dequantizing, and a scatter of
        # the kept channels into the tensor would not.
        slot = jnp.full(channels + 1, slots, jnp.int32)
        slot = slot.at[encoded.index].set(jnp.arange(slots, dtype=jnp.int32))[:channels]
        kept = saturated(encoded.kept.astype(jnp.float32), rest.dtype)
        kept = jnp.take(kept, slot, axis=-1, mode="clip")
        return jnp.where(
            jnp.expand_dims(slot < slots, range(rest.ndim - 1)), kept, rest
        )

    def _count(self, channels: int) -> int:
        slots = self.slots
        return min(
            channels, slots if isinstance(slots, int) else math.ceil(slots * channels)
        )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _outliers(x: jax.Array, slots: int, threshold: float) -> jax.Array:
    """Numbers of the outlier channels, ``int32[slots]``; unused: how many there are."""
    if not slots:
        return jnp.zeros(0, jnp.int32)
    furthest, finite = extreme(x, range(x.ndim - 1))
    size = jnp.abs(furthest).reshape(-1)
    largest = jnp.max(size)  # so that squares stay in range
    size = size / jnp.where(largest > 0, largest, 1.0)
    above = size - jnp.mean(size) > threshold * jnp.std(size)
    above &= jnp.all(finite)
    size = gathered(jnp.where(above, size, 0.0), 0)
    score, index = jax.lax.top_k(size, slots)
    return jnp.where(score > 0, index, x.shape[-1])
