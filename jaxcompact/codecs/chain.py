"""Codecs one after another."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxcompact.codecs.codec import Codec, leaf_nbytes
from jaxcompact.codecs.offload import Offload


@partial(
    jax.tree_util.register_dataclass, data_fields=["leaves"], meta_fields=["steps"]
)
@dataclass(frozen=True)
class Chained:
    """What is stored: the arrays that the last codec left, no more.

    ``steps`` says, for each codec, which arrays it encoded and how its results lie in
    the arrays of the next.
    """

    leaves: list[jax.Array]
    steps: tuple[tuple[tuple[bool, ...], Any], ...]


@dataclass(frozen=True, init=False, repr=False)
class Chain(Codec):
    """Encode with the first codec, what it stores with the second, and so on.

    Each codec encodes those of the arrays before it whose dtype it supports, and leaves
    the others as they are. Error, Inf and NaN: as the codecs say.

    Raises ValueError if there is no codec, or if `Offload` is not the last: the others
    work on the device. For a dtype that the first codec does not support.

    >>> import jaxcompact as jc
    >>> jc.Chain(jc.Hadamard(64), jc.Offload())
    Chain(Hadamard(block=64), Offload())
    >>> jc.Chain(jc.Hadamard(64), jc.Quantized(8), jc.Offload()).nbytes((64, 64))
    0
    """

    codecs: tuple[Codec, ...]

    def __init__(self, *codecs: Codec):
        if not codecs or not all(isinstance(codec, Codec) for codec in codecs):
            raise ValueError(f"codecs must be one or more codecs, got {codecs!r}")
        if any(map(_offloads, codecs[:-1])):
            raise ValueError(f"codecs must have Offload last, got {codecs!r}")
        object.__setattr__(self, "codecs", codecs)

    def __repr__(self) -> str:
        return f"Chain({', '.join(map(repr, self.codecs))})"

    def supports(self, dtype: Any) -> bool:
        return self.codecs[0].supports(dtype)

    def encode(self, x: jax.Array, seed: int = 0) -> Chained:
        self._require(x, seed)
        leaves, steps = [x], []
        for codec in self.codecs:
            chosen = tuple(codec.supports(leaf.dtype) for leaf in leaves)
            encoded = [
                codec.encode(leaf, seed) if yes else leaf
                for leaf, yes in zip(leaves, chosen, strict=True)
            ]
            leaves, tree = jax.tree.flatten(encoded)
            steps.append((chosen, tree))
        return Chained(leaves, tuple(steps))

    def decode(self, encoded: Chained) -> jax.Array:
        self._require_encoded(encoded, Chained)
        leaves = encoded.leaves
        for codec, (chosen, tree) in reversed(
            list(zip(self.codecs, encoded.steps, strict=True))
        ):
            leaves = [
                codec.decode(part) if yes else part
                for part, yes in zip(tree.unflatten(leaves), chosen, strict=True)
            ]
        return leaves[0]

    def nbytes(self, shape: tuple[int, ...], dtype: Any = jnp.float32) -> int:
        """Bytes on the device; those of the last codec, on what it does not encode."""
        *before, last = self.codecs
        return sum(
            last.nbytes(leaf.shape, leaf.dtype)
            if last.supports(leaf.dtype)
            else leaf_nbytes(leaf)
            for leaf in _leaves(before, shape, dtype)
        )

    def host_nbytes(self, shape: tuple[int, ...], dtype: Any = jnp.float32) -> int:
        *before, last = self.codecs
        return sum(
            last.host_nbytes(leaf.shape, leaf.dtype)
            for leaf in _leaves(before, shape, dtype)
            if last.supports(leaf.dtype)
        )


def _offloads(codec: Codec) -> bool:
    inside = codec.codecs if isinstance(codec, Chain) else ()
    return isinstance(codec, Offload) or any(map(_offloads, inside))


def _leaves(codecs: list[Codec], shape: tuple[int, ...], dtype: Any) -> list[Any]:
    """Shapes and dtypes of what these codecs leave."""
    x = jax.ShapeDtypeStruct(shape, dtype)
    return jax.tree.leaves(jax.eval_shape(Chain(*codecs).encode, x)) if codecs else [x]
