"""What is stored, as it crosses from the forward to the backward pass."""

import functools
import zlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxcompact.codecs import Codec, Quantized
from jaxcompact.graph import graph_of, on_host
from jaxcompact.kernels import choice
from jaxcompact.kinds import ELEMENTWISE, LAYOUT
from jaxcompact.policy import Save
from jaxcompact.reals import as_reals, from_reals, is_complex
from jaxcompact.replay import Replay, Slot
from jaxcompact.schedule import Later


@dataclass(frozen=True)
class Store:
    """How the value of a slot crosses from the forward to the backward pass.

    Where anything is encoded, ``as_bits``, as integers: an outer `checkpoint` then
    knows that there is nothing to encode. Integers have no derivative.
    """

    codec: Codec | None
    seed: int
    tree: Any
    leaves: list[Any]
    aval: Any
    as_bits: bool

    @classmethod
    def of(cls, slot: Slot, replay: Replay) -> "Store":
        aval, as_bits = replay.recording.avals[slot.source], replay.lossy
        codec = None if isinstance(slot.action, Save) else slot.action
        seed = zlib.crc32(slot.tensor.name.encode())
        with _its_mesh(aval):
            stored = aval if codec is None else _stored(codec, aval)
        leaves, tree = jax.tree.flatten(stored)
        return cls(codec, seed, tree, leaves, aval, as_bits)

    def encode(self, x: jax.Array) -> list[jax.Array]:
        with _its_mesh(self.aval):
            return self.leaves_of(
                x if self.codec is None else _encode(self.codec, self.seed, x)
            )

    def leaves_of(self, encoded: Any) -> list[jax.Array]:
        leaves = jax.tree.leaves(encoded)
        return list(map(_as_bits, leaves)) if self.as_bits else leaves

    def holds(self) -> Sequence[int]:
        """Leaves that what reads on is to be tied to.

        All of them, or the smallest of what a kernel makes at once: it can then write
        the others where a scan stacks them, in place of a copy.
        """
        every = range(len(self.leaves))
        with _its_mesh(self.aval):
            kernel = type(self.codec) is Quantized and self.codec.quantizes(
                jax.eval_shape(as_reals, self.aval)
            )
        return [min(every, key=lambda i: self.leaves[i].size)] if kernel else every

    def later(self, leaves: list[jax.Array]) -> Any:
        if self.codec is None:
            return self.decode(leaves)
        return Later(leaves, self.decode, light=_light(self.decode, leaves))

    def decode(self, leaves: list[jax.Array]) -> jax.Array:
        with _its_mesh(self.aval):
            return self._decoded(leaves)

    def _decoded(self, leaves: list[jax.Array]) -> jax.Array:
        pairs = zip(leaves, self.leaves, strict=True)
        leaves = [_from_bits(leaf, aval.dtype) for leaf, aval in pairs]
        x = jax.tree.unflatten(self.tree, leaves)
        if self.codec is None:
            return x
        x, sharding = _decode(self.codec, x), self.aval.sharding
        x = from_reals(x) if is_complex(self.aval) else x.astype(self.aval.dtype)
        # Groups that lie on several devices are gathered.
        same = jax.typeof(x).sharding.spec == sharding.spec
        return x if same else jax.sharding.reshard(x, sharding)


def _its_mesh(aval: Any) -> AbstractContextManager:
    """That of a tensor within `jax.sharding.auto_axes` is not the one around it."""
    here, mesh = jax.sharding.get_abstract_mesh(), aval.sharding.mesh
    if here.empty or mesh.empty or here == mesh:
        return nullcontext()
    return jax.sharding.use_abstract_mesh(mesh)


# Layers after the first find these traced.
@partial(jax.jit, static_argnums=(0, 1))
def _encode(codec: Codec, seed: int, x: jax.Array) -> Any:
    x = as_reals(x)
    if not codec.supports(x.dtype):  # a slope of zeros and ones
        x = x != 0
    return codec.encode(x, seed)


@partial(jax.jit, static_argnums=0)
def _decode(codec: Codec, encoded: Any) -> jax.Array:
    # Within the operations that read, for which a kernel would write it first.
    with choice.using("xla"):
        return codec.decode(encoded)


@functools.lru_cache(1024)
def _stored(codec: Codec, aval: Any) -> Any:
    """The shapes and dtypes of what is stored."""
    return jax.eval_shape(partial(_encode, codec, 0), aval)


def _light(decode: Callable[[Any], jax.Array], leaves: list[jax.Array]) -> bool:
    """Whether decoding, here and now, is no more than arithmetic on each entry."""
    made = {op.kind for op in graph_of(jax.make_jaxpr(decode)(leaves)).ops}
    return made <= ELEMENTWISE | LAYOUT - {"gather", "scatter"}


def _as_bits(x: jax.Array) -> jax.Array:
    bits = _bits_of(x.dtype)
    return x if bits == x.dtype or on_host(x) else jax.lax.bitcast_convert_type(x, bits)


def _from_bits(x: jax.Array, dtype: Any) -> jax.Array:
    return x if x.dtype == dtype else jax.lax.bitcast_convert_type(x, dtype)


def _bits_of(dtype: Any) -> Any:
    floating = jnp.issubdtype(dtype, jnp.floating)
    return jnp.dtype(f"uint{8 * dtype.itemsize}") if floating else dtype
