"""Project and quantize: in one pass by a kernel where that is the fastest."""

import functools
import math
from pathlib import Path

import jax

from jaxcompact.kernels import choice
from jaxcompact.kernels.explicit import on_parts, part, sharding_of, typed
from jaxcompact.kernels.project import reference
from jaxcompact.kernels.quantize.api import by_reference, flat
from jaxcompact.kernels.quantize.devices import split_by_xla
from jaxcompact.kernels.varying import varying_as

_FOLDER = Path(__file__).parent


def project(
    x: jax.Array,
    p_nr: jax.Array,
    *,
    bits: int,
    group: int,
    symmetric: bool = True,
    scale_bits: int = 16,
    seed: int | None = None,
    implementation: str | None = None,
) -> reference.Encoded:
    """Codes, scales and lows of ``z = x P``, which has x's dtype: as `quantize`.

    The kernel's sums are of 16-bit numbers in float32, as the tensor core makes them;
    they differ from XLA's in their order alone, so that z differs by an ulp of its
    dtype at most, where a sum lies between two of its numbers, and codes by one there.

    Memory: the kernel writes what is stored and nothing else; XLA's code z as well.

    Raises ValueError for an implementation that does not exist, NotImplementedError
    where the one that is asked for by name can't run.

    >>> import jax.numpy as jnp
    >>> x, p_nr = jnp.ones((2, 8)), jnp.ones((8, 64))
    >>> codes, scales, _ = project(x, p_nr, bits=4, group=64)
    >>> codes.shape, scales.shape
    ((2, 32), (2, 1))
    """
    fields = {"bits": bits, "group": group, "symmetric": symmetric}
    fields["scale_bits"] = scale_bits
    broken = _broken_rule(x, p_nr, bits, group, seed)
    config = choice.chosen("project", _FOLDER, implementation, broken, splits=typed(x))
    if config is None:
        return reference.project(x, p_nr, seed=seed, **fields)

    def kernel(x, p_nr):
        from jaxcompact.kernels.project import mosaic_gpu

        found = mosaic_gpu.project(flat(x, -1), p_nr, **fields, **config)
        found = [a if a is None else a.reshape(*x.shape[:-1], -1) for a in found]
        return tuple(varying_as((x, p_nr), found))

    def of_parts(x, p_nr):
        if not typed(x):
            return kernel(x, p_nr)
        tokens = jax.P(*sharding_of(x).spec[:-1], None)
        return on_parts(kernel, (x, p_nr), (tokens, jax.P(None, None)), tokens)

    run = jax.custom_batching.custom_vmap(of_parts)
    of_several = by_reference(functools.partial(reference.project, **fields))

    @run.def_vmap
    def _(size, batched, x, p_nr):
        if batched[1]:  # each example has a P of its own
            return of_several(size, batched, x, p_nr)
        out = project(x, p_nr, **fields, implementation=implementation)
        return out, jax.tree.map(lambda _: True, out)

    return run(x, p_nr)


def _broken_rule(
    x: jax.Array, p_nr: jax.Array, bits: int, group: int, seed: int | None
) -> str | None:
    """What keeps the kernel from these arrays; None if nothing does."""
    *tokens, n = part(x) if typed(x) else x.shape
    r = p_nr.shape[-1]
    if seed is not None:
        return "noise is XLA's"
    if split_by_xla(x):
        return "XLA can't split it over devices"
    if n != x.shape[-1]:
        return f"devices must have whole rows of x, got {n} of {x.shape[-1]} entries"
    if x.dtype != p_nr.dtype or x.dtype.itemsize != 2:
        return f"dtypes must be one of 16 bits, got {x.dtype} and {p_nr.dtype}"
    if bits not in (2, 4, 8) or group not in (64, 128, 256):
        return (
            f"bits must be 2, 4 or 8 in groups of 64, 128 or 256, got {bits} in {group}"
        )
    rows = math.prod(tokens)
    if rows % 8 or n % 64 or r % group or not rows * n * r:
        return (
            f"x must have a multiple of 8 rows and of 64 columns, P of {group}, "
            f"got {rows}, {n} and {r}"
        )
    return None
