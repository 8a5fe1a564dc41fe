"""Group quantization: by a kernel where that is the fastest, else by XLA."""

import functools
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType

import jax
import jax.numpy as jnp

from jaxcompact.kernels import choice
from jaxcompact.kernels.quantize import levels, reference
from jaxcompact.kernels.quantize.devices import division
from jaxcompact.kernels.quantize.noise import mixed_seed
from jaxcompact.kernels.varying import varying_as

_FOLDER = Path(__file__).parent


def quantize(
    x: jax.Array,
    *,
    bits: int,
    group: int,
    axis: int = -1,
    symmetric: bool = True,
    scale_bits: int = 16,
    bound: levels.Bound | None = None,
    seed: int | jax.Array | None = None,
    implementation: str | None = None,
) -> reference.Encoded:
    """Codes, scales and lows of ``x``: the bits that `reference.quantize` gives.

    Memory: the kernel reads x once and writes what is stored; nothing of x's size in
    between.

    Raises ValueError for an implementation that does not exist, NotImplementedError
    where the one that is asked for by name can't run.

    >>> codes, scales, _ = quantize(jnp.ones((2, 128)), bits=4, group=64)
    >>> codes.shape, scales.shape
    ((2, 64), (2, 2))
    """
    divided = division(x, axis, group, by_place=seed is not None)
    op = "quantize" if seed is None else "quantize_stochastic"
    config = _config(op, divided, x.dtype, axis, implementation, bits, group)
    fields = {"bits": bits, "group": group, "symmetric": symmetric}
    fields |= {"scale_bits": scale_bits, "bound": bound}
    if config is None:
        return reference.quantize(x, axis=axis, seed=seed, **fields)

    def kernel(x, *seed):
        mixed = mixed_seed(*seed) if seed else None
        run = _kernels(axis).quantize
        found = run(flat(x, axis), mixed, **fields, **config)
        shape = _sized(x.shape, axis, -1)
        return tuple(a if a is None else a.reshape(shape) for a in found)

    if seed is None:
        return varying_as(x, batched_in_rows(divided.wrap(kernel))(x))
    # Noise is of an entry's place in its own example, which the kernel does not know.
    run = jax.custom_batching.custom_vmap(divided.wrap(kernel))
    of_one = functools.partial(reference.quantize, axis=axis, **fields)
    run.def_vmap(by_reference(lambda x, seed: of_one(x, seed=seed)))
    seed = jnp.uint32(seed % 2**32 if isinstance(seed, int) else seed)
    return varying_as(x, run(x, seed))


def in_one_pass(
    x: jax.Array | jax.core.ShapedArray, *, bits: int, group: int, axis: int = -1
) -> bool:
    """Whether `quantize` would take its kernel, rounding to nearest."""
    divided = division(x, axis, group)
    return _config("quantize", divided, x.dtype, axis, None, bits, group) is not None


def dequantize(
    codes: jax.Array,
    stored: jax.Array,
    lows: jax.Array | None,
    *,
    bits: int,
    group: int,
    size: int,
    axis: int = -1,
    dtype: jnp.dtype,
    bound: levels.Bound | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """The inverse, as ``dtype[..., size, ...]``: `reference.dequantize`'s bits.

    Memory and errors: as `quantize`.
    """
    divided = division(codes, axis, group, size=size)
    config = _config("dequantize", divided, dtype, axis, implementation, bits, group)
    fields = {"bits": bits, "group": group, "dtype": dtype, "bound": bound}
    if config is None:
        return reference.dequantize(codes, stored, lows, size=size, axis=axis, **fields)

    def kernel(codes, *of):
        # Of a device's part, if there are several.
        here = min(size, codes.shape[axis] * 8 // bits)
        scales, low = [*(flat(a, axis) for a in of), None][:2]
        run = _kernels(axis).dequantize
        x = run(flat(codes, axis), scales, low, size=here, **fields, **config)
        return x.reshape(_sized(codes.shape, axis, here))

    run = batched_in_rows(divided.wrap(kernel))
    arrays = [codes, stored, *([] if lows is None else [lows])]
    return varying_as(arrays, run(*arrays))


def _config(op, divided, dtype, axis, implementation, bits, group) -> dict | None:
    dtype = jnp.dtype(dtype)
    broken = broken_rule(divided.shape, dtype, axis, bits, group)
    if not broken and axis == -1 and op != "dequantize":  # which writes longer rows
        nbytes = divided.shape[-1] * dtype.itemsize
        if nbytes % 16:  # all that the copy engine reads starts at such a multiple
            broken = f"rows must be multiples of 16 bytes, got {nbytes}"
    broken, op = divided.broken or broken, op + ("" if axis == -1 else "_channels")
    return choice.chosen(op, _FOLDER, implementation, broken, splits=divided.known)


def broken_rule(
    shape: Sequence[int], dtype: jnp.dtype, axis: int, bits: int, group: int
) -> str | None:
    """What keeps the kernels from such arrays; None if nothing does."""
    if not -len(shape) <= axis < 0:
        return f"x must have axis {axis}, got shape {tuple(shape)}"
    if not math.prod(shape):
        return f"x must have entries, got {tuple(shape)}"
    if dtype.itemsize not in (2, 4):
        return f"dtype must have 16 or 32 bits, got {dtype.name}"
    if axis == -1:
        if bits not in (2, 4, 8):
            return f"bits must be 2, 4 or 8, got {bits}"
        if group not in (32, 64, 128, 256):
            return f"group must be 32, 64, 128 or 256, got {group}"
        if group * bits < 128:  # 16 bytes, the least that is copied of a row
            return f"bits must be 4 or 8 in groups of 32, got {bits}"
        return None
    if bits not in (2, 3, 4, 8):
        return f"bits must be 2, 3, 4 or 8, got {bits}"
    if group % 8 or group > 128:
        return f"group must be a multiple of 8, at most 128, got {group}"
    channels = math.prod(shape[axis + 1 :])
    if channels % 16:
        return f"there must be a multiple of 16 channels, got {channels}"
    return None


def _kernels(axis: int) -> ModuleType:
    from jaxcompact.kernels.quantize import channels, mosaic_gpu

    return mosaic_gpu if axis == -1 else channels


def _sized(shape: Sequence[int], axis: int, size: int) -> tuple[int, ...]:
    """The shape with another size of one axis."""
    return *shape[:axis], size, *shape[axis:][1:]


def flat(x: jax.Array, axis: int) -> jax.Array:
    """One axis in place of those before ``axis``, and one in place of those after."""
    after = [] if axis == -1 else [math.prod(x.shape[axis + 1 :])]
    return x.reshape(math.prod(x.shape[:axis]), x.shape[axis], *after)


def batched_in_rows(
    kernel: Callable, shared: int = 0, reference: Callable | None = None
) -> Callable:
    """The kernel, of which more examples are more rows.

    ``shared``: how many of its arguments, the last ones, are the same for all rows;
    ``reference``: what runs where they are not.
    """
    run = jax.custom_batching.custom_vmap(kernel)

    @run.def_vmap
    def _(size, batched, *args):
        own, several = len(args) - shared, None
        if any(batched[own:]):
            return by_reference(reference)(size, batched, *args)
        args = [
            a if b or i >= own else jnp.broadcast_to(a, (size, *a.shape))
            for i, (a, b) in enumerate(zip(args, batched, strict=True))
        ]
        if reference is not None:
            several = jax.vmap(reference, [0] * own + [None] * shared)
        out = batched_in_rows(kernel, shared, several)(*args)
        return out, jax.tree.map(lambda _: True, out)

    return run


def by_reference(reference: Callable) -> Callable:
    """A rule of vmap that takes the reference."""

    def rule(size, batched, *args):
        axes = [0 if b else None for b in batched]
        out = jax.vmap(reference, axes, axis_size=size)(*args)
        return out, jax.tree.map(lambda _: True, out)

    return rule
