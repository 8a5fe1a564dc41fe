"""Activate and quantize: in one pass by a kernel where that is the fastest."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jaxcompact.kernels import choice
from jaxcompact.kernels.activate import reference
from jaxcompact.kernels.activate.elementwise import refused
from jaxcompact.kernels.explicit import part, sharding_of, typed
from jaxcompact.kernels.quantize.api import batched_in_rows, broken_rule, flat
from jaxcompact.kernels.quantize.devices import Division, division, split_by_xla
from jaxcompact.kernels.varying import varying_as

_FOLDER = Path(__file__).parent


def activate(
    f: Callable[..., jax.Array],
    xs: Sequence[jax.Array],
    *,
    bits: int,
    group: int,
    symmetric: bool = True,
    scale_bits: int = 16,
    implementation: str | None = None,
) -> tuple[jax.Array, list[reference.Encoded]]:
    """``f(*xs)``, f elementwise, and codes, scales and lows of each x.

    These have `quantize`'s bits, nearest, along the last axis. f's operations are
    rounded one by one, as XLA does: what the kernel's exp and tanh can change is said
    in `elementwise`.

    Memory: the kernel reads each x once, and writes what it returns.

    Raises ValueError for an implementation that does not exist, NotImplementedError
    where the one that is asked for by name can't run.

    >>> x = jnp.ones((2, 128))
    >>> y, [of_gate, of_up] = activate(lambda g, u: jax.nn.silu(g) * u, [x, x],
    ...                                bits=4, group=64)
    >>> y.shape, of_gate[0].shape
    ((2, 128), (2, 64))
    """
    fields = {"bits": bits, "group": group, "symmetric": symmetric}
    fields["scale_bits"] = scale_bits
    jaxpr, config, divided = _chosen(f, xs, bits, group, implementation)
    if config is None:
        return reference.activate(f, xs, **fields)

    def kernel(*xs):
        from jaxcompact.kernels.activate import mosaic_gpu

        y, of = mosaic_gpu.activate(
            jaxpr, [flat(x, -1) for x in xs], **fields, **config
        )
        leading = xs[0].shape[:-1]
        return jax.tree.map(lambda a: a.reshape(*leading, a.shape[-1]), (y, of))

    return varying_as(xs, batched_in_rows(divided.wrap(kernel))(*xs))


def in_one_pass(
    f: Callable[..., jax.Array], xs: Sequence[Any], *, bits: int, group: int
) -> bool:
    """Whether `activate` would take its kernel, for arrays or what describes them."""
    return _chosen(f, xs, bits, group, None)[1] is not None


def _chosen(f, xs, bits, group, implementation) -> tuple[Any, dict | None, Division]:
    """f's jaxpr, how its kernel is to run, None for XLA's code, and on which parts."""
    divided = division(xs[0], -1, group)
    chosen = partial(
        choice.chosen, "activate", _FOLDER, implementation, splits=divided.known
    )
    if chosen(None) is None:
        return None, None, divided
    shape, dtype = xs[0].shape, xs[0].dtype
    broken = broken_rule(divided.shape, jnp.dtype(dtype), -1, bits, group)
    closed, broken = None, divided.broken or broken
    if any(map(split_by_xla, xs)):
        broken = "XLA can't split it over devices"
    if group < 64:  # columns that f is evaluated on at once
        broken = f"group must be 64, 128 or 256, got {group}"
    if len(xs) > 2:
        broken = f"f must be of one or two arrays, got {len(xs)}"
    if any((x.shape, x.dtype, part(x)) != (shape, dtype, part(xs[0])) for x in xs):
        kinds = ", ".join(f"{x.dtype}{x.shape} in parts of {part(x)}" for x in xs)
        broken = f"xs must have one shape and dtype, got {kinds}"
    if not broken:
        x = jax.ShapeDtypeStruct(
            shape, dtype, sharding=sharding_of(xs[0]) if typed(xs[0]) else None
        )
        closed = jax.make_jaxpr(f)(*[x] * len(xs))
        broken = refused(closed.jaxpr, shape)
        broken = broken or _too_wide(closed.jaxpr, divided.shape, group)
    return closed and closed.jaxpr, chosen(broken), divided


def _too_wide(jaxpr: Any, shape: tuple[int, ...], group: int) -> str | None:
    """What the copy engine can't write, or a multiprocessor's shared memory hold."""
    avals = [v.aval for v in (*jaxpr.invars, *jaxpr.outvars)]
    for aval in avals:
        # Longer rows, as `dequantize` writes, a product that reads y would copy.
        if aval.dtype.itemsize * shape[-1] % 16:
            return f"rows must be multiples of 16 bytes, got {aval.str_short()}"
    width = sum(aval.dtype.itemsize for aval in avals)
    if group * width > 2048:
        return f"groups of {group} take {2048 // group} bytes of xs and y, got {width}"
    return None
