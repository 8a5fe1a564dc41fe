"""Normalize and quantize: in one pass by a kernel where that is the fastest."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jaxcompact.kernels import choice
from jaxcompact.kernels.explicit import on_parts, part, sharding_of, typed
from jaxcompact.kernels.functions.rows import (
    Function,
    Refused,
    broken_rows,
    function_of,
)
from jaxcompact.kernels.normalize import reference
from jaxcompact.kernels.quantize.api import batched_in_rows, broken_rule, flat
from jaxcompact.kernels.quantize.devices import split_by_xla
from jaxcompact.kernels.varying import varying_as

_FOLDER = Path(__file__).parent


def normalize(
    f: Callable[..., Sequence[jax.Array]],
    x: jax.Array,
    parameters: Sequence[jax.Array] = (),
    *,
    bits: int,
    group: int,
    symmetric: bool = True,
    scale_bits: int = 16,
    implementation: str | None = None,
) -> tuple[list[jax.Array], reference.Encoded]:
    """``f(x, *parameters)``: y and statistics; and codes, scales and lows of x.

    ``y[..., width]`` is made entry by entry of x, of parameters ``[width]`` and of sums
    over x's last axis; statistics, ``[...]`` or ``[..., 1]``, of such sums. Codes have
    `quantize`'s bits, nearest, along the last axis. How far y can be from XLA's is said
    in `functions.rows`.

    Memory: the kernel writes what it returns. It reads x once if rows fit in shared
    memory, else once more for each sum that waits for another's, and for y.

    Raises ValueError for an implementation that does not exist, NotImplementedError
    where the one that is asked for by name can't run.

    >>> def rms_norm(x, w):
    ...     mean = jnp.mean(jnp.square(x), -1, keepdims=True)
    ...     return x * jax.lax.rsqrt(mean + 1e-6) * w, mean
    >>> x, w = jnp.ones((2, 128)), jnp.ones(128)
    >>> (y, mean), (codes, scales, _) = normalize(rms_norm, x, [w], bits=4, group=64)
    >>> y.shape, mean.shape, codes.shape
    ((2, 128), (2, 1), (2, 64))
    """
    fields = {"bits": bits, "group": group, "symmetric": symmetric}
    fields["scale_bits"] = scale_bits
    function, config = _chosen(f, x, parameters, bits, group, implementation)
    if config is None:
        return reference.normalize(f, x, parameters, **fields)

    def kernel(x, *parameters):
        from jaxcompact.kernels.normalize import mosaic_gpu

        leading = x.shape[:-1]
        (y, *statistics), of = mosaic_gpu.normalize(
            function,
            flat(x, -1),
            [p.reshape(-1) for p in parameters],
            **fields,
            **config,
        )
        pairs = zip(statistics, function.kept, strict=True)
        statistics = [s.reshape(*leading, *[1] * kept) for s, kept in pairs]
        y, of = jax.tree.map(lambda a: a.reshape(*leading, a.shape[-1]), (y, of))
        return varying_as((x, *parameters), ([y, *statistics], of))

    def of_parts(x, *parameters):
        if not typed(x):
            return kernel(x, *parameters)
        of_rows = sharding_of(x).spec[:-1]
        whole = [jax.P(*[None] * p.ndim) for p in parameters]
        specs = jax.P(*of_rows, None), *whole
        return on_parts(kernel, (x, *parameters), specs, jax.P(*of_rows))

    def by_xla(x, *parameters):
        return reference.normalize(f, x, parameters, **fields)

    run = batched_in_rows(of_parts, len(parameters), by_xla)
    return run(x, *parameters)


def in_one_pass(
    f: Callable[..., Sequence[jax.Array]],
    x: Any,
    parameters: Sequence[Any],
    *,
    bits: int,
    group: int,
) -> bool:
    """Whether `normalize` would take its kernel, for arrays or what describes them."""
    return _chosen(f, x, parameters, bits, group, None)[1] is not None


def _chosen(
    f: Callable, x: Any, parameters: Sequence[Any], bits: int, group: int, asked: Any
) -> tuple[Function | None, dict | None]:
    """f as its kernel evaluates it, and how that is to run; None for XLA's code."""
    chosen = partial(choice.chosen, "normalize", _FOLDER, asked, splits=typed(x))
    if chosen(None) is None:
        return None, None
    shape = part(x) if typed(x) else x.shape
    function = None
    broken = broken_rule(shape, jnp.dtype(x.dtype), -1, bits, group)
    if split_by_xla(x):
        broken = "XLA can't split it over devices"
    if shape[-1:] != x.shape[-1:]:
        broken = f"devices must have whole rows, got {x.shape} as {shape}"
    if not broken:
        try:
            function = function_of(f, [x], parameters)
        except Refused as refusal:
            broken = str(refusal)
        else:
            broken = broken_rows(function, shape[-1])
            if not function.sums:
                broken = "f must sum over the last axis"
    return function, chosen(broken)
