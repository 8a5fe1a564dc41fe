"""What is stored, as it crosses from the forward to the backward pass."""

import functools
import zlib
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxcompact.arrays import on_host, types_made
from jaxcompact.codecs import Codec, Quantized
from jaxcompact.graph import graph_of
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
        stored, seed = aval, 0
        if codec is not None:
            with _its_mesh(aval):
                stored, noisy = _stored(codec, aval)
            seed = zlib.crc32(slot.tensor.name.encode()) if noisy else 0
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
                types_made(as_reals, self.aval)[0]
            )
        return [min(every, key=lambda i: self.leaves[i].size)] if kernel else every

    def later(self, leaves: list[jax.Array]) -> Any:
        if self.codec is None:
            return self.decode(leaves)
        with _its_mesh(self.aval):
            return Later(leaves, self.decode, light=_light(self.codec, self.aval))

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


# Tensors after the first, of one kind, find these traced.
@partial(jax.jit, static_argnums=(0, 1))
def _encode(codec: Codec, seed: int, x: jax.Array) -> Any:
    return _encoded(codec, x, seed)


def _encoded(codec: Codec, x: jax.Array, seed: int | jax.Array) -> Any:
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
def _stored(codec: Codec, aval: Any) -> tuple[Any, bool]:
    """The types of what is stored, and whether the seed is read."""
    seed = jax.ShapeDtypeStruct((), jnp.uint32)
    stored, program = types_made(partial(_encoded, codec), aval, seed)
    graph = graph_of(program)
    return stored, any(graph.inputs[1] in op.reads for op in graph.ops)


@functools.lru_cache(1024)
def _light(codec: Codec, aval: Any) -> bool:
    """Whether decoding is no more than arithmetic on each entry."""
    stored, _ = _stored(codec, aval)
    program = jax.make_jaxpr(partial(_decode, codec))(stored)
    made = {op.kind for op in graph_of(program).ops}
    return made <= ELEMENTWISE | LAYOUT - {"gather", "scatter"}


def _as_bits(x: jax.Array) -> jax.Array:
    bits = _bits_of(x.dtype)
    return x if bits == x.dtype or on_host(x) else jax.lax.bitcast_convert_type(x, bits)


def _from_bits(x: jax.Array, dtype: Any) -> jax.Array:
    return x if x.dtype == dtype else jax.lax.bitcast_convert_type(x, dtype)


def _bits_of(dtype: Any) -> Any:
    floating = jnp.issubdtype(dtype, jnp.floating)
    return jnp.dtype(f"uint{8 * dtype.itemsize}") if floating else dtype
