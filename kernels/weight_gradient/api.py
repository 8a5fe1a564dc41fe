"""The gradient of a weight from codes: by a kernel where that is the fastest."""

import math
from pathlib import Path

import jax
import jax.numpy as jnp

from jaxcompact.kernels import choice
from jaxcompact.kernels.explicit import (
    gathered,
    names,
    on_parts,
    part,
    sharding_of,
    typed,
)
from jaxcompact.kernels.varying import varying_as
from jaxcompact.kernels.weight_gradient import reference

_FOLDER = Path(__file__).parent


def weight_gradient(
    codes: jax.Array,
    stored: jax.Array,
    lows: jax.Array | None,
    dy: jax.Array,
    *,
    bits: int,
    group: int,
    size: int,
    dtype: jnp.dtype,
    preferred_element_type: jnp.dtype,
    precision: jax.lax.PrecisionLike = None,
    out_sharding: jax.sharding.Sharding | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """``dW = decode(x)^T dy``, ``[size, m]``, for an x quantized along its last axis.

    The kernel's products are of 16-bit numbers with sums in float32, as the tensor core
    makes them; XLA's are those of `jax.lax.dot_general`, whose arguments the last ones
    are. Sums differ in their order alone.

    Memory: the kernel never stores the decoded x; XLA's holds it for a moment.

    Raises ValueError for an implementation that does not exist, NotImplementedError
    where the one that is asked for by name can't run.
    """
    fields = {"bits": bits, "group": group, "size": size, "dtype": dtype}
    product = {
        "preferred_element_type": preferred_element_type,
        "precision": precision,
        "out_sharding": out_sharding,
    }

    def run(codes, stored, dy):
        from jaxcompact.kernels.weight_gradient import mosaic_gpu

        tokens, here = math.prod(dy.shape[:-1]), codes.shape[-1] * 8 // bits
        codes, stored, dy = (
            a.reshape(tokens, a.shape[-1]) for a in (codes, stored, dy)
        )
        sums = mosaic_gpu.weight_gradient(
            codes, stored.T, dy, bits=bits, size=here, **config
        )
        return sums.sum(0).astype(preferred_element_type)

    def summed(codes, stored, dy):
        """Over the devices that share the tokens, if the arrays' types name some."""
        if not typed(dy):
            return varying_as((codes, stored, dy), run(codes, stored, dy))
        *tokens, columns = sharding_of(dy).spec
        *_, rows = sharding_of(codes).spec

        def of_parts(*parts):
            return jax.lax.psum(varying_as(parts, run(*parts)), names(tokens))

        like = jax.P(*tokens, rows)
        specs = like, like, jax.P(*tokens, columns)
        dw = on_parts(of_parts, (codes, stored, dy), specs, jax.P(rows, columns))
        return dw if out_sharding is None else jax.sharding.reshard(dw, out_sharding)

    config = _config(implementation, codes, stored, lows, dy, bits, group, size, dtype)
    if config is None:
        return reference.weight_gradient(codes, stored, lows, dy, **fields, **product)
    kernel = jax.custom_batching.custom_vmap(summed)

    @kernel.def_vmap
    def _(size, batched, *args):
        # One example after another: each has a weight of its own.
        args = [
            gathered(a, 0) if b else jnp.broadcast_to(a, (size, *a.shape))
            for a, b in zip(args, batched, strict=True)
        ]
        return jax.lax.map(lambda a: kernel(*a), args), True

    return kernel(codes, stored, dy)


def _config(
    implementation, codes, stored, lows, dy, bits, group, size, dtype
) -> dict | None:
    # Of a device's part, if the arrays' types say it.
    *tokens, columns = part(dy)
    tokens, here = math.prod(tokens), part(codes)[-1] * 8 // bits
    unit = 16 // stored.dtype.itemsize  # the copy engine's rows of scales: 16 bytes
    broken = None
    if lows is not None:
        broken = "the codes must be symmetric"
    elif bits not in (2, 4, 8) or group != 64:
        broken = f"bits must be 2, 4 or 8 in groups of 64, got {bits} in {group}"
    elif dy.dtype != dtype or dy.dtype.itemsize != 2:
        broken = f"dtypes must be one of 16 bits, got {jnp.dtype(dtype)}, {dy.dtype}"
    elif tokens % unit or size % 64 or columns % 64 or not tokens * size * columns:
        broken = (
            f"tokens must be a multiple of {unit}, columns of 64, got {tokens}, "
            f"{size} and {columns}"
        )
    elif here % 64:
        broken = f"devices must have whole groups, got {here} columns of one"
    if typed(dy):
        shared = [names([sharding_of(x).spec[-1]]) for x in (codes, dy)]
        if set(shared[0]) & set(shared[1]):
            broken = f"x and dy must be shared over other axes, got {shared}"
    config = choice.chosen(
        "weight_gradient", _FOLDER, implementation, broken, splits=typed(dy)
    )
    if config is None:
        return None
    # As many blocks as multiprocessors, of which Hopper's cards have 132.
    blocks = -(-here // 128) * -(-columns // config["columns"])
    return config | {"splits": max(1, min(132 // blocks, tokens // 1024))}
