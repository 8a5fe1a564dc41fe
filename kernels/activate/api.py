"""Activate and quantize: in one pass by a kernel where that is the fastest."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jaxcompact.kernels import choice
from jaxcompact.kernels.activate import reference
from jaxcompact.kernels.explicit import part
from jaxcompact.kernels.functions.rows import (
    Function,
    Refused,
    broken_rows,
    function_of,
)
from jaxcompact.kernels.quantize.api import batched_in_rows, broken_rule, flat
from jaxcompact.kernels.quantize.devices import Division, division, split_by_xla
from jaxcompact.kernels.quantize.levels import Bound
from jaxcompact.kernels.varying import varying_as

_FOLDER = Path(__file__).parent


def activate(
    f: Callable[..., jax.Array],
    xs: Sequence[jax.Array],
    parameters: Sequence[jax.Array] = (),
    *,
    bits: int,
    group: int,
    symmetric: bool = True,
    scale_bits: int = 16,
    bounds: Sequence[Bound | None] | None = None,
    implementation: str | None = None,
) -> tuple[jax.Array, list[reference.Encoded]]:
    """``f(*xs, *parameters)``, f elementwise, and codes, scales and lows of each x.

    Parameters, a bias say, are ``[width]`` along the last axis, or ``[1, width]``.
    Codes have `quantize`'s bits, nearest, along that axis, with each x's bound. f's
    operations are rounded one by one, as XLA does: what the kernel's exp and tanh can
    change is said in `functions.operations`.

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
    function, config, divided = _chosen(f, xs, parameters, bits, group, implementation)
    fields["bounds"] = bounds or [None] * len(xs)
    count = len(xs)

    def by_xla(*arrays):
        return reference.activate(f, arrays[:count], arrays[count:], **fields)

    if config is None:
        return by_xla(*xs, *parameters)

    def kernel(*arrays):
        from jaxcompact.kernels.activate import mosaic_gpu

        xs = [flat(x, -1) for x in arrays[:count]]
        along = [p.reshape(-1) for p in arrays[count:]]
        y, of = mosaic_gpu.activate(function, xs, along, **fields, **config)
        leading = arrays[0].shape[:-1]
        return jax.tree.map(lambda a: a.reshape(*leading, a.shape[-1]), (y, of))

    run = batched_in_rows(divided.wrap(kernel), len(parameters), by_xla)
    return varying_as((*xs, *parameters), run(*xs, *parameters))


def in_one_pass(
    f: Callable[..., jax.Array],
    xs: Sequence[Any],
    parameters: Sequence[Any] = (),
    *,
    bits: int,
    group: int,
) -> bool:
    """Whether `activate` would take its kernel, for arrays or what describes them."""
    return _chosen(f, xs, parameters, bits, group, None)[1] is not None


def _chosen(
    f, xs, parameters, bits, group, implementation
) -> tuple[Function | None, dict | None, Division]:
    """f as a kernel evaluates it; how it is to run, None for XLA's code; on what."""
    divided = division(xs[0], -1, group)
    chosen = partial(
        choice.chosen, "activate", _FOLDER, implementation, splits=divided.known
    )
    if chosen(None) is None:
        return None, None, divided
    shape, dtype = xs[0].shape, xs[0].dtype
    broken = broken_rule(divided.shape, jnp.dtype(dtype), -1, bits, group)
    function, broken = None, divided.broken or broken
    if any(map(split_by_xla, xs)):
        broken = "XLA can't split it over devices"
    if len(xs) > 2:
        broken = f"f must be of one or two arrays, got {len(xs)}"
    if any((x.shape, x.dtype, part(x)) != (shape, dtype, part(xs[0])) for x in xs):
        kinds = ", ".join(f"{x.dtype}{x.shape} in parts of {part(x)}" for x in xs)
        broken = f"xs must have one shape and dtype, got {kinds}"
    if not broken:
        try:
            function = function_of(f, xs, parameters)
        except Refused as refusal:
            broken = str(refusal)
        else:
            broken = broken_rows(function, divided.shape[-1])
            broken = broken or _broken_by(function, group)
    return function, chosen(broken), divided


def _broken_by(f: Function, group: int) -> str | None:
    """What keeps the kernel from f; None if nothing does."""
    if f.sums or f.statistics:
        return "f must be elementwise, of one result"
    width = sum(value.dtype.itemsize for value in (*f.xs, f.y))
    if group * width > 2048:  # of a multiprocessor's shared memory
        return f"groups of {group} take {2048 // group} bytes of xs and y, got {width}"
    return None
