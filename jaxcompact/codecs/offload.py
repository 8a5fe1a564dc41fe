"""Tensors in the host's memory."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxcompact.codecs.codec import Codec, leaf_nbytes


@dataclass(frozen=True)
class Offload(Codec):
    """Keep a tensor, exactly, in the host's memory.

    Any dtype. ``encode`` copies to the host and ``decode`` back; under jit XLA runs the
    copies beside the computation. On the CPU both are one memory, and nothing is
    copied.

    Memory: none on the device; `host_nbytes` is the tensor's size.

    >>> import jaxcompact as jc
    >>> jc.Offload().nbytes((128, 64)), jc.Offload().host_nbytes((128, 64))
    (0, 32768)
    >>> jc.Chain(jc.Quantized(4), jc.Offload()).host_nbytes((128, 64))
    4352
    """

    def supports(self, dtype: Any) -> bool:
        return True

    def encode(self, x: jax.Array, seed: int = 0) -> jax.Array:
        self._require(x, seed)
        return jax.device_put(x, jax.memory.Space.Host)

    def decode(self, encoded: jax.Array) -> jax.Array:
        return jax.device_put(encoded, jax.memory.Space.Device)

    def nbytes(self, shape: tuple[int, ...], dtype: Any = jnp.float32) -> int:
        return 0

    def host_nbytes(self, shape: tuple[int, ...], dtype: Any = jnp.float32) -> int:
        return leaf_nbytes(jax.ShapeDtypeStruct(shape, dtype))
