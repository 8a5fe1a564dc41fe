"""What every codec is."""

import math
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp

from jaxcompact.kernels.explicit import gathered, part, typed
from jaxcompact.kernels.quantize.levels import saturated


class Written:
    """Equal to what is written alike: 1, a number, is not 1.0, a fraction."""

    def __eq__(self, other: Any) -> bool:
        return type(other) is type(self) and repr(other) == repr(self)

    def __hash__(self) -> int:
        return hash(repr(self))


class Codec:
    """How one tensor is stored between the forward and the backward pass.

    A codec is a frozen dataclass: hashable, comparable, printable as it is written. It
    works under jit, vmap and scan, asks for no random key and never waits for values.

    Every codec saturates, never wraps. Subclasses write `supports`, `encode` and
    `decode`; a subclass of your own needs nothing more.

    >>> import jax, jaxcompact as jc
    >>> jc.Quantized(4).nbytes((128, 64)), jc.BitMask().nbytes((128, 64), bool)
    (4352, 1024)
    """

    def supports(self, dtype: Any) -> bool:
        """Whether arrays of this dtype can be encoded."""
        raise NotImplementedError

    def encode(self, x: jax.Array, seed: int = 0) -> Any:
        """A pytree of the arrays that are stored, no more.

        ``seed`` names the tensor's place: an int, or an integer scalar if a place is
        known only as the program runs. Only stochastic codecs use it: tensors with
        different seeds share no rounding noise.

        Raises ValueError for a dtype that is not supported, and for a seed that is no
        integer.
        """
        raise NotImplementedError

    def decode(self, encoded: Any) -> jax.Array:
        """x again, in its shape and dtype.

        Raises ValueError for what no codec of this class has encoded; that its fields
        were others is not always noticed. One that stores an array takes any.
        """
        raise NotImplementedError

    def nbytes(self, shape: tuple[int, ...], dtype: Any = jnp.float32) -> int:
        """Bytes on the device that an encoded tensor takes, exactly."""
        return _nbytes(self, jax.ShapeDtypeStruct(shape, dtype))

    def host_nbytes(self, shape: tuple[int, ...], dtype: Any = jnp.float32) -> int:
        """Bytes that it takes in the host's memory."""
        return 0

    def _require(self, x: Any, seed: Any) -> None:
        if not isinstance(getattr(x, "shape", None), tuple):
            raise ValueError(f"x must be an array, got {x!r}")
        if not self.supports(x.dtype):
            raise ValueError(f"{self!r} can't encode dtype {x.dtype.name}")
        scalar = getattr(seed, "shape", None) == ()
        if type(seed) is not int and not (
            scalar and jnp.issubdtype(seed.dtype, jnp.integer)
        ):
            raise ValueError(f"seed must be an integer, or an array of one, got {seed}")

    def _require_encoded(self, encoded: Any, kind: type) -> None:
        if not isinstance(encoded, kind):
            raise ValueError(
                f"encoded must be what {self!r} encoded, got {type(encoded).__name__}"
            )


@lru_cache(4096)  # a planner asks for each codec of each tensor, many times
def _nbytes(codec: Codec, x: jax.ShapeDtypeStruct) -> int:
    return sum(map(leaf_nbytes, jax.tree.leaves(jax.eval_shape(codec.encode, x))))


def leaf_nbytes(leaf: Any) -> int:
    return math.prod(leaf.shape) * jnp.dtype(leaf.dtype).itemsize


def is_float(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.floating)


def merged(shape: tuple[int, ...], least: int) -> tuple[int, ...]:
    """The shape with trailing axes merged until the last holds ``least`` entries.

    A short last axis would waste a scale on a few entries. Axes before stay apart: one
    that is sharded stays sharded.
    """
    shape = shape or (1,)
    while len(shape) > 1 and shape[-1] < least:
        shape = (*shape[:-2], shape[-2] * shape[-1])
    return shape


def in_rows(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """``x``, trailing axes merged: of these the first one alone may be shared."""
    return gathered(narrowed(x), *range(len(shape), x.ndim)).reshape(shape)


def narrowed(x: jax.Array) -> jax.Array:
    """float64 as float32, the arithmetic's, of which it saturates."""
    return saturated(x, jnp.float32) if x.dtype == jnp.float64 else x


def in_parts(rows: jax.Array, axis: int, group: int) -> tuple[jax.Array, int]:
    """``rows`` whose grouped axis is split where devices have no whole groups of it.

    And in how many parts: of each one device has all, and groups begin anew.
    """
    size = rows.shape[axis]
    parts = size // part(rows)[axis] if typed(rows) and rows.size else 1
    if parts == 1 or size % (group * parts) == 0:
        return rows, 1
    at = rows.ndim + axis
    before, after = rows.shape[:at], rows.shape[at + 1 :]
    return rows.reshape(*before, parts, size // parts, *after), parts
