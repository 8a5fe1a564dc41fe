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

from jaxcompact.actions import Save
from jaxcompact.arrays import on_host, types_made
from jaxcompact.codecs import Codec, Quantized
from jaxcompact.graph import graph_of
from jaxcompact.kernels import choice
from jaxcompact.kinds import ELEMENTWISE, LAYOUT
from jaxcompact.reals import as_reals, from_reals, is_complex
from jaxcompact.transform.forward import held
from jaxcompact.transform.norms import Norm
from jaxcompact.transform.regions import Region
from jaxcompact.transform.replay import Replay, Slot
from jaxcompact.transform.schedule import Later
from jaxcompact.transform.sources import Source


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


class Stores:
    """Those of a replay's slots, and the forward pass that fills them."""

    def __init__(self, replay: Replay):
        self.forward = replay.forward
        self.sources = [slot.source for slot in replay.slots]
        self.each = [Store.of(slot, replay) for slot in replay.slots]

    def run(
        self,
        inputs: Sequence[Any],
        seen: Callable[[Source, Any], Any] | None,
        hold: bool,
    ) -> tuple[list[Any], list[list[Any]]]:
        """The outputs, and what is stored of each slot.

        Args:
            inputs: of the function.
            seen: ``(source, value)``: what is stored is of this, where a policy probes
                it: it is encoded otherwise than it is read.
            hold: the outputs wait for what is stored, or XLA encodes late, and keeps
                what it encodes.
        """
        regions = () if seen else list(filter(self._in_one_pass, self.forward.regions))
        holds = [store.holds() for store in self.each]

        def encode(k: int, x: Any) -> list[jax.Array]:
            return self.each[k].encode(seen(self.sources[k], x) if seen else x)

        outs, stored = self.forward.run(inputs, encode, holds, regions, self._evaluate)
        return held(outs, stored, holds) if hold else (outs, stored)

    def _in_one_pass(self, region: Region | Norm) -> bool:
        """Whether its sources' codec takes a kernel that evaluates it as well."""
        stores = self._of(region)
        codec, avals = stores[0].codec, [store.aval for store in stores]
        if type(codec) is not Quantized:
            return False
        of = [self.forward.graph.avals[v] for v in region.parameters]
        if isinstance(region, Norm):
            return codec.normalizes(region, *avals, of)
        return codec.activates(region, avals, of)

    def _evaluate(self, region: Region | Norm, arrays: list) -> tuple[list, list]:
        """What it makes, and what is stored of its sources."""
        xs, parameters = arrays[: len(region.sources)], arrays[len(region.sources) :]
        stores = self._of(region)
        codec = stores[0].codec
        if isinstance(region, Norm):
            outs, encoded = codec.normalize(region, *xs, parameters)
            return outs, [stores[0].leaves_of(encoded)]
        bounds = [store.codec.ends for store in stores]
        y, encoded = codec.activate(region, xs, parameters, bounds)
        pairs = zip(stores, encoded, strict=True)
        return [y], [store.leaves_of(e) for store, e in pairs]

    def _of(self, region: Region | Norm) -> list[Store]:
        return [self.each[k] for k in self.forward.slots_of(region)]

    def later(self, stored: Sequence[list[jax.Array]]) -> list[Any]:
        """Their values, decoded where the backward pass reads them."""
        pairs = zip(self.each, stored, strict=True)
        return [store.later(leaves) for store, leaves in pairs]


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
    return stored, any(graph.inputs[-1] in op.reads for op in graph.ops)


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
