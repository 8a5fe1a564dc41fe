"""Kernels whose gradient is a sketch, and the z that several of them share."""

import contextlib
import math
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import get_opaque_trace_state

from jaxcompact.codecs import Encoded
from jaxcompact.projection import Projection


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["weight", "sketch", "key", "layer"],
    meta_fields=["path", "family", "stack", "projection", "by_hand"],
)
@dataclass(frozen=True)
class SketchedKernel:
    """A kernel whose gradient is taken in a subspace; lives for one loss evaluation.

    `jaxcompact.value_and_grad` puts it in the kernel's place in the parameter tree.
    Its arrays may carry leading layer axes, which scan and vmap slice as they slice
    any parameter.

    Attributes:
        weight: the kernel itself, ``(n, m)``; never differentiated.
        sketch: zeros ``(r, m)`` of the kernel's dtype; the derivative is taken with
            respect to it.
        key: the PRNG key that P is made of.
        layer: number of the layer: kernels of equal family, stack and layer have equal
            keys. Not traced before a scan or vmap takes it apart.
        path: name of the parameter.
        family: of the kernels that share z; see `linear`.
        stack: the leading layer axes that the whole parameter has.
        projection: how z is made.
        by_hand: whether its stack may have been taken apart, reordered or cut by hand.
            Not traced: what was traced of another kernel is not taken for its own.
    """

    weight: jax.Array
    sketch: jax.Array
    key: jax.Array
    layer: np.ndarray
    path: str
    family: str
    stack: tuple[int, ...]
    projection: Projection
    by_hand: bool = False

    def __post_init__(self):
        if _by_hand(self.layer, self.stack):
            object.__setattr__(self, "by_hand", True)

    def __jax_array__(self, *_, **__):
        raise ValueError(self._told())

    __array__ = __getitem__ = __iter__ = __len__ = __jax_array__
    __neg__ = __abs__ = __add__ = __sub__ = __mul__ = __truediv__ = __jax_array__
    __pow__ = __matmul__ = __radd__ = __rsub__ = __rmul__ = __rtruediv__ = __jax_array__
    __rpow__ = __rmatmul__ = __lt__ = __le__ = __gt__ = __ge__ = __jax_array__

    def astype(self, dtype: jax.typing.DTypeLike) -> "SketchedKernel":
        """Its gradient is still of the parameter's dtype."""
        weight, sketch = self.weight.astype(dtype), self.sketch.astype(dtype)
        return replace(self, weight=weight, sketch=sketch)

    def __getattr__(self, name: str):  # of an array: T, reshape
        if name.startswith("_") or not hasattr(jax.Array, name):
            raise AttributeError(name)
        raise AttributeError(f"{name}: {self._told()}")

    def _told(self) -> str:
        return (
            f"parameter {self.path!r} is in the subspace, but the layer that reads it "
            f"knows nothing of sketches: use jaxcompact.nnx.Linear, "
            f"jaxcompact.linen.Dense or jaxcompact.linear there, or leave it out of "
            f"the subspace's rules"
        )

    @property
    def shape(self) -> tuple[int, ...]:
        return self.weight.shape

    @property
    def dtype(self) -> jnp.dtype:
        return self.weight.dtype


# --- sharing ---------------------------------------------------------------------
# q, k and v read one tensor, so one z serves all three. Which kernels read it is known
# only when they are called: the second call with the same x finds the z of the first.


@dataclass
class _Shared:
    x: jax.Array
    reader: tuple  # what must be the same of all that z serves
    result: tuple[jax.Array, jax.Array | Encoded]
    kernel: SketchedKernel  # that z was made for
    served: dict[str, jax.Array]  # path -> key
    open: bool = True


@dataclass
class _Sharing:
    trace: Any  # in which it began
    found: list[_Shared]


_sharing: ContextVar[_Sharing | None] = ContextVar("jaxcompact_sharing", default=None)


@contextlib.contextmanager
def shared_sketches() -> Iterator[None]:
    """Within it, kernels of one family that read the same tensor share one z."""
    token = _sharing.set(_Sharing(get_opaque_trace_state(), []))
    try:
        yield
    finally:
        _sharing.reset(token)


def sketched_input(x: jax.Array, kernel: SketchedKernel, dtype):
    """x and its z, and the sketch to differentiate by.

    x waits for z, so that z is made when x is, not when it is read. Not z for x: what
    reads z alone, as the backward pass, needs no x.
    """

    def make():
        fixed = jax.lax.stop_gradient(x).astype(dtype)
        z = kernel.projection.stored(kernel.key, fixed)
        z = jax.tree.map(lambda a: checkpoint_name(a, "sketch"), z)
        return jax.lax.optimization_barrier((x, z))[0], z

    sharing = _sharing.get()
    # What is shared keeps tracers alive, which is all that a check for leaks sees.
    if sharing is None or jax.config.jax_check_tracer_leaks:
        return *make(), kernel.sketch
    trace = get_opaque_trace_state()
    layer = _layer(kernel, taken_apart=trace == sharing.trace)
    # z must not leave its trace.
    reader = (kernel.family, kernel.stack, layer, jnp.dtype(dtype), trace)
    entries = (e for e in sharing.found if e.x is x and e.reader == reader)
    # What NumPy has may have been changed in place.
    entry = next(entries, None) if isinstance(x, jax.Array) else None
    if entry is None:
        entry = _Shared(x, reader, make(), kernel, {})
        sharing.found.append(entry)
    elif layer is None and entry.served.get(kernel.path, kernel.key) is not kernel.key:
        # The same kernel with another key: layers of a stack, taken apart by hand,
        # read one tensor. Which key belongs to which layer can't be seen any more.
        entry.open = False
    if not entry.open:
        return *make(), kernel.sketch
    entry.served[kernel.path] = kernel.key
    sketch, first = kernel.sketch, entry.kernel
    by_hand = kernel.by_hand or first.by_hand
    if layer is None and by_hand and kernel.key is not first.key:
        sketch = _if_of_one_key(sketch, kernel.key, first.key)
    return *entry.result, sketch


@jax.custom_vjp
def _if_of_one_key(sketch: jax.Array, key: jax.Array, z_key: jax.Array) -> jax.Array:
    """The sketch, whose gradient is NaN if z is of another layer, and so of another P.

    Only the compiled program knows: keys are its arguments, and nothing else is stored.
    """
    return sketch


def _if_of_one_key_backward(keys, dsketch):
    key, z_key = map(jax.random.key_data, keys)
    same = jnp.all(key == z_key)
    return dsketch * jnp.where(same, 1.0, jnp.nan).astype(dsketch.dtype), None, None


_if_of_one_key.defvjp(lambda sketch, *keys: (sketch, keys), _if_of_one_key_backward)


class Numbers(np.ndarray):
    """Of the layers of a stack: known where their index is, else traced."""

    @classmethod
    def of(cls, stack: tuple[int, ...]) -> "Numbers":
        return np.arange(math.prod(stack), dtype=np.int32).reshape(stack).view(cls)

    def __getitem__(self, index):
        if any(isinstance(i, jax.core.Tracer) for i in jax.tree.leaves(index)):
            # With an axis that what a scan or vmap is at does not have.
            return jnp.asarray(np.asarray(self))[index][..., None]
        return super().__getitem__(index)


def _by_hand(layer: Any, stack: tuple[int, ...]) -> bool:
    """Whether it is neither a stack as it was made nor what a scan or vmap is at."""
    if isinstance(layer, jax.core.Tracer):
        return layer.shape != ()
    if not stack or not isinstance(layer, np.ndarray | np.generic | jax.Array):
        return False
    return not np.array_equal(layer, np.arange(math.prod(stack)).reshape(stack))


def _layer(kernel: SketchedKernel, taken_apart: bool) -> Any:
    """What is the same of layers with equal keys; None for all that a loop is at.

    A scan or vmap is at one layer of all its stacks. Of what is ``taken_apart`` by an
    index that is traced, or has axes of which only some are known, no other than the
    same array is known to be the same.
    """
    if not isinstance(kernel.layer, jax.core.Tracer):
        return np.asarray(kernel.layer).tobytes()
    return id(kernel.key) if taken_apart or len(kernel.stack) > 1 else None
